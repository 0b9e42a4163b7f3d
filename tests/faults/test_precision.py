"""bfloat16: what is float32 stays so, after an update and after a restore, and for good reason."""

from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fault_programs import initial, program, put, state_of, stub, text
from flax import nnx

from shardtrain.checkpoint.checkpointer import Checkpointer
from shardtrain.models.transformer import constant

NARROW = {"train.precision": "bfloat16", "optimizer.name": "adamw", "optimizer.weight_decay": 0.1}


def dtypes(state: Any) -> dict[str, str]:
    return {
        jax.tree_util.keystr(path, simple=True, separator="/"): str(leaf.dtype)
        for path, leaf in jax.tree.leaves_with_path(state)
    }


def test_o14_dtypes_survive_an_update_and_a_restore(tmp_path) -> None:
    """O-14: bfloat16 parameters, float32 moments and master: in the beginning and restored."""
    layout = {"mesh.data": 2, "sharding.zero": 1}
    of = program({**NARROW, **layout})
    want = dtypes(of.shapes)
    assert {kind for path, kind in want.items() if path.startswith("params/")} == {"bfloat16"}
    inside = {kind for path, kind in want.items() if path.startswith("opt_state/")}
    assert inside == {"float32", "int32"}
    state = state_of(of, initial())
    assert dtypes(state) == want
    state, metrics = of.step(state, put(of, text()))
    assert dtypes(state) == want
    assert set(dtypes(metrics).values()) == {"float32"}
    assert float(metrics["loss"]) == pytest.approx(np.log(32), rel=0.02)
    with Checkpointer(tmp_path, keep=1) as checkpoints:
        checkpoints.save(1, state, {})
        checkpoints.wait()
        restored = checkpoints.restore(1, of.abstract_state)
    assert dtypes(restored) == want
    # the parameters are the master, rounded, and nothing else
    master = jax.device_get(restored.opt_state["master"])
    jax.tree.map(
        lambda p, m: np.testing.assert_array_equal(np.asarray(p), m.astype(jnp.bfloat16)),
        restored.params,
        master,
    )
    assert any(
        np.any(m != m.astype(jnp.bfloat16).astype(np.float32)) for m in jax.tree.leaves(master)
    )


class Entry(nnx.Module):
    """One matrix of ones, whose gradient `Told` gives."""

    def __init__(self, dtype: Any) -> None:
        self.w = constant(("embed", "mlp"), (2, 2), dtype, 1.0)


class Told:
    """The gradient of every entry is what the batch says."""

    coefficients: ClassVar = {"told": 1.0}
    headline = "told"

    def totals(self, batch: Any) -> dict[str, jax.Array]:
        return {"told": jnp.float32(1)}

    def terms(self, model: Any, batch: Any, key: Any, stack: Any) -> dict[str, jax.Array]:
        return {"told": model.w[...].astype(jnp.float32).sum() * batch["gradient"].sum()}


def told(of: Any, gradients: list[float]) -> Any:
    """The state after these gradients, all in one compiled loop."""
    rows = {"gradient": jnp.asarray(gradients, jnp.float32)[:, None, None]}

    def run(state: Any) -> Any:
        return jax.lax.scan(lambda s, batch: (of._step(s, batch)[0], None), state, rows)[0]

    return jax.jit(run)(of.init())


def test_o14_the_second_moment_decays() -> None:
    """O-14: a gradient of 1, then 1,000 zeros, beta2 0.999: nu = 1e-3 x 0.999^1000 = 3.677e-4."""
    adam = {"name": "adamw", "beta2": 0.999, "learning_rate": 1e-6}
    of = stub(Entry, Told(), precision="bfloat16", optimizer=adam)
    state = told(of, [1.0] + [0.0] * 1000)
    (nu,) = [
        leaf
        for path, leaf in jax.tree.leaves_with_path(state.opt_state)
        if "nu" in jax.tree_util.keystr(path)
    ]
    assert nu.dtype == jnp.float32
    np.testing.assert_allclose(nu, 3.677e-4, rtol=1e-3)


def test_o14_small_updates_add_up() -> None:
    """O-14: 1,000 updates of -1e-3 from 1 end at 0: bfloat16 alone would stay at exactly 1."""
    of = stub(Entry, Told(), precision="bfloat16", optimizer={"learning_rate": 1e-3})
    state = told(of, [1.0] * 1000)
    np.testing.assert_allclose(state.opt_state["master"]["w"], 0, atol=1e-5)
    np.testing.assert_allclose(np.asarray(state.params["w"], np.float32), 0, atol=1e-5)
    one = jnp.bfloat16(1)
    assert one - jnp.bfloat16(1e-3) == one


def test_o14_microbatches_are_added_up_in_float32() -> None:
    """O-14: 256 microbatches of 1 and 1/256 each: bfloat16 sums would lose what is small."""
    of = stub(Entry, Told(), precision="bfloat16", microbatches=257)
    gradient = np.full((257, 1), 2.0**-9, np.float32)
    gradient[0] = 1
    _, _, grads = of.step_with_gradients(of.init(), put(of, {"gradient": gradient}))
    assert grads["w"].dtype == jnp.float32
    np.testing.assert_allclose(grads["w"], 1.5, rtol=1e-6)
