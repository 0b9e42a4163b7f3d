"""Batches: one shift, documents kept apart, an order that is a function of the cursor."""

import itertools
import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from shardtrain.data.language import Batch, LanguageData, require_batch
from shardtrain.errors import DataError


def make(
    tokens: NDArray[np.integer] | int,
    *,
    documents: list[int] | None = None,
    length: int = 4,
    batch: int = 3,
    **options: bool | int,
) -> LanguageData:
    tokens = np.arange(tokens) % 251 if isinstance(tokens, int) else tokens
    offsets = [0, *np.cumsum(documents)] if documents else [0, len(tokens)]
    return LanguageData(
        tokens=tokens.astype(np.uint8),
        offsets=np.array(offsets, np.int64),
        vocab_size=256,
        sequence_length=length,
        batch_size=batch,
        **options,
    )


def equal(one: Batch, two: Batch) -> None:
    assert one.keys() == two.keys()
    for name in one:
        assert one[name].dtype == two[name].dtype
        np.testing.assert_array_equal(one[name], two[name], err_msg=name)


def test_shifted_exactly_once() -> None:
    """O-04: a model that puts all its mass on input + 1 has no loss, in every row and place."""
    data = make(4 * 12 + 1)
    for cursor in range(4):
        batch = data.batch_at(cursor)
        first = data.sample_ids(cursor) * 4
        np.testing.assert_array_equal(batch["tokens"], first[:, None] + np.arange(4))
        np.testing.assert_array_equal(batch["targets"], batch["tokens"] + 1)
        assert batch["weights"].min() == 1


def test_last_target_of_a_row_is_its_own() -> None:
    """O-04: changing the next row's other tokens changes nothing in this row."""
    text = np.arange(13)
    changed = text.copy()
    changed[5:9] = 99
    one = make(text, shuffle=False).batch_at(0)
    two = make(changed, shuffle=False).batch_at(0)
    np.testing.assert_array_equal(one["targets"][0], two["targets"][0])
    np.testing.assert_array_equal(one["tokens"][0], two["tokens"][0])
    assert one["targets"][0, 3] == one["tokens"][1, 0] == 4


def test_shapes_and_dtypes() -> None:
    data = make(100)
    batch = data.batch_at(0)
    assert {name: (x.dtype.name, x.shape) for name, x in batch.items()} == {
        "tokens": ("int32", (3, 4)),
        "targets": ("int32", (3, 4)),
        "weights": ("float32", (3, 4)),
        "sample": ("uint32", (3,)),
        "segments": ("int32", (3, 4)),
        "positions": ("int32", (3, 4)),
    }
    for blank in (data.blank(3), data.rows(0, 1, 1)):
        assert [x.dtype for x in blank.values()] == [x.dtype for x in batch.values()]
        assert [x.shape[1:] for x in blank.values()] == [x.shape[1:] for x in batch.values()]
    plain = make(100, separate_documents=False).batch_at(0)
    assert set(plain) == {"tokens", "targets", "weights", "sample"}


def test_documents_are_kept_apart() -> None:
    """O-25: positions restart, the target across a boundary is masked, and only that one."""
    data = make(25, documents=[6, 1, 2, 4, 12], length=8, batch=3, shuffle=False)
    batch = data.batch_at(0)
    assert batch["segments"].tolist() == [
        [0, 0, 0, 0, 0, 0, 1, 2],
        [0, 1, 1, 1, 1, 2, 2, 2],
        [0, 0, 0, 0, 0, 0, 0, 0],
    ]
    assert batch["positions"].tolist() == [
        [0, 1, 2, 3, 4, 5, 0, 0],
        [0, 0, 1, 2, 3, 0, 1, 2],
        [0, 1, 2, 3, 4, 5, 6, 7],
    ]
    assert batch["weights"].tolist() == [
        [1, 1, 1, 1, 1, 0, 0, 1],
        [0, 1, 1, 1, 0, 1, 1, 1],
        [1, 1, 1, 1, 1, 1, 1, 1],
    ]
    joined = make(25, documents=[6, 1, 2, 4, 12], length=8, shuffle=False, separate_documents=False)
    assert joined.batch_at(0)["weights"].min() == 1


