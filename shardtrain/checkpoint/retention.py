"""Which complete steps stay. Owns that choice; does not own deleting the others."""

import datetime
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Step:
    """What the choice looks at."""

    number: int
    created: datetime.datetime
    metric: float | None = None
    """The validation loss, where there is one."""


@dataclass(frozen=True)
class Retention:
    """How many steps stay, and which of the older ones."""

    keep: int = 2
    every: int = 0
    hours: float = 0.0
    best: int = 0

    @property
    def count(self) -> int:
        """Steps that are there at most by number, while none is being written."""
        return max(self.keep, 2)

    def kept(self, steps: Sequence[Step]) -> Mapping[int, str]:
        """Chooses.

        The newest two stay whatever `keep` says: the newest has not been read by anybody yet.

        Args:
            steps: the complete ones, oldest first.

        Returns:
            Why each step stays that does.

        Example:
            >>> now = datetime.datetime(2026, 1, 1)
            >>> steps = [Step(n, now) for n in (1000, 1500, 2000, 2500, 3000)]
            >>> Retention(keep=1, every=1000).kept(steps)
            {3000: 'newest', 2500: 'the one before', 1000: 'every 1000', 2000: 'every 1000'}
        """
        reasons: dict[int, str] = {}
        newest = [step.number for step in reversed(steps)]
        for place, number in enumerate(newest[: self.count]):
            words = ("newest", "the one before")
            reasons[number] = words[place] if place < 2 else f"one of {self.keep} newest"
        if self.every:
            for step in steps:
                if step.number % self.every == 0:
                    reasons.setdefault(step.number, f"every {self.every}")
        if self.hours:
            last: datetime.datetime | None = None
            for step in steps:
                if last is None or step.created - last >= datetime.timedelta(hours=self.hours):
                    last = step.created
                    reasons.setdefault(step.number, f"one in {self.hours:g} hours")
        for step in self._best(steps):
            reasons.setdefault(step.number, f"validation loss {step.metric:.4g}")
        return reasons

    def _best(self, steps: Sequence[Step]) -> list[Step]:
        """The steps with the lowest losses that are numbers, the older one of two equal ones."""
        measured = [s for s in steps if s.metric is not None and math.isfinite(s.metric)]
        return sorted(measured, key=lambda step: (step.metric, step.number))[: self.best]
