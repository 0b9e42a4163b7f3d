"""A run under Open MPI's mpirun.

Owns: the command line of mpirun, running it. Does not own: the processes' numbers, which
`sharding.processes` reads from Open MPI's environment. MPI itself is not used: mpirun starts the
processes and passes their output on, and they meet through jax.

jax can find the coordinator in Open MPI 4's environment, but takes the machine of mpirun for it,
which may have no process, and finds nothing in version 5's. So it is named here.
"""

import os
import shlex
import shutil
import signal
from collections.abc import Mapping
from typing import Final

from shardtrain.errors import ConfigError
from shardtrain.launch_ending import Ended
from shardtrain.launch_job import Job, LaunchOptions, check_devices, need_processes
from shardtrain.launch_local import Group, Signals, free_port, tell
from shardtrain.sharding.processes import COORDINATOR

USES: Final = frozenset({"processes", "show", "hosts"})
_PASSED_ON: Final = ("JAX_", "XLA_", "NCCL_", "CUDA_VISIBLE_DEVICES", "PYTHONPATH", "LD_LIBRARY_")
"""Variables that processes on other hosts get too, by the beginnings of their names."""
_PORT: Final = 15700
"""For hosts that are not this one, whose free ports cannot be known here."""
_KILL_SECONDS: Final = 10
_SAVE: Final = dict.fromkeys((signal.SIGTERM, signal.SIGHUP, signal.SIGINT), signal.SIGUSR1)
"""mpirun passes SIGUSR1 on, but kills for other signals. It means the same to a run."""


def launch_mpi(job: Job, options: LaunchOptions) -> int:
    """Run a job under mpirun, or print how.

    Args:
        job: What is run.
        options: Processes and hosts.

    Returns:
        The exit code of the run.

    Raises:
        ConfigError: The processes or hosts cannot be, or there is no mpirun.
    """
    count = need_processes(options)
    check_hosts(options.hosts, count)
    if options.hosts:
        _check_share(job, count)
    else:
        check_devices(job.config, count)
    words = mpirun_words(job, count, options.hosts, os.environ)
    if options.show:
        print(shlex.join(words))
        return 0
    if shutil.which(words[0]) is None:
        raise ConfigError(
            "there is no mpirun here",
            where="--engine mpi",
            cure="install Open MPI (Debian: openmpi-bin), or use --engine local -n "
            f"{count} on one machine",
        )
    with Signals() as signals:
        (end,) = Group(words, [dict(os.environ)], signals, instead=_SAVE).run()
        return _code(end, signals)


def mpirun_words(job: Job, count: int, hosts: str, environ: Mapping[str, str]) -> list[str]:
    """Return the command line.

    Args:
        job: What is run.
        count: Processes.
        hosts: Hosts and their slots; "" = this machine.
        environ: The environment, of which a part is passed on.

    Returns:
        Its words.
    """
    first = hosts.split(",", maxsplit=1)[0].split(":", maxsplit=1)[0]
    coordinator = f"{first}:{_PORT}" if hosts else f"127.0.0.1:{free_port()}"
    words = ["mpirun", "--quiet", "-n", str(count)]
    words += ["--host", hosts] if hosts else ["--oversubscribe"]
    words += ["--bind-to", "none"]  # else every process is bound to one core
    # one that ends with an error ends all; mpirun lets this time pass, whoever has ended before
    words += ["--mca", "odls_base_sigkill_timeout", str(_KILL_SECONDS)]
    words += ["--allow-run-as-root"] if os.geteuid() == 0 else []
    words += ["-x", f"{COORDINATOR}={coordinator}", "-x", "PYTHONUNBUFFERED=1"]
    for name in sorted(environ):
        if name.startswith(_PASSED_ON):
            words += ["-x", name]
    return [*words, *job.words()]


def check_hosts(hosts: str, count: int) -> None:
    """See to it that there are slots for all processes.

    Args:
        hosts: As mpirun takes them; "" = this machine.
        count: Processes.

    Raises:
        ConfigError: They are written wrongly, or have fewer slots.
    """
    if not hosts:
        return
    slots = 0
    for part in hosts.split(","):
        name, colon, number = part.partition(":")
        if not name or (colon and not number.isdecimal()) or set(part) & set(" /"):
            raise ConfigError(
                "hosts are written wrongly",
                where="--hosts",
                value=hosts,
                allowed="names and slots, such as a:4,b:4",
            )
        slots += int(number or 1)
    if slots < count:
        raise ConfigError(
            f"these hosts have {slots} slots, fewer than the {count} processes",
            where="--hosts",
            value=hosts,
            cure=f"add slots, or use -n {slots}",
        )


def _check_share(job: Job, count: int) -> None:
    """What can be said of machines that are not this one."""
    if job.config.run.cpu_devices:
        check_devices(job.config, count)


def _code(end: Ended, signals: Signals) -> int:
    """The exit code of mpirun, which says 128 + N for a process that signal N has killed."""
    number = end.code - 128
    killed = number in signal.valid_signals() and end.code != 130
    code = tell([Ended(0, -number if killed else end.code, end.told)])
    return 130 if code == 75 and signal.SIGINT in signals.taken else code
