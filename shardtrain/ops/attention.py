"""Causal attention over query groups, with document segments and ALiBi.

Owns: the two products, the masked softmax between them, and their gradient; the block size on CPU.
Does not own: projections, rotary positions, dropout, nor attention over a split `length`.

The backward pass recomputes the probabilities of a block from the row sums that the forward pass
keeps (Dao et al. 2022, arXiv 2205.14135), so that nothing of size length^2 is saved.
"""

from collections.abc import Iterator
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from shardtrain.ops.dense import phrasing

BLOCK = 128
"""Query rows of a block on CPU: keys past a block's last row are never touched."""
MASKED = -1e30
"""Score of a key that a query may not see: finite, so that no difference of scores is NaN."""


def attention(
    q: Float[Array, "batch length kv_heads group head_dim"],
    k: Float[Array, "batch length kv_heads head_dim"],
    v: Float[Array, "batch length kv_heads head_dim"],
    *,
    segments: Int[Array, "batch length"] | None = None,
    alibi: Float[Array, "kv_heads group"] | None = None,
    implementation: str = "xla",
    causal: bool = True,
) -> Float[Array, "batch length kv_heads group head_dim"]:
    """Mixes values by the softmax of scaled query-key products.

    Args:
        q: queries; `group` of them share one key/value head.
        k: keys.
        v: values.
        segments: document of each position; a query sees keys of its own document only.
        alibi: slope of each head: scores fall by slope x distance (Press et al. 2021).
        implementation: "xla", or "cudnn" for cuDNN's fused kernel (16-bit types on NVIDIA GPUs).
        causal: whether a query sees only keys at its own position and before.

    Returns:
        An array of the shape and dtype of `q`; the softmax is held in at least 32 bits.
    """
    if implementation == "cudnn":
        return _cudnn(q, k, v, segments, alibi, causal)
    how = phrasing()
    block = BLOCK if causal and how.flatten else q.shape[1]
    static = Static(min(block, q.shape[1]), causal, how.widen and q.dtype.itemsize == 2)
    return _attention(static, q, k, v, segments, alibi)


class Static(NamedTuple):
    """What is fixed when the code is traced."""

    block: int
    causal: bool
    widen: bool


class Saved(NamedTuple):
    """What the backward pass reads: operands as [batch, kv_heads, group, length, head_dim]."""

    q: jax.Array
    k: jax.Array
    v: jax.Array
    out: jax.Array  # [batch, length, kv_heads, group, head_dim]
    log_sum: jax.Array  # [batch, kv_heads, group, length]
    segments: jax.Array | None
    alibi: jax.Array | None


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attention(
    static: Static,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    segments: jax.Array | None,
    alibi: jax.Array | None,
) -> jax.Array:
    return _forward(static, q, k, v, segments, alibi)[0]


def _forward(
    static: Static,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    segments: jax.Array | None,
    alibi: jax.Array | None,
) -> tuple[jax.Array, Saved]:
    q, k, v = _heads_first(q), _heads_first(k), _heads_first(v)
    wide = jnp.promote_types(q.dtype, jnp.float32)
    outs, sums = [], []
    for start, stop, end in _blocks(static, q.shape[3]):
        scores = _scores(q[..., start:stop, :], k[..., :end, :])
        scores = _biased(static, scores, start, segments, alibi)
        peak = scores.max(-1, keepdims=True)
        weights = jnp.exp(scores - peak)
        total = weights.sum(-1, keepdims=True)
        mixed = _rows_times(weights.astype(q.dtype), v[..., :end, :]).astype(wide)
        outs.append((mixed / total).astype(q.dtype))
        sums.append((peak + jnp.log(total))[..., 0])
    out = _join(outs, 3).transpose(0, 3, 1, 2, 4)
    return out, Saved(q, k, v, out, _join(sums, 3), segments, alibi)


def _backward(
    static: Static, saved: Saved, g: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array, None, None]:
    q, k, v = saved.q, saved.k, saved.v
    wide = jnp.promote_types(q.dtype, jnp.float32)
    length = q.shape[3]
    along = (g.astype(wide) * saved.out.astype(wide)).sum(-1).transpose(0, 2, 3, 1)
    g = _heads_first(g)
    scale = q.shape[-1] ** -0.5
    dq = []
    dk, dv = jnp.zeros(k.shape, wide), jnp.zeros(v.shape, wide)
    for start, stop, end in _blocks(static, length):
        rows = slice(start, stop)
        q_block, g_block, keys = q[..., rows, :], g[..., rows, :], k[..., :end, :]
        scores = _scores(q_block, keys)
        scores = _biased(static, scores, start, saved.segments, saved.alibi)
        weights = jnp.exp(scores - saved.log_sum[..., rows, None])
        mixed = _scores_like(g_block, v[..., :end, :]).astype(wide)
        slope = weights * (mixed - along[..., rows, None]) * scale
        slope = slope.astype(q.dtype)
        dq.append(_rows_times(slope, keys).astype(q.dtype))
        rest = ((0, 0), (0, 0), (0, length - end), (0, 0))
        dk += jnp.pad(_columns_times(static, slope, q_block).astype(wide), rest)
        dv += jnp.pad(_columns_times(static, weights.astype(q.dtype), g_block).astype(wide), rest)
    back = (0, 2, 1, 3)
    return (
        _join(dq, 3).transpose(0, 3, 1, 2, 4),
        dk.astype(k.dtype).transpose(back),
        dv.astype(v.dtype).transpose(back),
        None,
        None,
    )


