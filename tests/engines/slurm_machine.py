"""Slurm on this machine: one node, with munge, started as root and ended again."""

import os
import shutil
import socket
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from debian import install
from launched import PATIENCE

CONF = """
ClusterName=shardtrain
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmdPort={ports[1]}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
SlurmUser=root
SlurmdUser=root
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
ReturnToService=2
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
KillWait=30
NodeName={host} NodeAddr=127.0.0.1 CPUs=4 State=UNKNOWN
PartitionName=main Nodes={host} Default=YES MaxTime=INFINITE State=UP
"""
"""More CPUs than there may be: here they only count how many tasks go beside each other. A job that
was put back waits as long as its credentials live, which is two minutes by default."""


class Slurm:
    """A cluster of one node."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._started: list[subprocess.Popen[bytes]] = []

    def start(self) -> None:
        for name in ("state", "spool"):
            (self.folder / name).mkdir()
        host, ports = socket.gethostname().split(".")[0], [_free_port(), _free_port()]
        conf = self.folder / "slurm.conf"
        conf.write_text(CONF.format(host=host, ports=ports, folder=self.folder))
        os.environ["SLURM_CONF"] = str(conf)
        key = self.folder / "munge.key"
        key.write_bytes(os.urandom(64))
        key.chmod(0o600)
        self.folder.chmod(0o755)
        places = {
            "socket": "munge.socket",
            "key-file": "munge.key",
            "log-file": "munge.log",
            "pid-file": "munge.pid",
            "seed-file": "munge.seed",
        }
        flags = [f"--{flag}={self.folder / name}" for flag, name in places.items()]
        self._run("munged", "--foreground", "--force", *flags)
        _wait_for((self.folder / "munge.socket").exists, "munged")
        self._run("slurmctld", "-D", "-f", str(conf))
        _wait_for(lambda: "UP" in said("scontrol", "ping"), "slurmctld")
        self._run("slurmd", "-D", "-f", str(conf))
        _wait_for(lambda: "idle" in said("sinfo", "-h", "-o", "%T"), "slurmd")

    def _run(self, name: str, *flags: str) -> None:
        path = shutil.which(name) or f"/usr/sbin/{name}"
        with (self.folder / f"{name}.out").open("wb") as out:
            self._started.append(
                subprocess.Popen([path, *flags], stdout=out, stderr=out, start_new_session=True)
            )

    def stop(self) -> None:
        said("scancel", "-s", "KILL", "-u", "root")
        for process in reversed(self._started):
            process.terminate()
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        os.environ.pop("SLURM_CONF", None)


def said(*words: str) -> str:
    """What a command of Slurm's says, whether or not it is content."""
    done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=PATIENCE)
    return done.stdout + done.stderr


def job_state(job: str) -> tuple[str, int]:
    """The state of a job, and how often it was put back into the queue."""
    text = said("scontrol", "-o", "show", "job", job)
    fields = dict(word.partition("=")[::2] for word in text.split() if "=" in word)
    return fields.get("JobState", text), int(fields.get("Restarts", 0))


def make_slurm(folder: Path) -> Slurm:
    """A cluster that runs; skips the test, saying why, where it cannot be."""
    install("slurm-wlm", "munge", needs=("slurmctld", "slurmd", "munged", "srun"))
    slurm = Slurm(folder)
    try:
        slurm.start()
    except BaseException:
        slurm.stop()
        for log in sorted(folder.glob("*.log")) + sorted(folder.glob("*.out")):
            print(log.name, log.read_text(errors="replace")[-2000:], sep="\n")
        raise
    return slurm


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


def _wait_for(ready: Callable[[], bool], what: str) -> None:
    limit = time.monotonic() + PATIENCE
    while not ready():
        if time.monotonic() > limit:
            pytest.fail(f"{what} did not start in {PATIENCE:.0f} s")
        time.sleep(0.1)
