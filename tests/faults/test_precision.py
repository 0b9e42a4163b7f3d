"""bfloat16: what is float32 stays so, after an update and after a restore, and for good reason."""

from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from fault_programs import program, put, stub, text
from flax import nnx

from shardtrain.checkpoint.checkpointer import Checkpointer
from shardtrain.models.transformer import constant


def dtypes(state: Any) -> dict[str, str]:
    return {
        jax.tree_util.keystr(path, simple=True, separator="/"): str(leaf.dtype)
        for path, leaf in jax.tree.leaves_with_path(state)
    }


def test_o14_dtypes_survive_an_update() -> None:
    """O-14: the step maps bfloat16 parameters and float32 moments and master to the same; what it
    reports is float32."""
    keys = {"train.precision": "bfloat16", "optimizer.name": "adamw", "mesh.data": 2}
    of = program(keys)
    want = dtypes(of.shapes)
    assert {kind for path, kind in want.items() if path.startswith("params/")} == {"bfloat16"}
    inside = {kind for path, kind in want.items() if path.startswith("opt_state/")}
    assert inside == {"float32", "int32"}
    state, metrics = jax.eval_shape(of.step, of.abstract_state, put(of, text()))
    assert dtypes(state) == want
    kinds = dtypes(metrics)
    assert {kinds.pop(name) for name in ("moved", "finite", "retry")} == {"bool"}
    assert set(kinds.values()) == {"float32"}


class Entry(nnx.Module):
    """One matrix of ones, whose gradient `Told` gives."""

    def __init__(self, dtype: Any) -> None:
        self.w = constant(("embed", "mlp"), (2, 2), dtype, 1.0)


class Told:
    """The gradient of every entry is what the batch says."""

    coefficients: ClassVar = {"told": 1.0}
    reported: ClassVar = {"val_loss": "told"}

    def totals(self, batch: Any) -> dict[str, jax.Array]:
        return {"told": jnp.float32(1)}

    def terms(self, model: Any, batch: Any, key: Any, stack: Any) -> dict[str, jax.Array]:
        return {"told": model.w[...].astype(jnp.float32).sum() * batch["gradient"].sum()}


def told(of: Any, gradients: list[float]) -> Any:
    """The state after these gradients, all in one compiled loop."""
    rows = {"gradient": jnp.asarray(gradients, jnp.float32)[:, None, None]}

    def run(state: Any) -> Any:
        return jax.lax.scan(
            lambda s, batch: (of.step_with_gradients(s, batch)[0], None), state, rows
        )[0]

    return jax.jit(run)(of.init())


def test_o14_dtypes_survive_a_restore(tmp_path) -> None:
    """O-14: as saved and restored after ten updates; the parameters are the master, rounded."""
    adam = {"name": "adamw", "weight_decay": 0.1, "learning_rate": 1e-3}
    of = stub(Entry, Told(), mesh={"data": 2}, zero=1, precision="bfloat16", optimizer=adam)
    state = told(of, [1.0, 0.3] * 5)
    with Checkpointer(tmp_path, keep=1) as checkpoints:
        checkpoints.save(10, state, {})
        checkpoints.wait()
        restored = checkpoints.restore(10, of.abstract_state)
    assert dtypes(of.init()) == dtypes(state) == dtypes(restored)
    assert restored.params["w"].dtype == jnp.bfloat16
    moments = [leaf for leaf in jax.tree.leaves(restored.opt_state) if leaf.ndim]
    assert [leaf.dtype for leaf in moments] == [jnp.float32] * 3
    master = np.asarray(restored.opt_state["master"]["w"])
    np.testing.assert_array_equal(np.asarray(restored.params["w"]), master.astype(jnp.bfloat16))
    assert np.all(master != master.astype(jnp.bfloat16).astype(np.float32))


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
