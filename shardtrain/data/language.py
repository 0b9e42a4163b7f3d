"""Batches of a language model as a pure function of the cursor.

Owns: which tokens a sample covers, the order of samples, what a batch holds, and batches for
evaluation. Does not own: files, devices, prefetching. The order knows nothing of devices or
processes.

A sample covers up to T + 1 tokens, of which all but the last are inputs and all but the first their
targets: the only shift by one there is. Of a stream of text sample i covers [i * T, i * T + T]. Of
examples it covers whole ones, as many as fit (`pack`), and what is left counts for nothing.
"""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardtrain.data.order import InOrder
from shardtrain.data.tokens import TokenFile
from shardtrain.errors import DataError

Batch = dict[str, NDArray[Any]]
"""tokens, targets [rows, length] int32; weights [rows, length] float32; sample [rows] uint32; with
documents kept apart also segments, positions [rows, length] int32."""


@dataclass(frozen=True, eq=False)
class LanguageData(InOrder):
    """Tokens in samples of a fixed length, and the order in which they are taken."""

    tokens: NDArray[np.integer[Any]] = field(repr=False)
    """All tokens, [any], may be memory-mapped."""
    offsets: NDArray[np.int64] = field(repr=False)
    """Where each document starts, and the end of the last; each has a token at least."""
    vocab_size: int
    sequence_length: int
    batch_size: int
    """Sequences in a global batch."""
    seed: int = 0
    shuffle: bool = True
    separate_documents: bool = True
    learned: NDArray[np.uint8] | None = field(default=None, repr=False)
    """1 for each token that counts as a target, [any]; None = all do."""
    packed: NDArray[np.int64] | None = field(default=None, repr=False)
    """First token of each sample, and the one after its last, [samples, 2]; None = a stream."""
    to_the_end: bool = False
    """Whether the last sample of a stream may be a shorter one."""

    @property
    def num_samples(self) -> int:
        """Samples that there are."""
        if self.packed is not None:
            return len(self.packed)
        targets = max(0, len(self.tokens) - 1)
        return (
            -(-targets // self.sequence_length)
            if self.to_the_end
            else (targets // self.sequence_length)
        )

    def epochs(self, cursor: int) -> float:
        """Return how many epochs lie before a batch.

        Args:
            cursor: the batch, counted from 0 over all epochs.
        """
        return cursor / self.batches_per_epoch

    def remarks(self) -> dict[str, int]:
        """Nothing: what cannot be read stops the run."""
        return {}

    def rows(self, cursor: int, start: int, stop: int) -> Batch:
        """Read some rows of a global batch.

        Args:
            cursor: the batch, counted from 0 over all epochs.
            start, stop: rows of the global batch.

        Returns:
            The rows, see `Batch`. `sample` is the low 32 bits of cursor * batch_size + row.
        """
        number = cursor * self.batch_size
        return self._read(self.sample_ids(cursor, start, stop), number + start)

    def batch_at(self, cursor: int) -> Batch:
        """Read a global batch.

        Args:
            cursor: the batch, counted from 0 over all epochs.

        Returns:
            All rows, see `Batch`.
        """
        return self.rows(cursor, 0, self.batch_size)

    def evaluation_rows(self, index: int, start: int, stop: int) -> Batch:
        """Read some rows of a batch for evaluation.

        The batches are the same in every run and take samples from all over the text, each once;
        rows after the last sample have weight 0.

        Args:
            index: the batch, from 0.
            start, stop: rows of the global batch.

        Returns:
            The rows, see `Batch`.
        """
        first = index * self.batch_size
        ids = self.order.evaluation_ids(index, start, stop)
        batch = self._read(ids, first + start)
        missing = stop - start - len(ids)
        if missing <= 0:
            return batch
        padding = self.blank(missing)
        number = np.uint32((first + start + len(ids)) % 2**32)
        padding["sample"] += number + np.arange(missing, dtype=np.uint32)
        return {name: np.concatenate([batch[name], padding[name]]) for name in batch}

    def evaluation(self, limit: int) -> list[Batch]:
        """Read the batches for evaluation, always the same, each sample once.

        Args:
            limit: at most so many batches; 0 = no limit.

        Returns:
            Global batches; the last is filled up with rows of weight 0.
        """
        count = self.evaluation_batches(limit)
        return [self.evaluation_rows(index, 0, self.batch_size) for index in range(count)]

    def blank(self, rows: int) -> Batch:
        """Return rows that count for nothing; they also tell shapes and dtypes.

        Args:
            rows: how many.
        """
        return blank_batch(rows, self.sequence_length, separate_documents=self.separate_documents)

    def _read(self, ids: NDArray[np.int64], number: int) -> Batch:
        length = self.sequence_length
        if not len(ids):
            return self.blank(0)
        first, last = self._bounds(ids)
        text = _cut(self.tokens, first, last, length + 1, np.int32)
        inside = np.arange(1, length + 1) < (last - first)[:, None]
        weights = inside.astype(np.float32)
        if self.learned is not None:
            weights *= _cut(self.learned, first, last, length + 1, np.float32)[:, 1:]
        sample = (np.arange(len(ids), dtype=np.uint64) + np.uint64(number % 2**32)).astype(
            np.uint32
        )
        batch: Batch = {
            "tokens": np.ascontiguousarray(text[:, :-1]),
            "targets": np.ascontiguousarray(text[:, 1:]),
            "weights": weights,
            "sample": sample,
        }
        if self.separate_documents:
            starts = self._document_starts(first)
            places = np.arange(length, dtype=np.int32)
            inside = starts[:, :-1]
            batch["segments"] = np.cumsum(inside, axis=1, dtype=np.int32)
            batch["positions"] = places - np.maximum.accumulate(np.where(inside, places, 0), axis=1)
            batch["weights"][starts[:, 1:]] = 0.0
        return batch

    def _bounds(self, ids: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The first token of each sample, and the one after its last."""
        if self.packed is not None:
            first, last = self.packed[ids].T
            return first, last
        first = ids * self.sequence_length
        return first, np.minimum(first + self.sequence_length + 1, len(self.tokens))

    def _document_starts(self, first: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Mark what begins a document after a sample's first token: [rows, length + 1]."""
        length = self.sequence_length
        low = np.searchsorted(self.offsets, first, side="right")
        high = np.searchsorted(self.offsets, first + length, side="right")
        counts = high - low
        row = np.repeat(np.arange(len(first)), counts)
        before = np.cumsum(counts) - counts
        document = np.arange(len(row)) - np.repeat(before - low, counts)
        marks = np.zeros((len(first), length + 1), np.bool_)
        marks[row, self.offsets[document] - first[row]] = True
        return marks


def _cut(
    values: NDArray[Any],
    first: NDArray[np.int64],
    last: NDArray[np.int64],
    length: int,
    dtype: Any,
) -> NDArray[Any]:
    """Stretches of an array as rows [rows, length], filled up with zeros."""
    rows = np.zeros((len(first), length), dtype)
    for row, start, stop in zip(rows, first.tolist(), last.tolist(), strict=True):
        row[: stop - start] = values[start:stop]
    return rows


def pack(offsets: NDArray[np.int64], most: int) -> tuple[NDArray[np.int64], list[tuple[int, int]]]:
    """Put whole documents into samples, in order, as many into each as fit.

    Args:
        offsets: where each document starts, and the end of the last, [documents + 1].
        most: tokens of a sample.

    Returns:
        First token of each sample and the one after its last, [samples, 2]; and the number and the
        tokens of each document that is too long and in none.
    """
    samples: list[tuple[int, int]] = []
    long: list[tuple[int, int]] = []
    document, documents = 0, len(offsets) - 1
    while document < documents:
        start = int(offsets[document])
        after = int(np.searchsorted(offsets, start + most, side="right")) - 1
        if after == document:
            long.append((document, int(offsets[document + 1]) - start))
            document += 1
            continue
        samples.append((start, int(offsets[after])))
        document = after
    return np.array(samples, np.int64).reshape(-1, 2), long


def language_data(
    file: TokenFile,
    *,
    sequence_length: int,
    batch_size: int,
    seed: int = 0,
    shuffle: bool = True,
    separate_documents: bool = True,
    to_the_end: bool = False,
    packed: NDArray[np.int64] | None = None,
) -> LanguageData:
    """Take samples from a token file.

    Args:
        file: the open file.
        sequence_length: tokens predicted per sequence.
        batch_size: sequences in a global batch.
        seed: decides the order.
        shuffle: whether every epoch has an order of its own.
        separate_documents: whether documents in one sequence are kept apart.
        to_the_end: whether the last sample of a stream may be a shorter one.
        packed: samples of whole documents, of `pack`.

    Returns:
        The data.
    """
    return LanguageData(
        tokens=file.tokens,
        offsets=file.offsets,
        vocab_size=file.header.vocab_size,
        sequence_length=sequence_length,
        batch_size=batch_size,
        seed=seed,
        shuffle=shuffle,
        separate_documents=separate_documents,
        learned=file.learned,
        packed=packed,
        to_the_end=to_the_end,
    )


def require_batch(data: LanguageData, where: str, *, held: int = 0) -> None:
    """Refuse data too short for a single batch.

    Args:
        data: the data.
        where: what it was read from.
        held: tokens of it that are held out for validation.

    Raises:
        DataError: it has fewer samples than a batch.
    """
    if data.num_samples >= data.batch_size:
        return
    if data.packed is not None:
        raise DataError(
            f"too few examples for one batch of {data.batch_size} sequences",
            where=where,
            value=f"{data.num_samples} sequences of {data.sequence_length} hold them all",
            cure="use more examples, or a smaller data.batch_size or data.sequence_length",
        )
    needed = data.batch_size * data.sequence_length + 1
    raise DataError(
        f"too few tokens for one batch of {data.batch_size} x {data.sequence_length}",
        where=where,
        value=f"{len(data.tokens)} tokens, {data.num_samples} sequences"
        + (f"; {held} more tokens held out for validation" if held else ""),
        allowed=f"at least {needed} tokens",
        cure="use more text, or a smaller data.batch_size or data.sequence_length"
        + (", or hold out less: data.validation_fraction" if held else ""),
    )


def blank_batch(rows: int, length: int, *, separate_documents: bool) -> Batch:
    """Return rows that count for nothing; they tell shapes and dtypes where there is no data.

    Args:
        rows: how many.
        length: tokens of each.
        separate_documents: whether documents are told apart.
    """
    batch: Batch = {
        "tokens": np.zeros((rows, length), np.int32),
        "targets": np.zeros((rows, length), np.int32),
        "weights": np.zeros((rows, length), np.float32),
        "sample": np.zeros(rows, np.uint32),
    }
    if separate_documents:
        batch["segments"] = np.zeros((rows, length), np.int32)
        batch["positions"] = np.tile(np.arange(length, dtype=np.int32), (rows, 1))
    return batch
