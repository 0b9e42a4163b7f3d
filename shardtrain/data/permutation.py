"""An order for every epoch, addressable at any place without an index in memory.

Owns: a keyed permutation of range(size), sizes up to 2**62, and the keys it derives from seed and
epoch. Does not own: what is permuted.

The permutation is a Feistel network over the next power of two, walked until it lands inside the
range (at most two visits on average, since the power of two is less than twice the size). Integers
only, so that every machine and every NumPy gives the same order.
"""

import hashlib
import struct

import numpy as np
from numpy.typing import NDArray

_ROUNDS = 8
_FIRST, _SECOND = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)


def keys(seed: int, epoch: int) -> NDArray[np.uint64]:
    """Derive the round keys of one epoch.

    Args:
        seed: the run's seed, any integer.
        epoch: the epoch, from 0.

    Returns:
        Round keys for `permute`.
    """
    text = f"shardtrain epoch order:{seed}:{epoch}".encode()
    digest = hashlib.blake2b(text, digest_size=8 * _ROUNDS).digest()
    return np.array(struct.unpack(f"<{_ROUNDS}Q", digest), np.uint64)


def permute(index: NDArray[np.int64], size: int, keys: NDArray[np.uint64]) -> NDArray[np.int64]:
    """Map places to members of a keyed permutation of range(size).

    Args:
        index: places in [0, size), one dim.
        size: how many members there are, up to 2**62.
        keys: round keys from `keys`.

    Returns:
        The members at those places; over all places every member occurs once.
    """
    assert 0 < size <= 2**62, size
    assert index.ndim == 1
    bits = (size - 1).bit_length()
    value = index.astype(np.uint64)
    limit = np.uint64(size)
    value = _feistel(value, bits, keys)
    outside = np.flatnonzero(value >= limit)
    while outside.size:
        walked = _feistel(value[outside], bits, keys)
        value[outside] = walked
        outside = outside[walked >= limit]
    return value.astype(np.int64)


def _feistel(value: NDArray[np.uint64], bits: int, keys: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Permute range(2**bits): the halves change in turn, each keyed by the other."""
    low_bits = bits // 2
    high_bits = bits - low_bits
    high = value >> np.uint64(low_bits)
    low = value & np.uint64((1 << low_bits) - 1)
    for number, key in enumerate(keys):
        if number % 2 == 0:
            high ^= _mix(low, key, high_bits)
        else:
            low ^= _mix(high, key, low_bits)
    return (high << np.uint64(low_bits)) | low


def _mix(value: NDArray[np.uint64], key: np.uint64, bits: int) -> NDArray[np.uint64]:
    """Hash to a number of `bits` bits (the finalizer of splitmix64, wrapping by design)."""
    if bits == 0:
        return np.zeros_like(value)
    x = value + key
    x ^= x >> np.uint64(30)
    x *= _FIRST
    x ^= x >> np.uint64(27)
    x *= _SECOND
    x ^= x >> np.uint64(31)
    return x >> np.uint64(64 - bits)