def test_two_documents_packed_are_as_two_rows() -> None:
    """O-25: what a row holds of each document equals the document in a row of its own."""
    packed = make(np.arange(9), documents=[4, 5], length=8, batch=1).batch_at(0)
    alone = make(np.arange(4), documents=[4], length=3, batch=1).batch_at(0)
    second = make(np.arange(4, 9), documents=[5], length=4, batch=1).batch_at(0)
    for name in ("tokens", "targets", "weights", "positions"):
        np.testing.assert_array_equal(packed[name][:, :3], alone[name], err_msg=name)
        np.testing.assert_array_equal(packed[name][:, 4:], second[name], err_msg=name)
    assert packed["weights"][0, 3] == 0
    assert packed["segments"].tolist() == [[0, 0, 0, 0, 1, 1, 1, 1]]


@given(
    documents=st.lists(st.integers(1, 9), min_size=1, max_size=20),
    length=st.integers(1, 12),
    batch=st.integers(1, 4),
    cursor=st.integers(0, 50),
)
def test_documents_against_a_plain_loop(
    documents: list[int], length: int, batch: int, cursor: int
) -> None:
    total = sum(documents)
    data = make(total, documents=documents, length=length, batch=batch)
    if data.batches_per_epoch == 0:
        return
    owner = np.repeat(np.arange(len(documents)), documents)
    got = data.batch_at(cursor)
    for row, sample in enumerate(data.sample_ids(cursor)):
        start = sample * length
        for t in range(length):
            place = start + t
            document_start = int(np.flatnonzero(owner == owner[place])[0])
            assert got["segments"][row, t] == owner[place] - owner[start]
            assert got["positions"][row, t] == place - max(start, document_start)
            assert got["weights"][row, t] == (owner[place] == owner[place + 1])


@given(
    batch=st.integers(1, 17),
    cursor=st.integers(0, 10**6),
    separate=st.booleans(),
    data=st.data(),
)
def test_any_split_of_the_rows_makes_the_batch(
    batch: int, cursor: int, separate: bool, data: st.DataObject
) -> None:
    source = make(
        5 * 100 + 1, documents=[167] * 3, length=5, batch=batch, separate_documents=separate
    )
    cuts = data.draw(st.lists(st.integers(0, batch), max_size=4))
    bounds = [0, *sorted(cuts), batch]
    parts = [source.rows(cursor, a, b) for a, b in itertools.pairwise(bounds)]
    joined = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    equal(joined, source.batch_at(cursor))


def test_three_epochs() -> None:
    """O-26: complete, different, reproducible; an epoch that does not divide leaves out a rest."""
    data = make(100 * 4 + 1, batch=10)
    epochs = [
        np.concatenate([data.sample_ids(10 * epoch + b) for b in range(10)]) for epoch in range(3)
    ]
    for epoch in epochs:
        np.testing.assert_array_equal(np.sort(epoch), np.arange(100))
    for one, two in itertools.combinations(epochs, 2):
        assert np.mean(one == two) < 0.2
    again = make(100 * 4 + 1, batch=10)
    np.testing.assert_array_equal(again.sample_ids(25), epochs[2][50:60])
    other = make(100 * 4 + 1, batch=10, seed=1)
    assert other.digest(0) != data.digest(0)
    uneven = make(100 * 4 + 1, batch=30)
    assert uneven.batches_per_epoch == 3
    rest = [
        set(range(100)) - {int(i) for b in range(3) for i in uneven.sample_ids(3 * e + b)}
        for e in range(2)
    ]
    assert [len(left) for left in rest] == [10, 10]
    assert rest[0] != rest[1]


