"""Ctrl-C, termination and a machine's warnings: noticed at once, acted on between two steps.

Owns: who takes the signals, and exit codes. Does not own: saving. A thread reads the interpreter's
wake-up pipe, because a handler in Python does not run while the main thread compiles. The first
signal asks the loop to save and end. A second Ctrl-C ends the process; a second SIGTERM changes
nothing, for machines repeat themselves.
"""

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn, Self

from shardtrain.errors import EXIT_INTERRUPTED, EXIT_PREEMPTED

EXIT_CODES = {
    signal.SIGINT: EXIT_INTERRUPTED,
    signal.SIGTERM: EXIT_PREEMPTED,
    signal.SIGUSR1: EXIT_PREEMPTED,
}
"""What the process exits with once it has saved. SIGUSR1 is what Slurm warns with."""


class Interrupt:
    """A context in which signals set `signal` instead of raising or ending the process."""

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None
        self._read, self._write, self._wakeup_before = -1, -1, -1
        self._before: dict[signal.Signals, object] = {}
        self._thread: threading.Thread | None = None
        self._tell: Callable[[signal.Signals], None] | None = None

    def tell(self, tell: Callable[[signal.Signals], None]) -> None:
        """Calls a function once with the first signal, also if that has come already.

        Args:
            tell: called by the thread that takes signals, or by this call.
        """
        self._tell = tell
        if self.signal is not None:
            tell(self.signal)

    def __enter__(self) -> Self:
        if threading.current_thread() is not threading.main_thread():
            return self  # only the main thread may set handlers; elsewhere signals do what they did
        self._read, self._write = os.pipe()
        os.set_blocking(self._write, False)
        self._wakeup_before = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        for number in EXIT_CODES:
            self._before[number] = signal.signal(number, _ignore)
        self._thread = threading.Thread(target=self._watch, name="signals", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._thread is None:
            return
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]
        signal.set_wakeup_fd(self._wakeup_before)
        os.close(self._write)  # the thread reads the end of the pipe
        self._thread.join()
        os.close(self._read)
        self._thread = None

    def _watch(self) -> None:
        while received := os.read(self._read, 1):
            if received[0] in EXIT_CODES:
                self._take(signal.Signals(received[0]))

    def _take(self, caught: signal.Signals) -> None:
        if self.signal is None:
            self.signal = caught
            _say(f"{caught.name}: the run saves and ends after this step; Ctrl-C ends it at once")
            if self._tell is not None:
                self._tell(caught)
        elif caught is signal.SIGINT:
            _say("stopped at once; the last complete checkpoint stands")
            os._exit(EXIT_CODES[caught])


@contextmanager
def leave_on_termination() -> Iterator[None]:
    """While there is nothing to save yet, SIGTERM and SIGUSR1 end the process with its code."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {n: signal.signal(n, _leave) for n in (signal.SIGTERM, signal.SIGUSR1)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _leave(number: int, _frame: FrameType | None) -> NoReturn:
    _say(f"{signal.Signals(number).name}: ended; no training was under way")
    raise SystemExit(EXIT_PREEMPTED)


def _ignore(_number: int, _frame: FrameType | None) -> None:
    """Takes the place of handlers that raise; the thread acts instead."""


def _say(message: str) -> None:
    echoed = "\n" if sys.stderr.isatty() else ""  # by the terminal: ^C
    print(f"{echoed}{message}", file=sys.stderr, flush=True)
