"""What a schedule costs: time, bubble, memory and messages, for given costs of each virtual stage.

Owns: the figures of a proven table. Does not own: what a layer costs; costs come from outside, in
any unit.

Sends tie neighbours together in every tick, so a tick costs what its slowest stage does. That is
the lockstep time; a schedule with fewer ticks is not faster for it.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from shardtrain.errors import ConfigError
from shardtrain.strategies.schedules.table import (
    BUFFERS,
    NOTHING,
    PARTS,
    Schedule,
    Work,
    after,
    before,
    is_first,
    is_last,
)

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Costs:
    """Time of one microbatch on each virtual stage: arrays [stages, virtual stages]."""

    forward: Floats
    backward: Floats
    """The whole backward, whether or not the weight gradient is a part of its own."""
    weight: Floats
    """The part of `backward` that is the gradient of the weights; for schedules that split it."""

    def of(self, part: str, *, split: bool) -> Floats:
        """Return the time of a part [stages, virtual stages] in a table that splits or not."""
        if part == "backward":
            return self.backward - self.weight if split else self.backward
        return self.forward if part == "forward" else self.weight


def make_costs(
    share: Floats, forward: float = 1.0, backward: float = 2.0, weight: float | None = None
) -> Costs:
    """Return costs in proportion to what each virtual stage holds.

    Args:
        share: How much of a unit each virtual stage holds [stages, virtual stages].
        forward: Time of a unit's forward.
        backward: Time of its whole backward.
        weight: The part of it that is the gradient of the weights; None = half.

    Raises:
        ConfigError: A time is negative, or the part larger than the whole.
    """
    weight = backward / 2 if weight is None else weight
    for name, value in (("forward", forward), ("backward", backward), ("weight", weight)):
        if not 0 <= value < np.inf:
            raise ConfigError("must be a time, at least 0", where=f"{name}={value:g}")
    if weight > backward:
        raise ConfigError(
            f"is more than the whole backward, {backward:g}", where=f"weight={weight:g}"
        )
    return Costs(share * forward, share * backward, share * weight)


def even(stages: int, virtual_stages: int = 1) -> Floats:
    """Return the share [stages, virtual stages] of equal stages, whose whole is 1 on each."""
    return np.full((stages, virtual_stages), 1 / virtual_stages)


@dataclass(frozen=True)
class Sizes:
    """Bytes of one microbatch; the residuals on each virtual stage in the unit of its share."""

    activation: float = 0.0
    """What is sent to a neighbour: the activation, and its gradient."""
    residual: float = 0.0
    """What a forward of a unit keeps for its backward."""
    pending: float = 0.0
    """What a backward of a unit leaves for its weight part."""


@dataclass(frozen=True, eq=False)
class Figures:
    """What a table costs."""

    time: float
    """Lockstep time of the whole table."""
    ideal: float
    """Work of the busiest stage, with no bubble at all."""
    bubble: float
    """Share of all stages' time in which they have nothing to do."""
    tick_times: Floats
    """[ticks]."""
    live: dict[str, list[int]]
    """Most slots of each buffer that are live at once, by stage. A slot is of a virtual stage."""
    live_bytes: list[float]
    """Most bytes that are live at once, by stage."""
    slot_bytes: float
    """Bytes of all slots on one device: each stage has as many, and as large, as any needs."""
    messages: list[int]
    """Activations and gradients sent to another stage, by the stage that sends."""
    message_bytes: list[float]
    """Bytes of them."""

    @property
    def ratio(self) -> float:
        """Lockstep time over the ideal."""
        return self.time / self.ideal if self.ideal else 1.0


def simulate(
    schedule: Schedule,
    costs: Costs | None = None,
    sizes: Sizes | None = None,
    share: Floats | None = None,
) -> Figures:
    """Work out what a table costs.

    Args:
        schedule: A proven table.
        costs: Times; None = a forward of 1 and a backward of 2 on each stage.
        sizes: Bytes; None = none.
        share: How much of a unit each virtual stage holds [stages, virtual stages], for `sizes`;
            None = equal stages.

    Returns:
        The figures.

    Example:
        >>> from shardtrain.strategies.schedules.kinds import make_schedule
        >>> simulate(make_schedule("1f1b", stages=4, microbatches=8)).ratio
        1.375
    """
    work = schedule.work
    share = even(work.num_stages, work.num_virtual) if share is None else share
    costs = make_costs(share) if costs is None else costs
    sizes = Sizes() if sizes is None else sizes
    spent = _spent(work, costs)
    tick_times = spent.max(axis=1)
    time, ideal = float(tick_times.sum()), float(spent.sum(axis=0).max())
    live, live_bytes = _live(schedule, sizes, share)
    messages = _messages(work)
    slot = _slot_bytes(sizes, share)
    return Figures(
        time=time,
        ideal=ideal,
        bubble=1 - float(spent.sum()) / (work.num_stages * time) if time else 0.0,
        tick_times=tick_times,
        live={buffer: counts.max(axis=0).tolist() for buffer, counts in live.items()},
        live_bytes=live_bytes.max(axis=0).tolist(),
        slot_bytes=float(sum(schedule.slots.size(b) * slot[b].max() for b in BUFFERS)),
        messages=messages,
        message_bytes=[count * sizes.activation for count in messages],
    )