@pytest.mark.parametrize("cut", [3, 10, 14])
def test_cut_anywhere(cut: int) -> None:
    """O-27, O-28, O-29: the tail after a cut in or between epochs is the tail of the uncut list."""
    uncut = [make(100 * 4 + 1, batch=10).sample_ids(c).tolist() for c in range(30)]
    resumed = make(100 * 4 + 1, batch=10)
    assert [resumed.sample_ids(c).tolist() for c in range(cut, 30)] == uncut[cut:]
    assert resumed.epochs(cut) == cut / 10
    assert resumed.batch_at(cut)["sample"].tolist() == list(range(10 * cut, 10 * cut + 10))


def test_sample_number_beyond_32_bits() -> None:
    data = make(100 * 4 + 1, batch=10)
    cursor = 2**32 + 3
    expected = [(cursor * 10 + row) % 2**32 for row in range(10)]
    assert data.batch_at(cursor)["sample"].tolist() == expected
    assert data.rows(cursor, 4, 6)["sample"].tolist() == expected[4:6]
    wrap = 2**32 // 10
    assert data.batch_at(wrap)["sample"].tolist() == [
        (wrap * 10 + row) % 2**32 for row in range(10)
    ]


def test_digest() -> None:
    data = make(100 * 4 + 1, batch=10)
    digests = [data.digest(cursor) for cursor in range(20)]
    assert len(set(digests)) == 20
    assert all(len(digest) == 16 and int(digest, 16) >= 0 for digest in digests)
    assert data.digest(0) == "9cfd491e717b2991"


@pytest.mark.parametrize("items", [22, 24, 2])
def test_evaluation_counts_every_sample_once(items: int) -> None:
    """O-41: 3 devices x 8; the rows that fill up the last batch have no weight."""
    data = make(items * 4 + 1, batch=24)
    (batch,) = data.evaluation(5)
    assert batch["tokens"].shape == (24, 4)
    right = (batch["tokens"][:, 0] < 20 * 4).astype(np.float64)  # the first 20 samples are right
    weight = batch["weights"][:, 0]
    assert weight.sum() == items
    assert (right * weight).sum() / weight.sum() == min(items, 20) / items
    np.testing.assert_array_equal(batch["sample"], np.arange(24))
    np.testing.assert_array_equal(batch["positions"][-1], np.arange(4))


def test_evaluation_is_the_same_in_every_run() -> None:
    data = make(50 * 4 + 1, batch=12, documents=[101, 100])
    batches = data.evaluation(0)
    assert len(batches) == data.evaluation_batches(0) == 5
    assert sum(int(batch["weights"].sum()) for batch in batches) == 50 * 4 - 1
    seen = np.concatenate([b["tokens"][b["weights"].any(1), 0] for b in batches])
    np.testing.assert_array_equal(np.sort(seen), np.arange(50) * 4)
    assert len(data.evaluation(2)) == data.evaluation_batches(2) == 2
    other = make(50 * 4 + 1, batch=12, documents=[101, 100], seed=9, shuffle=False)
    for one, two in zip(batches, other.evaluation(0), strict=True):
        equal(one, two)
    assert np.ptp(seen[:12]) > 100  # from all over the text
    for index in range(5):
        parts = [data.evaluation_rows(index, a, a + 3) for a in range(0, 12, 3)]
        equal({n: np.concatenate([p[n] for p in parts]) for n in parts[0]}, batches[index])


def test_too_few_tokens_for_one_batch() -> None:
    require_batch(make(13), "text")
    with pytest.raises(DataError, match="too few tokens for one batch of 3 x 4") as error:
        require_batch(make(12), "text")
    assert error.value.allowed == "at least 13 tokens"


def test_fast() -> None:
    """A 64 x 128 batch is far below a step; the best of many, since the machine is shared."""
    data = make(2_000_000, documents=[2000] * 1000, length=128, batch=64)
    best = np.inf
    for cursor in range(50):
        began = time.perf_counter()
        data.batch_at(cursor)
        best = min(best, time.perf_counter() - began)
    assert best < 0.002
