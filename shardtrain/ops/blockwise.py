"""Attention tile by tile: a loop over pairs of a block of queries and a block of keys.

Owns: the loop, the running softmax that it carries (Rabe and Staats 2021, arXiv 2112.05682), and
its gradient. Nothing of size length^2 is there at any time, and one tile at a time is worked on.
Does not own: which pairs there are, and where queries and keys come from (`ring_attention`,
`ulysses`); the arithmetic of a tile (`attention_blocks`).

Operands have their heads first, as in `attention_blocks`.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from numpy.typing import NDArray

from shardtrain.ops.attention_blocks import MASKED, hidden, product, row_gradients, softmax
from shardtrain.ops.dropout import Mask, Thinning, mask_of
from shardtrain.ops.sums import sum_dtype

BLOCK = 512
"""Most rows of a tile: 32 heads of them are 32 MiB of scores."""
CPU_BLOCK = 128
"""The same on CPU, whose caches are smaller."""


class Side(NamedTuple):
    """Where rows, or keys, are."""

    places: jax.Array
    """In the sequence: [rows]."""
    segments: jax.Array | None
    """Document of each: [batch, rows]."""

    def tile(self, start: jax.Array, size: int) -> "Side":
        """Some of them, from one on."""
        documents = self.segments
        if documents is not None:
            documents = lax.dynamic_slice_in_dim(documents, start, size, 1)
        return Side(lax.dynamic_slice_in_dim(self.places, start, size), documents)


class Sight(NamedTuple):
    """What decides about a score besides query and key."""

    rows: Side
    keys: Side
    slopes: jax.Array | None
    """ALiBi's: [kv_heads, group]."""
    thinning: Thinning | None
    """Dropout of the weights."""


class Tiles(NamedTuple):
    """Which pairs are worked on."""

    pairs: jax.Array | NDArray[np.int32]
    """Numbers of a block of queries and of a block of keys: [pairs, 2]."""
    block: int
    """Rows of each block."""
    causal: bool
    """Whether a query may be before a key in some pair."""


class Mixed(NamedTuple):
    """What queries have got from the keys so far."""

    out: jax.Array
    """[batch, kv_heads, group, rows, head_dim], in at least 32 bits."""
    log_sum: jax.Array
    """Log of the sum of exponentials: [batch, kv_heads, group, rows]."""


class Gradients(NamedTuple):
    """Sums so far, in at least 32 bits."""

    q: jax.Array
    k: jax.Array
    v: jax.Array


class Rows(NamedTuple):
    """What a backward pass knows of queries."""

    q: jax.Array
    g: jax.Array
    """The gradient of what they got."""
    log_sum: jax.Array
    along: jax.Array
    """Sums over head_dim of `g` times what they got."""


def block_size(length: int, platform: str) -> int:
    """The largest block that divides a length and is not above the platform's."""
    most = CPU_BLOCK if platform == "cpu" else BLOCK
    return max(size for size in range(1, min(most, length) + 1) if length % size == 0)


def below_diagonal(num: int) -> NDArray[np.int32]:
    """The pairs of which causality hides less than all, of so many blocks in order."""
    return np.stack(np.tril_indices(num), 1).astype(np.int32)


def every_pair(num: int) -> NDArray[np.int32]:
    """All pairs of so many blocks of queries and of keys."""
    return np.stack(np.divmod(np.arange(num * num), num), 1).astype(np.int32)


def nothing_mixed(q: jax.Array) -> Mixed:
    """What queries have before they have seen any key."""
    wide = sum_dtype(q.dtype)
    return Mixed(jnp.zeros(q.shape, wide), jnp.full(q.shape[:4], MASKED, wide))


def no_gradients(q: jax.Array, k: jax.Array) -> Gradients:
    """Sums of nothing."""
    wide = sum_dtype(q.dtype)
    return Gradients(jnp.zeros(q.shape, wide), jnp.zeros(k.shape, wide), jnp.zeros(k.shape, wide))


