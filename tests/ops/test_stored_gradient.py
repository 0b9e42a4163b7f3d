"""The fence in the residual stream changes no bit, and keeps the backward pass linear in depth."""

import re

import jax
import jax.numpy as jnp
import numpy as np

from shardtrain.ops.stored_gradient import stored_gradient


def test_changes_no_bit():
    g = jnp.asarray([1.5, -0.0, 3e-38, 1e30, jnp.nan], jnp.float32)
    for dtype in (jnp.float32, jnp.bfloat16):
        x, back = jax.vjp(stored_gradient, jnp.ones(5, dtype))
        got, want = (np.asarray(a, np.float32) for a in (back(g.astype(dtype))[0], g.astype(dtype)))
        np.testing.assert_array_equal(got, want)
        assert x.dtype == dtype


def most_operands(fence):
    """Of one fused loop, in the gradient of eight residual layers."""

    def normed(x):
        mean = x.mean(-1, keepdims=True)
        return (x - mean) * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) - mean * mean + 1e-5)

    def loss(x, ws):
        for i in range(8):
            x = fence(x)
            x = x + normed(x) @ ws[i]
        return (x * x).sum()

    shapes = jnp.zeros((2, 32, 16)), jnp.zeros((8, 16, 16))
    text = jax.jit(jax.grad(loss, (0, 1))).lower(*shapes).compile().as_text()
    loops = re.findall(r"= f32\S* fusion\([^)]*\)", text)
    return max(line.count("%") for line in loops)


def test_backward_is_linear_in_depth():
    assert most_operands(stored_gradient) < most_operands(lambda x: x) / 2
