"""Batches of interactions as a pure function of the cursor.

Owns: which rows a batch holds, of one data set or of each process's own shards. Does not own: files
(`interaction_files`), what is generated (`interaction_generator`), devices.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardtrain.data.order import InOrder
from shardtrain.data.permutation import keys, permute
from shardtrain.errors import DataError

Batch = dict[str, NDArray[Any]]
"""ids [rows, fields] int32, dense [rows, features], label and weights [rows] float32."""
_SPLIT_SEED = 0
_EVALUATION_SEED = 0


def record(num_dense: int, fields: int) -> np.dtype[Any]:
    """What an interaction is in binary form.

    Args:
        num_dense: numbers that are no ids.
        fields: ids.
    """
    return np.dtype([("label", "<f4"), ("dense", "<f4", (num_dense,)), ("ids", "<i4", (fields,))])


@dataclass(frozen=True, eq=False)
class Shards:
    """Arrays of records as one; sizes are 64-bit."""

    arrays: Sequence[NDArray[Any]]

    @cached_property
    def ends(self) -> NDArray[np.int64]:
        """Records up to the end of each."""
        return np.cumsum([len(array) for array in self.arrays], dtype=np.int64)

    def __len__(self) -> int:
        return int(self.ends[-1]) if len(self.arrays) else 0

    def take(self, rows: NDArray[np.int64]) -> NDArray[Any]:
        """Records by their numbers.

        Args:
            rows: numbers from 0.
        """
        where = np.searchsorted(self.ends, rows, side="right")
        found = np.zeros(len(rows), self.arrays[0].dtype)
        for shard in np.unique(where):
            here = where == shard
            first = self.ends[shard] - len(self.arrays[shard])
            found[here] = self.arrays[shard][rows[here] - first]
        return found


@dataclass(frozen=True)
class Part:
    """Some of the rows: [first, first + count) of a fixed shuffled order, or of given numbers."""

    total: int
    first: int
    count: int
    numbers: NDArray[np.int64] | None = field(default=None, repr=False)

    def at(self, places: NDArray[np.int64]) -> NDArray[np.int64]:
        """Numbers of rows, by their places in this part."""
        if self.numbers is not None:
            found: NDArray[np.int64] = self.numbers[places]
            return found
        if not len(places):  # nor is there an order of no rows
            return places
        return permute(self.first + places, self.total, keys(_SPLIT_SEED, 0))


def split(total: int, fraction: float, *, shuffle: bool) -> tuple[Part, Part]:
    """Rows for training, and for validation: the same in every run.

    Args:
        total: rows.
        fraction: for validation.
        shuffle: whether training rows may come in any order; without, an index of 8 bytes a row is
            held in memory.
    """
    held = round(total * fraction)
    validation, train = Part(total, 0, held), Part(total, held, total - held)
    if not shuffle and total:
        places = np.arange(train.count, dtype=np.int64)
        train = Part(total, held, train.count, np.sort(train.at(places)))
    return train, validation


@dataclass(frozen=True, eq=False)
class Interactions(InOrder):
    """Some rows of a data set that all processes read, in batches."""

    source: Shards
    part: Part
    batch_size: int
    seed: int = 0
    shuffle: bool = True
    skipped: int = 0
    """Rows that could not be used."""

    @property
    def num_samples(self) -> int:
        """Interactions that there are."""
        return self.part.count

    def remarks(self) -> dict[str, int]:
        """How many rows could not be used, where there were any."""
        return {"skipped_rows": self.skipped} if self.skipped else {}

    def rows(self, cursor: int, start: int, stop: int) -> Batch:
        """Read some rows of a global batch; see `data.loader.BatchSource`."""
        return self._read(self.order.sample_ids(cursor, start, stop), stop - start)

    def evaluation_rows(self, index: int, start: int, stop: int) -> Batch:
        """Read some rows of a batch for evaluation; those after the last one have weight 0."""
        return self._read(self.order.evaluation_ids(index, start, stop), stop - start)

    def blank(self, rows: int) -> Batch:
        """Return rows that count for nothing; they also tell shapes and dtypes."""
        kind = self.source.arrays[0].dtype
        return blank_interactions(rows, kind["dense"].shape[0], kind["ids"].shape[0])

    def _read(self, places: NDArray[np.int64], rows: int) -> Batch:
        batch = self.blank(rows)
        fill(batch, self.source.take(self.part.at(places)), np.arange(len(places)))
        return batch


@dataclass(frozen=True, eq=False)
class LocalInteractions:
    """Rows of which each process has its own; an epoch ends when the largest share is used up.

    Process i has the i-th part of every microbatch. Whoever has no more rows in an epoch gives rows
    that count for nothing, so that every row counts once an epoch, no process waits for another,
    and the loss is the mean over those that count. The order is a function of cursor and of the
    numbers of rows, so all processes name the samples of a batch alike; on other numbers of
    processes it is another one.
    """

    source: Shards
    part: Part
    batch_size: int
    seed: int
    shuffle: bool
    skipped: int
    counts: tuple[int, ...]
    """Rows of each process."""
    index: int
    """Of this process."""
    microbatches: int

    @property
    def num_samples(self) -> int:
        """Interactions of all processes."""
        return sum(self.counts)

    @property
    def _share(self) -> int:
        """Rows of a process in a global batch."""
        return self.batch_size // len(self.counts)

    @property
    def _batches(self) -> int:
        """Batches in an epoch."""
        return -(-max(self.counts) // self._share)

    def sample_ids(self, cursor: int, start: int = 0, stop: int | None = None) -> NDArray[np.int64]:
        """Return which samples a batch holds, those of a process after those of the one before.

        Args:
            cursor: the batch, counted from 0 over all epochs.
            start, stop: rows of the global batch.

        Returns:
            Sample ids; -1 where a row counts for nothing.
        """
        rows = np.arange(start, self.batch_size if stop is None else stop, dtype=np.int64)
        owners, places = self._owned(rows)
        firsts = np.cumsum((0, *self.counts[:-1]), dtype=np.int64)
        found = np.full(len(rows), -1, np.int64)
        for owner in np.unique(owners):
            mine = np.flatnonzero(owners == owner)
            local = self._numbers(int(owner), cursor, places[mine], evaluates=False)
            found[mine] = np.where(local < 0, -1, firsts[owner] + local)
        return found

    def digest(self, cursor: int) -> str:
        """Name the samples of a batch."""
        ids = self.sample_ids(cursor).astype("<i8")
        return hashlib.blake2b(ids.tobytes(), digest_size=8).hexdigest()

    def evaluation_batches(self, limit: int) -> int:
        """Return how many batches an evaluation has: until the largest share is used up."""
        return min(limit, self._batches) if limit else self._batches

    def remarks(self) -> dict[str, int]:
        """How many rows could not be used in this process, where there were any."""
        return {"skipped_rows": self.skipped} if self.skipped else {}

    def rows(self, cursor: int, start: int, stop: int) -> Batch:
        """Read some rows of a global batch, which must be this process's own."""
        return self._read(cursor, start, stop, evaluates=False)

    def evaluation_rows(self, index: int, start: int, stop: int) -> Batch:
        """Read some rows of a batch for evaluation, which must be this process's own."""
        return self._read(index, start, stop, evaluates=True)

    def blank(self, rows: int) -> Batch:
        """Return rows that count for nothing; they also tell shapes and dtypes."""
        kind = self.source.arrays[0].dtype
        return blank_interactions(rows, kind["dense"].shape[0], kind["ids"].shape[0])

    def _read(self, batch: int, start: int, stop: int, *, evaluates: bool) -> Batch:
        owners, places = self._owned(np.arange(start, stop, dtype=np.int64))
        if (owners != self.index).any():
            raise DataError(
                "a device of this process has rows of another one's shards",
                where='data.shards="local"',
                cure='use a mesh of data and replica whose devices are in order, or "global"',
            )
        numbers = self._numbers(self.index, batch, places, evaluates=evaluates)
        found = self.blank(stop - start)
        there = np.flatnonzero(numbers >= 0)
        fill(found, self.source.take(self.part.at(numbers[there])), there)
        return found

    def _owned(self, rows: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Of rows of the global batch: whose they are, and their places in that share."""
        whole = self.batch_size // self.microbatches
        share = whole // len(self.counts)
        microbatch, row = rows // whole, rows % whole
        return row // share, microbatch * share + row % share

    def _numbers(
        self, owner: int, batch: int, places: NDArray[np.int64], *, evaluates: bool
    ) -> NDArray[np.int64]:
        """A process's own numbers of its samples, -1 after the last one."""
        count, seed = self.counts[owner], self.seed
        epoch, batch = (0, batch) if evaluates else divmod(batch, self._batches)
        places = batch * self._share + places
        found = np.full(len(places), -1, np.int64)
        there = places < count
        if evaluates or self.shuffle:
            of = keys(_EVALUATION_SEED if evaluates else seed, epoch)
            found[there] = permute(places[there], count, of) if there.any() else 0
        else:
            found[there] = places[there]
        return found


def fill(batch: Batch, records: NDArray[Any], places: NDArray[np.int64]) -> None:
    """Write records into rows of a batch, and let them count.

    Args:
        batch: from `blank_interactions`.
        records: as `record` describes them.
        places: the row of each.
    """
    for name in ("ids", "dense", "label"):
        batch[name][places] = records[name]
    batch["weights"][places] = 1.0


def blank_interactions(rows: int, num_dense: int, fields: int) -> Batch:
    """Return rows that count for nothing.

    Args:
        rows: how many.
        num_dense: numbers that are no ids.
        fields: ids.
    """
    return {
        "ids": np.zeros((rows, fields), np.int32),
        "dense": np.zeros((rows, num_dense), np.float32),
        "label": np.zeros(rows, np.float32),
        "weights": np.zeros(rows, np.float32),
    }
