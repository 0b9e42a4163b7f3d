"""Numbers that are none, numbers that jump: what the guard makes of them, unit by unit."""

import math

import pytest

from shardtrain.train.config import GuardConfig
from shardtrain.train.guard import Guard, Update


def update(step: int, loss: float, norm: float = 1.0) -> Update:
    return Update(step, step - 1, loss, norm, math.isfinite(loss) and math.isfinite(norm))


def test_a_steady_loss_is_no_news() -> None:
    guard = Guard(GuardConfig())
    assert [guard.judge(update(n, 3.0 + 0.1 * (n % 3))) for n in range(1, 300)] == [None] * 299


@pytest.mark.parametrize("action", ["stop", "rollback"])
def test_a_loss_that_is_no_number(action: str) -> None:
    verdict = Guard(GuardConfig(bad_numbers=action)).judge(update(25, math.nan))
    assert verdict is not None
    assert verdict.action == action
    assert verdict.reason == "the loss of update 25 is nan"
    assert verdict.values()["cursor"] == 24


def test_a_norm_that_is_no_number() -> None:
    verdict = Guard(GuardConfig()).judge(update(7, 2.0, math.inf))
    assert verdict is not None
    assert verdict.reason == "the norm of the gradient of update 7 is inf"


def test_skipping_ends_after_so_many_in_a_row() -> None:
    guard = Guard(GuardConfig(bad_numbers="skip", skip_limit=2))
    kinds = []
    for loss in (math.nan, math.nan, 1.0, math.nan, math.inf, math.nan):
        verdict = guard.judge(update(5, loss))
        kinds.append(verdict.action if verdict else None)
    assert kinds == ["skip", "skip", None, "skip", "skip", "stop"]


@pytest.mark.parametrize("action", ["warn", "stop", "rollback"])
def test_a_jump_is_named_and_never_becomes_usual(action: str) -> None:
    guard = Guard(GuardConfig(spikes=action, spike_sigmas=6.0), [2.0, 2.1, 1.9, 2.05] * 8)
    verdict = guard.judge(update(40, 5.0))
    assert verdict is not None
    assert verdict.action == action
    assert "the loss of update 40 is 5" in verdict.reason
    assert guard.judge(update(41, 2.0)) is None
    assert guard.judge(update(42, 1.0)) is None, "a fall is no jump"


def test_a_jump_needs_a_past_and_a_guard_that_looks() -> None:
    assert Guard(GuardConfig(), [2.0] * 7).judge(update(8, 50.0)) is None
    assert Guard(GuardConfig(), [2.0] * 8).judge(update(9, 50.0)) is not None
    assert Guard(GuardConfig(spikes="ignore"), [2.0] * 99).judge(update(9, 50.0)) is None
    guard = Guard(GuardConfig(), [2.0] * 50)
    guard.forget()
    assert guard.judge(update(9, 50.0)) is None


def test_the_window_slides() -> None:
    guard = Guard(GuardConfig(spike_window=16), [100.0] * 16)
    for step in range(16):
        guard.judge(update(step, 1.0 + step % 2))
    assert guard.judge(update(20, 100.0)) is not None
