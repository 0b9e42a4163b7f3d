"""Lockstep time, bubble, memory and messages."""

import math
from fractions import Fraction

import numpy as np
import pytest

from shardtrain.errors import ConfigError
from shardtrain.strategies.schedules.kinds import SCHEDULES, make_schedule
from shardtrain.strategies.schedules.layout import balance
from shardtrain.strategies.schedules.simulate import Sizes, even, make_costs, simulate, times
from shardtrain.strategies.schedules.table import Times, tabulate

WHOLE = [(1.0, 2.0, 1.0), (3.0, 7.0, 2.0), (4.0, 13.0, 4.0)]
"""Forward, backward, weight: whole numbers, so that sums are exact."""


def ratio(name: str, stages: int, microbatches: int, virtual: int, times: tuple[float, ...]):
    schedule = make_schedule(name, stages, microbatches, virtual)
    figures = simulate(schedule, make_costs(np.ones((stages, virtual)), *times))
    return Fraction(figures.time) / Fraction(figures.ideal)


@pytest.mark.parametrize("cost", WHOLE)
@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
def test_gpipe_and_1f1b_take_one_bubble(name: str, cost: tuple[float, ...]) -> None:
    for stages in range(1, 9):
        for microbatches in (1, 2, 3, 8, 17, 32):
            expected = Fraction(microbatches + stages - 1, microbatches)
            assert ratio(name, stages, microbatches, 1, cost) == expected


@pytest.mark.parametrize("cost", WHOLE)
@pytest.mark.parametrize("virtual", [1, 2, 3, 4])
def test_interleaved_takes_a_bubble_of_one_virtual_stage(
    virtual: int, cost: tuple[float, ...]
) -> None:
    for stages in (1, 2, 3, 4, 8):
        for microbatches in (stages, stages + 1, 2 * stages, 3 * stages + 2):
            units = virtual * microbatches
            expected = Fraction(units + stages - 1, units)
            assert ratio("interleaved", stages, microbatches, virtual, cost) == expected


@pytest.mark.parametrize("cost", WHOLE)
def test_zero_bubble_fills_the_bubble_with_weight_gradients(cost: tuple[float, ...]) -> None:
    forward, backward, weight = (Fraction(value) for value in cost)
    for stages in range(1, 9):
        for microbatches in (1, 2, 5, 14, 15, 32):
            found = ratio("zero_bubble", stages, microbatches, 1, cost)
            assert found <= Fraction(microbatches + stages - 1, microbatches)
            if microbatches >= 2 * (stages - 1):
                bubble = (stages - 1) * (forward + backward - 2 * weight)
                assert found == 1 + bubble / (microbatches * (forward + backward))


def test_ticks_that_do_either_would_cost_more() -> None:
    """1F1B as it is drawn elsewhere, one piece of work a tick: 1.2 to 1.4 times longer."""
    stages, microbatches = 4, 16
    forward, backward = np.zeros((2, stages, 1, microbatches), int)
    for s in range(stages):
        ahead = stages - s
        for m in range(microbatches):
            forward[s, 0, m] = s + m if m < ahead else 2 * m + s
            backward[s, 0, m] = 2 * stages - s - 1 + 2 * m
    schedule = tabulate("either", Times(forward, backward))
    either, both = simulate(schedule), simulate(make_schedule("1f1b", stages, microbatches))
    assert 1.2 < either.time / both.time < 1.4


def test_the_slowest_stage_sets_each_tick() -> None:
    share = balance(5, 4).share()
    assert share[:, 0].tolist() == [1, 1, 1, 2]
    figures = simulate(make_schedule("1f1b", 4, 8), make_costs(share))
    # the last stage works in ticks 3 to 10, for twice as long as the others in ticks of their own
    assert figures.time == 3 * 1 + 8 * 6 + 3 * 2
    assert (figures.ideal, figures.tick_times.tolist()) == (48, [1] * 3 + [6] * 8 + [2] * 3)
    assert figures.bubble == pytest.approx(1 - 5 * 3 * 8 / (4 * 57))


@pytest.mark.parametrize("name", SCHEDULES)
def test_the_bubble_of_equal_stages_follows_from_the_time(name: str) -> None:
    figures = simulate(make_schedule(name, 4, 8))
    assert figures.bubble == pytest.approx(1 - 1 / figures.ratio)


@pytest.mark.smoke312
def test_messages_and_bytes() -> None:
    sizes = Sizes(activation=10.0, residual=100.0, pending=7.0)
    one = simulate(make_schedule("1f1b", 4, 8), sizes=sizes)
    assert one.messages == [8, 16, 16, 8]
    assert one.message_bytes == [80, 160, 160, 80]
    assert one.live["residual"] == [7, 5, 3, 1]
    # in its busiest tick a stage has an activation waiting or a gradient, or both
    assert one.live_bytes == [710, 520, 320, 120]
    assert one.slot_bytes == 10 + 700 + 10
    interleaved = simulate(make_schedule("interleaved", 4, 8, 2), sizes=sizes)
    assert interleaved.messages == [24, 32, 32, 24]
    assert interleaved.live["residual"] == [11, 9, 7, 5]
    assert interleaved.slot_bytes == 10 + 11 * 50 + 10
    split = simulate(make_schedule("zero_bubble", 4, 8), sizes=sizes)
    assert split.slot_bytes == 10 + 7 * 100 + 10 + 6 * 7


def test_one_stage_sends_nothing() -> None:
    figures = simulate(make_schedule("interleaved", 1, 4, 3), sizes=Sizes(activation=10.0))
    assert (figures.messages, figures.message_bytes, figures.ratio) == ([0], [0], 1.0)


def test_bytes_count_the_layers_of_each_virtual_stage() -> None:
    layout = balance(9, 2, 2)
    schedule = make_schedule("interleaved", 2, 4, 2)
    figures = simulate(schedule, sizes=Sizes(residual=1.0), share=layout.share())
    ticks = times(schedule.work)
    expected = []
    for stage in range(2):
        begin, end = ticks["forward"][stage], ticks["backward"][stage]
        lives = [
            ((begin <= tick) & (tick <= end)).sum(axis=1) @ layout.share()[stage]
            for tick in range(schedule.work.num_ticks)
        ]
        expected.append(max(lives))
    assert figures.live_bytes == expected
    assert figures.slot_bytes == schedule.slots.size("residual") * 3


@pytest.mark.parametrize(
    ("cost", "message"),
    [
        ((-1.0, 2.0, None), "forward=-1: must be a time, at least 0"),
        ((1.0, math.inf, None), "backward=inf: must be a time"),
        ((1.0, math.nan, None), "backward=nan: must be a time"),
        ((1.0, 2.0, 3.0), "weight=3: is more than the whole backward, 2"),
    ],
)
def test_impossible_costs_are_refused(
    cost: tuple[float, float, float | None], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        make_costs(even(2), *cost)
