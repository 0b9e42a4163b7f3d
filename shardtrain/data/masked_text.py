"""Batches of masked text as a pure function of the cursor.

Owns: which text a sample holds (pairs for the next sentence, or a stream), what a batch holds, and
batches for evaluation. Does not own: files, which tokens are hidden (`masking`), the order.

A pair is a stretch of a document, cut in two at the beginning of a word; or its first part and as
much from another document. It is [CLS] first [SEP] second [SEP], filled up with padding that nobody
attends to. Where the cut is, which tokens are hidden and from where the other part comes differs
from epoch to epoch, and is a function of (seed, epoch, sample).
"""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardtrain.data.language import Batch
from shardtrain.data.masking import EVALUATION, generator, hide, num_predicted
from shardtrain.data.order import InOrder
from shardtrain.data.tokens import TokenFile
from shardtrain.data.wordpiece import Pieces
from shardtrain.errors import DataError

FOLLOWS, OTHER = 0, 1
"""Labels of a pair, as the published models have them."""
_SHORTER = 0.1
"""Part of the pairs that are shorter than they could be, as in the published code."""
_SPECIAL = 3


@dataclass(frozen=True, eq=False)
class MaskedText(InOrder):
    """Documents in samples of a fixed length, and the order in which they are taken."""

    tokens: NDArray[np.integer[Any]] = field(repr=False)
    """All tokens, [any], may be memory-mapped."""
    starts: NDArray[np.int64] = field(repr=False)
    """First token of each document that samples are made of, [documents]."""
    stops: NDArray[np.int64] = field(repr=False)
    """The one after its last."""
    firsts: NDArray[np.int64] = field(repr=False)
    """Samples before each document, and all of them, [documents + 1]."""
    pieces: Pieces = field(repr=False)
    sequence_length: int
    batch_size: int
    """Samples in a global batch."""
    pairs: bool
    seed: int = 0
    shuffle: bool = True
    fraction: float = 0.15
    """Part of a sample's tokens that is predicted."""
    whole_words: bool = False

    @property
    def num_samples(self) -> int:
        """Samples that there are."""
        return int(self.firsts[-1])

    def remarks(self) -> dict[str, int]:
        """Nothing: what cannot be read stops the run."""
        return {}

    def rows(self, cursor: int, start: int, stop: int) -> Batch:
        """Read some rows of a global batch.

        Args:
            cursor: the batch, counted from 0 over all epochs.
            start, stop: rows of the global batch.

        Returns:
            The rows, see `blank_masked`. `sample` is the low 32 bits of cursor * batch_size + row.
        """
        epoch = cursor // self.batches_per_epoch
        ids = self.sample_ids(cursor, start, stop)
        return self._read(ids, cursor * self.batch_size + start, self.seed, epoch)

    def batch_at(self, cursor: int) -> Batch:
        """Read a global batch; see `rows`."""
        return self.rows(cursor, 0, self.batch_size)

    def evaluation_rows(self, index: int, start: int, stop: int) -> Batch:
        """Read some rows of a batch for evaluation.

        The batches are the same in every run, with the same tokens hidden, and have each sample
        once; rows after the last sample have weight 0.

        Args:
            index: the batch, from 0.
            start, stop: rows of the global batch.
        """
        number = index * self.batch_size + start
        ids = self.order.evaluation_ids(index, start, stop)
        batch = self._read(ids, number, 0, EVALUATION)
        missing = stop - start - len(ids)
        if missing <= 0:
            return batch
        padding = self.blank(missing)
        padding["sample"] += _numbers(number + len(ids), missing)
        return {name: np.concatenate([batch[name], padding[name]]) for name in batch}

    def blank(self, rows: int) -> Batch:
        """Return rows that count for nothing; they also tell shapes and dtypes."""
        return blank_masked(rows, self.sequence_length, self.fraction, pairs=self.pairs)

    def _read(self, ids: NDArray[np.int64], number: int, seed: int, epoch: int) -> Batch:
        batch = self.blank(len(ids))
        batch["sample"] += _numbers(number, len(ids))
        for row, sample in enumerate(ids.tolist()):
            random = generator(seed, epoch, sample)
            if self.pairs:
                text = self._pair(sample, random, batch, row)
            else:
                text = self._stream(sample, batch, row)
            masked = hide(text, self.pieces, self.fraction, random, whole_words=self.whole_words)
            count = len(masked.predicted)
            batch["tokens"][row] = self.pieces.pad
            batch["tokens"][row, : len(text)] = masked.tokens
            batch["predicted"][row, :count] = masked.predicted
            batch["targets"][row, :count] = masked.targets
            batch["weights"][row, :count] = 1.0
        return batch

    # -- pairs

    def _pair(
        self, sample: int, random: np.random.Generator, batch: Batch, row: int
    ) -> NDArray[np.int64]:
        """Two parts with their special tokens; fills in all but what is hidden."""
        room = self.sequence_length - _SPECIAL
        document = int(np.searchsorted(self.firsts, sample, side="right")) - 1
        begin = int(self.starts[document]) + (sample - int(self.firsts[document])) * room
        end = min(int(self.stops[document]), begin + room)
        if random.random() < _SHORTER:
            end = begin + int(random.integers(2, end - begin + 1))
        text = self.tokens[begin:end].astype(np.int64)
        cut = self._cut(text, random)
        first, second, label = text[:cut], text[cut:], FOLLOWS
        if random.random() < 0.5:
            second, label = self._elsewhere(document, len(second), random), OTHER
        cls, sep = [self.pieces.cls], [self.pieces.sep]
        whole = np.concatenate([cls, first, sep, second, sep]).astype(np.int64)
        batch["segments"][row, : len(whole)] = 1
        batch["parts"][row, len(first) + 2 : len(whole)] = 1
        batch["next"][row], batch["next_weights"][row] = label, 1.0
        return whole

    def _cut(self, text: NDArray[np.int64], random: np.random.Generator) -> int:
        """A place within where a word begins; anywhere within one word."""
        places = np.flatnonzero(~self.pieces.goes_on[text[1:]]) + 1
        return int(random.choice(places)) if len(places) else int(random.integers(1, len(text)))

    def _elsewhere(
        self, document: int, count: int, random: np.random.Generator
    ) -> NDArray[np.int64]:
        """So many tokens of another document, from the beginning of a word on."""
        other = int(random.integers(len(self.starts) - 1))
        other += other >= document
        low, high = int(self.starts[other]), int(self.stops[other])
        at = low + int(random.integers(max(0, high - low - count) + 1))
        while at > low and self.pieces.goes_on[self.tokens[at]]:
            at -= 1
        return self.tokens[at : min(high, at + count)].astype(np.int64)

    # -- a stream

    def _stream(self, sample: int, batch: Batch, row: int) -> NDArray[np.int64]:
        """A stretch of all tokens, documents told apart."""
        length = self.sequence_length
        first = sample * length
        text = self.tokens[first : first + length].astype(np.int64)
        low = np.searchsorted(self.starts, first, side="right")
        high = np.searchsorted(self.starts, first + len(text), side="left")
        begins = self.starts[low:high] - first
        marks = np.zeros(len(text), np.int32)
        marks[begins] = 1
        places = np.arange(len(text), dtype=np.int32)
        batch["segments"][row, : len(text)] = 1 + np.cumsum(marks)
        last = np.maximum.accumulate(np.where(marks, places, 0))
        batch["positions"][row, : len(text)] = places - last
        return text


