"""Several processes of a run on this machine.

Owns: starting them, their output, passing signals on, ending all of them when one has failed,
starting again. Does not own: what their codes mean together (`launch_ending`), or the run, whose
own watchdog takes survivors down before this file has to.

Nothing here has a thread: one loop waits for output, ends and signals. The processes are in a
process group of their own, whose leader is a guard. The guard waits for the end of the launcher, in
whatever way it comes, and then kills the group. So no process, and no child of one, is left.
"""

import os
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from types import FrameType
from typing import IO, Final, Self

from shardtrain.launch_ending import (
    AGAIN,
    AGREED,
    SIGNAL_CODES,
    Ended,
    first_failure,
    meaning,
    one_code,
    pause,
)
from shardtrain.sharding.processes import COORDINATOR, PROCESS, PROCESSES

GRACE_SECONDS: Final = 30.0
"""After the first failure, how long the others may take to end by themselves."""
TERM_SECONDS: Final = 5.0
"""After that and SIGTERM, how long until SIGKILL."""
_IMPATIENT: Final = 3
"""So many times Ctrl-C, and everything is killed: the processes may be stopped and not listen."""
_INSTEAD: Final = {signal.SIGHUP: signal.SIGTERM}
"""The terminal is gone, and the run should save."""
GUARD: Final = "import os; os.read(0, 1); os.killpg(0, 9)"
"""The guard: waits for the end of who started it, and kills its group, itself included."""


def run_local(words: Sequence[str], count: int, *, restarts: int = 0) -> int:
    """Run a command in several processes that are peers, to its end.

    Args:
        words: The command line of every process.
        count: The number of processes.
        restarts: How many times to start again when a process was lost or hung.

    Returns:
        One exit code, by the rule of `one_code`.
    """
    with Signals() as signals:
        attempt = 0
        while True:
            code = tell(Group(words, _environments(count), signals).run())
            if code not in AGAIN or attempt == restarts or signals.taken:
                return code
            attempt += 1
            seconds = pause(attempt)
            say(f"{meaning(code)}; start {attempt} of {restarts} follows in {seconds:.0f} s")
            if signals.wait(seconds):
                return SIGNAL_CODES[signals.taken[0]]


def tell(ended: Sequence[Ended]) -> int:
    """Say which process began the end of a run.

    Args:
        ended: How all of them ended.

    Returns:
        One exit code.
    """
    code, first = one_code(ended), first_failure(ended)
    if first is not None and len(ended) > 1:
        say(f"process {first.index}: {meaning(first.code)}; the run ends with {code}")
    return code


def say(message: str) -> None:
    """Print a line of the launcher's own.

    Args:
        message: What to say.
    """
    print(f"launch: {message}", file=sys.stderr, flush=True)