def lockstep_time(schedule: Schedule, costs: Costs) -> float:
    """Return the lockstep time of the whole table alone, which is soon known.

    Args:
        schedule: A table.
        costs: Times.
    """
    return float(_spent(schedule.work, costs).max(axis=1).sum())


def _spent(work: Work, costs: Costs) -> Floats:
    """Time that each stage has something to do in each tick [ticks, stages]."""
    spent: Floats = np.sum(list(part_times(work, costs).values()), axis=0)
    return spent


def part_times(work: Work, costs: Costs) -> dict[str, Floats]:
    """Return how long each part takes in each cell [ticks, stages] of a table."""
    stage = np.arange(work.num_stages)
    return {
        part: np.where(
            work.part(part)[1] == NOTHING,
            0.0,
            costs.of(part, split=work.split)[stage, work.part(part)[0]],
        )
        for part in PARTS
    }


def _slot_bytes(sizes: Sizes, share: Floats) -> dict[str, Floats]:
    """Bytes of a slot of each buffer [stages, virtual stages]."""
    one = np.ones_like(share)
    return {
        "activation": sizes.activation * one,
        "gradient": sizes.activation * one,
        "residual": sizes.residual * share,
        "pending": sizes.pending * share,
    }


def _live(
    schedule: Schedule, sizes: Sizes, share: Floats
) -> tuple[dict[str, npt.NDArray[np.intp]], Floats]:
    """Slots of each buffer, and bytes of all, that are live in each tick [ticks, stages]."""
    work = schedule.work
    shape = (work.num_ticks + 1, work.num_stages)
    counts = {buffer: np.zeros(shape, np.intp) for buffer in BUFFERS}
    size = np.zeros(shape)
    bytes_of = _slot_bytes(sizes, share)
    for buffer, stage, virtual, begin, end in _lives(work):
        change = bytes_of[buffer][stage, virtual]
        counts[buffer][begin, stage] += 1
        counts[buffer][end + 1, stage] -= 1
        size[begin, stage] += change
        size[end + 1, stage] -= change
    return {b: count.cumsum(axis=0) for b, count in counts.items()}, size.cumsum(axis=0)


def _lives(work: Work) -> list[tuple[str, int, int, int, int]]:
    """What lies in a slot from one tick to another: buffer, stage, virtual stage, both ticks."""
    ticks = times(work)
    stages = work.num_stages
    lives = []
    for stage, virtual, micro in np.ndindex(ticks["forward"].shape):
        at = {part: int(ticks[part][stage, virtual, micro]) for part in PARTS}
        end = at["weight"] if work.split else at["backward"]
        lives.append(("residual", stage, virtual, at["forward"], end))
        if work.split:
            lives.append(("pending", stage, virtual, at["backward"], end))
        sent = at["forward"]
        if not is_last(stage, virtual, work):
            sent = int(ticks["backward"][(*after(stage, virtual, stages), micro)]) + 1
        lives.append(("gradient", stage, virtual, sent, at["backward"]))
        if not is_first(stage, virtual):
            sent = int(ticks["forward"][(*before(stage, virtual, stages), micro)]) + 1
            lives.append(("activation", stage, virtual, sent, at["forward"]))
    return lives


def times(work: Work) -> dict[str, npt.NDArray[np.intp]]:
    """Return the tick of each piece of work of a proven table.

    Args:
        work: What runs when.

    Returns:
        For each part an array [stages, virtual stages, microbatches]; -1 where it is not there.
    """
    found = {}
    for part in PARTS:
        virtual, micro = work.part(part)
        ticks = np.full((work.num_stages, work.num_virtual, work.num_microbatches), NOTHING)
        tick, stage = np.nonzero(micro != NOTHING)
        ticks[stage, virtual[tick, stage], micro[tick, stage]] = tick
        found[part] = ticks
    return found


def _messages(work: Work) -> list[int]:
    """Activations and gradients that each stage sends to another one."""
    if work.num_stages == 1:
        return [0]
    units = work.num_virtual * work.num_microbatches
    sent = np.full(work.num_stages, 2 * units)
    sent[0] -= work.num_microbatches  # the gradient of the first input goes nowhere,
    sent[-1] -= work.num_microbatches  # nor does the last output
    return [int(count) for count in sent]
