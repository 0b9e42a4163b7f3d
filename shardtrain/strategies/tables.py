"""Gradients where some parameters are large tables: of the rows that were looked up, not of them.

Owns: the order of looking up, differentiating and bringing home. Does not own: the exchange of rows
(`ops.tables`), the tables' update (`optim.tables`).

A table is left out of what is differentiated, and the rows that a microbatch reads are put in its
place. So no array of a table's size is made by a backward pass. Microbatches come one after another
and each is seen whole, as by the loss with negatives from its own batch; their gradients of all
other parameters are added up, and those of rows are kept side by side and summed once, by id.
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from shardtrain.sharding.frozen import joined
from shardtrain.sharding.placement import Placement, constrain_tree
from shardtrain.sharding.row_gradient import apart, table_paths, together_again
from shardtrain.strategies.accumulate import Accumulation
from shardtrain.strategies.order import LayerOrder
from shardtrain.strategies.parts import Evaluation, Gradients, Parts, Sums
from shardtrain.strategies.precision import Policy
from shardtrain.strategies.stack import make_stack

PyTree = Any


@dataclass(frozen=True, eq=False)
class TableAccumulation:
    """Runs microbatches one after another, with gradients of rows (a `Runner`)."""

    microbatches: int = 1
    """Parts of a step's batch."""
    order: LayerOrder = LayerOrder()  # noqa: RUF009  # frozen
    """As the model is."""

    @property
    def sums_gradients(self) -> bool:
        """Whether there are several microbatches."""
        return self.microbatches > 1

    def gradients(self, parts: Parts, placement: Placement, dtypes: Policy) -> Gradients:
        """The gradient function of a whole step; see `Runner`."""
        lookup, paths = parts.lookup, table_paths(placement.names)
        assert lookup is not None
        places = apart(placement.gradients, paths)[0]
        at_end = apart(placement.optimizer, paths)[0]
        stack = make_stack()

        def loss(
            others: PyTree, rows: dict[str, jax.Array], batch: PyTree, shared: PyTree
        ) -> tuple[jax.Array, Sums]:
            seeds, key, variables, frozen = shared
            params = joined(together_again(others, rows), frozen)
            sums = parts.sums(params, None, variables, batch, key, stack)
            value = parts.value(sums, seeds)
            return value, {**sums, "loss": value}

        def gradients(
            params: PyTree, inputs: PyTree, batch: PyTree, shared: PyTree
        ) -> tuple[Sums, PyTree, PyTree]:
            others, tables = apart(params, paths)

            def microbatch(total: PyTree, part: PyTree) -> tuple[PyTree, PyTree]:
                ids = lookup.ids(part)
                rows = lookup.rows(tables, ids)
                (own, of_rows), sums = jax.grad(loss, argnums=(0, 1), has_aux=True)(
                    others, rows, part, shared
                )
                total = jax.tree.map(lambda t, g: t + g.astype(t.dtype), total, own)
                return constrain_tree(total, places), (sums, ids, of_rows)

            zeros = jax.tree.map(lambda p: jnp.zeros(p.shape, dtypes.accumulate), others)
            total, (sums, ids, of_rows) = jax.lax.scan(
                microbatch, constrain_tree(zeros, places), batch
            )
            whole = together_again(constrain_tree(total, at_end), lookup.gradients(ids, of_rows))
            return jax.tree.map(lambda s: s.sum(0), sums), whole, inputs

        return gradients

    def evaluation(self, parts: Parts, placement: Placement) -> Evaluation:
        """Sums over all microbatches; see `Runner`."""
        return Accumulation(microbatches=self.microbatches).evaluation(parts, placement)
