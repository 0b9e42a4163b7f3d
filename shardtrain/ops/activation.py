"""Activations whose gradient by automatic differentiation would be slow or coarse.

Owns: GELU, computed in at least 32 bits and rounded once, forward and backward; it saves its input.
Does not own: which activation a model uses.
"""

import math

import jax
from jaxtyping import Array, Float

from shardtrain.ops.sums import sum_dtype

SLOPE = math.sqrt(2 / math.pi)
CUBE = 0.044715


@jax.custom_vjp
def gelu_tanh(x: Float[Array, "..."]) -> Float[Array, "..."]:
    """GELU by its tanh approximation (Hendrycks and Gimpel 2016, arXiv 1606.08415).

    Automatic differentiation rounds a 16-bit type after each of a dozen operations; this, once.
    """
    wide = x.astype(sum_dtype(x.dtype))
    y: jax.Array = wide * jax.nn.sigmoid(_doubled(wide))
    return y.astype(x.dtype)


def _forward(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    return gelu_tanh(x), x


def _backward(x: jax.Array, g: jax.Array) -> tuple[jax.Array]:
    wide = x.astype(sum_dtype(x.dtype))
    gate = jax.nn.sigmoid(_doubled(wide))
    inner = 2 * SLOPE * (1 + 3 * CUBE * wide * wide)
    slope = gate * (1 + wide * (1 - gate) * inner)
    return ((g.astype(wide.dtype) * slope).astype(x.dtype),)


gelu_tanh.defvjp(_forward, _backward)


def _doubled(x: jax.Array) -> jax.Array:
    """Twice the argument of the tanh: `(1 + tanh(z)) / 2` is `sigmoid(2 z)`."""
    return 2 * SLOPE * (x + CUBE * x * x * x)
