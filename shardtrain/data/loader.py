"""Batches on devices, read ahead of the step.

Owns: which rows this process reads, how they become sharded arrays, and reading ahead. Does not
own: the order of samples, the mesh, what rests where. Every process makes the same calls in the
same order; what each reads is a matter of its devices only.
"""

import threading
import time
from bisect import bisect_right
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol, Self

import jax
import numpy as np
from numpy.typing import NDArray

from shardtrain.errors import DataError

Place = Callable[[str, tuple[int, ...]], jax.sharding.Sharding]
"""From an array's name and its shape [microbatches, rows, ...] to where it is put."""
DeviceBatch = dict[str, jax.Array]
Rows = dict[str, NDArray[Any]]
Read = Callable[[int, int], Rows]
"""From a range of global rows to their contents."""


class BatchSource(Protocol):
    """What batches are read from."""

    @property
    def batch_size(self) -> int:
        """Rows in a global batch."""

    def rows(self, cursor: int, start: int, stop: int) -> Rows:
        """Read rows [start, stop) of a global batch."""

    def evaluation_rows(self, index: int, start: int, stop: int) -> Rows:
        """Read rows [start, stop) of a batch for evaluation."""

    def blank(self, rows: int) -> Rows:
        """Return rows that count for nothing, with the right shapes and dtypes."""


class Samples(BatchSource, Protocol):
    """What a run is trained or evaluated on."""

    @property
    def num_samples(self) -> int:
        """Samples that there are."""

    def sample_ids(self, cursor: int, start: int = 0, stop: int | None = None) -> NDArray[np.int64]:
        """Return which samples a batch holds."""

    def digest(self, cursor: int) -> str:
        """Name the samples of a batch."""

    def evaluation_batches(self, limit: int) -> int:
        """Return how many batches an evaluation has, at most `limit` unless that is 0."""

    def remarks(self) -> dict[str, int]:
        """Return what a row of the metrics says about reading so far, such as what was skipped."""


@dataclass(frozen=True)
class Layout:
    """How the arrays of a batch lie on the devices, and which rows this process needs for it."""

    arrays: dict[str, jax.ShapeDtypeStruct]
    """Shape [microbatches, rows, ...], dtype and sharding of each array."""
    ranges: tuple[tuple[int, int], ...]
    """Ranges of global rows that this process reads, in order, apart from each other."""

    def put(self, read: Read) -> DeviceBatch:
        """Read the rows needed here and put them on the devices.

        Args:
            read: reads a range of rows.

        Returns:
            The global arrays.
        """
        blocks = [read(start, stop) for start, stop in self.ranges]
        starts = [start for start, _ in self.ranges]

        def take(name: str, start: int, stop: int) -> NDArray[Any]:
            place = bisect_right(starts, start) - 1
            return blocks[place][name][start - starts[place] : stop - starts[place]]

        return {name: _put(array, name, take) for name, array in self.arrays.items()}


def _put(
    array: jax.ShapeDtypeStruct, name: str, take: Callable[[str, int, int], NDArray[Any]]
) -> jax.Array:
    rows = array.shape[1]

    def part(index: tuple[slice, ...] | None) -> NDArray[Any]:
        assert index is not None
        microbatches = range(*index[0].indices(array.shape[0]))
        start, stop, _ = index[1].indices(rows)
        pieces = [take(name, m * rows + start, m * rows + stop) for m in microbatches]
        rest = tuple(index[2:])
        if len(pieces) == 1:
            return np.ascontiguousarray(pieces[0][(np.newaxis, slice(None), *rest)])
        return np.stack([piece[(slice(None), *rest)] for piece in pieces])

    return jax.make_array_from_callback(array.shape, array.sharding, part)


