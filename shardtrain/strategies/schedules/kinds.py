"""The schedules by name: when each piece of work runs, as formulas.

Owns: the registered schedules. Does not own: tables and slots (`table`), proofs (`proof`), tables
from files (`csv_file`).

To add one: write a function from stages, microbatches and virtual stages to `Times`, and give it a
row in `SCHEDULES`. Slots, proof, figures and pictures come by themselves.
"""

import difflib
from collections.abc import Callable

import numpy as np

from shardtrain.errors import ConfigError
from shardtrain.strategies.schedules.proof import prove
from shardtrain.strategies.schedules.table import Schedule, Ticks, Times, tabulate


def gpipe(stages: int, microbatches: int, virtual_stages: int) -> Times:
    """All forwards, then all backwards (Huang et al. 2018, arXiv 1811.06965)."""
    _one_virtual_stage("gpipe", virtual_stages)
    stage, _, micro = np.indices((stages, 1, microbatches))
    half = microbatches + stages - 1
    return Times(forward=micro + stage, backward=half + micro + (stages - 1 - stage))


def one_forward_one_backward(stages: int, microbatches: int, virtual_stages: int) -> Times:
    """A backward as soon as it can be (Narayanan et al. 2020, arXiv 2006.09503).

    Stage s has 2 (stages - s) - 1 live microbatches, however many there are.
    """
    _one_virtual_stage("1f1b", virtual_stages)
    stage, _, micro = np.indices((stages, 1, microbatches))
    return Times(forward=micro + stage, backward=micro + 2 * (stages - 1) - stage)


def interleaved(stages: int, microbatches: int, virtual_stages: int) -> Times:
    """1F1B over several smaller stages on each device (Narayanan et al. 2021, arXiv 2104.04473).

    Microbatches go in groups of at least as many as there are stages, so that a group comes round
    to the first stage just when that is done with it: any number of microbatches runs without gaps.
    """
    last = virtual_stages - 1
    stage, virtual, micro = np.indices((stages, virtual_stages, microbatches))
    groups = np.array_split(np.arange(microbatches), max(microbatches // stages, 1))
    widths = np.array([max(len(group), stages) for group in groups])
    group = np.repeat(np.arange(len(groups)), [len(members) for members in groups])[micro]
    begin = virtual_stages * (np.cumsum(widths) - widths)[group]
    member = micro - np.array([members[0] for members in groups])[group]
    first_backward = last * int(widths.max()) + stages - 1
    return Times(
        forward=begin + virtual * widths[group] + member + stage,
        backward=begin
        + (last - virtual) * widths[group]
        + member
        + first_backward
        + (stages - 1 - stage),
    )


def zero_bubble(stages: int, microbatches: int, virtual_stages: int) -> Times:
    """1F1B whose weight gradients fill the gaps (after Qi et al. 2023, arXiv 2401.10241).

    A stage that has no forward or no backward in a tick does a weight gradient instead; so the last
    stages need none of their own time for the first and the last of them.
    """
    _one_virtual_stage("zero_bubble", virtual_stages)
    times = one_forward_one_backward(stages, microbatches, 1)
    end = microbatches + stages - 1  # the last stage is done with forwards and backwards
    gaps = min(stages - 1, microbatches)  # as many of the last backwards are followed by a tick
    late = times.backward - end
    spread = np.where(late >= 0, np.maximum(late - (stages - 1 - gaps), 0), 0)
    backward = times.backward + spread
    weight = np.stack(
        [
            _weight_ticks(times.forward[stage, 0], backward[stage, 0], stages)
            for stage in range(stages)
        ]
    )
    return Times(forward=times.forward, backward=backward, weight=weight[:, None])


def _weight_ticks(forward: Ticks, backward: Ticks, stages: int) -> Ticks:
    """The ticks of a stage's weight gradients: where they cost nothing or all stages have one."""
    microbatches = len(forward)
    end = microbatches + stages - 1
    with_forward, with_backward = set(forward.tolist()), set(backward.tolist())
    ticks: list[int] = []
    done = tick = 0
    while len(ticks) < microbatches:
        done += tick in with_backward
        both = tick in with_forward and tick in with_backward
        middle = 2 * (stages - 1) <= tick < microbatches
        free = not both if tick < end else tick not in with_backward
        if len(ticks) < done and (middle or free):
            ticks.append(tick)
        tick += 1
    return np.array(ticks)


SCHEDULES: dict[str, Callable[[int, int, int], Times]] = {
    "gpipe": gpipe,
    "1f1b": one_forward_one_backward,
    "interleaved": interleaved,
    "zero_bubble": zero_bubble,
}
"""Name to function of stages, microbatches and virtual stages."""


def make_schedule(
    name: str, stages: int, microbatches: int, virtual_stages: int = 1, *, proven: bool = True
) -> Schedule:
    """Make and prove a schedule.

    Args:
        name: A row of `SCHEDULES`.
        stages: Stages, the degree of the mesh axis `pipeline`.
        microbatches: Microbatches of a step.
        virtual_stages: Parts of the model on each stage.
        proven: False leaves the proof out, for a table that is only priced.

    Returns:
        The proven table.

    Raises:
        ConfigError: There is no such schedule, it does not exist for these sizes, or its table is
            faulty; that says where.

    Example:
        >>> make_schedule("1f1b", stages=4, microbatches=8).work.num_ticks
        14
    """
    if name not in SCHEDULES:
        near = difflib.get_close_matches(name, SCHEDULES, n=1)
        raise ConfigError(
            "there is no such schedule",
            where=f"schedule={name}",
            allowed=", ".join(SCHEDULES),
            cure=f"did you mean {near[0]}?" if near else "",
        )
    sizes = {"stages": stages, "microbatches": microbatches, "virtual_stages": virtual_stages}
    for what, size in sizes.items():
        if size < 1:
            raise ConfigError("must be at least 1", where=f"{what}={size}")
    table = tabulate(name, SCHEDULES[name](stages, microbatches, virtual_stages))
    return prove(table) if proven else table


def _one_virtual_stage(name: str, virtual_stages: int) -> None:
    if virtual_stages != 1:
        raise ConfigError(
            f"{name} has one virtual stage",
            where=f"virtual_stages={virtual_stages}",
            cure="use 1, or the schedule interleaved",
        )
