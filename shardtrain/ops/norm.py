"""Normalisation of the residual stream: the arithmetic only.

Owns: both norms and their gradients, computed in at least 32 bits. A backward pass finds the input
and one or two numbers a position, where automatic differentiation would keep three wide copies.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from shardtrain.ops.sums import sum_dtype


def layer_norm(
    x: Float[Array, "batch length embed"],
    scale: Float[Array, " embed"],
    bias: Float[Array, " embed"] | None = None,
    *,
    epsilon: float = 1e-5,
) -> Float[Array, "batch length embed"]:
    """Layer normalisation (Ba et al. 2016, arXiv 1607.06450), computed in at least float32."""
    return _norm(True, epsilon, x, scale, bias)


def rms_norm(
    x: Float[Array, "batch length embed"],
    scale: Float[Array, " embed"],
    *,
    epsilon: float = 1e-5,
) -> Float[Array, "batch length embed"]:
    """Root-mean-square normalisation (Zhang and Sennrich 2019, arXiv 1910.07467)."""
    return _norm(False, epsilon, x, scale, None)


Saved = tuple[jax.Array, jax.Array, jax.Array | None, jax.Array | None, jax.Array]
"""The input, scale and bias; of each position the mean, if it is taken off, and 1 / deviation."""


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _norm(
    centred: bool, epsilon: float, x: jax.Array, scale: jax.Array, bias: jax.Array | None
) -> jax.Array:
    return _forward(centred, epsilon, x, scale, bias)[0]


def _forward(
    centred: bool, epsilon: float, x: jax.Array, scale: jax.Array, bias: jax.Array | None
) -> tuple[jax.Array, Saved]:
    wide = _wide(x)
    square = (wide * wide).mean(-1, keepdims=True)
    mean = None
    if centred:
        mean = wide.mean(-1, keepdims=True)
        # E[x^2] - E[x]^2: both sums in one pass over x; the residual stream is near zero mean.
        square = jnp.maximum(square - mean * mean, 0)
    inverse = jax.lax.rsqrt(square + epsilon)
    y = _normalised(wide, mean, inverse) * _wide(scale)
    if bias is not None:
        y = y + _wide(bias)
    return y.astype(x.dtype), (x, scale, bias, mean, inverse)


def _backward(
    centred: bool, epsilon: float, saved: Saved, g: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    del epsilon
    x, scale, bias, mean, inverse = saved
    lead = tuple(range(x.ndim - 1))
    g, normalised = _wide(g), _normalised(_wide(x), mean, inverse)
    inner = g * _wide(scale)
    along = (inner * normalised).mean(-1, keepdims=True)
    dx = inner - normalised * along
    if centred:
        dx = dx - inner.mean(-1, keepdims=True)
    dx = (dx * inverse).astype(x.dtype)
    dscale = (g * normalised).sum(lead).astype(scale.dtype)
    return dx, dscale, None if bias is None else g.sum(lead).astype(bias.dtype)


_norm.defvjp(_forward, _backward)


def _normalised(wide: jax.Array, mean: jax.Array | None, inverse: jax.Array) -> jax.Array:
    return (wide if mean is None else wide - mean) * inverse


def _wide(x: jax.Array) -> jax.Array:
    return x.astype(sum_dtype(x.dtype))
