"""Causal attention over query groups, with document segments and ALiBi.

Owns: the choice of the way; whole rows of scores, and the block size on CPU.
Does not own: the arithmetic of one block (`attention_blocks`), attention over a split `length`
(`ring_attention`, `ulysses`), projections, rotary positions, what is dropped (`dropout`).

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

from shardtrain.ops.attention_blocks import (
    MASKED,
    flat,
    heads_first,
    hidden,
    product,
    row_gradients,
    row_products,
    softmax,
)
from shardtrain.ops.dense import phrasing, transposed
from shardtrain.ops.dropout import Thinning, mask_of, thinned
from shardtrain.ops.platform import platform
from shardtrain.ops.ring_attention import ring_attention
from shardtrain.ops.split_attention import context_degree
from shardtrain.ops.ulysses import ulysses
from shardtrain.sharding.rules import current

BLOCK = 128
"""Rows of a block on CPU: what causality hides from a whole block is never computed."""


def attention(
    q: Float[Array, "batch length kv_heads group head_dim"],
    k: Float[Array, "batch length kv_heads head_dim"],
    v: Float[Array, "batch length kv_heads head_dim"],
    *,
    segments: Int[Array, "batch length"] | None = None,
    alibi: Float[Array, "kv_heads group"] | None = None,
    thinning: Thinning | None = None,
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
        thinning: dropout of the weights; not with "cudnn".
        implementation: "xla"; "cudnn" for cuDNN's fused kernel (16-bit types on NVIDIA GPUs);
            "ring" or "ulysses" for a split `length`; or "auto": "ring" where it is split, else
            "xla".
        causal: whether a query sees only keys at its own position and before.

    Returns:
        An array of the shape and dtype of `q`; the softmax is held in at least 32 bits.
    """
    if implementation == "auto":
        implementation = "ring" if context_degree(current()) > 1 else "xla"
    if implementation in ("ring", "ulysses"):
        assert causal
        split = ring_attention if implementation == "ring" else ulysses
        return split(q, k, v, segments=segments, alibi=alibi, thinning=thinning)
    if implementation == "cudnn":
        assert thinning is None
        return _cudnn(q, k, v, segments, alibi, causal)
    how = phrasing()
    block = BLOCK if causal and how.flatten else q.shape[1]
    static = Static(block, causal, how.canonical, platform() != "cpu")
    return _attention(static, q, k, v, segments, alibi, thinning)


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
    anew: bool
    """Make masks and biases in each layer anew. They are the same in all, so jax would make them
    before the first one and keep them: as large as the scores, to be read in every layer."""


class Saved(NamedTuple):
    """What the backward pass reads: operands as [batch, kv_heads, group, length, head_dim]."""

    q: jax.Array
    k: jax.Array
    v: jax.Array
    out: jax.Array  # [batch, length, kv_heads, group, head_dim]
    log_sum: jax.Array  # [batch, kv_heads, group, length]
    segments: jax.Array | None
    alibi: jax.Array | None
    thinning: Thinning | None


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attention(
    static: Static,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    segments: jax.Array | None,
    alibi: jax.Array | None,
    thinning: Thinning | None,
) -> jax.Array:
    return _forward(static, q, k, v, segments, alibi, thinning)[0]


def _forward(
    static: Static,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    segments: jax.Array | None,
    alibi: jax.Array | None,
    thinning: Thinning | None,
) -> tuple[jax.Array, Saved]:
    q, k, v = heads_first(q), heads_first(k), heads_first(v)
    length = q.shape[3]
    slopes = None if alibi is None else alibi[:, :, None, None]
    outs, sums = [], []
    for start, stop in _blocks(static, length):
        end = stop if static.causal else length
        part = q[..., start:stop, :]
        scores = product(part, k[..., :end, :], 4, 3) * q.shape[-1] ** -0.5
        at = _along(2, start, stop), _along(3, 0, end)
        masked = jnp.asarray(MASKED, scores.dtype)
        if static.anew:
            scores, *hiding = lax.optimization_barrier((scores, at, segments, slopes, masked))
            at, segments, slopes, masked = hiding
        scores = _hidden(static, at, segments, slopes, scores, masked)
        mask = mask_of(thinning, *at, scores.shape)
        mixed, log_sum = softmax(scores, v[..., :end, :], mask)
        outs.append(mixed.astype(q.dtype))
        sums.append(log_sum)
    out = _join(outs, 3).transpose(0, 3, 1, 2, 4)
    return out, Saved(q, k, v, out, _join(sums, 3), segments, alibi, thinning)


Gradients = tuple[jax.Array, jax.Array, jax.Array, None, None, None]


