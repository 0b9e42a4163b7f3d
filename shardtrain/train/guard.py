"""What follows from numbers: a loss that is none, a loss that jumps, and what is done about it.

Owns: the judgement. Does not own: that parameters never take in what is no number (the step sees to
that), and going back or stopping (the loop and its owner). Every process judges the same numbers in
the same order, and so all come to the same verdict without a word between them.
"""

import math
import statistics
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final, Literal

from shardtrain.train.config import GuardConfig

_FEWEST: Final = 8
"""Losses before a jump is one."""
_NORMAL: Final = 1.4826
"""Standard deviations in a median deviation, of normal numbers."""
_SMALLEST_DEVIATION: Final = 1e-3
"""Part of the median loss below which a deviation counts as that much."""


@dataclass(frozen=True)
class Update:
    """What is judged of one batch."""

    step: int
    """Updates done with it; the update that it would have been where it was none."""
    cursor: int
    loss: float
    grad_norm: float
    moved: bool
    """Whether parameters took it in."""
    loss_scale: float | None = None
    """What the loss was multiplied by, where it was."""


@dataclass(frozen=True)
class Verdict:
    """What is to be done about an update."""

    action: Literal["warn", "skip", "stop", "rollback"]
    reason: str
    update: Update

    def values(self) -> dict[str, Any]:
        """What an event says of it."""
        update = self.update
        numbers = {"loss": update.loss, "grad_norm": update.grad_norm}
        return {"reason": self.reason, "update": update.step, "cursor": update.cursor, **numbers}


class Guard:
    """Judges updates one after another."""

    def __init__(self, config: GuardConfig, losses: Iterable[float] = ()) -> None:
        """Begins to judge.

        Args:
            config: what the user wants.
            losses: those of the last updates, where a run goes on.
        """
        self._config = config
        self._losses = deque(losses, maxlen=config.spike_window)
        self._skipped = 0

    def judge(self, update: Update) -> Verdict | None:
        """Judges an update.

        Args:
            update: what is known of it.

        Returns:
            What is to be done; None for nothing.
        """
        if not update.moved:
            return self._bad(update)
        self._skipped = 0
        verdict = self._spike(update)
        if verdict is None or verdict.action == "warn":
            self._losses.append(update.loss)
        return verdict

    def forget(self) -> None:
        """Begins anew, after a rollback."""
        self._losses.clear()
        self._skipped = 0

    def _bad(self, update: Update) -> Verdict:
        what = "the loss" if not math.isfinite(update.loss) else "the norm of the gradient"
        value = update.grad_norm if math.isfinite(update.loss) else update.loss
        reason = f"{what} of update {update.step} is {value}"
        if update.loss_scale is not None:
            reason += f", with a loss scale of {update.loss_scale:g}"
        if self._config.bad_numbers != "skip":
            return Verdict(self._config.bad_numbers, reason, update)
        self._skipped += 1
        if self._skipped <= self._config.skip_limit:
            return Verdict("skip", reason, update)
        limit = self._config.skip_limit
        more = f"such batch {self._skipped} in a row, guard.skip_limit={limit}"
        return Verdict("stop", f"{reason}, {more}", update)

    def _spike(self, update: Update) -> Verdict | None:
        config = self._config
        if config.spikes == "ignore" or len(self._losses) < min(_FEWEST, config.spike_window):
            return None
        median = statistics.median(self._losses)
        deviation = statistics.median(abs(loss - median) for loss in self._losses)
        sigma = max(_NORMAL * deviation, _SMALLEST_DEVIATION * abs(median))
        height = (update.loss - median) / sigma if sigma else 0.0
        if height <= config.spike_sigmas:
            return None
        reason = (
            f"the loss of update {update.step} is {update.loss:.4g}, {height:.1f} standard "
            f"deviations above the median {median:.4g} of the last {len(self._losses)}"
        )
        return Verdict(config.spikes, reason, update)
