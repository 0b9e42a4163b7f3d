"""A launcher in a process of its own, with small programs in place of a training run."""

import os
import subprocess
import sys
import time
from pathlib import Path

PATIENCE = 60.0
LAUNCHER = """
import sys
from shardtrain import launch_local
launch_local.GRACE_SECONDS, launch_local.TERM_SECONDS = 1.0, 0.5
launch_local.pause = lambda attempt: 0.1 * attempt
words = [sys.executable, "-u", "-S", "-c", sys.argv[1]]
sys.exit(launch_local.run_local(words, int(sys.argv[2]), restarts=int(sys.argv[3])))
"""
HEAD = """
import os, signal, subprocess, sys, time
me, count = int(os.environ["SHARDTRAIN_PROCESS"]), int(os.environ["SHARDTRAIN_PROCESSES"])
open(f"{me}.pid", "w").write(str(os.getpid()))
"""


def start(folder: Path, program: str, count: int, restarts: int = 0) -> subprocess.Popen[str]:
    """Starts the launcher; every process of it runs the program, and notes its pid."""
    return subprocess.Popen(
        [sys.executable, "-c", LAUNCHER, HEAD + program, str(count), str(restarts)],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def end(launcher: subprocess.Popen[str], code: int) -> tuple[str, str]:
    """Waits for an exit code; returns what was said."""
    out, error = launcher.communicate(timeout=PATIENCE)
    assert launcher.returncode == code, f"{launcher.returncode}, not {code}:\n{out}\n{error}"
    assert "Traceback" not in error
    return out, error


def pid_of(folder: Path, name: str) -> int:
    """The pid in a file, as soon as it is there."""
    limit = time.monotonic() + PATIENCE
    while time.monotonic() < limit:
        path = folder / f"{name}.pid"
        if path.exists() and (text := path.read_text()):
            return int(text)
        time.sleep(0.01)
    raise AssertionError(f"no {name}.pid")


def gone(pid: int, seconds: float = 5.0) -> bool:
    """Whether a process is no more, not even as a zombie that somebody here should have reaped."""
    limit = time.monotonic() + seconds
    while time.monotonic() < limit:
        try:
            os.kill(pid, 0)
            state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
        except (ProcessLookupError, FileNotFoundError):
            return True
        if state[0] == "Z" and int(state[1]) == 1:
            return True  # its parent was killed, and whoever is process 1 here is slow
        time.sleep(0.02)
    return False
