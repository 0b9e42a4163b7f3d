"""Activations whose gradient by automatic differentiation would be slow, coarse or large.

Owns: GELU, computed in at least 32 bits and rounded once, forward and backward, with nothing kept
but its input.
Does not own: which activation a model uses.
"""

import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from shardtrain.ops.platform import platform
from shardtrain.ops.sums import sum_dtype

SLOPE = 2 * math.sqrt(2 / math.pi)
CUBE = 0.044715


@jax.custom_vjp
def gelu(x: Float[Array, "..."]) -> Float[Array, "..."]:
    """GELU (Hendrycks and Gimpel 2016, arXiv 1606.08415): `x` times the normal distribution."""
    return _gelu_forward(x)[0]


def _gelu_forward(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    wide = x.astype(sum_dtype(x.dtype))
    return (wide * _normal(wide)).astype(x.dtype), x


def _gelu_backward(x: jax.Array, g: jax.Array) -> tuple[jax.Array]:
    wide = x.astype(sum_dtype(x.dtype))
    density = jnp.exp(-0.5 * wide * wide) / math.sqrt(2 * math.pi)
    slope = _normal(wide) + wide * density
    return ((g.astype(wide.dtype) * slope).astype(x.dtype),)


gelu.defvjp(_gelu_forward, _gelu_backward)


def _normal(x: jax.Array) -> jax.Array:
    share: jax.Array = 0.5 * jax.lax.erfc(-x / math.sqrt(2))
    return share


@jax.custom_vjp
def gelu_tanh(x: Float[Array, "..."]) -> Float[Array, "..."]:
    """GELU by its tanh approximation (Hendrycks and Gimpel 2016, arXiv 1606.08415).

    It is `x sigmoid(2 z)`, as `(1 + tanh(z)) / 2` is `sigmoid(2 z)`. Automatic differentiation
    rounds a 16-bit type after each of a dozen operations; this, once.
    """
    return _forward(x)[0]


def _forward(x: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array | None]]:
    wide = x.astype(sum_dtype(x.dtype))
    if platform() == "cpu" and x.dtype.itemsize == 2:
        # A loop with both a sigmoid and a rounding to 16 bits runs at half speed: keep them apart.
        gate = _sigmoid(wide)
        return (wide * gate).astype(x.dtype), (x, gate)
    # tanh here and sigmoid in the gradient: XLA would store what is common to both.
    y = 0.5 * wide * (1 + jnp.tanh(0.5 * _argument(wide)))
    return y.astype(x.dtype), (x, None)


def _backward(saved: tuple[jax.Array, jax.Array | None], g: jax.Array) -> tuple[jax.Array]:
    x, gate = saved
    wide = x.astype(sum_dtype(x.dtype))
    gate = _sigmoid(wide) if gate is None else gate
    slope = gate * (1 + wide * (1 - gate) * SLOPE * (1 + 3 * CUBE * wide * wide))
    return ((g.astype(wide.dtype) * slope).astype(x.dtype),)


gelu_tanh.defvjp(_forward, _backward)


def _sigmoid(x: jax.Array) -> jax.Array:
    gate: jax.Array = jax.nn.sigmoid(_argument(x))
    return gate


def _argument(x: jax.Array) -> jax.Array:
    return SLOPE * (x + CUBE * x * x * x)
