"""A gradient that is no finite number moves nothing, on any mesh; the norm is told as it is."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from shardtrain.sharding.mesh import make_mesh
from shardtrain.train.functional import make_train_step


def loss(params, batch, keys):
    """Its gradient is infinite where w + x is zero, and its value is not."""
    return jnp.mean(jnp.sqrt(params["w"] + batch["x"])) + jnp.mean(params["v"] ** 2)


@pytest.mark.parametrize("zero", [0, 1, 3])
@pytest.mark.parametrize("clip_norm", [0.0, 1.0])
def test_o16_an_infinite_norm_is_no_update(zero: int, clip_norm: float) -> None:
    """O-16: masking by a factor of zero made NaN of it; one shard of eight has the infinity."""
    params = {"w": jnp.zeros(8), "v": jnp.ones(8)}
    step = make_train_step(
        loss,
        optax.sgd(0.1, momentum=0.9),
        params,
        make_mesh(data=8),
        zero=zero,
        clip_norm=clip_norm,
    )
    good = {"x": jnp.ones((8, 8))}
    bad = {"x": jnp.ones((8, 8)).at[5, 3].set(jnp.float32(0))}
    state, metrics = step(step.init(params), good)
    before = jax.device_get((state.params, state.opt_state))
    state = state.replace(params={**state.params, "w": jnp.zeros_like(state.params["w"])})
    for count in (1, 2):
        state, metrics = step(state, bad)
        assert np.isfinite(metrics["loss"])
        assert np.isinf(metrics["grad_norm"])
        assert (int(state.step), int(state.cursor), int(state.skipped)) == (1, 1 + count, count)
    assert (state.params["w"] == 0).all()
    jax.tree.map(np.testing.assert_array_equal, before[1], jax.device_get(state.opt_state))
    np.testing.assert_array_equal(before[0]["v"], state.params["v"])
    state, metrics = step(state, good)
    assert (int(state.step), int(state.cursor), int(state.skipped)) == (2, 4, 0)
    assert (state.params["v"] != before[0]["v"]).all()
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(jax.device_get(state.params)))
