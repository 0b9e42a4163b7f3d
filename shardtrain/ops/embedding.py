"""Vocabulary-parallel embedding: each device looks up the rows it holds, as in Megatron-LM.

Written as two maps that are manual over every mesh axis not yet taken, forward and backward, inside
one custom derivative: XLA's partitioner does not handle gathers on sharded operands inside partly
manual regions, and neither map is ever differentiated through.
"""

import math
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int

from shardtrain.ops.sums import sum_dtype
from shardtrain.sharding.rules import Active, current


def embedding(
    table: Float[Array, "vocab embed"],
    tokens: Int[Array, "batch length"],
    *,
    axis: str = "vocab",
) -> Float[Array, "batch length embed"]:
    """Looks tokens up in a table whose rows may be split over devices.

    The gradient of the table leaves one sum a data shard, added up outside: XLA turns that into the
    reduction that the gradient's placement asks for (an all-reduce, or a reduce-scatter).

    Args:
        table: one row a token.
        tokens: row numbers.
        axis: the name of the table's first axis (`position` for a table of positions).

    Returns:
        The rows. Where the residual stream splits its positions over the axes that split the table
        (sequence parallel), they are reduced straight into that split.
    """
    return _embedding(Static(current(), axis, table.shape[0]), table, tokens)


class Static(NamedTuple):
    """What is fixed when the code is traced."""

    active: Active | None
    axis: str
    num_rows: int

    @property
    def plain(self) -> bool:
        """Whether one device holds the table and all tokens."""
        return self.active is None or self.active.alone


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _embedding(static: Static, table: jax.Array, tokens: jax.Array) -> jax.Array:
    active = static.active
    if active is None or static.plain:
        return table[tokens]
    split = active.axes(static.axis)
    residual = active.axes("residual_length")
    scatter = bool(split) and residual == (*active.axes("length"), *split)

    def look_up(table: jax.Array, tokens: jax.Array) -> jax.Array:
        at, hit = _own(tokens, table.shape[0], split)
        rows = jnp.where(hit[..., None], table[at], 0)
        if scatter:
            rows = jax.lax.psum_scatter(rows, split, scatter_dimension=1, tiled=True)
        elif split:
            rows = jax.lax.psum(rows, split)
        return rows

    out: jax.Array = jax.shard_map(
        look_up,
        mesh=active.context_mesh,
        axis_names=active.free,
        in_specs=(active.spec(static.axis, None), active.spec("batch", "length")),
        out_specs=active.spec("batch", "residual_length" if scatter else "length", None),
        check_vma=False,
    )(table, tokens)
    return out


def _forward(static: Static, table: jax.Array, tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
    return _embedding(static, table, tokens), tokens


def _backward(static: Static, tokens: jax.Array, g: jax.Array) -> tuple[jax.Array, None]:
    active = static.active
    if active is None or static.plain:
        return _add_up(g, tokens, static.num_rows, ()).astype(g.dtype), None
    split = active.axes(static.axis)
    num = static.num_rows // math.prod(active.mesh.shape[axis] for axis in split)
    shards = (*active.axes("batch"), *active.axes("length"))
    parts = jax.shard_map(
        lambda g, tokens: _add_up(g, tokens, num, split)[None],
        mesh=active.context_mesh,
        axis_names=active.free,
        in_specs=(active.spec("batch", "length", None), active.spec("batch", "length")),
        out_specs=PartitionSpec(shards or None, *active.spec(static.axis, None)),
        check_vma=False,
    )(g, tokens)
    # In the gradient's dtype, so that no more bytes travel than it has; and as a product, because
    # XLA adds a tied head's gradient to it before it reduces them only if both come from products.
    ones = jnp.ones(parts.shape[0], g.dtype)
    precision = jax.lax.Precision.HIGHEST
    return jnp.einsum("s,sve->ve", ones, parts.astype(g.dtype), precision=precision), None


_embedding.defvjp(_forward, _backward)


def _add_up(g: jax.Array, tokens: jax.Array, num: int, split: tuple[str, ...]) -> jax.Array:
    """Sums of the gradients of each of this device's `num` rows, in at least float32."""
    at, hit = _own(tokens, num, split)
    wide = g.astype(sum_dtype(g.dtype))
    zeros = jnp.zeros((num, g.shape[-1]), wide.dtype)
    return zeros.at[at].add(jnp.where(hit[..., None], wide, 0))


def _own(tokens: jax.Array, num: int, split: tuple[str, ...]) -> tuple[jax.Array, jax.Array]:
    """Local row of each token, and whether this device, which holds `num` rows, has it."""
    first = jax.lax.axis_index(split) * num if split else 0
    at = tokens - first
    hit = (at >= 0) & (at < num)
    return jnp.where(hit, at, 0), hit
