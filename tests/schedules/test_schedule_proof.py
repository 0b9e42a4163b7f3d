"""Faulty tables are refused, with what is wrong, the tick and the stage."""

from collections.abc import Mapping

import numpy as np
import pytest
from schedule_machine import is_right

from shardtrain.errors import ConfigError
from shardtrain.strategies.schedules.kinds import make_schedule
from shardtrain.strategies.schedules.proof import Fault, first_fault, prove
from shardtrain.strategies.schedules.table import (
    NOTHING,
    Schedule,
    Times,
    Work,
    tabulate,
    with_columns,
    with_slots,
)


def changed(schedule: Schedule, cells: Mapping[tuple[str, int, int], int]) -> Schedule:
    """A table with other numbers in some cells."""
    columns = {name: column.copy() for name, column in schedule.columns().items()}
    for (name, tick, stage), value in cells.items():
        columns[name][tick, stage] = value
    return with_columns(schedule, columns)


def reslotted(schedule: Schedule) -> Schedule:
    """A table with fresh slots, so that only what runs when can be wrong."""
    return with_slots(schedule.name, schedule.work)


def fault_of(schedule: Schedule) -> Fault:
    found = first_fault(schedule)
    assert found is not None
    return found


@pytest.fixture(scope="module")
def table() -> Schedule:
    return make_schedule("1f1b", stages=3, microbatches=4)


def test_a_right_table_comes_back(table: Schedule) -> None:
    assert first_fault(table) is None
    assert prove(table) is table


@pytest.mark.smoke312
def test_a_microbatch_that_is_missing(table: Schedule) -> None:
    found = fault_of(
        changed(table, {("forward_micro", 3, 1): NOTHING, ("forward_virtual", 3, 1): NOTHING})
    )
    words = "the table ends without forward of microbatch 2"
    assert found == Fault(words, tick=7, stage=1)


def test_a_microbatch_that_comes_twice(table: Schedule) -> None:
    found = fault_of(changed(table, {("backward_micro", 4, 1): 0}))
    words = "backward of microbatch 0 again; it was done in tick 3"
    assert found == Fault(words, tick=4, stage=1)


@pytest.mark.parametrize(
    ("column", "value", "what", "cure"),
    [
        ("forward_micro", 4, "forward of an unknown microbatch, 4", "there are 0 to 3"),
        ("backward_micro", -2, "backward of an unknown microbatch, -2", "there are 0 to 3"),
        ("forward_virtual", 1, "forward of an unknown virtual stage, 1", "there are 0 to 0"),
        ("weight_virtual", 5, "weight of an unknown virtual stage, 5", "there are 0 to 0"),
        (
            "forward_virtual",
            NOTHING,
            "forward of microbatch 1 on virtual stage -1: one is missing",
            "",
        ),
    ],
)
def test_an_unknown_number(table: Schedule, column: str, value: int, what: str, cure: str) -> None:
    found = fault_of(changed(table, {(column, 3, 2): value}))
    assert found == Fault(what, tick=3, stage=2, cure=cure)


def test_data_that_is_not_there_yet(table: Schedule) -> None:
    work = table.work
    columns = {name: column.copy() for name, column in table.columns().items()}
    for what in ("forward_virtual", "forward_micro"):  # stage 1 does everything a tick early
        columns[what][:-1, 1] = columns[what][1:, 1]
        columns[what][-1, 1] = NOTHING
    found = fault_of(reslotted(with_columns(table, columns)))
    assert (found.tick, found.stage) == (0, 1)
    assert found.what == (
        "forward of microbatch 0 needs its activation, which is not there before tick 1"
    )
    assert found.cure.startswith("run it in tick 1 or later")
    assert work.num_ticks == 8


def test_a_deadlock_names_who_waits_for_whom() -> None:
    def column(*rows: tuple[int, int]) -> "np.ndarray[tuple[int, ...], np.dtype[np.int32]]":
        return np.array(rows, np.int32)

    # stage 0 wants the gradient of microbatch 0 before it starts microbatch 1; stage 1 wants
    # microbatch 1 first
    forward = column((0, -1), (-1, -1), (1, -1), (-1, 1), (-1, 0), (-1, -1))
    backward = column((-1, -1), (0, -1), (-1, -1), (-1, 1), (-1, 0), (1, -1))
    nothing = np.full_like(forward, NOTHING)
    work = Work(
        1,
        2,
        np.where(forward >= 0, 0, NOTHING).astype(np.int32),
        forward,
        np.where(backward >= 0, 0, NOTHING).astype(np.int32),
        backward,
        nothing,
        nothing,
    )
    found = fault_of(with_slots("mine", work))
    assert (found.tick, found.stage) == (1, 0)
    assert found.what == (
        "deadlock, backward of microbatch 0 can never run: stage 0 with backward of microbatch 0 "
        "waits for backward of microbatch 0 of stage 1; stage 1 with forward of microbatch 1 waits "
        "for forward of microbatch 1 of stage 0"
    )


