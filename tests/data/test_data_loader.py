"""Batches on 8 devices: placement, microbatches, reading ahead, threads, errors."""

import threading
import time
from collections.abc import Callable

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from shardtrain.data.language import Batch, LanguageData
from shardtrain.data.loader import (
    Loader,
    _merge,
    batch_layout,
    batch_on_device,
    evaluation_on_device,
)
from shardtrain.errors import DataError


def make(samples: int = 100, batch: int = 8, length: int = 4) -> LanguageData:
    tokens = (np.arange(samples * length + 1) % 251).astype(np.uint8)
    offsets = np.unique([*range(0, len(tokens), 11), len(tokens)])
    return LanguageData(tokens, offsets, 256, sequence_length=length, batch_size=batch)


@pytest.fixture
def mesh() -> Mesh:
    return jax.make_mesh((4, 1, 2), ("data", "context", "tensor"), axis_types=(AxisType.Auto,) * 3)


def over(mesh: Mesh, *axes: str | None) -> Callable[[str, tuple[int, ...]], NamedSharding]:
    return lambda name, shape: NamedSharding(mesh, PartitionSpec(*axes[: len(shape)]))


@pytest.mark.parametrize("axes", [(None, "data"), (None, "data", "tensor"), (), ("tensor", "data")])
@pytest.mark.parametrize("microbatches", [1, 2])
def test_every_layout_holds_the_same_batch(
    mesh: Mesh, axes: tuple[str | None, ...], microbatches: int
) -> None:
    if axes[:1] == ("tensor",) and microbatches == 1:
        pytest.skip("one microbatch cannot be split")
    data = make()
    batch = batch_on_device(data, 5, microbatches, over(mesh, *axes))
    layout = batch_layout(data, microbatches, over(mesh, *axes))
    for name, expected in data.batch_at(5).items():
        array = batch[name]
        assert array.shape == (microbatches, 8 // microbatches, *expected.shape[1:])
        assert array.dtype == expected.dtype
        assert array.sharding.is_equivalent_to(over(mesh, *axes)(name, array.shape), array.ndim)
        np.testing.assert_array_equal(np.asarray(array).reshape(expected.shape), expected)
        spec = layout.arrays[name]
        assert (spec.shape, spec.dtype) == (array.shape, array.dtype)


def test_evaluation(mesh: Mesh) -> None:
    data = make(samples=13)
    for index, expected in enumerate(data.evaluation(0)):
        batch = evaluation_on_device(data, index, 2, over(mesh, None, "data"))
        for name, array in batch.items():
            np.testing.assert_array_equal(
                np.asarray(array).reshape(expected[name].shape), expected[name]
            )


def test_ranges_are_joined() -> None:
    assert _merge({(4, 8), (0, 2), (2, 4), (12, 14), (13, 16)}) == ((0, 8), (12, 16))


def test_batch_that_does_not_divide(mesh: Mesh) -> None:
    with pytest.raises(DataError, match="does not divide into 3 microbatches") as error:
        batch_layout(make(), 3, over(mesh))
    assert error.value.where == "train.microbatches"
    assert error.value.allowed == "1, 2, 4, 8"


@pytest.mark.parametrize("prefetch", [0, 1, 2])
def test_order_and_threads(mesh: Mesh, prefetch: int) -> None:
    data = make()
    before = set(threading.enumerate())
    loader = Loader(
        data, microbatches=2, place=over(mesh, None, "data"), start=7, stop=30, prefetch=prefetch
    )
    cursors = []
    for cursor, batch, waited in loader:
        cursors.append(cursor)
        assert waited >= 0
        expected = data.batch_at(cursor)["tokens"]
        np.testing.assert_array_equal(np.asarray(batch["tokens"]).reshape(expected.shape), expected)
    assert cursors == list(range(7, 30))
    assert set(threading.enumerate()) == before
    with pytest.raises(StopIteration):
        next(loader)
    loader.close()


@pytest.mark.parametrize("taken", [0, 1, 5])
def test_closed_in_the_middle(mesh: Mesh, taken: int) -> None:
    before = set(threading.enumerate())
    with Loader(make(), microbatches=1, place=over(mesh), start=0, stop=10**9) as loader:
        assert [next(loader)[0] for _ in range(taken)] == list(range(taken))
    assert set(threading.enumerate()) == before
    with pytest.raises(StopIteration):
        next(loader)


def test_nothing_to_read(mesh: Mesh) -> None:
    assert list(Loader(make(), microbatches=1, place=over(mesh), start=5, stop=5)) == []


class Slow:
    """Data whose reading takes time, or fails."""

    batch_size = 8

    def __init__(self, seconds: float = 0.0, fails_at: int = -1) -> None:
        self.data = make()
        self.seconds = seconds
        self.fails_at = fails_at
        self.read: list[tuple[int, int, int]] = []

    def rows(self, cursor: int, start: int, stop: int) -> Batch:
        time.sleep(self.seconds)
        if cursor == self.fails_at:
            raise DataError("the disk is gone")
        self.read.append((cursor, start, stop))
        return self.data.rows(cursor, start, stop)

    def evaluation_rows(self, index: int, start: int, stop: int) -> Batch:
        return self.data.evaluation_rows(index, start, stop)

    def blank(self, rows: int) -> Batch:
        return self.data.blank(rows)


def test_reading_ahead_hides_the_reading(mesh: Mesh) -> None:
    data = Slow(seconds=0.02)
    waits = []
    with Loader(data, microbatches=1, place=over(mesh), start=0, stop=8) as loader:
        for _, _, waited in loader:
            waits.append(waited)
            time.sleep(0.06)
    assert waits[0] > 0.02
    assert sorted(waits[1:])[3] < 0.01
    waits = []
    with Loader(data, microbatches=1, place=over(mesh), start=0, stop=3, prefetch=0) as loader:
        waits = [waited for _, _, waited in loader]
    assert min(waits) > 0.02


def test_rows_are_read_once_a_batch(mesh: Mesh) -> None:
    data = Slow()
    batch_on_device(data, 3, 2, over(mesh, None, "data"))
    assert data.read == [(3, 0, 8)]


@pytest.mark.parametrize("prefetch", [0, 2])
def test_errors_reach_the_caller(mesh: Mesh, prefetch: int) -> None:
    data = Slow(fails_at=2)
    before = set(threading.enumerate())
    with Loader(
        data, microbatches=1, place=over(mesh), start=0, stop=9, prefetch=prefetch
    ) as loader:
        assert [next(loader)[0], next(loader)[0]] == [0, 1]
        with pytest.raises(DataError, match="the disk is gone"):
            next(loader)
    assert set(threading.enumerate()) == before
