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
    frequencies: np.ndarray,
) -> Float[Array, "batch length kv_heads group head_dim"]:
    """Rotates pairs of channels by an angle that grows with position.

    Su et al. 2021, arXiv 2104.09864. Channel i is paired with channel i + head_dim / 2, as in
    Llama's published weights.

    Args:
        x: queries or keys.
        positions: of each token.
        frequencies: radians a position, one a pair; of `rotary_frequencies`.
    """
    wide = sum_dtype(x.dtype)
    angle = positions.astype(wide)[:, :, None, None, None] * jnp.asarray(frequencies, wide)
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    a, b = jnp.split(x.astype(wide), 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1).astype(x.dtype)


def rotary_frequencies(head_dim: int, theta: float) -> np.ndarray:
    """Radians a position of each pair of channels: a geometric series from 1 to about 1 / theta.

    Returns:
        float64 [head_dim / 2].
    """
    half = head_dim // 2
    frequencies: np.ndarray = theta ** (-np.arange(half) / half)
    return frequencies


def llama3_frequencies(
    frequencies: np.ndarray, *, factor: float, trained_length: int, low: float, high: float
) -> np.ndarray:
    """Slows rotations as Llama 3.1 does, so that it can read longer texts than it was trained on.

    A pair that turns at most `low` times within `trained_length` positions becomes `factor` times
    slower, one that turns at least `high` times stays, and between the two the frequency goes over
    in a line (the `llama3` rope type of published configs).

    Args:
        frequencies: of `rotary_frequencies`.
        factor: how many times slower.
        trained_length: positions that the turns are counted in.
        low: turns up to which a pair is slowed in full.
        high: turns from which a pair is left alone.

    Returns:
        float64 [head_dim / 2].

    Example:
        >>> turns = np.array([0.5, 2.5, 8.0])
        >>> how = {"factor": 8, "trained_length": 100, "low": 1, "high": 4}
        >>> slowed = llama3_frequencies(2 * np.pi * turns / 100, **how)
        >>> (slowed * 100 / (2 * np.pi)).round(5).tolist()
        [0.0625, 1.40625, 8.0]
    """
    turns = frequencies * trained_length / (2 * math.pi)
    kept = np.clip((turns - low) / (high - low), 0, 1)
    slowed: np.ndarray = frequencies * (kept + (1 - kept) / factor)
    return slowed


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