def _backward(static: Static, saved: Saved, g: jax.Array) -> Gradients:
    if static.canonical and saved.q.dtype.itemsize == 2:
        return _backward_by_keys(static, saved, g)
    return _backward_by_rows(static, saved, g)


def _backward_by_rows(static: Static, saved: Saved, g: jax.Array) -> Gradients:
    """Works on [queries, keys], a block of queries at a time."""
    q, k, v = saved.q, saved.k, saved.v
    length = q.shape[3]
    slopes = None if saved.alibi is None else saved.alibi[:, :, None, None]
    along = row_products(g, saved.out, by_product=static.canonical)
    g = heads_first(g)
    blocks = _blocks(static, length)
    dq = []
    dk: list[list[jax.Array]] = [[] for _ in blocks]
    dv: list[list[jax.Array]] = [[] for _ in blocks]
    for start, stop in blocks:
        end = stop if static.causal else length
        at = _along(2, start, stop), _along(3, 0, end)
        part = q[..., start:stop, :]
        shape = (*part.shape[:4], end)
        part, *others = row_gradients(
            part,
            g[..., start:stop, :],
            k[..., :end, :],
            v[..., :end, :],
            saved.log_sum[..., start:stop],
            along[..., start:stop],
            partial(_hidden, static, at, saved.segments, slopes),
            mask_of(saved.thinning, *at, shape),
        )
        dq.append(part.astype(q.dtype))
        for total, part in zip((dk, dv), others, strict=True):
            for index, (low, high) in enumerate(blocks):
                if low < end:
                    total[index].append(part[..., low:high, :])
    back = (0, 2, 1, 3)
    dk_whole, dv_whole = (
        _join([sum(some[1:], some[0]).astype(k.dtype) for some in parts], 2).transpose(back)
        for parts in (dk, dv)
    )
    return _join(dq, 3).transpose(0, 3, 1, 2, 4), dk_whole, dv_whole, None, None, None


def _backward_by_keys(static: Static, saved: Saved, g: jax.Array) -> Gradients:
    """Works on [keys, queries], a block of keys at a time."""
    q, k, v = saved.q, saved.k, saved.v
    batch, heads, group, length, size = q.shape
    along = row_products(g, saved.out, by_product=static.canonical)
    g = heads_first(g)
    slopes = None if saved.alibi is None else saved.alibi[:, None, :, None]
    parts: list[list[jax.Array]] = [[] for _ in _blocks(static, length)]
    dk, dv = [], []
    for start, stop in _blocks(static, length):
        first = start if static.causal else 0
        queries, outer = (flat(a[..., first:, :]) for a in (q, g))
        keys, values = k[..., start:stop, :], v[..., start:stop, :]
        scores = product(keys, queries, 3, 3) * size**-0.5
        shape = (batch, heads, stop - start, group, length - first)
        at = _along(3, first, length), _along(1, start, stop)
        scores = _hidden(static, at, saved.segments, slopes, scores.reshape(shape))
        weights = jnp.exp(scores - saved.log_sum[:, :, None, :, first:])
        mask = mask_of(saved.thinning, *at, shape, by_keys=True)
        mixed = thinned(product(values, outer, 3, 3).reshape(shape), mask)
        slope = weights * (mixed - along[:, :, None, :, first:]) * size**-0.5
        weights = thinned(weights, mask)
        slope, weights = (a.astype(q.dtype).reshape(*keys.shape[:3], -1) for a in (slope, weights))
        dk.append(product(slope, queries, 3, 2).astype(k.dtype))
        dv.append(product(weights, outer, 3, 2).astype(v.dtype))
        part = product(transposed(keys), slope, 3, 2).reshape(batch, heads, size, group, -1)
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
        None,
    )


_attention.defvjp(_forward, _backward)


def _blocks(static: Static, length: int) -> list[tuple[int, int]]:
    """First row of each block and the row past its last."""
    return [(low, min(low + static.block, length)) for low in range(0, length, static.block)]


def _along(dim: int, start: int, stop: int) -> jax.Array:
    """Positions along one of four dims."""
    return jnp.arange(start, stop).reshape([-1 if i == dim else 1 for i in range(4)])


def _join(parts: list[jax.Array], dim: int) -> jax.Array:
    return parts[0] if len(parts) == 1 else jnp.concatenate(parts, dim)


def _hidden(
    static: Static,
    at: tuple[jax.Array, jax.Array],
    segments: jax.Array | None,
    slopes: jax.Array | None,
    scores: jax.Array,
    masked: jax.Array | float = MASKED,
) -> jax.Array:
    """Scores with ALiBi, and without the keys at these places that these rows may not see."""
    documents = None if segments is None else (segments[:, at[0]], segments[:, at[1]])
    return hidden(scores, *at, documents, slopes, causal=static.causal, masked=masked)


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
