"""Attention of new positions over a cache of keys and values, for generation.

Owns: the masked softmax of a few queries over all that is kept. Does not own: the cache, gradients
(there are none), nor attention within a training batch (`attention`).
"""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from shardtrain.ops.attention_blocks import MASKED
from shardtrain.ops.sums import sum_dtype


def cached_attention(
    q: Float[Array, "batch length kv_heads group head_dim"],
    keys: Float[Array, "batch kept kv_heads head_dim"],
    values: Float[Array, "batch kept kv_heads head_dim"],
    *,
    first: Int[Array, ""],
    alibi: Float[Array, "kv_heads group"] | None = None,
) -> Float[Array, "batch length kv_heads group head_dim"]:
    """Mixes kept values by the softmax of scaled query-key products.

    Args:
        q: queries of consecutive positions; `group` of them share one key/value head.
        keys: one row a position, from 0 on. Rows after a query's own are never seen by it.
        values: likewise.
        first: the position of the first query.
        alibi: slope of each head: scores fall by slope x distance (Press et al. 2021).

    Returns:
        An array of the shape and dtype of `q`; the softmax is held in at least 32 bits.
    """
    wide = sum_dtype(q.dtype)
    scores = jnp.einsum("btngh,bsnh->bngts", q, keys, preferred_element_type=wide)
    scores *= q.shape[-1] ** -0.5
    distance = (first + jnp.arange(q.shape[1], dtype=jnp.int32))[:, None] - jnp.arange(
        keys.shape[1], dtype=jnp.int32
    )[None, :]
    distance = distance[None, None, None]  # [batch, kv_heads, group, length, kept]
    if alibi is not None:
        scores -= alibi.astype(wide)[None, :, :, None, None] * distance.astype(wide)
    scores = jnp.where(distance >= 0, scores, MASKED)
    weights = jnp.exp(scores - scores.max(-1, keepdims=True))
    total = weights.sum(-1)[..., None].transpose(0, 3, 1, 2, 4)
    mixed = jnp.einsum(
        "bngts,bsnh->btngh", weights.astype(q.dtype), values, preferred_element_type=wide
    )
    return (mixed / total).astype(q.dtype)
