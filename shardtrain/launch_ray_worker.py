"""What runs on a node of a Ray cluster: one process of the run, and nothing of Ray inside it.

Owns: starting that process, its output and its end. Does not own: when (`launch_ray`).
"""

import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Final

from shardtrain.launch_local import GUARD, free_port

_WAIT_SECONDS: Final = 0.5


class Worker:
    """One process of the run. When Ray ends the worker, a guard ends the process.

    Args:
        index: The number of the process.
    """

    def __init__(self, index: int) -> None:
        self._index = index
        self._rest = b""
        self._process: subprocess.Popen[bytes] | None = None
        self._guard: subprocess.Popen[bytes] | None = None

    def address(self) -> str:
        """Return where the peers of a process on this node can meet."""
        import ray

        return f"{ray.util.get_node_ip_address()}:{free_port()}"

    def start(self, words: Sequence[str], folder: str, environment: Mapping[str, str]) -> None:
        """Start the process.

        Args:
            words: Its command line; the first is replaced by this node's interpreter.
            folder: Its folder, the same on every node.
            environment: What it has besides the environment of the worker.
        """
        self._guard = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", GUARD], stdin=subprocess.PIPE, process_group=0
        )
        self._process = subprocess.Popen(
            [sys.executable, *words[1:]],
            cwd=folder,
            env={**os.environ, "PYTHONUNBUFFERED": "1", **environment},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            process_group=self._guard.pid,
        )
        assert self._process.stdout is not None
        os.set_blocking(self._process.stdout.fileno(), False)

    def send(self, number: int) -> None:
        """Pass a signal on.

        Args:
            number: Of the signal.
        """
        if self._process is not None:
            self._process.send_signal(number)

    def poll(self) -> tuple[list[str], int | None]:
        """Return what the process has said since the last call, and its code when it has ended."""
        assert self._process is not None
        assert self._process.stdout is not None
        source = self._process.stdout.fileno()
        select.select([source], [], [], _WAIT_SECONDS)
        code = self._process.poll()
        lines: list[str] = []
        while data := self._read(source):
            *whole, self._rest = (self._rest + data).split(b"\n")
            lines += [line.decode(errors="replace") for line in whole]
        if code is None:
            time.sleep(0.05)  # the end of the output comes a little before the end of the process
            return lines, None
        self._end()
        return lines + ([self._rest.decode(errors="replace")] if self._rest else []), code

    def _read(self, source: int) -> bytes:
        try:
            return os.read(source, 65536)
        except BlockingIOError:
            return b""

    def _end(self) -> None:
        assert self._guard is not None
        if self._guard.poll() is None:
            os.killpg(self._guard.pid, signal.SIGKILL)
            self._guard.wait()
