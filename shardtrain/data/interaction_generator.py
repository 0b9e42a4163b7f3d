"""Interactions of a known structure, for runs without files.

Owns: how they are drawn, and how well the best of all models does on some of them. A label is 1
with a probability whose log odds are those of a factorization machine (Rendle 2010): a bias for
each id, a product of vectors for each pair of ids, and a linear map of the dense numbers.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from shardtrain.data.interactions import record

_SEED: Final = 20_240_501
_RANK: Final = 2
"""Width of the true vectors."""
_BIAS, _PAIR, _DENSE = 0.7, 1.2, 0.7
"""Spread of the log odds that come of each."""


@dataclass(frozen=True, eq=False)
class Generated:
    """Interactions, and the truth about them."""

    records: NDArray[Any] = field(repr=False)
    odds: NDArray[np.float64] = field(repr=False)
    """The true log odds of each label."""


def generate(count: int, sizes: Sequence[int], num_dense: int) -> Generated:
    """Draw interactions; the same for the same arguments.

    Args:
        count: interactions.
        sizes: ids of each field; low ones are frequent.
        num_dense: numbers that are no ids.
    """
    # The truth is drawn apart, so that it is the same for any number of interactions.
    truth, random = (np.random.Generator(np.random.Philox([_SEED, use])) for use in range(2))
    records = np.zeros(count, record(num_dense, len(sizes)))
    odds = np.zeros(count)
    vectors = []
    for place, size in enumerate(sizes):
        # With the square of an even draw the first percent of ids has a tenth of all interactions.
        ids = np.minimum(size * random.random(count) ** 2, size - 1).astype(np.int32)
        records["ids"][:, place] = ids
        odds += _BIAS * truth.standard_normal(size)[ids]
        vectors.append(truth.standard_normal((size, _RANK))[ids])
    pairs = len(sizes) * (len(sizes) - 1) // 2
    for first in range(len(sizes)):
        for second in range(first):
            product = np.einsum("nr,nr->n", vectors[first], vectors[second])
            odds += _PAIR * product / (_RANK * pairs) ** 0.5
    dense = random.standard_normal((count, num_dense))
    records["dense"] = dense
    if num_dense:
        odds += dense @ (_DENSE * truth.standard_normal(num_dense) / num_dense**0.5)
    records["label"] = random.random(count) < 1 / (1 + np.exp(-odds))
    return Generated(records, odds)
