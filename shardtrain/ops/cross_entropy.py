"""Cross-entropy over a vocabulary that may be split over devices, as in Megatron-LM.

Owns: the loss of each position, its gradient, and the reductions over the vocabulary's mesh axes.
Written as two maps that are manual over every mesh axis not yet taken, forward and backward, inside
one custom derivative, so that neither is ever differentiated through.
Does not own: weights of positions, sums over them, nor the product that makes the logits.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from shardtrain.ops.sums import sum_dtype
from shardtrain.sharding.rules import Active, current


def cross_entropy(
    logits: Float[Array, "batch length vocab"],
    targets: Int[Array, "batch length"],
    *,
    vocab_size: int,
) -> tuple[Float[Array, "batch length"], Float[Array, "batch length"]]:
    """The negative log-likelihood of each target, and the log of each softmax's denominator.

    Args:
        logits: scores; entries from `vocab_size` on are padding, without probability or gradient.
        targets: token ids below `vocab_size`.
        vocab_size: number of real tokens.

    Returns:
        (nll, log_z), both in at least 32 bits.
    """
    static = Static(current(), vocab_size, vocab_size < logits.shape[-1])
    return _cross_entropy(static, logits, targets)


class Static(NamedTuple):
    """What is fixed when the code is traced."""

    active: Active | None
    vocab_size: int
    padded: bool


Pair = tuple[jax.Array, jax.Array]


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _cross_entropy(static: Static, logits: jax.Array, targets: jax.Array) -> Pair:
    active = static.active
    if active is None or active.mesh.size == 1:
        return _local_loss(static, (), logits, targets)
    rows = active.spec("batch", "length")
    losses: Pair = jax.shard_map(
        partial(_local_loss, static, active.axes("vocab")),
        mesh=active.mesh,
        axis_names=active.free,
        in_specs=(active.spec("batch", "length", "vocab"), rows),
        out_specs=(rows, rows),
        check_vma=False,
    )(logits, targets)
    return losses


Saved = tuple[jax.Array, jax.Array, jax.Array]


def _forward(static: Static, logits: jax.Array, targets: jax.Array) -> tuple[Pair, Saved]:
    nll, log_z = _cross_entropy(static, logits, targets)
    return (nll, log_z), (logits, targets, log_z)


def _backward(static: Static, saved: Saved, g: Pair) -> tuple[jax.Array, None]:
    active = static.active
    if active is None or active.mesh.size == 1:
        return _local_gradient(static, (), *saved, *g), None
    rows = active.spec("batch", "length")
    whole = active.spec("batch", "length", "vocab")
    gradient = jax.shard_map(
        partial(_local_gradient, static, active.axes("vocab")),
        mesh=active.mesh,
        axis_names=active.free,
        in_specs=(whole, rows, rows, rows, rows),
        out_specs=whole,
        check_vma=False,
    )(*saved, *g)
    return gradient, None


_cross_entropy.defvjp(_forward, _backward)


def _local_loss(
    static: Static, axes: tuple[str, ...], logits: jax.Array, targets: jax.Array
) -> Pair:
    """Reduces the part of the vocabulary that is here, then over the mesh axes that split it."""
    ids, wide = _ids(axes, logits), _wide(static, axes, logits)
    peak = wide.max(-1, keepdims=True)
    peak = lax.pmax(peak, axes) if axes else peak
    total = jnp.exp(wide - peak).sum(-1)
    hit = jnp.where(ids == targets[..., None], wide, 0).sum(-1)
    if axes:
        total, hit = lax.psum((total, hit), axes)
    log_z = peak[..., 0] + jnp.log(total)
    return log_z - hit, log_z


def _local_gradient(
    static: Static,
    axes: tuple[str, ...],
    logits: jax.Array,
    targets: jax.Array,
    log_z: jax.Array,
    g_nll: jax.Array,
    g_log_z: jax.Array,
) -> jax.Array:
    """`softmax x (g_nll + g_log_z) - onehot x g_nll`, in one pass."""
    ids, wide = _ids(axes, logits), _wide(static, axes, logits)
    weights = jnp.exp(wide - log_z[..., None]) * (g_nll + g_log_z)[..., None]
    gradient = jnp.where(ids == targets[..., None], weights - g_nll[..., None], weights)
    return gradient.astype(logits.dtype)


def _ids(axes: tuple[str, ...], logits: jax.Array) -> jax.Array:
    """Token id of each entry of the part that is here."""
    first = lax.axis_index(axes) * logits.shape[-1] if axes else 0
    return first + lax.broadcasted_iota(jnp.int32, (1, 1, logits.shape[-1]), 2)


def _wide(static: Static, axes: tuple[str, ...], logits: jax.Array) -> jax.Array:
    """Logits in at least 32 bits, padding hidden: finite, so that no difference is NaN."""
    wide = logits.astype(sum_dtype(logits.dtype))
    if not static.padded:
        return wide
    return jnp.where(_ids(axes, logits) < static.vocab_size, wide, -1e30)
