"""What the run is doing, and since when: one clock for the watchdog, for goodput and for drift.

Owns: the names of the phases, their sums, the timeline file. Does not own: what is read from it
(`shardtrain.report`) and how long a phase may take (`watchdog`).

`timeline.jsonl` is never cut back when a run resumes: each line has the time of the clock on the
wall, the attempt, the step and the seconds that each phase has taken in this attempt so far. All
time of a process is in some phase, so the seconds of a line add up to the age of its attempt.
"""

import contextlib
import json
import os
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from shardtrain.train.metrics import plain

PHASES: Final = (
    "start", "compile", "restore", "data", "host", "step", "replay", "eval", "save", "idle", "end",
)  # fmt: skip
"""start: until the step is compiled, all else that is not named here · data: waiting for a batch ·
host: between a batch and its dispatch · step: the devices work · replay: the same, on steps that an
earlier attempt had done · save: the loop is held up by one · idle: waiting for other processes ·
end: after the last step."""


@dataclass(frozen=True)
class Now:
    """What a process does at a moment."""

    phase: str
    step: int
    """Updates done, as far as they were reported."""
    since: float
    """When it began, in seconds of `time.monotonic`."""


def _nothing(_now: Now) -> None:
    """Nobody wants to know."""


@dataclass
class Phases:
    """The clock of one process; one thread sets it, any may read it."""

    told: Callable[[Now], None] = _nothing
    """Called when a phase has ended, with what comes now."""
    begun: float = field(default_factory=time.monotonic)
    _seconds: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        self._now = Now("start", 0, self.begun)

    @property
    def now(self) -> Now:
        """What the process does."""
        return self._now

    def enter(self, phase: str, step: int | None = None) -> None:
        """End a phase and begin another.

        Args:
            phase: One of `PHASES`.
            step: Updates done; None = as before.
        """
        assert phase in PHASES, phase
        now = time.monotonic()
        with self._lock:
            before = self._now
            self._seconds[before.phase] += now - before.since
            self._now = Now(phase, before.step if step is None else step, now)
        self.told(self._now)

    @contextmanager
    def within(self, phase: str, step: int) -> Iterator[None]:
        """A phase inside another one, which goes on afterwards; `step` updates are done."""
        outer = self._now.phase
        self.enter(phase, step)
        try:
            yield
        finally:
            self.enter(outer)

    def seconds(self) -> dict[str, float]:
        """The seconds of every phase so far, that of now included; they add up to the age."""
        with self._lock:
            found = dict(self._seconds)
            now = self._now
            found[now.phase] = found.get(now.phase, 0.0) + time.monotonic() - now.since
        return found


class Timeline:
    """Writes the timeline of one attempt: a line now and then, and one for every event.

    Its thread writes one too where a phase lasts, such as a compilation that is killed.
    """

    EVERY = 1.0
    """Seconds between two lines, and so about the most that a killed attempt leaves untold."""
    PART = 1e-3
    """Part of the attempt's age that they are apart at least, so that the file stays small."""

    def __init__(self, path: Path, phases: Phases, **start: Any) -> None:
        """Begin an attempt.

        Args:
            path: The file; it is appended to.
            phases: The clock.
            start: What the first line says: processes, devices, the step resumed from.
        """
        self._phases = phases
        self.earlier = read_timeline(path)
        """The lines of the attempts before."""
        self.attempt = 1 + max((line["attempt"] for line in self.earlier), default=0)
        self._file = path.open("ab+", buffering=0)
        if self._file.tell():
            self._file.seek(-1, os.SEEK_END)
            if self._file.read(1) != b"\n":  # torn; all writes go to the end
                self._file.write(b"\n")
        self._last = float("-inf")
        self._lock = threading.Lock()
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="timeline", daemon=True)
        self.write("start", **start)
        self._thread.start()

    def tick(self, now: Now) -> None:
        """Write a line if it is time."""
        moment = time.monotonic()
        if moment - self._last >= max(self.EVERY, self.PART * (moment - self._phases.begun)):
            self.write("", step=now.step)

    def write(self, event: str, **values: Any) -> None:
        """Write a line.

        Args:
            event: What happened; "" = nothing but that time has passed.
            values: What belongs to it.
        """
        with self._lock:  # or a line could be older than the one before it
            self._last = time.monotonic()
            seconds = {name: round(value, 4) for name, value in self._phases.seconds().items()}
            line: dict[str, Any] = {"time": time.time(), "attempt": self.attempt}
            line |= {"event": event} if event else {}
            line |= {"step": self._phases.now.step, **values, "seconds": seconds}
            self._file.write(json.dumps(plain(line), allow_nan=False).encode() + b"\n")

    def close(self) -> None:
        """Close the file."""
        self._end.set()
        self._thread.join()
        self._file.close()

    def _beat(self) -> None:
        while not self._end.wait(self.EVERY):
            with contextlib.suppress(OSError):  # a full disk is told by those who need it
                self.tick(self._phases.now)


def read_timeline(path: Path) -> list[dict[str, Any]]:
    """Read a timeline, also while it is written; lines that are torn are left out.

    Args:
        path: The file; it may be missing.

    Returns:
        Its lines, oldest first.
    """
    found = []
    try:
        lines = path.read_bytes().split(b"\n")
    except FileNotFoundError:
        return []
    for text in lines:
        try:
            line = json.loads(text)
        except ValueError:
            continue
        if isinstance(line, dict) and {"time", "attempt", "seconds"} <= line.keys():
            found.append(line)
    return found


def process_age() -> float:
    """Seconds since this process was started; 0 where the system does not tell."""
    try:
        ticks = Path("/proc/self/stat").read_text(encoding="ascii").rpartition(")")[2].split()[19]
        uptime = float(Path("/proc/uptime").read_text(encoding="ascii").split()[0])
        return max(0.0, uptime - int(ticks) / os.sysconf("SC_CLK_TCK"))
    except (OSError, ValueError, IndexError):
        return 0.0
