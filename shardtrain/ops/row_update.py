"""Reading, changing and writing back some rows of tables that are split over devices.

Owns: which device does it, and that nothing of a table's size is made besides the table. Does not
own: what the change is (`optim.tables`), nor how a gradient comes to its rows (`ops.tables`).
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from shardtrain.sharding.mesh import mesh_axes
from shardtrain.sharding.placement import split_size
from shardtrain.sharding.row_gradient import RowGradient

PyTree = Any
Total = Callable[[jax.Array], jax.Array]
"""Adds up over the devices that have other columns of the same rows."""
Move = Callable[[jax.Array, PyTree, jax.Array, Total], tuple[jax.Array, PyTree]]
"""(rows, their cells, their gradients, total) -> (rows, cells)."""


def update_rows(
    move: Move,
    place: NamedSharding,
    gradient: RowGradient | jax.Array,
    table: jax.Array,
    cells: PyTree,
) -> tuple[jax.Array, PyTree]:
    """Moves the rows of a table that have a gradient.

    Args:
        move: what becomes of some rows.
        place: where the table rests.
        gradient: of some rows; or of all, for comparisons.
        table: [rows, width].
        cells: a tree of [rows, 1], which rest like the table's rows.

    Returns:
        The table, and its cells.
    """
    over = [mesh_axes(entry) for entry in (*place.spec, None, None)]
    rows_over, width_over = over[0], over[1]
    if not isinstance(gradient, RowGradient):
        gradient = _all_rows(gradient, split_size(place.mesh, rows_over))

    def total(x: jax.Array) -> jax.Array:
        return jax.lax.psum(x, width_over) if width_over else x

    def here(ids: jax.Array, grads: jax.Array, table: jax.Array, cells: PyTree) -> Any:
        at = ids[0]
        kept = jax.tree.map(lambda cell: _take(cell, at), cells)
        rows, kept = move(_take(table, at), kept, grads[0], total)
        return _put(table, at, rows), jax.tree.map(lambda c, n: _put(c, at, n), cells, kept)

    function: Callable[..., tuple[jax.Array, PyTree]] = here
    if rows_over or width_over:
        own = PartitionSpec(rows_over or None)
        grads = PartitionSpec(rows_over or None, None, width_over or None)
        rests = (place.spec, jax.tree.map(lambda _: own, cells))
        function = jax.shard_map(
            here,
            mesh=place.mesh,
            in_specs=(own, grads, *rests),
            out_specs=rests,
            check_vma=False,
        )
    return function(gradient.ids, gradient.rows, table, cells)


def _take(rows: jax.Array, at: jax.Array) -> jax.Array:
    """Rows by their numbers, zero for what stands for none."""
    taken: jax.Array = rows.at[at].get(
        mode="fill", fill_value=0, unique_indices=True, indices_are_sorted=True
    )
    return taken


def _put(rows: jax.Array, at: jax.Array, new: jax.Array) -> jax.Array:
    """Rows written back; what stands for none is left out."""
    put: jax.Array = rows.at[at].set(new, mode="drop", unique_indices=True, indices_are_sorted=True)
    return put


def _all_rows(grads: jax.Array, blocks: int) -> RowGradient:
    """A whole gradient as one of rows."""
    rows = grads.reshape(blocks, -1, grads.shape[-1])
    ids = jnp.broadcast_to(jnp.arange(rows.shape[1], dtype=jnp.int32), rows.shape[:2])
    return RowGradient(ids, rows)
