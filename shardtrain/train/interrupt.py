"""Ctrl-C and termination: noticed at once, acted on between two steps.

Signals are taken by a thread that reads the interpreter's wake-up pipe, because a handler in Python does
not run while the main thread compiles. The first signal asks the loop to save and end; a second one ends
the process.
"""

import os
import signal
import sys
import threading
from types import FrameType
from typing import Self

EXIT_CODES = {signal.SIGINT: 130, signal.SIGTERM: 75}
"""What the process exits with once it has saved."""


class Interrupt:
    """A context in which SIGINT and SIGTERM set `signal` instead of raising."""

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None
        self._read, self._write = -1, -1
        self._before: dict[signal.Signals, object] = {}
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Self:
        if threading.current_thread() is not threading.main_thread():
            return self  # only the main thread may set handlers; elsewhere signals do what they did
        self._read, self._write = os.pipe()
        os.set_blocking(self._write, False)
        signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
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
        signal.set_wakeup_fd(-1)
        os.close(self._write)  # the thread reads the end of the pipe
        self._thread.join()
        os.close(self._read)
        self._thread = None

    def _watch(self) -> None:
        while received := os.read(self._read, 1):
            number = received[0]
            if number not in EXIT_CODES:
                continue
            caught = signal.Signals(number)
            if self.signal is not None:
                print("\nstopped at once; the last complete checkpoint stands", file=sys.stderr)
                os._exit(EXIT_CODES[caught])
            self.signal = caught
            print(
                f"\n{caught.name}: saving after this step; once more stops at once",
                file=sys.stderr,
            )


def _ignore(_number: int, _frame: FrameType | None) -> None:
    """Takes the place of handlers that raise; the thread acts instead."""