def free_port() -> int:
    """Return a port of this machine that nobody listens at."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


def _environments(count: int) -> list[dict[str, str]]:
    peers = {COORDINATOR: f"127.0.0.1:{free_port()}", PROCESSES: str(count)}
    # what a process says comes at once, and not when a buffer is full
    base = {"PYTHONUNBUFFERED": "1"} | dict(os.environ) | peers
    return [
        base | {PROCESS: str(index)} | _share_of_gpus(os.environ, index, count)
        for index in range(count)
    ]


def _share_of_gpus(environ: Mapping[str, str], index: int, count: int) -> dict[str, str]:
    """The visible GPUs of one process, where the launcher has named more than one of them."""
    named = [name for name in environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
    if len(named) < count or named == ["-1"]:
        return {}
    share = len(named) // count
    return {"CUDA_VISIBLE_DEVICES": ",".join(named[index * share : (index + 1) * share])}


class Signals:
    """A context in which signals are noted and do nothing else.

    Whoever waits in a selector registers this object, which can be read when a signal came.
    """

    def __init__(self) -> None:
        self.taken: list[signal.Signals] = []
        """What came, in order."""
        self._read, self._write, self._before_fd = -1, -1, -1
        self._before: dict[signal.Signals, object] = {}

    def __enter__(self) -> Self:
        self._read, self._write = os.pipe()
        os.set_blocking(self._read, False)
        os.set_blocking(self._write, False)
        self._before_fd = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        for number in SIGNAL_CODES:
            if signal.getsignal(number) is not signal.SIG_IGN:  # as nohup ignores SIGHUP
                self._before[number] = signal.signal(number, _ignore)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]
        signal.set_wakeup_fd(self._before_fd)
        os.close(self._read)
        os.close(self._write)

    def fileno(self) -> int:
        """Return what a selector waits for."""
        return self._read

    def read(self) -> list[signal.Signals]:
        """Return the signals that came since the last call."""
        try:
            numbers = os.read(self._read, 4096)
        except BlockingIOError:
            numbers = b""
        new = [signal.Signals(number) for number in numbers if number in self._before]
        self.taken += new
        return new

    def wait(self, seconds: float) -> bool:
        """Wait, or until a signal comes; returns whether one did."""
        end = time.monotonic() + seconds
        with selectors.DefaultSelector() as selector:
            selector.register(self, selectors.EVENT_READ)
            while not self.taken and (left := end - time.monotonic()) > 0:
                selector.select(left)
                self.read()
        return bool(self.taken)


def _ignore(_number: int, _frame: FrameType | None) -> None:
    """Takes the place of handlers that raise; the loop acts instead."""


class _Stream:
    """The output of a process, line by line; those of process 0 come as they are."""

    def __init__(self, index: int, source: IO[bytes], target: IO[str]) -> None:
        self._source, self._target = source, target
        self._prefix = f"[{index}] " if index else ""
        self._rest = b""
        self.ended = False
        os.set_blocking(source.fileno(), False)

    def fileno(self) -> int:
        """Return what a selector waits for."""
        return self._source.fileno()

    def pass_on(self) -> bool:
        """Write the whole lines of what is there; returns whether there may be more."""
        try:
            data = os.read(self.fileno(), 65536)
        except BlockingIOError:
            return False
        *lines, self._rest = (self._rest + data).split(b"\n")
        self._write(lines)
        if not data:
            self.ended = True
        return bool(data)

    def drain(self) -> None:
        """Write all lines that are there."""
        while self.pass_on():
            pass

    def _write(self, lines: Sequence[bytes]) -> None:
        texts = [f"{self._prefix}{line.decode(errors='replace')}\n" for line in lines]
        try:
            self._target.write("".join(texts))
            self._target.flush()
        except BrokenPipeError:  # nobody reads any more, which is no reason to end a run
            pass

    def close(self) -> None:
        """Write the rest, and close."""
        self.drain()
        if self._rest:
            self._write([self._rest])
        self._source.close()


class Group:
    """The processes of one start of the run.

    Args:
        words: The command line of every process.
        environments: The environment of each.
        signals: What has to be passed on to all of them.
        instead: Signals that are passed on in place of others.
    """

    def __init__(
        self,
        words: Sequence[str],
        environments: Sequence[dict[str, str]],
        signals: Signals,
        *,
        instead: Mapping[signal.Signals, signal.Signals] = _INSTEAD,
    ) -> None:
        self._instead = instead
        self._signals = signals
        self._selector = selectors.DefaultSelector()
        self._selector.register(signals, selectors.EVENT_READ)
        self._guard = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", GUARD], stdin=subprocess.PIPE, process_group=0
        )
        self._running: dict[int, subprocess.Popen[bytes]] = {}
        self._streams: dict[int, list[_Stream]] = {}
        self._ended: list[Ended] = []
        self._told: list[signal.Signals] = []
        self._deadline = float("inf")
        self._forced: list[signal.Signals] = []
        try:
            for index, environment in enumerate(environments):
                self._start(index, words, environment)
        except BaseException:
            self._close()
            raise

    def _start(self, index: int, words: Sequence[str], environment: dict[str, str]) -> None:
        process = subprocess.Popen(
            words,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            process_group=self._guard.pid,
        )
        self._running[index] = process
        assert process.stdout is not None
        assert process.stderr is not None
        self._streams[index] = [
            _Stream(index, process.stdout, sys.stdout),
            _Stream(index, process.stderr, sys.stderr),
        ]
        for stream in self._streams[index]:
            self._selector.register(stream, selectors.EVENT_READ)
        self._selector.register(os.pidfd_open(process.pid), selectors.EVENT_READ, index)

    def run(self) -> list[Ended]:
        """Wait for all of them, and end them where that is needed; returns how they ended."""
        try:
            while self._running:
                left = max(0.0, self._deadline - time.monotonic())
                ready = self._selector.select(None if left == float("inf") else left)
                for key, _ in ready:
                    self._take(key)
                if time.monotonic() >= self._deadline:
                    self._force()
        finally:
            self._close()
        return self._ended

    def _take(self, key: selectors.SelectorKey) -> None:
        if isinstance(key.fileobj, _Stream):
            key.fileobj.pass_on()
            if key.fileobj.ended:
                self._selector.unregister(key.fileobj)
        elif isinstance(key.fileobj, Signals):
            for number in self._signals.read():
                self._forward(number)
        else:
            self._selector.unregister(key.fileobj)
            os.close(key.fd)
            self._end(key.data)

    def _forward(self, number: signal.Signals) -> None:
        number = self._instead.get(number, number)
        self._told.append(number)
        if self._signals.taken.count(signal.SIGINT) >= _IMPATIENT:
            number = signal.SIGKILL
            self._told.append(number)
        for process in self._running.values():
            process.send_signal(number)

    def _end(self, index: int) -> None:
        """Note that a process has ended; the first failure sets the others a time."""
        process = self._running.pop(index)
        end = Ended(index, process.wait(), tuple(self._told), forced=bool(self._forced))
        for stream in self._streams[index]:
            stream.drain()
        self._ended.append(end)
        if end.code in (0, *AGREED) or self._deadline != float("inf") or not self._running:
            return
        self._deadline = time.monotonic() + GRACE_SECONDS
        say(f"process {index}: {meaning(end.code)}; the others have {GRACE_SECONDS:.0f} s to end")

    def _force(self) -> None:
        number = signal.SIGKILL if self._forced else signal.SIGTERM
        self._forced.append(number)
        self._deadline = time.monotonic() + TERM_SECONDS
        those = ", ".join(str(index) for index in self._running)
        say(f"{number.name} to what has not ended: {those}")
        for process in self._running.values():
            process.send_signal(number)

    def _close(self) -> None:
        """Leave nothing: neither a process, nor a child of one, nor a zombie."""
        os.killpg(self._guard.pid, signal.SIGKILL)
        self._guard.wait()
        assert self._guard.stdin is not None
        self._guard.stdin.close()
        for process in self._running.values():
            process.wait()
        for key in list(self._selector.get_map().values()):
            if isinstance(key.fileobj, int):
                os.close(key.fileobj)
        for stream in [stream for streams in self._streams.values() for stream in streams]:
            stream.close()
        self._selector.close()
