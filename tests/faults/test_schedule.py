"""The learning rate: a function of the update's number, whatever stops or splits a run."""

import itertools
from typing import Any

import jax
import numpy as np
import pytest
from fault_programs import TwoLosses, put, stub

from shardtrain.checkpoint.checkpointer import Checkpointer
from shardtrain.optim.config import OptimizerConfig
from shardtrain.optim.schedules import SCHEDULES, make_schedule

WARM = {"learning_rate": 1.0, "warmup_steps": 4, "schedule": "cosine", "final_ratio": 0.1}
STEPS = 10


def schedule(steps: int, **keys: Any) -> list[float]:
    """The rate of update 0 (which there is not), 1, ..., steps."""
    rate = make_schedule(OptimizerConfig(learning_rate=1.0, **keys), steps)
    return [float(rate(update)) for update in range(steps + 1)]


def batch(rows: int = 8) -> dict[str, np.ndarray]:
    tokens = np.arange(rows * 3).reshape(rows, 3).astype(np.int32) % 2
    sample = np.arange(rows, dtype=np.uint32)
    weights = np.ones((rows, 3), np.float32)
    return {"tokens": tokens, "targets": 0 * tokens, "weights": weights, "sample": sample}


def rates(of: Any, state: Any, steps: int, save: Any = None) -> list[float]:
    found = []
    for _ in range(steps):
        state, metrics = of.step(state, put(of, batch()))
        found.append(float(metrics["learning_rate"]))
        if save:
            save(state)
    return found


@pytest.fixture(scope="module")
def straight() -> list[float]:
    of = stub(TwoLosses, optimizer=WARM, steps=STEPS)
    return rates(of, of.init(), STEPS)


def test_o11_a_restart_anywhere_changes_no_rate(straight, tmp_path) -> None:
    """O-11: with a restart at every possible step the list of rates is the same, to the bit."""
    of = stub(TwoLosses, optimizer=WARM, steps=STEPS)
    with Checkpointer(tmp_path, keep=STEPS + 1) as checkpoints:
        assert (
            rates(of, of.init(), STEPS, lambda s: checkpoints.save(int(s.step), s, {})) == straight
        )
        checkpoints.wait()
        for stop in range(1, STEPS):
            again = stub(TwoLosses, optimizer=WARM, steps=STEPS)
            state = checkpoints.restore(stop, again.abstract_state)
            assert int(state.step) == stop == int(state.cursor)
            assert rates(of, state, STEPS - stop) == straight[stop:]
    assert len(set(straight)) == STEPS


def test_o12_warm_up_reaches_its_peak_on_time() -> None:
    """O-12: warm-up 4, peak 1: update k uses lr(k): 0.25, 0.5, 0.75, 1; lr(0) = 0 is never used."""
    assert schedule(8, warmup_steps=4, schedule="constant")[:6] == [0, 0.25, 0.5, 0.75, 1, 1]


def test_o12_the_first_update_uses_the_first_rate(straight) -> None:
    """O-12: as the step applies it and as it reports it."""
    assert straight[:4] == [0.25, 0.5, 0.75, 1.0]
    of = stub(TwoLosses, optimizer=WARM, steps=STEPS)
    before = of.init()
    state, _, grads = of.step_with_gradients(before, put(of, batch()))
    moved = np.asarray(before.params["scale"]) - np.asarray(state.params["scale"])
    np.testing.assert_allclose(moved, 0.25 * np.asarray(grads["scale"]), rtol=1e-6)


@pytest.mark.parametrize("microbatches", [1, 4])
@pytest.mark.parametrize("devices", [1, 2, 8])
def test_o13_devices_and_microbatches_do_not_speed_it_up(straight, devices, microbatches) -> None:
    """O-13: the rate of update k is the same for 1, 2, 8 devices and 1, 4 microbatches."""
    mesh = {"data": min(devices, 2), "replica": max(devices // 2, 1)}
    of = stub(TwoLosses, mesh=mesh, microbatches=microbatches, optimizer=WARM, steps=STEPS)
    rows = batch(32)
    state, found = of.init(), []
    for _ in range(STEPS):
        state, metrics = of.step(state, put(of, rows))
        found.append(float(metrics["learning_rate"]))
    assert found == straight
    assert int(state.step) == int(state.cursor) == STEPS


# -- shapes


@pytest.mark.parametrize("name", SCHEDULES)
def test_ends(name) -> None:
    """After the warm-up the peak, at the last update the final rate, past the end still that."""
    found = schedule(20, schedule=name, warmup_steps=5, final_ratio=0.1, decay_fraction=0.4)
    assert found[5] == 1.0
    assert found[20] == pytest.approx(1.0 if name == "constant" else 0.1, rel=1e-6)
    assert all(a >= b for a, b in itertools.pairwise(found[5:]))
    rate = make_schedule(OptimizerConfig(learning_rate=1.0, schedule=name, warmup_steps=5), 20)
    assert float(rate(30)) == float(rate(20))


def test_shapes_in_between() -> None:
    """Halfway values by hand."""
    assert schedule(10, schedule="linear", final_ratio=0.0)[5] == pytest.approx(0.5)
    assert schedule(10, schedule="cosine", final_ratio=0.0)[5] == pytest.approx(0.5)
    quarter = 0.2 + 0.8 * 0.5 * (1 + np.cos(np.pi / 4))
    assert schedule(8, schedule="cosine", final_ratio=0.2)[2] == pytest.approx(quarter)
    stable = schedule(10, schedule="wsd", final_ratio=0.0, decay_fraction=0.4)
    np.testing.assert_allclose(stable[1:], [1, 1, 1, 1, 1, 1, 0.75, 0.5, 0.25, 0], atol=1e-6)


def test_without_warm_up_and_with_nothing_else() -> None:
    """No warm-up starts at the peak; a run that is all warm-up ends at it."""
    assert schedule(4, schedule="constant")[1] == 1.0
    assert schedule(4, schedule="linear", warmup_steps=4)[1:] == [0.25, 0.5, 0.75, 1.0]
    assert schedule(2, schedule="cosine", warmup_steps=4)[1:] == [0.25, 0.5]


def test_the_peak_scales_it() -> None:
    """`learning_rate` is the peak."""
    rate = make_schedule(OptimizerConfig(learning_rate=3e-3, warmup_steps=2), 6)
    assert float(rate(2)) == pytest.approx(3e-3)
    assert float(jax.jit(rate)(1)) == pytest.approx(1.5e-3)
