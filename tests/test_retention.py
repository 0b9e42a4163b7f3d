"""Which steps stay: by count, by number, by time, by loss."""

import datetime
import math

import pytest

from shardtrain.checkpoint.retention import Retention, Step

START = datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC)


def steps(*numbers: int, hours: float = 1.0, losses: tuple[float | None, ...] = ()) -> list[Step]:
    given = losses or (None,) * len(numbers)
    return [
        Step(n, START + datetime.timedelta(hours=hours * place), loss)
        for place, (n, loss) in enumerate(zip(numbers, given, strict=True))
    ]


@pytest.mark.parametrize(("keep", "kept"), [(1, [40, 50]), (2, [40, 50]), (3, [30, 40, 50])])
def test_by_count_and_never_the_newest_alone(keep: int, kept: list[int]) -> None:
    assert sorted(Retention(keep).kept(steps(10, 20, 30, 40, 50))) == kept


def test_one_step_stays() -> None:
    assert Retention(1).kept(steps(10)) == {10: "newest"}
    assert Retention(1).kept([]) == {}


def test_every_so_many_stay_for_good() -> None:
    found = Retention(1, every=20).kept(steps(10, 20, 30, 40, 50, 60))
    assert sorted(found) == [20, 40, 50, 60]


def test_one_in_so_many_hours_stays() -> None:
    """Chosen again after each save, as a run does: what went cannot come back."""
    there: list[Step] = []
    for step in steps(*range(1, 25), hours=0.5):
        there.append(step)
        kept = Retention(1, hours=3).kept(there)
        there = [s for s in there if s.number in kept]
    assert [s.number for s in there] == [1, 7, 13, 19, 23, 24]


def test_the_best_loss_and_numbers_that_are_none() -> None:  # O-39
    losses = (3.0, math.nan, 2.0, None, math.inf, 1.0)
    there: list[Step] = []
    best = []
    for step in steps(1, 2, 3, 4, 5, 6, losses=losses):
        there.append(step)
        kept = Retention(1, best=1).kept(there)
        there = [s for s in there if s.number in kept]
        measured = [s for s in there if s.metric is not None and math.isfinite(s.metric)]
        best.append(min(measured, key=lambda s: s.metric or 0).number)
    assert best == [1, 1, 3, 3, 3, 6]
    first = steps(1, 2, 3, losses=(math.nan, 5.0, 6.0))
    assert 2 in Retention(1, best=1).kept([*first, *steps(4, 5)])
