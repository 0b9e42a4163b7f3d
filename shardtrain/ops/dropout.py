"""Dropout whose masks belong to samples, not to devices.

A mask is keyed by (seed, step, sample, layer, site), so it is the same on every mesh, is found
again when a block is recomputed, and differs between samples, layers, sites and steps. It belongs
to places in the sequence: where these come in another order, so does it.
"""

import math
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.random import threefry2x32_p
from jaxtyping import Array, Bool, Float, Int, Key, UInt32

from shardtrain.ops.sums import sum_dtype


def sample_keys(key: Key[Array, ""], sample: UInt32[Array, " batch"]) -> Key[Array, " batch"]:
    """One key a sample, from the step's key."""
    return jax.vmap(jax.random.fold_in, in_axes=(None, 0))(key, sample)


def dropout(
    x: Float[Array, "batch residual_length embed"],
    rate: float,
    keys: Key[Array, " batch"] | None,
    layer: UInt32[Array, ""] | int,
    site: int,
    places: Int[Array, "batch length"] | None = None,
) -> Float[Array, "batch residual_length embed"]:
    """Zeroes entries with probability `rate` and scales the rest by 1 / (1 - rate).

    Args:
        x: what is dropped from.
        rate: the probability; 0 is the identity.
        keys: one key a sample (`sample_keys`), or None: the identity (evaluation).
        layer: index of the layer, or of a place of its own outside the stack.
        site: which dropout of the layer.
        places: where each position of `x` is in its sequence; None = in order.
    """
    if rate == 0 or keys is None:
        return x
    threshold = _threshold(rate)

    def mask(key: jax.Array, places: jax.Array | None) -> jax.Array:
        key = jax.random.fold_in(jax.random.fold_in(key, layer), site)
        if places is None:
            bits: jax.Array = jax.random.bits(key, x.shape[1:], jnp.uint32)
        else:
            bits = bits_at(key, places, x.shape[2:])
        keep: jax.Array = bits >= threshold
        return keep

    keep = jax.vmap(mask)(keys, places)
    return jnp.where(keep, x * jnp.asarray(1 / (1 - rate), x.dtype), 0)


def _threshold(rate: float) -> np.uint32:
    """Random bits below it are dropped: integers, whatever the precision of the run."""
    return np.uint32(round(rate * 2**32))


@partial(jax.tree_util.register_dataclass, data_fields=["words"], meta_fields=["rate"])
@dataclass(frozen=True)
class Thinning:
    """Dropout of attention weights: each belongs to a sample, a head, a query and a key."""

    words: UInt32[Array, "batch kv_heads group 2"]
    """A key for each sample and head, as threefry takes it."""
    rate: float
    """Probability that a weight is dropped."""


class Mask(NamedTuple):
    """Which of some attention weights are kept."""

    kept: Bool[Array, "..."]
    scale: float
    """What those are multiplied by."""


def thinned(weights: Float[Array, "..."], mask: Mask | None) -> Float[Array, "..."]:
    """Weights, or gradients of weights, after dropout; as they are without a mask."""
    if mask is None:
        return weights
    wide = sum_dtype(weights.dtype)
    scaled = weights.astype(wide) * jnp.asarray(mask.scale, wide)
    return jnp.where(mask.kept, scaled, 0).astype(weights.dtype)


def mask_of(
    thinning: Thinning | None,
    rows: Int[Array, "..."],
    keys: Int[Array, "..."],
    shape: tuple[int, ...],
    *,
    by_keys: bool = False,
) -> Mask | None:
    """Which weights of a tile are kept.

    A weight's own places make its random bits, so a tile of them, on whatever device, has those of
    the whole.

    Args:
        thinning: dropout of all; None where nothing is dropped.
        rows: places of the queries in the sequence, with the dims of `shape` after batch.
        keys: those of the keys, likewise.
        shape: [batch, kv_heads, group, rows, keys].
        by_keys: whether it is [batch, kv_heads, keys, group, rows].
    """
    if thinning is None:
        return None
    words = jnp.expand_dims(thinning.words, (2, 4) if by_keys else (3, 4))
    operands = (words[..., 0], words[..., 1], *(at.astype(jnp.uint32) for at in (rows, keys)))
    bits, _ = threefry2x32_p.bind(*(jnp.broadcast_to(x, shape) for x in operands))
    return Mask(bits >= _threshold(thinning.rate), 1 / (1 - thinning.rate))


def thinning(
    rate: float,
    keys: Key[Array, " batch"] | None,
    layer: UInt32[Array, ""] | int,
    site: int,
    heads: tuple[int, int],
) -> Thinning | None:
    """Dropout of attention weights; None where nothing is dropped.

    Args:
        rate: the probability.
        keys: one key a sample (`sample_keys`), or None (evaluation).
        layer: index of the layer.
        site: which dropout of the layer.
        heads: key/value heads, and queries of each.
    """
    if rate == 0 or keys is None:
        return None

    def one(key: jax.Array) -> jax.Array:
        key = jax.random.fold_in(jax.random.fold_in(key, layer), site)
        return jax.random.key_data(jax.random.split(key, heads))

    return Thinning(jax.vmap(one)(keys), rate)


def bits_at(
    key: Key[Array, ""], places: Int[Array, " length"], shape: tuple[int, ...]
) -> UInt32[Array, "length ..."]:
    """Rows of `jax.random.bits(key, (rows, *shape), uint32)`, each made by itself.

    jax makes each of its words from that word's own number alone, so the rows may come in any
    order, and each device makes those that it has.

    Args:
        key: a threefry key.
        places: numbers of the rows.
        shape: of one row.
    """
    size = math.prod(shape)
    assert size < 2**16, "numbers are made of two halves"
    words = jax.random.key_data(key)
    row = jnp.broadcast_to(places.astype(jnp.uint32)[:, None], (len(places), size))
    # row * size + column has up to 64 bits
    low, high = (row & 0xFFFF) * jnp.uint32(size), (row >> 16) * jnp.uint32(size)
    column = jax.lax.broadcasted_iota(jnp.uint32, row.shape, 1)
    first = low + column
    number = first + (high << 16)
    carry = (number < first).astype(jnp.uint32)
    one, two = threefry2x32_p.bind(words[0], words[1], (high >> 16) + carry, number)
    bits: jax.Array = (one ^ two).reshape(len(places), *shape)
    return bits
