"""Batch normalisation: mean and variance over the samples of a batch, and what they are taken of.

Owns: the arithmetic, and over which devices it reaches. Does not own: running statistics, which the
model holds and the state keeps.

Under jit a batch is one array over all devices, so a mean over it is that of the global batch; XLA
adds the collectives. Where gradients are added up shard by shard (`strategies.accumulate`), samples
of the others are reached by the name of the mapped axis.
"""

import jax
from jaxtyping import Array, Float

from shardtrain.ops.sums import sum_dtype
from shardtrain.sharding.mesh import DATA_AXES, SHARDS
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
        scale: multiplied by, after normalisation.
        bias: added after that.
        epsilon: added to the variance.
        per_replica: whether each data shard normalises by its own samples alone.

    Returns:
        The result in the dtype of `x`; and mean and variance (that of the samples themselves, not
        the unbiased one) in at least float32. With `per_replica` they are means over the shards.

    Example:
        >>> x = jnp.array([0.0, 0.0, 2.0, 4.0]).reshape(4, 1, 1, 1)
        >>> _, (mean, variance) = batch_norm(x, jnp.ones(1), jnp.zeros(1), epsilon=0.0)
        >>> float(mean[0]), float(variance[0])
        (1.5, 2.75)
    """
    wide = x.astype(sum_dtype(x.dtype))
    groups = _shards() if per_replica else 1
    # One group a shard: cutting the batch there moves nothing.
    grouped = wide.reshape(groups, -1, *x.shape[1:])
    if groups > 1:
        grouped = constrain(grouped, "batch", None, None, None, None)
    mean = _mean(grouped, per_replica)
    centred = grouped - mean
    # Of what is left after the mean: E[x^2] - E[x]^2 would lose digits where means are large.
    variance = _mean(centred * centred, per_replica)
    factor = jax.lax.rsqrt(variance + epsilon) * scale.astype(wide.dtype)
    y = centred * factor + bias.astype(wide.dtype)
    observed = (mean.mean((0, 1, 2, 3)), variance.mean((0, 1, 2, 3)))
    return y.reshape(x.shape).astype(x.dtype), observed


def normalise(
    x: Float[Array, "batch height width embed"],
    scale: Float[Array, " embed"],
    bias: Float[Array, " embed"],
    statistics: Statistics,
    *,
    epsilon: float,
) -> Float[Array, "batch height width embed"]:
    """The same by given statistics, as in evaluation: it depends on no other sample."""
    mean, variance = statistics
    wide = x.astype(sum_dtype(x.dtype))
    factor = jax.lax.rsqrt(variance.astype(wide.dtype) + epsilon) * scale.astype(wide.dtype)
    y = (wide - mean.astype(wide.dtype)) * factor + bias.astype(wide.dtype)
    return y.astype(x.dtype)


def _mean(grouped: jax.Array, per_replica: bool) -> jax.Array:
    """The mean of each group and channel, [groups, 1, 1, 1, embed]."""
    mean = grouped.mean((1, 2, 3), keepdims=True)
    active = current()
    if per_replica or active is None or not active.mapped & set(DATA_AXES):
        return mean
    reduced: jax.Array = jax.lax.pmean(mean, SHARDS)
    return reduced


def _shards() -> int:
    """Over how many devices the batch is split in the traced code."""
    active = current()
    if active is None:
        return 1
    degree = 1
    for axis in active.axes("batch"):
        degree *= active.mesh.shape[axis]
    return degree
