"""The update of large tables: the rows that a batch has used, and nothing else.

Owns: the row optimizers, and the sweep that updates tables beside all other parameters. Does not
own: where a gradient's rows are from (`ops.tables`). No array of a table's size is made: rows are
read, changed and written back in place.
"""

from dataclasses import dataclass
from typing import Any, Final, Protocol

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding, PartitionSpec

from shardtrain.optim.sweep import Advance, MakeTransform, Numbers, Sweep, Whole
from shardtrain.sharding.placement import Placement, leaves_by_path, mesh_axes
from shardtrain.sharding.row_gradient import (
    RowGradient,
    apart,
    table_paths,
    together_again,
)

PyTree = Any
TABLES: Final = "tables"
"""The part of the transformation's state that belongs to tables, in a tree like theirs."""
OTHERS: Final = "others"


class RowRule(Protocol):
    """How rows move."""

    @property
    def rate(self) -> float:
        """What the learning rate is multiplied by."""
        ...

    def init(self, table: jax.Array) -> PyTree:
        """What is kept for each row, [rows, 1]; `()` where there is nothing."""
        ...

    def step(self, cells: PyTree, grads: jax.Array, squares: jax.Array) -> tuple[PyTree, jax.Array]:
        """New cells, and the direction.

        Args:
            cells: of these rows [number, 1].
            grads: [number, width of this device's part].
            squares: means of the squares of a row's gradient over its whole width [number, 1].
        """
        ...


