"""Cross-entropy over a vocabulary that may be split over devices, as in Megatron-LM.

Owns: the loss of each position, its gradient, and the reductions over the vocabulary's mesh axes.
Written as two maps that are manual over every mesh axis not yet taken, forward and backward, inside
one custom derivative, so that neither is ever differentiated through.
Does not own: weights of positions, sums over them, nor the product that makes the logits.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from shardtrain.ops.platform import platform
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
    padded = vocab_size < logits.shape[-1]
    static = Static(current(), vocab_size, padded, logits.dtype, platform() == "cpu")
    return _cross_entropy(static, logits, targets)


class Static(NamedTuple):
    """What is fixed when the code is traced."""

    active: Active | None
    vocab_size: int
    padded: bool
    dtype: Any
    keep_exponentials: bool
    """Save exp(logits - peak) in place of the logits: on CPU a second exp costs more."""


Pair = tuple[jax.Array, jax.Array]


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _cross_entropy(static: Static, logits: jax.Array, targets: jax.Array) -> Pair:
    return _forward(static, logits, targets)[0]


Saved = tuple[jax.Array, jax.Array, jax.Array]
"""The exponentials or the logits, the targets, and the sums or their log."""


def _forward(static: Static, logits: jax.Array, targets: jax.Array) -> tuple[Pair, Saved]:
    active = static.active
    if active is None or active.alone:
        nll, log_z, saved, sums = local_loss(static, (), logits, targets)
    else:
        rows = active.spec("batch", "length")
        whole = active.spec("batch", "length", "vocab")
        nll, log_z, saved, sums = jax.shard_map(
            partial(local_loss, static, active.axes("vocab")),
            mesh=active.context_mesh,
            axis_names=active.free,
            in_specs=(whole, rows),
            out_specs=(rows, rows, whole, rows),
            check_vma=False,
        )(logits, targets)
    return (nll, log_z), (saved, targets, sums)


def _backward(static: Static, saved: Saved, g: Pair) -> tuple[jax.Array, None]:
    active = static.active
    if active is None or active.alone:
        return local_gradient(static, (), *saved, *g), None
    rows = active.spec("batch", "length")
    whole = active.spec("batch", "length", "vocab")
    gradient = jax.shard_map(
        partial(local_gradient, static, active.axes("vocab")),
        mesh=active.context_mesh,
        axis_names=active.free,
        in_specs=(whole, rows, rows, rows, rows),
        out_specs=whole,
        check_vma=False,
    )(*saved, *g)
    return gradient, None


_cross_entropy.defvjp(_forward, _backward)


def local_loss(
    static: Static, axes: tuple[str, ...], logits: jax.Array, targets: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Reduces the part of the vocabulary that is here, then over the mesh axes that split it."""
    wide = _wide(static, axes, logits)
    peak = wide.max(-1, keepdims=True)
    peak = lax.pmax(peak, axes) if axes else peak
    exponentials = jnp.exp(wide - peak)
    total = exponentials.sum(-1)
    # A gather of one entry a position; the rows of this device alone, so nothing is moved.
    at = targets - _first(axes, logits)
    here = (at >= 0) & (at < logits.shape[-1])
    at = jnp.where(here, at, 0)
    hit = jnp.where(here, jnp.take_along_axis(wide, at[..., None], -1)[..., 0], 0)
    if axes:
        total, hit = lax.psum((total, hit), axes)
    log_z = peak[..., 0] + jnp.log(total)
    kept = (exponentials, total) if static.keep_exponentials else (logits, log_z)
    return log_z - hit, log_z, *kept


def local_gradient(
    static: Static,
    axes: tuple[str, ...],
    saved: jax.Array,
    targets: jax.Array,
    sums: jax.Array,
    g_nll: jax.Array,
    g_log_z: jax.Array,
) -> jax.Array:
    """`softmax x (g_nll + g_log_z) - onehot x g_nll`, in one pass."""
    both = g_nll + g_log_z
    if static.keep_exponentials:
        weights = saved * (both / sums)[..., None]
    else:
        weights = jnp.exp(_wide(static, axes, saved) - sums[..., None]) * both[..., None]
    hit = _ids(axes, saved) == targets[..., None]
    return jnp.where(hit, weights - g_nll[..., None], weights).astype(static.dtype)


def _first(axes: tuple[str, ...], logits: jax.Array) -> jax.Array | int:
    """Token id of the first entry of the part that is here."""
    return lax.axis_index(axes) * logits.shape[-1] if axes else 0


def _ids(axes: tuple[str, ...], logits: jax.Array) -> jax.Array:
    """Token id of each entry of the part that is here."""
    ids = lax.broadcasted_iota(jnp.int32, (1, 1, logits.shape[-1]), 2)
    return _first(axes, logits) + ids


def _wide(static: Static, axes: tuple[str, ...], logits: jax.Array) -> jax.Array:
    """Logits in at least 32 bits, padding hidden: finite, so that no difference is NaN."""
    wide: jax.Array = logits.astype(sum_dtype(logits.dtype))
    if not static.padded:
        return wide
    return jnp.where(_ids(axes, logits) < static.vocab_size, wide, -1e30)
