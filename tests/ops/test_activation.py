"""GELU: value and gradient against jax's own in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from shardtrain.ops.activation import gelu, gelu_tanh


@pytest.mark.parametrize(("ours", "approximate"), [(gelu, False), (gelu_tanh, True)])
@pytest.mark.parametrize(
    ("dtype", "bound"), [(np.float64, 1e-13), (np.float32, 4e-6), (jnp.bfloat16, 4e-3)]
)
def test_gelu(ours, approximate, dtype, bound):
    with jax.enable_x64(True):
        x = jnp.asarray(np.concatenate([np.linspace(-8, 8, 401), [-1e4, -60, 60, 1e4]]), dtype)
        g = jnp.asarray(np.linspace(1, 2, x.size), dtype)
        wide = jnp.asarray(x, np.float64)
        y, back = jax.vjp(ours, x)
        want, want_back = jax.vjp(lambda x: jax.nn.gelu(x, approximate=approximate), wide)
        for got, exact in ((y, want), (back(g)[0], want_back(jnp.asarray(g, np.float64))[0])):
            assert got.dtype == dtype
            got, exact = np.asarray(got, np.float64), np.asarray(exact)
            assert (np.abs(got - exact) <= bound * np.maximum(1, np.abs(exact))).all()
