"""The named schedules: that their tables compute the right thing, and their sizes."""

import re
from pathlib import Path

import numpy as np
import pytest
from schedule_machine import is_right

from shardtrain.errors import ConfigError
from shardtrain.strategies.schedules import kinds
from shardtrain.strategies.schedules.kinds import SCHEDULES, make_schedule
from shardtrain.strategies.schedules.simulate import simulate, times
from shardtrain.strategies.schedules.table import BUFFERS, Times, tabulate

DOCS = Path(__file__).parents[2] / "docs" / "pipeline.md"
SIZES = [(1, 1), (1, 5), (2, 1), (2, 8), (3, 2), (3, 7), (4, 4), (4, 9), (5, 16), (8, 3), (8, 32)]


def virtual_stages_of(name: str) -> tuple[int, ...]:
    return (1, 2, 3) if name == "interleaved" else (1,)


@pytest.mark.parametrize(
    ("name", "virtual_stages"), [(n, v) for n in SCHEDULES for v in virtual_stages_of(n)]
)
@pytest.mark.parametrize(("stages", "microbatches"), SIZES)
def test_a_named_schedule_computes_the_right_gradients(
    name: str, virtual_stages: int, stages: int, microbatches: int
) -> None:
    assert is_right(make_schedule(name, stages, microbatches, virtual_stages))


@pytest.mark.smoke312
def test_a_small_table_reads_as_it_should() -> None:
    work = make_schedule("1f1b", stages=2, microbatches=3).work
    assert work.forward_micro.tolist() == [[0, -1], [1, 0], [2, 1], [-1, 2], [-1, -1]]
    assert work.backward_micro.tolist() == [[-1, -1], [-1, 0], [0, 1], [1, 2], [2, -1]]


@pytest.mark.parametrize("stages", range(1, 9))
def test_1f1b_holds_as_many_microbatches_however_many_there_are(stages: int) -> None:
    for microbatches in (2 * stages, 40):
        live = simulate(make_schedule("1f1b", stages, microbatches)).live
        assert live["residual"] == [2 * (stages - s) - 1 for s in range(stages)]
        assert make_schedule("1f1b", stages, microbatches).slots.size("gradient") == 1


def test_gpipe_holds_all_microbatches() -> None:
    assert simulate(make_schedule("gpipe", 4, 24)).live["residual"] == [24] * 4


@pytest.mark.parametrize("virtual_stages", [2, 3, 4])
def test_interleaved_holds_a_group_for_each_virtual_stage_but_one(virtual_stages: int) -> None:
    live = simulate(make_schedule("interleaved", 4, 32, virtual_stages)).live["residual"]
    assert live == [(virtual_stages - 1) * 4 + 2 * (4 - s) - 1 for s in range(4)]


@pytest.mark.parametrize("stages", range(1, 9))
def test_zero_bubble_holds_no_more_than_the_first_stage_of_1f1b(stages: int) -> None:
    for microbatches in (1, stages, 3 * stages, 40):
        slots = make_schedule("zero_bubble", stages, microbatches).slots
        assert slots.size("residual") <= 2 * stages - 1
        assert slots.size("pending") <= max(2 * (stages - 1), 1)


@pytest.mark.parametrize("name", SCHEDULES)
def test_slots_are_as_many_as_live_at_once(name: str) -> None:
    schedule = make_schedule(name, 4, 12, 2 if name == "interleaved" else 1)
    live = simulate(schedule).live
    assert {b: schedule.slots.size(b) for b in BUFFERS} == {b: max(live[b]) for b in BUFFERS}


def test_interleaved_with_one_virtual_stage_is_1f1b() -> None:
    one, other = make_schedule("interleaved", 4, 9), make_schedule("1f1b", 4, 9)
    pairs = zip(one.columns().values(), other.columns().values(), strict=True)
    assert all(np.array_equal(a, b) for a, b in pairs)


def test_a_table_gives_back_its_times() -> None:
    given = kinds.zero_bubble(4, 9, 1)
    found = times(tabulate("zero_bubble", given).work)
    assert given.weight is not None
    assert np.array_equal(found["forward"], given.forward)
    assert np.array_equal(found["backward"], given.backward)
    assert np.array_equal(found["weight"], given.weight)


@pytest.mark.parametrize(
    ("name", "sizes", "message"),
    [
        ("1fib", (4, 8, 1), "did you mean 1f1b?"),
        ("1f1b", (0, 8, 1), "stages=0: must be at least 1"),
        ("gpipe", (4, -1, 1), "microbatches=-1: must be at least 1"),
        ("interleaved", (4, 8, 0), "virtual_stages=0: must be at least 1"),
        ("1f1b", (4, 8, 2), "virtual_stages=2: 1f1b has one virtual stage"),
        ("zero_bubble", (4, 8, 2), "use 1, or the schedule interleaved"),
    ],
)
def test_what_does_not_exist_is_refused(
    name: str, sizes: tuple[int, int, int], message: str
) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        make_schedule(name, *sizes)


# -- a newcomer's schedule: a function and a row


def test_the_schedule_in_the_docs_is_a_function_and_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    block = re.search(r"```python\n(def last_first.*?)```", DOCS.read_text(encoding="utf-8"), re.S)
    assert block is not None
    names = {"np": np, "Times": Times}
    exec(block[1], names)
    row = re.search(r'"(\w+)": last_first', DOCS.read_text(encoding="utf-8"))
    assert row is not None
    monkeypatch.setitem(SCHEDULES, row[1], names["last_first"])
    schedule = make_schedule(row[1], stages=4, microbatches=8)
    assert schedule.work.at("backward", 11, 3) == (0, 7)
    assert simulate(schedule).ratio == (8 + 4 - 1) / 8
    assert is_right(schedule)


def test_a_newcomers_mistakes_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def early(stages: int, microbatches: int, virtual_stages: int) -> Times:
        stage, _, micro = np.indices((stages, 1, microbatches))
        return Times(forward=micro + stage, backward=micro + stages - 1)

    def twice(stages: int, microbatches: int, virtual_stages: int) -> Times:
        stage, _, micro = np.indices((stages, 1, microbatches))
        return Times(forward=stage, backward=micro + 2 * (stages - 1) - stage)

    def before(stages: int, microbatches: int, virtual_stages: int) -> Times:
        stage, _, micro = np.indices((stages, 1, microbatches))
        return Times(forward=micro - stage, backward=micro)

    def told(function: object) -> str:
        monkeypatch.setitem(SCHEDULES, "mine", function)  # type: ignore[arg-type]
        with pytest.raises(ConfigError) as fault:
            make_schedule("mine", 4, 8)
        return str(fault.value)

    assert told(early) == (
        "mine: tick 3, stage 0: backward of microbatch 0 needs its gradient, "
        "which is not there before tick 4\n  to do: run it in tick 4 or later; what is sent in a "
        "tick can be used from the next one on"
    )
    assert told(twice).startswith(
        "mine: tick 0, stage 0: forward of microbatch 1 in the same tick as that of microbatch 0"
    )
    assert told(before).startswith("mine: tick -1, stage 1: forward of microbatch 0")
