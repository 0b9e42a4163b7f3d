"""What is said of an order of samples: the area under the ROC curve, and recall.

Owns: the figures, from the numbers of all samples together: they are no means over samples, or are
known only in evaluation. Plain NumPy in float64; equal on every process, since all have all of
them.
"""

from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from shardtrain.tasks.base import Task

Gathered = Mapping[str, NDArray[Any]]
"""Arrays with an entry for each sample; `weights` is one of them, 0 = no sample."""


class RankingTask(Task, Protocol):
    """A workload that, when evaluating, has `GATHERED` arrays beside the sums of its terms."""

    def ranked(self, gathered: Gathered) -> dict[str, float]:
        """What evaluation reports of all samples together.

        Args:
            gathered: of all batches, joined.
        """
        ...


def auc(scores: NDArray[Any], labels: NDArray[Any]) -> float:
    """How often a sample of label 1 has a higher score than one of label 0; equal ones count half.

    Args:
        scores: [samples], in any unit.
        labels: [samples], 0 or 1.

    Returns:
        From 0 to 1, exact (Mann and Whitney 1947); NaN where one of the labels is missing, or a
        score is no number.

    Example:
        >>> auc(np.array([0.1, 0.4, 0.4, 0.8]), np.array([0, 0, 1, 1]))
        0.875
    """
    right = labels > 0
    positive = int(right.sum())
    negative = len(labels) - positive
    if not positive or not negative or np.isnan(scores).any():
        return float("nan")
    values, place, count = np.unique(scores, return_inverse=True, return_counts=True)
    # Twice the mean rank of each value, so that all are whole numbers.
    ranks = 2 * np.cumsum(count, dtype=np.int64) - count + 1
    assert len(values) == len(ranks)
    total = int(ranks[place][right].sum()) - positive * (positive + 1)
    return total / (2 * positive * negative)


def recall(ranks: NDArray[Any], among: int) -> float:
    """The part of samples whose item is among the first.

    Args:
        ranks: how many items go before each sample's own.
        among: the number of the first.
    """
    return float(np.mean(ranks < among)) if len(ranks) else float("nan")
