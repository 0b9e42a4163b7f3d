"""Causal attention over query groups, with document segments and ALiBi.

Owns: the two products, the masked softmax between them, and their gradient; the block size on CPU.
Does not own: projections, rotary positions, dropout, nor attention over a split `length`.

The backward pass recomputes the probabilities of a block from the row sums that the forward pass
keeps (Dao et al. 2022, arXiv 2205.14135), so that nothing of size length^2 is saved. There are two:
by rows, and for 16-bit types on CPU by keys, where products are fast only if they are contracted on
the left operand's last dim.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from shardtrain.ops.dense import phrasing, transposed
from shardtrain.ops.sums import sum_dtype

BLOCK = 128
"""Rows of a block on CPU: what causality hides from a whole block is never computed."""
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
    static = Static(block, causal, how.canonical)
    return _attention(static, q, k, v, segments, alibi)


@jax.custom_vjp
def split_groups(
    qkv: Float[Array, "batch length kv_heads group head_dim"],
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Cuts each group of a fused product into queries, key and value.

    Args:
        qkv: in `group`, the queries of one key/value head, then its key, then its value.

    Returns:
        q [batch, length, kv_heads, queries, head_dim], and k and v without the fourth dim. The
        gradient is one concatenation, where slices would be padded and added.
    """
    return qkv[..., :-2, :], qkv[..., -2, :], qkv[..., -1, :]


def _split_forward(qkv: jax.Array) -> tuple[tuple[jax.Array, jax.Array, jax.Array], None]:
    return split_groups(qkv), None


def _split_backward(_: None, g: tuple[jax.Array, jax.Array, jax.Array]) -> tuple[jax.Array]:
    dq, dk, dv = g
    return (jnp.concatenate([dq, dk[..., None, :], dv[..., None, :]], -2),)


split_groups.defvjp(_split_forward, _split_backward)


class Static(NamedTuple):
    """What is fixed when the code is traced."""

    block: int
    causal: bool
    canonical: bool


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
    length = q.shape[3]
    slopes = None if alibi is None else alibi[:, :, None, None]
    outs, sums = [], []
    for start, stop in _blocks(static, length):
        end = stop if static.causal else length
        part = q[..., start:stop, :]
        scores = _product(part, k[..., :end, :], 4, 3) * q.shape[-1] ** -0.5
        at = _along(2, start, stop), _along(3, 0, end)
        scores = _hidden(static, scores, *at, segments, slopes)
        peak = scores.max(-1, keepdims=True)
        weights = jnp.exp(scores - peak).astype(q.dtype)
        total = weights.astype(scores.dtype).sum(-1, keepdims=True)
        outs.append((_product(weights, v[..., :end, :], 4, 2) / total).astype(q.dtype))
        sums.append((peak + jnp.log(total))[..., 0])
    out = _join(outs, 3).transpose(0, 3, 1, 2, 4)
    return out, Saved(q, k, v, out, _join(sums, 3), segments, alibi)


Gradients = tuple[jax.Array, jax.Array, jax.Array, None, None]


def _backward(static: Static, saved: Saved, g: jax.Array) -> Gradients:
    if static.canonical and saved.q.dtype.itemsize == 2:
        return _backward_by_keys(static, saved, g)
    return _backward_by_rows(static, saved, g)


def _backward_by_rows(static: Static, saved: Saved, g: jax.Array) -> Gradients:
    """Works on [queries, keys], a block of queries at a time."""
    q, k, v = saved.q, saved.k, saved.v
    length, scale = q.shape[3], q.shape[-1] ** -0.5
    slopes = None if saved.alibi is None else saved.alibi[:, :, None, None]
    along = _row_products(static, g, saved.out)
    g = _heads_first(g)
    blocks = _blocks(static, length)
    dq = []
    dk: list[list[jax.Array]] = [[] for _ in blocks]
    dv: list[list[jax.Array]] = [[] for _ in blocks]
    for start, stop in blocks:
        end = stop if static.causal else length
        queries, outer = (_flat(a[..., start:stop, :]) for a in (q, g))
        keys, values = k[..., :end, :], v[..., :end, :]
        shape = (*q.shape[:3], stop - start, end)
        scores = (_product(queries, keys, 3, 3) * scale).reshape(shape)
        at = _along(2, start, stop), _along(3, 0, end)
        scores = _hidden(static, scores, *at, saved.segments, slopes)
        weights = jnp.exp(scores - saved.log_sum[..., start:stop, None])
        mixed = _product(outer, values, 3, 3).reshape(shape)
        slope = weights * (mixed - along[..., start:stop, None]) * scale
        slope, weights = (_flat(a.astype(q.dtype)) for a in (slope, weights))
        part = _product(slope, keys, 3, 2).astype(q.dtype)
        dq.append(part.reshape(*q.shape[:3], stop - start, -1))
        for total, left, right in ((dk, slope, queries), (dv, weights, outer)):
            part = _product(left, right, 2, 2)
            for index, (low, high) in enumerate(blocks):
                if low < end:
                    total[index].append(part[..., low:high, :])
    back = (0, 2, 1, 3)
    dk_whole, dv_whole = (
        _join([sum(some[1:], some[0]).astype(k.dtype) for some in parts], 2).transpose(back)
        for parts in (dk, dv)
    )
    return _join(dq, 3).transpose(0, 3, 1, 2, 4), dk_whole, dv_whole, None, None