def mix(
    mixed: Mixed, q: jax.Array, k: jax.Array, v: jax.Array, sight: Sight, tiles: Tiles
) -> Mixed:
    """Mixes in the values of some tiles.

    Args:
        mixed: what the queries have so far.
        q: queries; k: keys; v: values.
        sight: what they may see of each other.
        tiles: the pairs.
    """
    size = tiles.block
    # What may be seen is the same in every layer, so jax would make the masks of all tiles before
    # the first and keep them: size length^2 after all. So let them need the queries.
    q, sight = lax.optimization_barrier((q, sight))

    def tile(mixed: Mixed, pair: jax.Array) -> tuple[Mixed, None]:
        row, key = pair[0] * size, pair[1] * size
        queries, out = (lax.dynamic_slice_in_dim(a, row, size, 3) for a in (q, mixed.out))
        keys, values = (lax.dynamic_slice_in_dim(a, key, size, 2) for a in (k, v))
        before = lax.dynamic_slice_in_dim(mixed.log_sum, row, size, 3)
        scores = product(queries, keys, 4, 3) * q.shape[-1] ** -0.5
        scores = _seen(scores, sight, row, key, tiles)
        new, log_sum = softmax(scores, values, _mask(scores.shape, sight, row, key, size))
        after = jnp.logaddexp(before, log_sum)
        out = out * jnp.exp(before - after)[..., None] + new * jnp.exp(log_sum - after)[..., None]
        return Mixed(
            lax.dynamic_update_slice_in_dim(mixed.out, out, row, 3),
            lax.dynamic_update_slice_in_dim(mixed.log_sum, after, row, 3),
        ), None

    return lax.scan(tile, mixed, jnp.asarray(tiles.pairs))[0]


def add_gradients(
    sums: Gradients, rows: Rows, k: jax.Array, v: jax.Array, sight: Sight, tiles: Tiles
) -> Gradients:
    """Adds the gradients of some tiles.

    Args:
        sums: the gradients so far.
        rows: the queries.
        k: keys; v: values.
        sight: what they may see of each other, as in the forward pass.
        tiles: the pairs.
    """
    size = tiles.block

    def add(total: jax.Array, part: jax.Array, start: jax.Array, dim: int) -> jax.Array:
        part += lax.dynamic_slice_in_dim(total, start, size, dim)
        return lax.dynamic_update_slice_in_dim(total, part, start, dim)

    def tile(sums: Gradients, pair: jax.Array) -> tuple[Gradients, None]:
        row, key = pair[0] * size, pair[1] * size
        q, g, log_sum, along = (lax.dynamic_slice_in_dim(a, row, size, 3) for a in rows)
        keys, values = (lax.dynamic_slice_in_dim(a, key, size, 2) for a in (k, v))
        dq, dk, dv = row_gradients(
            q,
            g,
            keys,
            values,
            log_sum,
            along,
            lambda s: _seen(s, sight, row, key, tiles),
            _mask((*q.shape[:4], size), sight, row, key, size),
        )
        return Gradients(
            add(sums.q, dq, row, 3), add(sums.k, dk, key, 2), add(sums.v, dv, key, 2)
        ), None

    return lax.scan(tile, sums, jnp.asarray(tiles.pairs))[0]


def _mask(
    shape: tuple[int, ...], sight: Sight, row: jax.Array, key: jax.Array, size: int
) -> Mask | None:
    """What dropout leaves of the weights of a tile."""
    rows, keys = sight.rows.tile(row, size).places, sight.keys.tile(key, size).places
    return mask_of(sight.thinning, rows[None, None, :, None], keys[None, None, None, :], shape)


def _seen(
    scores: jax.Array, sight: Sight, row: jax.Array, key: jax.Array, tiles: Tiles
) -> jax.Array:
    """The scores of a tile without what its queries may not see."""
    rows, keys = sight.rows.tile(row, tiles.block), sight.keys.tile(key, tiles.block)
    documents = None
    if rows.segments is not None and keys.segments is not None:
        documents = rows.segments[:, None, None, :, None], keys.segments[:, None, None, None, :]
    slopes = None if sight.slopes is None else sight.slopes[:, :, None, None]
    return hidden(
        scores,
        rows.places[None, None, :, None],
        keys.places[None, None, None, :],
        documents,
        slopes,
        causal=tiles.causal,
    )
