"""One block of attention: some queries and some keys; their scores, softmax and gradients.

Owns: the arithmetic that every way of cutting attention into blocks shares. Does not own: which
blocks there are, and where queries and keys lie.

Operands have their heads first: queries [batch, kv_heads, group, rows, head_dim], keys and values
[batch, kv_heads, keys, head_dim]. Sums are held in at least 32 bits.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from shardtrain.ops.dropout import Mask, thinned
from shardtrain.ops.sums import sum_dtype

MASKED = -1e30
"""Score of a key that a query may not see: finite, so that no difference of scores is NaN."""


def heads_first(x: jax.Array) -> jax.Array:
    """[batch, length, *heads, head_dim] -> [batch, *heads, length, head_dim]."""
    return jnp.moveaxis(x, 1, -2)


def flat(x: jax.Array) -> jax.Array:
    """[batch, kv_heads, group, rows, head_dim] -> [batch, kv_heads, group x rows, head_dim]."""
    return x.reshape(*x.shape[:2], -1, x.shape[-1])


def product(x: jax.Array, y: jax.Array, over_x: int, over_y: int) -> jax.Array:
    """The product for each batch row and key/value head, in at least 32 bits."""
    wide = sum_dtype(x.dtype)
    out: jax.Array = lax.dot_general(
        x, y, (((over_x,), (over_y,)), ((0, 1), (0, 1))), preferred_element_type=wide
    )
    return out


def row_products(x: jax.Array, y: jax.Array, *, by_product: bool) -> jax.Array:
    """Sums of x * y over head_dim.

    Args:
        x: [batch, length, kv_heads, group, head_dim].
        y: likewise.
        by_product: whether to phrase the sum as a product with ones: XLA:CPU spends 0.2 us on each
            short row of a sum.

    Returns:
        [batch, kv_heads, group, length].
    """
    wide = sum_dtype(x.dtype)
    both = x.astype(wide) * y.astype(wide)
    if not by_product:
        return both.sum(-1).transpose(0, 2, 3, 1)
    ones = jnp.ones((x.shape[-1], 2), wide)
    return (both @ ones)[..., 0].transpose(0, 2, 3, 1)


def hidden(
    scores: jax.Array,
    rows: jax.Array,
    keys: jax.Array,
    documents: tuple[jax.Array, jax.Array] | None,
    slopes: jax.Array | None,
    *,
    causal: bool,
    masked: jax.Array | float = MASKED,
) -> jax.Array:
    """Applies ALiBi to scores and hides the keys that a row may not see.

    Args:
        scores: [batch, kv_heads, group, rows, keys] or [batch, kv_heads, keys, group, rows].
        rows: places in the sequence, with the dims of `scores` after `batch`.
        keys: likewise.
        documents: those of the rows and of the keys, with the dims of `scores`.
        slopes: with the dims of `scores` after `batch`.
        causal: whether a row sees only keys at its own place and before.
        masked: score of what is hidden.
    """
    if slopes is not None:
        bias = slopes.astype(scores.dtype) * jnp.abs(rows - keys).astype(scores.dtype)
        scores -= jnp.broadcast_to(bias, scores.shape)
    if causal:
        scores = jnp.where(jnp.broadcast_to(rows >= keys, scores.shape), scores, masked)
    if documents is not None:
        same = documents[0] == documents[1]
        scores = jnp.where(jnp.broadcast_to(same, scores.shape), scores, masked)
    return scores


def softmax(
    scores: jax.Array, values: jax.Array, mask: Mask | None = None
) -> tuple[jax.Array, jax.Array]:
    """Mixes values by the softmax of whole rows.

    Args:
        scores: [batch, kv_heads, group, rows, keys].
        values: [batch, kv_heads, keys, head_dim].
        mask: what dropout leaves of the weights, with the dims of `scores`.

    Returns:
        The mixed values [batch, kv_heads, group, rows, head_dim], in the dtype of the scores, and
        the log of each row's sum of exponentials.
    """
    peak = scores.max(-1, keepdims=True)
    weights = jnp.exp(scores - peak).astype(values.dtype)
    total = weights.astype(scores.dtype).sum(-1, keepdims=True)
    weights = thinned(weights, mask)
    return product(weights, values, 4, 2) / total, (peak + jnp.log(total))[..., 0]


def row_gradients(
    q: jax.Array,
    g: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    log_sum: jax.Array,
    along: jax.Array,
    hide: Callable[[jax.Array], jax.Array],
    mask: Mask | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """What some rows and some keys contribute to the gradients of both.

    Args:
        q: queries.
        g: the gradient of what they got.
        keys: some of their keys.
        values: likewise.
        log_sum: of all keys that the rows see, from the forward pass: [batch, kv_heads, group,
            rows].
        along: sums over head_dim of `g` times what the rows got; likewise.
        hide: applied to the scores, as in the forward pass.
        mask: what dropout leaves, as in the forward pass.

    Returns:
        Gradients of queries, keys and values, in at least 32 bits.
    """
    shape = (*q.shape[:4], keys.shape[2])
    queries, outer, scale = flat(q), flat(g), q.shape[-1] ** -0.5
    scores = hide((product(queries, keys, 3, 3) * scale).reshape(shape))
    weights = jnp.exp(scores - log_sum[..., None])
    mixed = thinned(product(outer, values, 3, 3).reshape(shape), mask)
    slope = weights * (mixed - along[..., None]) * scale
    weights = thinned(weights, mask)
    slope, weights = (flat(a.astype(q.dtype)) for a in (slope, weights))
    dq = product(slope, keys, 3, 2).reshape(q.shape)
    return dq, product(slope, queries, 2, 2), product(weights, outer, 2, 2)
