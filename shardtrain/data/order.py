"""The order in which samples are taken, as a pure function of seed and cursor.

Owns: which samples a batch holds, for training and for evaluation. Does not own: what a sample is.
It knows nothing of devices or processes.
"""

import hashlib
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from shardtrain.data.permutation import keys, permute

_EVALUATION_SEED = 0


@dataclass(frozen=True)
class Order:
    """Samples by number, in batches; each epoch may have an order of its own."""

    num_samples: int
    batch_size: int
    """Samples in a global batch."""
    seed: int = 0
    shuffle: bool = True

    @property
    def batches_per_epoch(self) -> int:
        """Full batches in an epoch; the samples that are left over differ from epoch to epoch."""
        return self.num_samples // self.batch_size

    def sample_ids(self, cursor: int, start: int = 0, stop: int | None = None) -> NDArray[np.int64]:
        """Return which samples a batch holds.

        Args:
            cursor: the batch, counted from 0 over all epochs.
            start, stop: rows of the global batch; all of them by default.

        Returns:
            Sample ids, [stop - start].
        """
        stop = self.batch_size if stop is None else stop
        assert cursor >= 0
        assert 0 <= start <= stop <= self.batch_size
        epoch, batch = divmod(cursor, self.batches_per_epoch)
        first = batch * self.batch_size
        places = np.arange(first + start, first + stop, dtype=np.int64)
        if not self.shuffle:
            return places
        return permute(places, self.num_samples, _epoch_keys(self.seed, epoch))

    def digest(self, cursor: int) -> str:
        """Name the samples of a batch.

        Args:
            cursor: the batch.

        Returns:
            16 hex digits, the same for the same ids in the same order.
        """
        ids = self.sample_ids(cursor).astype("<i8")
        return hashlib.blake2b(ids.tobytes(), digest_size=8).hexdigest()

    def evaluation_batches(self, limit: int) -> int:
        """Return how many batches an evaluation has.

        Args:
            limit: at most so many; 0 = no limit.
        """
        there = -(-self.num_samples // self.batch_size)
        return min(limit, there) if limit else there

    def evaluation_ids(self, index: int, start: int, stop: int) -> NDArray[np.int64]:
        """Return which samples a batch for evaluation holds.

        The batches are the same in every run and take samples from everywhere, each once.

        Args:
            index: the batch, from 0.
            start, stop: rows of the global batch.

        Returns:
            Sample ids; fewer than stop - start after the last sample.
        """
        first = index * self.batch_size
        places = np.arange(first + start, min(first + stop, self.num_samples), dtype=np.int64)
        return permute(places, self.num_samples, _epoch_keys(_EVALUATION_SEED, 0))


class InOrder:
    """What takes its samples in an `Order`; a base of the kinds of data that are held whole.

    `num_samples` is how many there are, `batch_size` how many a global batch has.
    """

    batch_size: int
    seed: int
    shuffle: bool

    @property
    def num_samples(self) -> int:
        """Samples that there are."""
        raise NotImplementedError  # each kind of data has its own

    @property
    def order(self) -> Order:
        """Which samples each batch holds."""
        return Order(self.num_samples, self.batch_size, self.seed, self.shuffle)

    @property
    def batches_per_epoch(self) -> int:
        """Full batches in an epoch; the samples that are left over differ from epoch to epoch."""
        return self.order.batches_per_epoch

    def sample_ids(self, cursor: int, start: int = 0, stop: int | None = None) -> NDArray[np.int64]:
        """Return which samples a batch holds; see `Order.sample_ids`."""
        return self.order.sample_ids(cursor, start, stop)

    def digest(self, cursor: int) -> str:
        """Name the samples of a batch; see `Order.digest`."""
        return self.order.digest(cursor)

    def evaluation_batches(self, limit: int) -> int:
        """Return how many batches an evaluation has; see `Order.evaluation_batches`."""
        return self.order.evaluation_batches(limit)


@lru_cache(maxsize=16)
def _epoch_keys(seed: int, epoch: int) -> NDArray[np.uint64]:
    return keys(seed, epoch)