def test_a_live_slot_that_is_overwritten(table: Schedule) -> None:
    slot = int(table.slots.forward_residual[0, 0])
    found = fault_of(changed(table, {("forward_residual", 2, 0): slot}))
    words = (
        f"forward of microbatch 2 overwrites residual slot {slot}, which still "
        "holds what backward of microbatch 0 needs"
    )
    assert found == Fault(words, tick=2, stage=0)


def test_the_machine_that_judges_mutations_sees_what_is_wrong(table: Schedule) -> None:
    assert is_right(table)
    assert not is_right(changed(table, {("forward_residual", 2, 0): 0}))
    assert not is_right(changed(table, {("receive_gradient", 2, 1): NOTHING}))
    zero_bubble = make_schedule("zero_bubble", stages=2, microbatches=3)
    tick, stage = (int(i) for i in np.argwhere(zero_bubble.work.weight_micro == 1)[0])
    nothing = {("weight_micro", tick, stage): NOTHING, ("weight_virtual", tick, stage): NOTHING}
    assert not is_right(changed(zero_bubble, nothing))


def test_an_arrival_that_overwrites() -> None:
    stage, _, micro = np.indices((2, 1, 4))  # stage 1 is late, so that activations wait there
    table = tabulate("late", Times(micro + 3 * stage, 9 + micro - stage))
    assert first_fault(table) is None
    assert table.slots.receive_activation[:4, 1].tolist() == [0, 1, 2, 0]
    found = fault_of(changed(table, {("receive_activation", 1, 1): 0}))
    words = (
        "the activation that arrives overwrites activation slot 0, which still holds what "
        "forward of microbatch 0 needs"
    )
    assert found == Fault(words, tick=1, stage=1)


@pytest.mark.parametrize(
    ("column", "tick", "stage", "value", "what"),
    [
        ("backward_residual", 4, 0, 2, "reads residual slot 2; its own is in slot 0"),
        ("backward_residual", 4, 0, NOTHING, "reads residual slot -1; its own is in slot 0"),
        ("forward_activation", 1, 1, NOTHING, "reads activation slot -1; its own is in slot 0"),
        ("forward_activation", 0, 0, 0, "names activation slot 0 for nothing"),
        ("forward_residual", 1, 1, NOTHING, "has no residual slot"),
        ("forward_gradient", 2, 2, NOTHING, "has no gradient slot"),
        ("forward_gradient", 1, 1, 0, "names gradient slot 0 for nothing"),
        ("backward_pending", 2, 2, 0, "names pending slot 0 for nothing"),
        ("weight_residual", 2, 2, 0, "weight_residual names residual slot 0 for nothing"),
        ("receive_activation", 0, 1, NOTHING, "that arrives has no activation slot"),
        ("receive_activation", 0, 0, 0, "that arrives names activation slot 0 for nothing"),
        ("receive_gradient", 2, 1, -7, "that arrives has no gradient slot"),
    ],
)
def test_a_wrong_slot(
    table: Schedule, column: str, tick: int, stage: int, value: int, what: str
) -> None:
    found = fault_of(changed(table, {(column, tick, stage): value}))
    assert (found.tick, found.stage) == (tick, stage)
    assert what in found.what


def test_weight_parts_are_all_there_or_none() -> None:
    table = make_schedule("zero_bubble", stages=2, microbatches=3)
    tick, stage = (int(i) for i in np.argwhere(table.work.weight_micro == 1)[0])
    cells = {("weight_micro", tick, stage): NOTHING, ("weight_virtual", tick, stage): NOTHING}
    found = fault_of(changed(table, cells))
    assert "the table ends without weight of microbatch 1" in found.what
    nothing = np.full_like(table.work.weight_micro, NOTHING)
    none = with_columns(table, {"weight_micro": nothing, "weight_virtual": nothing})
    assert "names pending slot 0 for nothing" in fault_of(none).what
    assert first_fault(reslotted(none)) is None


@pytest.mark.parametrize(
    ("array", "message"),
    [
        (np.zeros((3, 3), np.int32), r"weight_pending is int32\[3, 3\]"),
        (np.zeros((8, 3), np.float32), r"weight_pending is float32\[8, 3\] and not integers"),
    ],
)
def test_arrays_of_another_kind(
    table: Schedule, array: "np.ndarray[tuple[int, int], np.dtype[np.int32]]", message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        prove(with_columns(table, {"weight_pending": array}))


def test_an_empty_table_is_refused(table: Schedule) -> None:
    nothing = {name: column[:0] for name, column in table.columns().items()}
    with pytest.raises(ConfigError, match="tick 0, stage 0: the table is empty"):
        prove(with_columns(table, nothing))


def test_a_refusal_says_where(table: Schedule) -> None:
    with pytest.raises(ConfigError) as fault:
        prove(changed(table, {("forward_micro", 3, 2): 9}))
    assert str(fault.value) == (
        "1f1b: tick 3, stage 2: forward of an unknown microbatch, 9\n  to do: there are 0 to 3"
    )
