"""Delayed scaling: what is seen is the largest anywhere, is in the checkpoint, and does scale."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fault_programs import program, put, text

from shardtrain.checkpoint.checkpointer import Checkpointer
from shardtrain.ops.dense import dense
from shardtrain.ops.fp8 import LayersInFp8
from shardtrain.strategies.model_state import FP8, HISTORY, LargestEntries

ZERO3 = {"mesh.data": 2, "train.microbatches": 2, "sharding.zero": 3, "train.remat": "full"}
KEYS = {"train.precision": "float32,products=fp8_delayed", "optimizer.name": "adamw"}


def trained(layout: dict[str, Any], steps: int = 2) -> tuple[np.ndarray, float]:
    """The history and the loss after some steps."""
    of = program({**KEYS, **layout})
    state, batch = of.init(), put(of, text())
    for _ in range(steps):
        state, metrics, _ = of.step_with_gradients(state, batch)
    return np.asarray(state.model_state[FP8]), float(metrics["loss"])


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param(
            {"mesh.data": 2, "train.microbatches": 2, "sharding.zero": 1},
            marks=pytest.mark.campaign,
        ),
        ZERO3,
        {"mesh.tensor": 2, "model.layer_loop": "scan"},
        {"mesh.pipeline": 2, "mesh.data": 2, "train.microbatches": 2, "sharding.zero": 1},
        pytest.param(
            {
                "mesh.pipeline": 2,
                "train.microbatches": 4,
                "pipeline.schedule": "zero_bubble",
                "train.remat": "full",
            },
            marks=pytest.mark.campaign,
        ),
    ],
    ids=lambda layout: ",".join(map(str, layout.values())),
)
def test_every_layout_sees_the_same(layout: dict[str, Any]) -> None:
    """The largest over microbatches and shards, not their sum; activations, weights, gradients."""
    want, loss = trained({})
    assert want.shape == (2, 4, 3, HISTORY)
    assert (want[..., :2] > 0).all()
    assert not want[..., 2:].any()
    found, other = trained(layout)
    # Where a scale steps to the next power of two, numbers of the next layer move a little.
    np.testing.assert_allclose(found[..., :2], want[..., :2], rtol=2e-3)
    np.testing.assert_allclose(other, loss, rtol=1e-5)


def test_the_history_is_saved_and_goes_on(tmp_path: Path) -> None:
    of = program({**KEYS, **ZERO3})
    batch = put(of, text())
    first, _, _ = of.step_with_gradients(of.init(), batch)
    with Checkpointer(tmp_path, keep=1) as checkpoints:
        checkpoints.save(1, first, {})
        checkpoints.wait()
        restored = checkpoints.restore(1, of.abstract_state)
    second, again = (of.step_with_gradients(s, batch)[0] for s in (first, restored))
    np.testing.assert_array_equal(second.model_state[FP8], again.model_state[FP8])
    np.testing.assert_array_equal(second.model_state[FP8][..., 1], first.model_state[FP8][..., 0])


def test_only_steps_that_move_are_remembered() -> None:
    state = LargestEntries(1, 1)
    seen = jnp.ones((1, 1, 3))
    old = state.init()
    assert not np.asarray(state.after(old, seen, jnp.bool_(False))[FP8]).any()
    assert np.asarray(state.after(old, seen, jnp.bool_(True))[FP8]).sum() == 3
    for _ in range(HISTORY + 1):
        old = state.after(old, seen, jnp.bool_(True))
        seen = seen / 2
    np.testing.assert_array_equal(state.inputs(old), np.full((1, 1, 3), 0.5))


def test_earlier_steps_do_scale() -> None:
    """Entries beyond what was seen are cut off; what is seen now is in the gradient's place."""
    x, w = jnp.full((1, 1, 16), 1000.0), jnp.eye(16)

    def loss(earlier: jax.Array) -> jax.Array:
        run = LayersInFp8(1)(lambda w, index, x: dense(x, w), earlier)
        return jnp.sum(run(w, jnp.uint32(0), x))

    small = jnp.asarray([[[1.0, 1.0, 1.0]]])
    value, seen = jax.value_and_grad(loss)(small)
    # 1.0 comes to lie at 128, so the largest number, 448, is 3.5.
    np.testing.assert_allclose(value, 16 * 3.5)
    np.testing.assert_array_equal(seen, [[[1000.0, 1.0, 1.0]]])
    nothing = jnp.zeros((1, 1, 3))
    np.testing.assert_allclose(loss(nothing), 16 * 1000, rtol=0.04)
