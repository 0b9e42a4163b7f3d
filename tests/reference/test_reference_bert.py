"""A BERT beside plain PyTorch: the same losses, alone and under DDP."""

import math

import pytest

from benchmarks.reference.bert import BOUND, MODULE, train
from benchmarks.reference.ddp import Trial, largest, theirs, why_no_torch

pytestmark = pytest.mark.reference
STEPS = 10


@pytest.fixture(scope="module")
def both() -> tuple[Trial, list[float]]:
    reason = why_no_torch()
    if reason:
        pytest.skip(reason)
    return train(STEPS)


@pytest.mark.parametrize("ranks", [1, 2])
def test_losses_are_those_of_torch(both: tuple[Trial, list[float]], ranks: int) -> None:
    trial, mine = both
    other = theirs(trial, MODULE, ranks)
    assert len(other) == STEPS
    assert largest(mine, other) <= BOUND, (mine, other)


def test_the_comparison_can_fail(both: tuple[Trial, list[float]]) -> None:
    """It has learned something, and another label of one pair is seen."""
    trial, mine = both
    assert mine[-1] < mine[0] - 0.1
    assert all(map(math.isfinite, mine))
    trial.batches["next"][0, 3] ^= 1
    assert largest(mine, theirs(trial, MODULE, 1)) > BOUND