@dataclass(frozen=True)
class RowAdagrad:
    """One sum of squares for each row, of the mean over its width.

    Mudigere et al. 2021 (arXiv 2104.05158), section 4.1; FBGEMM's exact row-wise Adagrad.
    """

    rate: float = 1.0
    epsilon: float = 1e-8

    def init(self, table: jax.Array) -> jax.Array:
        """Zeros."""
        return jnp.zeros((table.shape[0], 1), table.dtype)

    def step(
        self, cells: jax.Array, grads: jax.Array, squares: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """See `RowRule.step`."""
        cells = cells + squares
        return cells, grads / (jnp.sqrt(cells) + jnp.asarray(self.epsilon, cells.dtype))


@dataclass(frozen=True)
class RowSgd:
    """Rows go against their gradient."""

    rate: float = 1.0

    def init(self, table: jax.Array) -> tuple[()]:
        """Nothing."""
        del table
        return ()

    def step(self, cells: PyTree, grads: jax.Array, squares: jax.Array) -> tuple[PyTree, jax.Array]:
        """See `RowRule.step`."""
        del squares
        return cells, grads


def make_sweep(make: MakeTransform, placement: Placement, rule: RowRule) -> Sweep:
    """The sweep for parameters on the device, some of which may be tables.

    Args:
        make: names of axes -> transformation, for all that is no table.
        placement: of the parameters.
        rule: for tables.
    """
    paths = table_paths(placement.names)
    if not paths:
        return Whole(make(placement.names))
    others, _ = apart(placement.names, paths)
    return WithTables(make(others), placement, paths, rule)


@dataclass(frozen=True, eq=False)
class WithTables:
    """All leaves at once, and tables row by row."""

    transform: optax.GradientTransformation
    placement: Placement
    paths: frozenset[str]
    rule: RowRule
    on_device: bool = True

    def init(self, master: PyTree) -> PyTree:
        """The state of both."""
        others, tables = apart(master, self.paths)
        cells = {path: self.rule.init(table) for path, table in tables.items()}
        return {OTHERS: self.transform.init(others), TABLES: together_again({}, cells)}

    def __call__(
        self, advance: Advance, numbers: Numbers, grads: PyTree, state: PyTree, params: PyTree
    ) -> tuple[PyTree, PyTree]:
        """Updates every leaf; see `Sweep`."""
        others, tables = apart(params, self.paths)
        other_grads, found = apart(grads, self.paths)
        old = state["transform"]
        old_cells = apart(old[TABLES], self.paths)[1]
        others, after = advance(
            self.transform, numbers, other_grads, {"transform": old[OTHERS]}, others, None
        )
        places = dict(leaves_by_path(self.placement.optimizer))
        cells: dict[str, PyTree] = {}
        for path in tables:
            tables[path], cells[path] = update_table(
                self.rule, numbers, places[path], found[path], tables[path], old_cells[path]
            )
        transform = {OTHERS: after["transform"], TABLES: together_again({}, cells)}
        return together_again(others, tables), {"transform": transform}


def update_table(
    rule: RowRule,
    numbers: Numbers,
    place: NamedSharding,
    gradient: RowGradient | jax.Array,
    table: jax.Array,
    cells: PyTree,
) -> tuple[jax.Array, PyTree]:
    """Moves the rows of a table that have a gradient.

    Args:
        rule: how.
        numbers: what gradients are multiplied by, the learning rate, and whether anything moves.
        place: where the table rests.
        gradient: of some rows; or of all, for comparisons.
        table: [rows, width].
        cells: from `RowRule.init`.

    Returns:
        The table, and its cells.
    """
    factor, rate, moved = numbers
    rows_over, width_over = (mesh_axes(entry) for entry in (*place.spec, None, None)[: table.ndim])
    if not isinstance(gradient, RowGradient):
        gradient = _all_rows(gradient, place, rows_over)
    width = table.shape[1]

    def move(ids: jax.Array, rows: jax.Array, table: jax.Array, cells: PyTree) -> Any:
        at, grads = ids[0], rows[0] * jnp.asarray(factor, rows.dtype)
        squares = jnp.sum(jnp.square(grads), -1, keepdims=True)
        if width_over:
            squares = jax.lax.psum(squares, width_over)
        old = _take(table, at)
        kept = jax.tree.map(lambda cell: _take(cell, at), cells)
        new, direction = rule.step(kept, grads, squares / width)
        step = rate.astype(old.dtype) * jnp.asarray(rule.rate, old.dtype)
        # Chosen and not multiplied: zero times infinity is no number.
        after = jnp.where(moved, old - step * direction, old)
        new = jax.tree.map(lambda fresh, was: jnp.where(moved, fresh, was), new, kept)
        return _put(table, at, after), jax.tree.map(lambda c, n: _put(c, at, n), cells, new)

    arguments = (gradient.ids, gradient.rows, table, cells)
    moved_on: tuple[jax.Array, PyTree]
    if not (rows_over or width_over):
        moved_on = move(*arguments)
        return moved_on
    here = PartitionSpec(rows_over or None)
    specs = (
        here,
        PartitionSpec(rows_over or None, None, width_over or None),
        place.spec,
        jax.tree.map(lambda _: here, cells),
    )
    mapped = jax.shard_map(
        move, mesh=place.mesh, in_specs=specs, out_specs=specs[2:], check_vma=False
    )
    moved_on = mapped(*arguments)
    return moved_on


def _take(rows: jax.Array, at: jax.Array) -> jax.Array:
    taken: jax.Array = rows.at[at].get(
        mode="fill", fill_value=0, unique_indices=True, indices_are_sorted=True
    )
    return taken


def _put(rows: jax.Array, at: jax.Array, new: jax.Array) -> jax.Array:
    """Rows written back; what stands for none is left out."""
    put: jax.Array = rows.at[at].set(new, mode="drop", unique_indices=True, indices_are_sorted=True)
    return put


def _all_rows(grads: jax.Array, place: NamedSharding, rows_over: tuple[str, ...]) -> RowGradient:
    """A whole gradient as one of rows."""
    blocks = 1
    for axis in rows_over:
        blocks *= place.mesh.shape[axis]
    rows = grads.reshape(blocks, -1, grads.shape[-1])
    ids = jnp.broadcast_to(jnp.arange(rows.shape[1], dtype=jnp.int32), rows.shape[:2])
    return RowGradient(ids, rows)
