"""A residual network in plain PyTorch, from the same weights on the same batches: equal losses."""

import pytest

from benchmarks.reference import resnet
from benchmarks.reference.ddp import Trial, largest, theirs, why_no_torch

pytestmark = pytest.mark.reference
STEPS = 10
Side = tuple[Trial, list[float]]


@pytest.fixture(scope="module", autouse=True)
def _torch() -> None:
    if reason := why_no_torch():
        pytest.skip(reason)


@pytest.fixture(scope="module")
def per_replica() -> Side:
    return resnet.train("per_replica", STEPS)


@pytest.fixture(scope="module")
def whole() -> Side:
    return resnet.train("global", STEPS)


def test_two_devices_are_two_processes_of_ddp(per_replica: Side) -> None:
    """Each normalises by its own images, and the gradients are averaged."""
    trial, losses = per_replica
    assert largest(losses, theirs(trial, resnet.MODULE, 2)) <= resnet.BOUND


def test_global_statistics_are_those_of_one_process(whole: Side) -> None:
    trial, losses = whole
    assert largest(losses, theirs(trial, resnet.MODULE, 1)) <= resnet.BOUND


def test_which_statistics_are_taken_is_seen(per_replica: Side, whole: Side) -> None:
    """The comparison tells the two apart, so that it means something where they agree."""
    (trial, losses), (_, others) = per_replica, whole
    assert largest(losses, others) > 10 * resnet.BOUND
    assert largest(losses, theirs(trial, resnet.MODULE, 1)) > 10 * resnet.BOUND
