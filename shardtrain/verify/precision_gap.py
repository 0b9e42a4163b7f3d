"""A precision against float32: the same run twice, and how far apart the losses are.

Owns: both runs, the gap, and the limit that it is held to. Does not own: the programs, and the
command.

Both begin with the same random numbers, rounded to what each rests in, and read the same batches.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

import jax

from shardtrain.errors import PolicyError
from shardtrain.strategies.precision_words import Words
from shardtrain.train.build import Program

Batch = Mapping[str, jax.Array]
SMOOTHED: Final = 0.9
"""Weight of the past in a smoothed loss, as in figure 10 of the report of DeepSeek-V3."""


@dataclass(frozen=True)
class Limit:
    """By what part the loss may be worse in the end, and who says so."""

    gap: float
    source: str


LIMITS: Final = {
    "float32": Limit(0.0, "it is float32"),
    "bfloat16": Limit(
        0.0025,
        "no gap in Kalamkar et al. 2019 (arXiv 1905.12322); what DeepSeek-V3 (arXiv 2412.19437, "
        "section 3.3) takes for the randomness of training",
    ),
    "float16": Limit(
        0.0025,
        "no gap in Micikevicius et al. 2018 (arXiv 1710.03740); what DeepSeek-V3 (arXiv "
        "2412.19437, section 3.3) takes for the randomness of training",
    ),
    "fp8": Limit(
        0.0025, "smoothed losses stay within 0.25 %, DeepSeek-V3 (arXiv 2412.19437, section 3.3)"
    ),
    "moments": Limit(
        0.0025, "no gap from bfloat16 moments, and 0.25 % in all, DeepSeek-V3 (arXiv 2412.19437)"
    ),
    "master": Limit(
        0.0025,
        "0.2 % of accuracy with stochastic rounding, Zamirai et al. 2020 (arXiv 2010.06192); "
        "0.25 % of loss here",
    ),
}
"""By what a precision has that the ones above it lack."""


def limit_of(words: Words) -> Limit:
    """The limit for a precision: that of its boldest part."""
    if words.master == "bfloat16":
        return LIMITS["master"]
    if words.moments == "bfloat16":
        return LIMITS["moments"]
    return LIMITS["fp8" if words.products else words.compute]


@dataclass(frozen=True)
class Gap:
    """Losses of both runs, step by step."""

    precision: str
    limit: Limit
    found: Sequence[float]
    float32: Sequence[float]

    @cached_property
    def smoothed(self) -> list[float]:
        """The relative gap of the smoothed losses at each step; positive = worse than float32."""
        pairs = zip(_smooth(self.found), _smooth(self.float32), strict=True)
        return [(ours - theirs) / theirs for ours, theirs in pairs]

    @property
    def final(self) -> float:
        """The relative gap of the mean losses of the last tenth of the steps."""
        last = -max(len(self.found) // 10, 1)
        ours, theirs = (math.fsum(losses[last:]) for losses in (self.found, self.float32))
        return (ours - theirs) / theirs

    @property
    def largest(self) -> float:
        """The largest smoothed one of all steps, whichever of both is worse."""
        return max(map(abs, self.smoothed))

    @property
    def step(self) -> int:
        """The update at which it is largest."""
        return 1 + [abs(gap) for gap in self.smoothed].index(self.largest)

    @property
    def within(self) -> bool:
        """Whether the loss is no worse in the end than the limit says.

        Single steps of a small batch differ by more: their losses are random numbers themselves.
        """
        return self.final <= self.limit.gap


def loss_gap(
    found: tuple[Program, Callable[[int], Batch]],
    float32: tuple[Program, Callable[[int], Batch]],
    *,
    steps: int,
) -> Gap:
    """Trains both and compares their losses.

    Args:
        found: a program and its batches.
        float32: the same in float32.
        steps: updates.

    Raises:
        PolicyError: a loss is no number.
    """
    of = found[0].policy
    return Gap(of.name, limit_of(of.words), _losses(*found, steps), _losses(*float32, steps))


def _losses(program: Program, batch_at: Callable[[int], Batch], steps: int) -> list[float]:
    """The loss of each update; a batch whose gradient overflows is tried again, as in a run."""
    state: Any = program.init()
    losses: list[float] = []
    cursor = 0
    while len(losses) < steps:
        state, metrics = program.step(state, batch_at(cursor))
        if bool(metrics["retry"]):
            continue
        if not bool(metrics["moved"]):
            raise PolicyError(
                "the loss or its gradient is no number",
                where=f"update {len(losses) + 1}",
                value=program.policy.name,
            )
        losses.append(float(metrics["loss"]))
        cursor += 1
    return losses


def _smooth(losses: Sequence[float]) -> list[float]:
    """The exponential mean of losses so far, without a bias to its beginning."""
    mean = weight = 0.0
    smoothed = []
    for loss in losses:
        mean = SMOOTHED * mean + (1 - SMOOTHED) * loss
        weight = SMOOTHED * weight + (1 - SMOOTHED)
        smoothed.append(mean / weight)
    return smoothed