def _backward_by_keys(static: Static, saved: Saved, g: jax.Array) -> Gradients:
    """Works on [keys, queries], a block of keys at a time."""
    q, k, v = saved.q, saved.k, saved.v
    batch, heads, group, length, size = q.shape
    along = _row_products(static, g, saved.out)
    g = _heads_first(g)
    slopes = None if saved.alibi is None else saved.alibi[:, None, :, None]
    parts: list[list[jax.Array]] = [[] for _ in _blocks(static, length)]
    dk, dv = [], []
    for start, stop in _blocks(static, length):
        first = start if static.causal else 0
        queries, outer = (_flat(a[..., first:, :]) for a in (q, g))
        keys, values = k[..., start:stop, :], v[..., start:stop, :]
        scores = _product(keys, queries, 3, 3) * size**-0.5
        shape = (batch, heads, stop - start, group, length - first)
        at = _along(3, first, length), _along(1, start, stop)
        scores = _hidden(static, scores.reshape(shape), *at, saved.segments, slopes)
        weights = jnp.exp(scores - saved.log_sum[:, :, None, :, first:])
        mixed = _product(values, outer, 3, 3).reshape(shape)
        slope = weights * (mixed - along[:, :, None, :, first:]) * size**-0.5
        slope, weights = (a.astype(q.dtype).reshape(*keys.shape[:3], -1) for a in (slope, weights))
        dk.append(_product(slope, queries, 3, 2).astype(k.dtype))
        dv.append(_product(weights, outer, 3, 2).astype(v.dtype))
        part = _product(transposed(keys), slope, 3, 2).reshape(batch, heads, size, group, -1)
        for index, (low, high) in enumerate(_blocks(static, length)):
            if low >= first:
                parts[index].append(part[..., low - first : high - first])
    dq = _join([sum(some[1:], some[0]).astype(q.dtype) for some in parts], 4)
    back = (0, 2, 1, 3)
    return (
        dq.transpose(0, 4, 1, 3, 2),
        _join(dk, 2).transpose(back),
        _join(dv, 2).transpose(back),
        None,
        None,
    )


_attention.defvjp(_forward, _backward)


def _blocks(static: Static, length: int) -> list[tuple[int, int]]:
    """First row of each block and the row past its last."""
    return [(low, min(low + static.block, length)) for low in range(0, length, static.block)]


def _along(dim: int, start: int, stop: int) -> jax.Array:
    """Positions along one of four dims."""
    return jnp.arange(start, stop).reshape([-1 if i == dim else 1 for i in range(4)])


def _heads_first(x: jax.Array) -> jax.Array:
    """[batch, length, *heads, head_dim] -> [batch, *heads, length, head_dim]."""
    return jnp.moveaxis(x, 1, -2)


def _flat(x: jax.Array) -> jax.Array:
    """[batch, kv_heads, group, rows, head_dim] -> [batch, kv_heads, group x rows, head_dim]."""
    return x.reshape(*x.shape[:2], -1, x.shape[-1])


def _join(parts: list[jax.Array], dim: int) -> jax.Array:
    return parts[0] if len(parts) == 1 else jnp.concatenate(parts, dim)


def _hidden(
    static: Static,
    scores: jax.Array,
    rows: jax.Array,
    keys: jax.Array,
    segments: jax.Array | None,
    slopes: jax.Array | None,
) -> jax.Array:
    """Applies ALiBi to scores and hides the keys that a row may not see.

    Args:
        static: see there.
        scores: [batch, kv_heads, group, rows, keys] or [batch, kv_heads, keys, group, rows].
        rows: positions, with the dims of `scores` after `batch`.
        keys: likewise.
        segments: document of each position.
        slopes: with the dims of `scores` after `batch`.
    """
    if slopes is not None:
        bias = slopes.astype(scores.dtype) * jnp.abs(rows - keys).astype(scores.dtype)
        scores -= jnp.broadcast_to(bias, scores.shape)
    if static.causal:
        scores = jnp.where(jnp.broadcast_to(rows >= keys, scores.shape), scores, MASKED)
    if segments is not None:
        same = segments[:, rows] == segments[:, keys]
        scores = jnp.where(jnp.broadcast_to(same, scores.shape), scores, MASKED)
    return scores


# -- products for each batch row and key/value head, in at least 32 bits


def _product(x: jax.Array, y: jax.Array, over_x: int, over_y: int) -> jax.Array:
    wide = sum_dtype(x.dtype)
    out: jax.Array = lax.dot_general(
        x, y, (((over_x,), (over_y,)), ((0, 1), (0, 1))), preferred_element_type=wide
    )
    return out


def _row_products(static: Static, x: jax.Array, y: jax.Array) -> jax.Array:
    """Sums of x * y over head_dim, as [batch, kv_heads, group, length]."""
    wide = sum_dtype(x.dtype)
    both = x.astype(wide) * y.astype(wide)
    if not static.canonical:
        return both.sum(-1).transpose(0, 2, 3, 1)
    # XLA:CPU spends 0.2 us on each short row of a sum; a product with ones does not.
    ones = jnp.ones((x.shape[-1], 2), wide)
    return (both @ ones)[..., 0].transpose(0, 2, 3, 1)


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
