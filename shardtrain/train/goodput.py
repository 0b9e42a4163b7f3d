"""Where the time of a run went, over all its attempts: read from its timeline.

Owns: the buckets, their sum, which steps were done for nothing. Does not own: the timeline
(`phases`), how the buckets are told (`shardtrain.report`). Imports no jax.

An update counts once: the time that it took in the attempt, or after the rollback, whose result the
run went on with is productive, and all earlier time on it is recomputed. So work is what phases
`step` and `replay` have taken, and what a later attempt or a rollback takes back is cut off it.
Between two lines of the timeline an update takes the mean time of those updates.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, Final

from shardtrain.train.phases import PHASES

Line = Mapping[str, Any]

WORK: Final = ("step", "replay")
"""The phases in which the devices work on updates."""
BUCKETS: Final = (
    "productive", "recomputed", "compile", "save", "end", "restore", "data", "host", "eval",
    "start", "idle", "down",
)  # fmt: skip
"""productive: steps that count · recomputed: steps that were done once more later · end: after the
last step, waiting for the last save · down: between two attempts. The others are phases."""


@dataclass(frozen=True)
class Spent:
    """One attempt: when it was, and what its phases have taken."""

    number: int
    begun: float
    """When its process was started, in seconds of the clock on the wall."""
    last: float
    """When it was last heard of."""
    resumed: int
    devices: int
    processes: int
    seconds: Mapping[str, float]
    lines: tuple[Line, ...]


@dataclass(frozen=True)
class Goodput:
    """Where the time went."""

    elapsed: float
    """From the start of the first attempt to the last line of the last one."""
    buckets: Mapping[str, float]
    """Seconds, by the names of `BUCKETS`; they add up to `elapsed`."""

    @property
    def share(self) -> float:
        """The productive part of the time."""
        return self.buckets["productive"] / self.elapsed if self.elapsed else 0.0


@dataclass
class _Work:
    """The time of updates that have been done and not been taken back."""

    spans: list[tuple[float, float, float]] = field(default_factory=list)
    """(updates done before, updates done after, seconds)."""
    lost: float = 0.0
    step: float = 0

    def add(self, step: float, seconds: float) -> None:
        """Work that has led to an update, or to none yet."""
        after = max(self.step, step)
        if seconds > 0:
            self.spans.append((self.step, after, seconds))
        self.step = after

    def go_back(self, step: float) -> None:
        """All work on updates after one was for nothing."""
        kept = []
        for before, after, seconds in self.spans:
            if before >= step:  # also work on the update after it that was not finished
                part = 0.0
            elif after <= step:
                part = 1.0
            else:
                part = (step - before) / (after - before)
                after = step
            self.lost += seconds * (1 - part)
            if part:
                kept.append((before, after, seconds * part))
        self.spans, self.step = kept, step


def attempts(lines: Iterable[Line]) -> list[Spent]:
    """Sort the lines of a timeline into attempts.

    Args:
        lines: From `read_timeline`, oldest first.

    Returns:
        The attempts, oldest first.
    """
    found = []
    for number, group in groupby(lines, key=lambda line: int(line["attempt"])):
        own = tuple(group)
        first, last = own[0], own[-1]
        found.append(
            Spent(
                number,
                begun=first["time"] - sum(first["seconds"].values()),
                last=last["time"],
                resumed=int(first.get("resumed", 0)),
                devices=int(first.get("devices", 0)),
                processes=int(first.get("processes", 1)),
                seconds=last["seconds"],
                lines=own,
            )
        )
    return found


def goodput(found: Iterable[Spent]) -> Goodput:
    """Sum up attempts.

    Args:
        found: From `attempts`.

    Returns:
        Where their time and the time between them went.
    """
    buckets = dict.fromkeys(BUCKETS, 0.0)
    work, first, last = _Work(), None, None
    for attempt in found:
        first = attempt.begun if first is None else first
        seconds = {name: attempt.seconds.get(name, 0.0) for name in PHASES}
        # Processes were started before the attempt before had ended: that time is in both.
        between = 0.0 if last is None else attempt.begun - last
        seconds["start"] = max(0.0, seconds["start"] + min(0.0, between))
        # A machine that sleeps has a clock on the wall that goes on, and no phase that does.
        asleep = attempt.last - attempt.begun - sum(attempt.seconds.values())
        buckets["down"] += max(0.0, between) + max(0.0, asleep)
        for name in BUCKETS:
            buckets[name] += seconds.get(name, 0.0)
        _count(work, attempt)
        last = attempt.last
    buckets["productive"] = sum(seconds for _, _, seconds in work.spans)
    buckets["recomputed"] = work.lost
    return Goodput(0.0 if first is None or last is None else last - first, buckets)


def _count(work: _Work, attempt: Spent) -> None:
    """Adds the work of an attempt, and takes back what it has taken back."""
    work.go_back(attempt.resumed)
    before = 0.0
    for line in attempt.lines:
        seconds = sum(line["seconds"].get(name, 0.0) for name in WORK)
        work.add(max(line["step"], line.get("at", 0)), seconds - before)
        before = seconds
        if line.get("event") == "rollback":
            work.go_back(line["at"])