_attention.defvjp(_forward, _backward)


def _blocks(static: Static, length: int) -> Iterator[tuple[int, int, int]]:
    """First row, row past the last, and number of keys that the rows may see."""
    for start in range(0, length, static.block):
        stop = min(start + static.block, length)
        yield start, stop, stop if static.causal else length


def _heads_first(x: jax.Array) -> jax.Array:
    """[batch, length, *heads, head_dim] -> [batch, *heads, length, head_dim]."""
    return jnp.moveaxis(x, 1, -2)


def _join(parts: list[jax.Array], dim: int) -> jax.Array:
    return parts[0] if len(parts) == 1 else jnp.concatenate(parts, dim)


def _biased(
    static: Static,
    scores: jax.Array,
    start: int,
    segments: jax.Array | None,
    alibi: jax.Array | None,
) -> jax.Array:
    """Hides the keys that a row may not see; scores are [batch, kv_heads, group, rows, keys]."""
    rows, keys = scores.shape[-2:]
    row = start + lax.broadcasted_iota(jnp.int32, (rows, keys), 0)
    key = lax.broadcasted_iota(jnp.int32, (rows, keys), 1)
    if alibi is not None:
        distance = jnp.abs(row - key).astype(scores.dtype)
        scores -= alibi.astype(scores.dtype)[:, :, None, None] * distance
    seen = row >= key if static.causal else None
    if segments is not None:
        same = segments[:, start : start + rows, None] == segments[:, None, :keys]
        same = same[:, None, None]
        seen = same if seen is None else seen & same
    return scores if seen is None else jnp.where(seen, scores, MASKED)


# -- products; the left operand has a group of rows for each key/value head


def _scores(q: jax.Array, k: jax.Array) -> jax.Array:
    """Scaled products of queries and keys, in at least 32 bits."""
    wide = jnp.promote_types(q.dtype, jnp.float32)
    scores: jax.Array = _scores_like(q, k).astype(wide) * q.shape[-1] ** -0.5
    return scores


def _scores_like(x: jax.Array, y: jax.Array) -> jax.Array:
    """[b, n, g, rows, h] with [b, n, keys, h] -> [b, n, g, rows, keys]."""
    return _batched(x, y, 4, 3)


def _rows_times(x: jax.Array, y: jax.Array) -> jax.Array:
    """[b, n, g, rows, keys] with [b, n, keys, h] -> [b, n, g, rows, h]."""
    return _batched(x, y, 4, 2)


def _batched(x: jax.Array, y: jax.Array, over_x: int, over_y: int) -> jax.Array:
    wide = jnp.float32 if x.dtype.itemsize == 2 else None
    return lax.dot_general(
        x, y, (((over_x,), (over_y,)), ((0, 1), (0, 1))), preferred_element_type=wide
    )


def _columns_times(static: Static, x: jax.Array, y: jax.Array) -> jax.Array:
    """[b, n, g, rows, keys] with [b, n, g, rows, h] -> [b, n, keys, h], summed over the group."""
    if x.dtype.itemsize == 2 and static.widen:
        x, y = x.astype(jnp.float32), y.astype(jnp.float32)
    return lax.dot_general(x, y, (((2, 3), (2, 3)), ((0, 1), (0, 1))))


def _cudnn(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    segments: jax.Array | None,
    alibi: jax.Array | None,
    causal: bool,
) -> jax.Array:
    batch, length, kv_heads, group, head_dim = q.shape
    bias = mask = None
    if segments is not None:
        mask = (segments[:, :, None] == segments[:, None, :])[:, None]
    if alibi is not None:
        at = jnp.arange(length)
        distance = jnp.abs(at[:, None] - at[None, :]).astype(q.dtype)
        bias = -alibi.astype(q.dtype).reshape(1, -1, 1, 1) * distance
    out = jax.nn.dot_product_attention(
        q.reshape(batch, length, kv_heads * group, head_dim),
        k,
        v,
        bias=bias,
        mask=mask,
        is_causal=causal,
        implementation="cudnn",
    )
    return out.reshape(q.shape)