def _numbers(first: int, count: int) -> NDArray[np.uint32]:
    numbers = np.arange(count, dtype=np.uint64) + np.uint64(first % 2**32)
    return numbers.astype(np.uint32)


def masked_text(
    file: TokenFile,
    pieces: Pieces,
    *,
    ends: tuple[int, int],
    sequence_length: int,
    batch_size: int,
    pairs: bool,
    seed: int,
    shuffle: bool,
    fraction: float,
    whole_words: bool,
) -> MaskedText:
    """Take samples from a token file.

    Args:
        file: the open file.
        pieces: what is known of the tokenizer.
        ends: how many special tokens a document has before and after it.
        sequence_length: tokens of a sample.
        batch_size: samples in a global batch.
        pairs: whether samples are pairs of parts; else a stream.
        seed: decides the order, and what is hidden.
        shuffle: whether every epoch has an order of its own.
        fraction: part of the tokens that is predicted.
        whole_words: whether all pieces of a word are predicted together.
    """
    starts, stops = file.offsets[:-1], file.offsets[1:]
    if pairs:
        starts, stops = starts + ends[0], stops - ends[1]
        has_two = stops - starts >= 2
        starts, stops = starts[has_two], stops[has_two]
        # A single token that is left over makes no pair.
        room = sequence_length - _SPECIAL
        counts = np.maximum(1, -(-(stops - starts - 1) // room))
        firsts = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
    else:
        firsts = np.array([0, -(-len(file.tokens) // sequence_length)], np.int64)
    return MaskedText(
        tokens=file.tokens,
        starts=starts,
        stops=stops,
        firsts=firsts,
        pieces=pieces,
        sequence_length=sequence_length,
        batch_size=batch_size,
        pairs=pairs,
        seed=seed,
        shuffle=shuffle,
        fraction=fraction,
        whole_words=whole_words,
    )


def require_pairs(data: MaskedText, where: str) -> None:
    """Refuse data too small for a single batch, or without another document to take a part from.

    Args:
        data: the data.
        where: what it was read from.

    Raises:
        DataError: it is.
    """
    if data.pairs and 0 < len(data.starts) < 2:
        raise DataError(
            "half of all pairs have a part of another document, and there is one document alone",
            where=where,
            cure="use a folder of text files, or JSONL with a line a document; or "
            "model.next_sentence=False",
        )
    if data.num_samples < data.batch_size:
        raise DataError(
            f"too little text for one batch of {data.batch_size} samples",
            where=where,
            value=f"{len(data.tokens)} tokens, {data.num_samples} samples",
            cure="use more text, or a smaller data.batch_size or data.sequence_length",
        )


def blank_masked(rows: int, length: int, fraction: float, *, pairs: bool) -> Batch:
    """Return rows that count for nothing; they tell shapes and dtypes where there is no data.

    Args:
        rows: how many.
        length: tokens of each.
        fraction: part of them that is predicted.
        pairs: whether samples are pairs.

    Returns:
        tokens, parts (0 or 1) and segments (0 = padding; positions of others see each other where
        they are equal) [rows, length]; predicted, targets [rows, places] and their weights; sample
        [rows]; of pairs also next, next_weights [rows]; of a stream positions [rows, length].
    """
    places = num_predicted(length, fraction)
    whole, few = (rows, length), (rows, places)
    batch: Batch = {
        "tokens": np.zeros(whole, np.int32),
        "parts": np.zeros(whole, np.int32),
        "segments": np.zeros(whole, np.int32),
        "predicted": np.zeros(few, np.int32),
        "targets": np.zeros(few, np.int32),
        "weights": np.zeros(few, np.float32),
        "sample": np.zeros(rows, np.uint32),
    }
    if pairs:
        batch["next"] = np.zeros(rows, np.int32)
        batch["next_weights"] = np.zeros(rows, np.float32)
    else:
        batch["positions"] = np.tile(np.arange(length, dtype=np.int32), (rows, 1))
    return batch
