"""Position schemes that act inside attention: rotary embedding and ALiBi."""

import math

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from shardtrain.ops.sums import sum_dtype


def rotary(
    x: Float[Array, "batch length kv_heads group head_dim"],
    positions: Int[Array, "batch length"],
    theta: float,
) -> Float[Array, "batch length kv_heads group head_dim"]:
    """Rotates pairs of channels by an angle that grows with position.

    Su et al. 2021, arXiv 2104.09864. Channel i is paired with channel i + head_dim / 2, as in
    Llama's published weights.
    """
    half = x.shape[-1] // 2
    wide = sum_dtype(x.dtype)
    frequency = jnp.asarray(theta ** (-np.arange(half) / half), wide)
    angle = positions.astype(wide)[:, :, None, None, None] * frequency
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    a, b = jnp.split(x.astype(wide), 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1).astype(x.dtype)


def alibi_slopes(num_heads: int) -> np.ndarray:
    """The slope of each head's linear bias (Press et al. 2021, arXiv 2108.12409).

    A geometric series from 2^(-8/n) for a power of two; other counts take the series of the power
    of two below and every second term of the one above.

    Returns:
        float64 [heads].
    """

    def series(n: int) -> list[float]:
        return [2.0 ** (-8.0 * (i + 1) / n) for i in range(n)]

    below = 2 ** math.floor(math.log2(num_heads))
    return np.array(series(below) + series(2 * below)[0::2][: num_heads - below])


def default_positions(tokens: jax.Array) -> Int[Array, "batch length"]:
    """Positions of rows that hold one document each."""
    return jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape)
