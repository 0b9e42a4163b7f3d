"""Random mutations of right tables: each is refused, or computes the same."""

import random
from collections import Counter
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from schedule_machine import is_right

from shardtrain.strategies.schedules.kinds import make_schedule
from shardtrain.strategies.schedules.proof import first_fault
from shardtrain.strategies.schedules.table import (
    BUFFERS,
    PARTS,
    Array,
    Schedule,
    with_columns,
    with_slots,
)

Columns = dict[str, Array]

TABLES = [
    make_schedule(*sizes)
    for sizes in [
        ("gpipe", 2, 3),
        ("gpipe", 3, 4),
        ("1f1b", 1, 3),
        ("1f1b", 2, 4),
        ("1f1b", 4, 6),
        ("interleaved", 2, 4, 2),
        ("interleaved", 3, 4, 2),
        ("interleaved", 1, 2, 3),
        ("zero_bubble", 2, 4),
        ("zero_bubble", 3, 5),
    ]
]


# -- mutations: each changes columns in place


def one_cell(columns: Columns, draw: random.Random) -> None:
    column = draw.choice(list(columns.values()))
    column[cell(columns, draw)] = draw.randint(-2, int(column.max()) + 2)


def one_cell_that_is_used(columns: Columns, draw: random.Random) -> None:
    column = draw.choice([column for column in columns.values() if (column >= 0).any()])
    used = np.argwhere(column >= 0)
    column[tuple(used[draw.randrange(len(used))])] = draw.randint(-1, int(column.max()) + 1)


def two_cells_of_a_stage(columns: Columns, draw: random.Random) -> None:
    (one, stage), (other, _) = cell(columns, draw), cell(columns, draw)
    for column in columns.values():
        column[[one, other], stage] = column[[other, one], stage]


def a_part_of_two_cells(columns: Columns, draw: random.Random) -> None:
    (one, stage), (other, _) = cell(columns, draw), cell(columns, draw)
    part = draw.choice(PARTS)
    for name, column in columns.items():
        if name.startswith(part):
            column[[one, other], stage] = column[[other, one], stage]


def two_numbers_of_a_column(columns: Columns, draw: random.Random) -> None:
    (one, stage), (other, _) = cell(columns, draw), cell(columns, draw)
    column = draw.choice(list(columns.values()))
    column[[one, other], stage] = column[[other, one], stage]


def two_ticks(columns: Columns, draw: random.Random) -> None:
    one, other = cell(columns, draw)[0], cell(columns, draw)[0]
    for column in columns.values():
        column[[one, other]] = column[[other, one]]


def two_stages(columns: Columns, draw: random.Random) -> None:
    one, other = cell(columns, draw)[1], cell(columns, draw)[1]
    for column in columns.values():
        column[:, [one, other]] = column[:, [other, one]]


def an_idle_tick(columns: Columns, draw: random.Random) -> None:
    tick = cell(columns, draw)[0]
    for name, column in columns.items():
        columns[name] = np.insert(column, tick, -1, axis=0)


def a_missing_tick(columns: Columns, draw: random.Random) -> None:
    tick = cell(columns, draw)[0]
    for name, column in columns.items():
        columns[name] = np.delete(column, tick, axis=0)


def a_stage_later(columns: Columns, draw: random.Random) -> None:
    stage = cell(columns, draw)[1]
    for name, column in columns.items():
        later = np.pad(column, ((0, 1), (0, 0)), constant_values=-1)
        later[:, stage] = np.roll(later[:, stage], 1)
        columns[name] = later


def other_slots(columns: Columns, draw: random.Random) -> None:
    buffer, stage = draw.choice(BUFFERS), cell(columns, draw)[1]
    names = [name for name in columns if name.endswith(buffer)]
    size = 2 + max(int(columns[name].max()) for name in names)
    order = np.array([*draw.sample(range(size), size), -1], np.int32)
    for name in names:
        columns[name][:, stage] = order[columns[name][:, stage]]


def other_microbatches(columns: Columns, draw: random.Random) -> None:
    one, other = (draw.randint(0, int(columns["forward_micro"].max())) for _ in range(2))
    order = np.arange(int(max(columns[f"{part}_micro"].max() for part in PARTS)) + 2)
    order[-1] = -1
    order[[one, other]] = order[[other, one]]
    for part in PARTS:
        columns[f"{part}_micro"] = order[columns[f"{part}_micro"]].astype(np.int32)


MUTATIONS: tuple[Callable[[Columns, random.Random], None], ...] = (
    one_cell,
    one_cell_that_is_used,
    two_cells_of_a_stage,
    a_part_of_two_cells,
    two_numbers_of_a_column,
    two_ticks,
    two_stages,
    an_idle_tick,
    a_missing_tick,
    a_stage_later,
    other_slots,
    other_microbatches,
)


def cell(columns: Columns, draw: random.Random) -> tuple[int, int]:
    ticks, stages = columns["forward_micro"].shape
    return draw.randrange(ticks), draw.randrange(stages)


# -- the property


def mutated(
    table: Schedule,
    mutations: list[Callable[[Columns, random.Random], None]],
    draw: random.Random,
    *,
    fresh_slots: bool,
) -> Schedule:
    columns = {name: column.copy() for name, column in table.columns().items()}
    for mutation in mutations:
        mutation(columns, draw)
    found = with_columns(table, columns)
    return with_slots(found.name, found.work) if fresh_slots else found


def property_of(examples: int) -> Counter[str]:
    """Runs the property, and counts what became of the tables."""
    seen: Counter[str] = Counter()

    @settings(max_examples=examples)
    @given(
        table=st.sampled_from(TABLES),
        mutations=st.lists(st.sampled_from(MUTATIONS), min_size=1, max_size=3),
        seed=st.integers(0, 2**32 - 1),
        fresh_slots=st.booleans(),
    )
    def check(
        table: Schedule,
        mutations: list[Callable[[Columns, random.Random], None]],
        seed: int,
        fresh_slots: bool,
    ) -> None:
        found = mutated(table, mutations, random.Random(seed), fresh_slots=fresh_slots)
        fault = first_fault(found)
        seen["refused" if fault else "same effect"] += 1
        if fault is None:
            assert is_right(found)
        else:
            assert 0 <= fault.tick < max(found.work.num_ticks, 1)
            assert 0 <= fault.stage < found.work.num_stages

    check()
    return seen


def test_a_mutation_is_refused_or_computes_the_same() -> None:
    seen = property_of(200)
    assert min(seen["refused"], seen["same effect"]) > 20


@pytest.mark.campaign
def test_ten_thousand_mutations_are_refused_or_compute_the_same() -> None:
    seen = property_of(10_000)
    assert sum(seen.values()) >= 10_000
    assert min(seen["refused"], seen["same effect"]) > 1000
    print(dict(seen))