def batch_layout(data: BatchSource, microbatches: int, place: Place) -> Layout:
    """Find how a batch lies on the devices, and so the step's inputs, before any data is read.

    Args:
        data: what is read from.
        microbatches: into how many parts a batch is cut.
        place: where each array is put.

    Returns:
        The layout.

    Raises:
        DataError: the batch does not divide into microbatches.
    """
    if microbatches < 1 or data.batch_size % microbatches:
        legal = ", ".join(str(n) for n in range(1, data.batch_size + 1) if data.batch_size % n == 0)
        raise DataError(
            f"data.batch_size={data.batch_size} does not divide into {microbatches} microbatches",
            where="train.microbatches",
            value=str(microbatches),
            allowed=legal,
        )
    rows = data.batch_size // microbatches
    arrays: dict[str, jax.ShapeDtypeStruct] = {}
    wanted: set[tuple[int, int]] = set()
    for name, blank in data.blank(0).items():
        shape = (microbatches, rows, *blank.shape[1:])
        sharding = place(name, shape)
        arrays[name] = jax.ShapeDtypeStruct(shape, blank.dtype, sharding=sharding)
        for index in sharding.addressable_devices_indices_map(shape).values():
            assert index is not None
            start, stop, _ = index[1].indices(rows)
            for m in range(*index[0].indices(microbatches)):
                wanted.add((m * rows + start, m * rows + stop))
    return Layout(arrays, _merge(wanted))


def _merge(ranges: set[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """Join ranges that touch or overlap."""
    merged: list[tuple[int, int]] = []
    for start, stop in sorted(ranges):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(stop, merged[-1][1]))
        else:
            merged.append((start, stop))
    return tuple(merged)


def batch_on_device(data: BatchSource, cursor: int, microbatches: int, place: Place) -> DeviceBatch:
    """Read one batch and put it on the devices, without reading ahead.

    Args:
        data: what is read from.
        cursor: the batch.
        microbatches: into how many parts it is cut.
        place: where each array is put.

    Returns:
        Arrays of shape [microbatches, rows, ...].
    """
    layout = batch_layout(data, microbatches, place)
    return layout.put(lambda start, stop: data.rows(cursor, start, stop))


def evaluation_on_device(
    data: BatchSource, index: int, microbatches: int, place: Place
) -> DeviceBatch:
    """Read one batch for evaluation and put it on the devices.

    Args:
        data: what is read from.
        index: the batch, from 0.
        microbatches: into how many parts it is cut.
        place: where each array is put.

    Returns:
        Arrays of shape [microbatches, rows, ...]; rows after the last sample have weight 0.
    """
    layout = batch_layout(data, microbatches, place)
    return layout.put(lambda start, stop: data.evaluation_rows(index, start, stop))


class Loader:
    """Iterates over the batches of a range of cursors, reading ahead in a thread.

    Gives (cursor, batch, seconds that the caller waited for it). Close it, or use it as a context
    manager; it also closes itself at its end.
    """

    def __init__(
        self,
        data: BatchSource,
        *,
        microbatches: int,
        place: Place,
        start: int,
        stop: int,
        prefetch: int = 2,
        threads: int = 1,
    ) -> None:
        """Prepare to read; nothing is read yet.

        Args:
            data: what is read from.
            microbatches: into how many parts a batch is cut.
            place: where each array is put.
            start, stop: the cursors.
            prefetch: batches read ahead, 0 for none.
            threads: that read them, each a batch.

        Raises:
            DataError: the batch does not divide into microbatches.
        """
        self.layout = batch_layout(data, microbatches, place)
        self._data = data
        self._next = start
        self._threads: set[threading.Thread] = set()
        self._cursors = range(start, stop)
        self._close: Callable[[], None] = lambda: None
        if prefetch == 0 or not self._cursors:
            self._batches: Iterator[DeviceBatch] = map(self._load, self._cursors)
        else:
            import grain  # a second of imports

            cursors = grain.MapDataset.range(start, stop).map(self._load)
            options = grain.ReadOptions(
                num_threads=min(threads, prefetch), prefetch_buffer_size=prefetch
            )
            batches = iter(cursors.to_iter_dataset(options))
            self._batches, self._close = batches, batches.close

    def _load(self, cursor: int) -> DeviceBatch:
        self._threads.add(threading.current_thread())
        return self.layout.put(lambda start, stop: self._data.rows(int(cursor), start, stop))

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> tuple[int, DeviceBatch, float]:
        """Return the next cursor, its batch, and how long it was waited for."""
        began = time.perf_counter()
        try:
            batch = next(self._batches)
        except StopIteration:
            self.close()
            raise
        cursor, self._next = self._next, self._next + 1
        return cursor, batch, time.perf_counter() - began

    def close(self) -> None:
        """Stop reading ahead and wait until the thread is gone. Safe to call twice."""
        self._close()
        self._batches = iter(())
        for thread in self._threads - {threading.current_thread(), threading.main_thread()}:
            thread.join()
        self._threads.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
