"""Batches of interactions: each sample once, uneven shards, and figures that are exact."""

import numpy as np
import pytest

from shardtrain.data.interaction_generator import generate
from shardtrain.data.interactions import (
    Interactions,
    LocalInteractions,
    Shards,
    record,
    split,
)
from shardtrain.errors import DataError
from shardtrain.tasks.ranking import auc, recall


def numbered(counts: list[int]) -> Shards:
    """Shards whose rows say their own numbers."""
    arrays, first = [], 0
    for count in counts:
        array = np.zeros(count, record(1, 1))
        array["ids"][:, 0] = np.arange(first, first + count)
        arrays.append(array)
        first += count
    return Shards(arrays)


def test_training_and_validation_share_out_all_rows_of_uneven_shards() -> None:
    source = numbered([5, 0, 90, 6])
    for shuffle in (True, False):
        train, held = split(len(source), 0.2, shuffle=shuffle)
        of = Interactions(source, train, 9, seed=1, shuffle=shuffle)
        seen = [of.rows(cursor, 0, 9)["ids"][:, 0] for cursor in range(9)]
        ids = np.concatenate(seen)
        kept = np.concatenate(
            [
                Interactions(source, held, 9).evaluation_rows(index, 0, 9)["ids"][:, 0]
                for index in range(3)
            ]
        )[:20]
        assert len(set(ids)) == 81
        assert set(ids) | set(kept) == set(range(101))
        assert (np.sort(ids) == ids).all() == (not shuffle)


def locals_of(counts: list[int], batch: int, microbatches: int) -> list[LocalInteractions]:
    found = []
    for index, count in enumerate(counts):
        part = split(count, 0.0, shuffle=True)[0]
        source = numbered([count])
        found.append(
            LocalInteractions(source, part, batch, 4, True, 0, tuple(counts), index, microbatches)
        )
    return found


@pytest.mark.parametrize("microbatches", [1, 2])
def test_uneven_shards_of_processes_count_each_row_once_and_never_end_apart(
    microbatches: int,
) -> None:
    counts, batch = [23, 9, 0], 12
    processes = locals_of(counts, batch, microbatches)
    batches = processes[0]._batches
    assert {p._batches for p in processes} == {batches} == {6}  # ceil(23 / 4)
    rows = batch // microbatches
    for epoch in range(2):
        seen = [[] for _ in counts]
        for cursor in range(epoch * batches, (epoch + 1) * batches):
            names = processes[0].sample_ids(cursor)
            assert len({p.digest(cursor) for p in processes}) == 1
            for owner, process in enumerate(processes):
                for m in range(microbatches):
                    start = m * rows + owner * rows // 3
                    part = process.rows(cursor, start, start + rows // 3)
                    there = part["weights"] > 0
                    seen[owner] += part["ids"][there, 0].tolist()
                    here = names[start : start + rows // 3]
                    assert ((here >= 0) == there).all()
        assert [sorted(ids) for ids in seen] == [list(range(count)) for count in counts]
        assert processes[0].num_samples == 32
    with pytest.raises(DataError, match="rows of another one's shards"):
        processes[1].rows(0, 0, 2)


def test_evaluation_of_uneven_shards_has_each_row_once() -> None:
    processes = locals_of([10, 3], 4, 1)
    assert {p.evaluation_batches(0) for p in processes} == {5}
    seen = [
        [
            id
            for index in range(5)
            for id, weight in zip(
                *(
                    process.evaluation_rows(index, owner * 2, owner * 2 + 2)[k]
                    for k in ("ids", "weights")
                ),
                strict=True,
            )
            if weight
        ]
        for owner, process in enumerate(processes)
    ]
    assert [len(ids) for ids in seen] == [10, 3]


def test_auc_is_that_of_all_pairs() -> None:
    random = np.random.default_rng(0)
    for ties in (3, 1000):
        scores = random.integers(0, ties, 200) / 7
        labels = random.integers(0, 2, 200)
        right, wrong = scores[labels == 1][:, None], scores[labels == 0][None, :]
        wanted = np.mean((right > wrong) + 0.5 * (right == wrong))
        assert auc(scores, labels) == pytest.approx(wanted, abs=1e-15)
    assert auc(np.array([3.0, 2.0]), np.array([1, 0])) == 1.0
    assert np.isnan(auc(np.array([3.0, 2.0]), np.array([1, 1])))
    assert np.isnan(auc(np.array([np.nan, 2.0]), np.array([1, 0])))
    assert recall(np.array([0, 9, 10, 3]), 10) == 0.75


def test_the_generator_is_what_it_says() -> None:
    made = generate(50_000, [300, 200, 24], 4)
    again = generate(50_000, [300, 200, 24], 4)
    np.testing.assert_array_equal(made.records, again.records)
    chance = 1 / (1 + np.exp(-made.odds))
    order = np.argsort(chance)
    for part in np.array_split(order, 10):  # what is said to happen in x % of cases does
        assert made.records["label"][part].mean() == pytest.approx(chance[part].mean(), abs=0.02)
    assert 0.7 < auc(made.odds, made.records["label"]) < 0.9
    ids = made.records["ids"]
    assert (ids.max(0) < [300, 200, 24]).all()
    assert np.mean(ids[:, 0] < 3) == pytest.approx(0.1, abs=0.01)
