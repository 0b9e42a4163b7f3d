"""Normalisation of the residual stream: the arithmetic only."""

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
    wide = _wide(x)
    mean = wide.mean(-1, keepdims=True)
    # E[x^2] - E[x]^2: both sums in one pass over x; the residual stream is near zero mean.
    variance = jnp.maximum((wide * wide).mean(-1, keepdims=True) - mean * mean, 0)
    y = (wide - mean) * jax.lax.rsqrt(variance + epsilon) * scale.astype(wide.dtype)
    if bias is not None:
        y = y + bias.astype(wide.dtype)
    return y.astype(x.dtype)


def rms_norm(
    x: Float[Array, "batch length embed"],
    scale: Float[Array, " embed"],
    *,
    epsilon: float = 1e-5,
) -> Float[Array, "batch length embed"]:
    """Root-mean-square normalisation (Zhang and Sennrich 2019, arXiv 1910.07467)."""
    wide = _wide(x)
    square = (wide * wide).mean(-1, keepdims=True)
    y = wide * jax.lax.rsqrt(square + epsilon) * scale.astype(wide.dtype)
    return y.astype(x.dtype)


def _wide(x: jax.Array) -> jax.Array:
    return x.astype(sum_dtype(x.dtype))
