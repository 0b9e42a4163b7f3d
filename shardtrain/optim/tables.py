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

from shardtrain.ops.row_update import Move, Total, update_rows
from shardtrain.optim.sweep import Advance, First, MakeTransform, Numbers, Sweep, Whole
from shardtrain.sharding.placement import Placement, leaves_by_path
from shardtrain.sharding.row_gradient import (
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

    def first(self, make: First, master: PyTree) -> PyTree:
        """The state before the first update; see `Sweep`."""
        return make(self.init, master)

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
            move = self._move(numbers, tables[path].shape[-1])
            tables[path], cells[path] = update_rows(
                move, places[path], found[path], tables[path], old_cells[path]
            )
        transform = {OTHERS: after["transform"], TABLES: together_again({}, cells)}
        return together_again(others, tables), {"transform": transform}

    def _move(self, numbers: Numbers, width: int) -> Move:
        """The arithmetic for some rows of a table of that width."""
        factor, rate, moved = numbers

        def move(
            old: jax.Array, cells: PyTree, grads: jax.Array, total: Total
        ) -> tuple[jax.Array, PyTree]:
            grads = grads * jnp.asarray(factor, grads.dtype)
            squares = total(jnp.sum(jnp.square(grads), -1, keepdims=True)) / width
            new, direction = self.rule.step(cells, grads, squares)
            step = rate.astype(old.dtype) * jnp.asarray(self.rule.rate, old.dtype)
            # Chosen and not multiplied: zero times infinity is no number.
            rows = jnp.where(moved, old - step * direction, old)
            return rows, jax.tree.map(lambda now, was: jnp.where(moved, now, was), new, cells)

        return move
