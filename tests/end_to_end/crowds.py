"""Several processes of one run on this machine, started by hand as an engine would."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from shardtrain.launch_local import free_port

TRAIN = ("-m", "shardtrain", "train", "tiny.toml")


class Crowd:
    """The processes; what each says goes to a file in the project's folder."""

    def __init__(self, folder: Path, count: int, *flags: str, program: tuple[str, ...] = TRAIN):
        """Starts them."""
        self.folder = folder
        peers = {
            "SHARDTRAIN_COORDINATOR": f"127.0.0.1:{free_port()}",
            "SHARDTRAIN_PROCESSES": str(count),
        }
        self.processes = []
        for index in range(count):
            with (folder / f"said-{index}.txt").open("w") as said:
                process = subprocess.Popen(
                    [sys.executable, *program, *flags],
                    cwd=folder,
                    env=os.environ | peers | {"SHARDTRAIN_PROCESS": str(index)},
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=said,
                    start_new_session=True,
                )
            self.processes.append(process)

    def said(self, index: int = 0) -> str:
        """What a process has said so far."""
        return (self.folder / f"said-{index}.txt").read_text(errors="replace")

    def send(self, index: int, number: signal.Signals) -> None:
        """Sends a signal to one of them."""
        self.processes[index].send_signal(number)

    def alive(self) -> bool:
        """Whether all of them run."""
        return all(process.poll() is None for process in self.processes)

    def finish(self, seconds: float = 180) -> list[int]:
        """Waits until all have ended; their exit codes."""
        deadline = time.monotonic() + seconds
        try:
            return [p.wait(max(0.0, deadline - time.monotonic())) for p in self.processes]
        except subprocess.TimeoutExpired:
            raise AssertionError("\n\n".join(map(self.said, range(len(self.processes))))) from None
        finally:
            self.kill()

    def kill(self) -> None:
        """Kills those that are left, stopped ones too."""
        for process in self.processes:
            if process.poll() is None:
                process.kill()
            process.wait()


def crowd(folder: Path, count: int, *flags: str, codes: set[int] | None = None) -> Crowd:
    """Processes from their start to their end."""
    found = Crowd(folder, count, *flags)
    ended = found.finish()
    said = "\n\n".join(map(found.said, range(count)))
    assert set(ended) == (codes or {0}), f"{ended}:\n{said}"
    return found
