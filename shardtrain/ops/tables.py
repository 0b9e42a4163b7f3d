"""Embedding tables that are split over devices: looking rows up, and bringing gradients home.

Owns: the exchange, for each way in which a table may be split. Does not own: which tables are split
in which way (`models.table_layout`) and what an optimizer does with a gradient (`optim.tables`).

`ids` are rows of the whole table, each device holding those of its own samples; -1 looks nothing up
and its row is zero. All shapes are static, and every exchange is exact, so that no id is ever
dropped however unevenly ids fall. With n devices of b samples each, a device sends

- tables, whole: ids to their owners and rows back, (n - 1) / n x b rows of each field;
- columns: all ids to everybody, then each device its columns of every row: the same bytes of rows;
- rows: all ids to everybody, then the sum over devices of rows of which one holds each: (n - 1) x b
  rows. An all-to-all with room for every id at every owner sends as much, after a sort.

Left to itself, XLA sums the rows of the whole batch over all devices, on all of them, where a table
is split by rows; so these are maps that are manual over all mesh axes (docs/decisions.md).
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int

from shardtrain.sharding.row_gradient import RowGradient
from shardtrain.sharding.rules import current

Axes = tuple[str, ...]


def look_up(
    table: Float[Array, "rows embed"], ids: Int[Array, "batch fields"], *, split: str
) -> Float[Array, "batch fields embed"]:
    """Rows of a table.

    Args:
        table: all of it.
        ids: rows; with `split="tables"` in as many equal parts, one after another, as the table has
            blocks, and each in its own block.
        split: "rows", "tables" or "columns"; what the table may be split by.
    """
    axes = _axes()
    here = _LOOK_UP[split]
    if not axes:
        alone: jax.Array = here(table, ids, axes)
        return alone
    columns = split == "columns"
    rows: jax.Array = _mapped(
        lambda table, ids: here(table, ids, axes),
        (_table_spec(axes, columns=columns), PartitionSpec(axes)),
        PartitionSpec(axes),
    )(table, ids)
    return rows


def bring_home(
    ids: Int[Array, "microbatch batch fields"],
    grads: Float[Array, "microbatch batch fields embed"],
    *,
    num_rows: int,
    split: str,
) -> RowGradient:
    """The gradient of a table, of those of the rows that were looked up.

    Args:
        ids: as for `look_up`, of all microbatches of a step.
        grads: one for each.
        num_rows: of the table.
        split: as for `look_up`.

    Returns:
        Where the table's parts are; an id that occurs more than once has the sum.
    """
    axes = _axes()
    flat = _HOME[split]

    def home(ids: jax.Array, grads: jax.Array) -> RowGradient:
        ids = ids.reshape(-1, ids.shape[-1])
        grads = grads.reshape(*ids.shape, -1)
        ids, grads = flat(ids, grads, axes)
        blocks = 1 if split == "columns" else _degree(axes)
        size = num_rows // blocks
        first = jax.lax.axis_index(axes) * size if axes and split != "columns" else 0
        at, hit = _own(ids.reshape(-1), first, size)
        own = jnp.where(hit[:, None], grads.reshape(at.shape[0], -1), 0)
        each, rows = summed(jnp.where(hit, at, size), own, size)
        return RowGradient(each[None], rows[None])

    if not axes:
        return home(ids, grads)
    if split == "columns":
        spec = RowGradient(PartitionSpec(), PartitionSpec(None, None, axes))  # type: ignore[arg-type]
    else:
        spec = RowGradient(PartitionSpec(axes), PartitionSpec(axes))  # type: ignore[arg-type]
    batch = PartitionSpec(None, axes)
    found: RowGradient = _mapped(home, (batch, batch), spec)(ids, grads)
    return found


def summed(
    ids: Int[Array, " number"], rows: Float[Array, "number embed"], none: int
) -> tuple[Int[Array, " number"], Float[Array, "number embed"]]:
    """Each id once, in rising order, with the sum of its rows.

    Args:
        ids: below `none`; what is `none` stands for nothing, and its rows are zero.
        rows: one for each.
        none: more than any id.

    Returns:
        As many as there were; those that are left over are different numbers from `none` on, for
        which 32 bits must have room.

    Example:
        >>> ids, rows = summed(jnp.array([4, 2, 4]), jnp.array([[1.0], [2.0], [3.0]]), 9)
        >>> ids.tolist(), rows.tolist()
        ([2, 4, 11], [[2.0], [4.0], [0.0]])
    """
    number = ids.shape[0]
    order = jnp.argsort(ids, stable=True)
    ids = ids[order]
    begins = jnp.concatenate([jnp.ones(1, bool), ids[1:] != ids[:-1]])
    place = jnp.cumsum(begins, dtype=jnp.int32) - 1
    sums = jax.ops.segment_sum(rows[order], place, number, indices_are_sorted=True)
    each = jnp.full(number, none, ids.dtype).at[place].set(ids)
    spare = none + jnp.arange(number, dtype=ids.dtype)
    return jnp.where(each < none, each, spare), sums


# -- one device's part


def _rows_here(table: jax.Array, ids: jax.Array, first: Any) -> jax.Array:
    """The rows that this device holds, zero for others."""
    at, hit = _own(ids, first, table.shape[0])
    rows = table.at[at].get(mode="promise_in_bounds")
    return jnp.where(hit[..., None], rows, 0)


def _own(ids: jax.Array, first: Any, size: int) -> tuple[jax.Array, jax.Array]:
    """Place of each id in a block of the table, and whether it is there."""
    at = ids - first
    hit = (at >= 0) & (at < size)
    return jnp.where(hit, at, 0), hit


def _first(table: jax.Array, axes: Axes) -> Any:
    return jax.lax.axis_index(axes) * table.shape[0] if axes else 0


def _by_rows(table: jax.Array, ids: jax.Array, axes: Axes) -> jax.Array:
    rows = _rows_here(table, _everywhere(ids, axes), _first(table, axes))
    if not axes:
        return rows
    own: jax.Array = jax.lax.psum_scatter(rows, axes, scatter_dimension=0, tiled=True)
    return own


def _by_tables(table: jax.Array, ids: jax.Array, axes: Axes) -> jax.Array:
    ids = _exchanged(ids, axes, 1, 0)
    return _exchanged(_rows_here(table, ids, _first(table, axes)), axes, 0, 1)


def _by_columns(table: jax.Array, ids: jax.Array, axes: Axes) -> jax.Array:
    return _exchanged(_rows_here(table, _everywhere(ids, axes), 0), axes, 0, 2)


def _home_by_rows(ids: jax.Array, grads: jax.Array, axes: Axes) -> tuple[jax.Array, jax.Array]:
    return _everywhere(ids, axes), _everywhere(grads, axes)


def _home_by_tables(ids: jax.Array, grads: jax.Array, axes: Axes) -> tuple[jax.Array, jax.Array]:
    return _exchanged(ids, axes, 1, 0), _exchanged(grads, axes, 1, 0)


def _home_by_columns(ids: jax.Array, grads: jax.Array, axes: Axes) -> tuple[jax.Array, jax.Array]:
    return _everywhere(ids, axes), _exchanged(grads, axes, 2, 0)


_LOOK_UP = {"rows": _by_rows, "tables": _by_tables, "columns": _by_columns}
_HOME = {"rows": _home_by_rows, "tables": _home_by_tables, "columns": _home_by_columns}


def _everywhere(x: jax.Array, axes: Axes) -> jax.Array:
    return jax.lax.all_gather(x, axes, axis=0, tiled=True) if axes else x


def _exchanged(x: jax.Array, axes: Axes, cut: int, join: int) -> jax.Array:
    """Each device gets its piece along one dim of everybody's, joined along another."""
    if not axes:
        return x
    got: jax.Array = jax.lax.all_to_all(x, axes, split_axis=cut, concat_axis=join, tiled=True)
    return got


# -- the mesh


def _axes() -> Axes:
    """Mesh axes that samples and tables are split over."""
    active = current()
    return () if active is None else active.axes("batch")


def _degree(axes: Axes) -> int:
    active = current()
    size = 1
    for axis in axes:
        assert active is not None
        size *= active.mesh.shape[axis]
    return size


def _table_spec(axes: Axes, *, columns: bool) -> PartitionSpec:
    return PartitionSpec(None, axes) if columns else PartitionSpec(axes)


def _mapped(function: Callable[..., Any], inputs: Any, outputs: Any) -> Callable[..., Any]:
    active = current()
    assert active is not None
    mapped: Callable[..., Any] = jax.shard_map(
        function,
        mesh=active.context_mesh,
        axis_names=active.free,
        in_specs=inputs,
        out_specs=outputs,
        check_vma=False,
    )
    return mapped
