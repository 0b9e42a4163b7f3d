"""Batch normalisation: mean and variance over the samples of a batch, and what they are taken of.

Owns: the arithmetic, and over which devices it reaches. Does not own: running statistics, which the
model holds and the state keeps.

Under jit a batch is one array over all devices, so a mean over it is that of the global batch; XLA
adds the collectives.
"""

from functools import partial

import jax
from jaxtyping import Array, Float

from shardtrain.ops.sums import sum_dtype
from shardtrain.sharding.placement import split_size
from shardtrain.sharding.rules import constrain, current

Statistics = tuple[Float[Array, " embed"], Float[Array, " embed"]]
"""Mean and variance of each channel."""


def batch_norm(
    x: Float[Array, "batch height width embed"],
    scale: Float[Array, " embed"],
    bias: Float[Array, " embed"],
    *,
    epsilon: float,
    per_replica: bool = False,
) -> tuple[Float[Array, "batch height width embed"], Statistics]:
    """Normalises each channel over samples and places (Ioffe and Szegedy 2015, arXiv 1502.03167).

    Args:
        x: activations.
        scale: what the normalised activations are multiplied by.
        bias: what is added then.
        epsilon: added to the variance.
        per_replica: whether each data shard normalises by its own samples alone.

    Returns:
        The result in the dtype of `x`; and mean and variance (that of the samples themselves, not
        the unbiased one) in at least float32. With `per_replica` they are means over the shards.

    Example:
        >>> import jax.numpy as jnp
        >>> x = jnp.array([0.0, 0.0, 2.0, 4.0]).reshape(4, 1, 1, 1)
        >>> _, (mean, variance) = batch_norm(x, jnp.ones(1), jnp.zeros(1), epsilon=0.0)
        >>> float(mean[0]), float(variance[0])
        (1.5, 2.75)
    """
    groups = _shards() if per_replica else 1
    # One group a shard: cutting the batch there moves nothing.
    grouped = x.reshape(groups, -1, *x.shape[1:])
    if groups > 1:
        grouped = constrain(grouped, "batch", None, None, None, None)
    y, mean, variance = _norm(epsilon, grouped, scale, bias)
    return y.reshape(x.shape), (mean.mean(_PLACES), variance.mean(_PLACES))


_PLACES = (0, 1, 2, 3)
"""All dims of [groups, batch, height, width, embed] but the last."""
Saved = tuple[jax.Array, jax.Array, jax.Array, jax.Array, jax.Array]
"""The input, scale and bias; of each group and channel the mean and 1 / deviation."""


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _norm(
    epsilon: float, x: jax.Array, scale: jax.Array, bias: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Normalised activations; and mean and variance of each group, without a gradient."""
    return _forward(epsilon, x, scale, bias)[0]


def _forward(
    epsilon: float, x: jax.Array, scale: jax.Array, bias: jax.Array
) -> tuple[tuple[jax.Array, jax.Array, jax.Array], Saved]:
    wide = _wide(x)
    mean = _mean(wide)
    centred = wide - mean
    # Of what is left after the mean: E[x^2] - E[x]^2 would lose digits where means are large.
    variance = _mean(centred * centred)
    inverse = jax.lax.rsqrt(variance + epsilon)
    y = centred * (inverse * _wide(scale)) + _wide(bias)
    return (y.astype(x.dtype), mean, variance), (x, scale, bias, mean, inverse)


def _backward(
    epsilon: float, saved: Saved, cotangents: tuple[jax.Array, ...]
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Keeps the input where automatic differentiation would keep several wide copies."""
    del epsilon
    x, scale, bias, mean, inverse = saved
    g, normalised = _wide(cotangents[0]), (_wide(x) - mean) * inverse
    along = g * normalised
    rest = _mean(g) + normalised * _mean(along)
    dx = (g - rest) * (inverse * _wide(scale))
    dscale, dbias = along.sum(_PLACES), g.sum(_PLACES)
    return dx.astype(x.dtype), dscale.astype(scale.dtype), dbias.astype(bias.dtype)


_norm.defvjp(_forward, _backward)


def normalise(
    x: Float[Array, "batch height width embed"],
    scale: Float[Array, " embed"],
    bias: Float[Array, " embed"],
    statistics: Statistics,
    *,
    epsilon: float,
) -> Float[Array, "batch height width embed"]:
    """The same by given statistics, as in evaluation: it depends on no other sample."""
    wide, (mean, variance) = _wide(x), map(_wide, statistics)
    y = (wide - mean) * (jax.lax.rsqrt(variance + epsilon) * _wide(scale)) + _wide(bias)
    return y.astype(x.dtype)


def _wide(x: jax.Array) -> jax.Array:
    return x.astype(sum_dtype(x.dtype))


def _mean(grouped: jax.Array) -> jax.Array:
    """The mean of each group and channel, [groups, 1, 1, 1, embed]."""
    return grouped.mean((1, 2, 3), keepdims=True)


def _shards() -> int:
    """Over how many devices the batch is split in the traced code."""
    active = current()
    return 1 if active is None else split_size(active.mesh, active.axes("batch"))
