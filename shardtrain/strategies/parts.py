"""A model's loss as plain functions of arrays: whole, and cut at its layers.

Owns: the contract between a workload and what runs a batch through it (`Runner`): accumulation, or
the pipeline, which needs the loss cut open. Does not own: any of the functions.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import jax

from shardtrain.sharding.placement import Placement
from shardtrain.sharding.row_gradient import RowGradient
from shardtrain.strategies.order import LayerOrder
from shardtrain.strategies.precision import Policy
from shardtrain.strategies.stack import Stack

PyTree = Any
Sums = dict[str, PyTree]
Gradients = Callable[[PyTree, PyTree, PyTree, PyTree], tuple[Sums, PyTree, PyTree]]
"""(params, inputs, batch, (seeds, key, variables, frozen)) -> (sums with the `loss`, gradients,
what was seen); for a whole step.

`params` are those that are trained, `frozen` the others; a `Parts` takes both as one tree. `inputs`
are those of a `ModelState`."""

Evaluation = Callable[[PyTree, PyTree, PyTree], Sums]
"""(params, variables, batch) -> sums over a batch's microbatches."""

OBSERVED = "observed"
"""Beside the sums of the terms: what the model has seen for its variables, to be added up too."""


EARLIER = "earlier"
"""Beside the parameters of a layer: its row of a `ModelState`'s inputs, where there are any."""


@dataclass(frozen=True, eq=False)
class Cut:
    """The loss between whose pieces a pipeline sends: `head(layer(... layer(embed)))`."""

    context: Callable[[PyTree, PyTree, jax.Array | None], PyTree]
    """(params, batch, key) -> arrays that every layer reads; of parameters only the config."""
    embed: Callable[[PyTree, PyTree, PyTree], jax.Array]
    """(params, batch, context) -> the first layer's input."""
    layer: Callable[[PyTree, jax.Array, jax.Array, PyTree], jax.Array]
    """(one layer's parameters, perhaps with `EARLIER`, its index in the model, x, context) -> x."""
    head: Callable[[PyTree, jax.Array, PyTree], Sums]
    """(params, x, batch) -> sums."""


GATHERED = "gathered"
"""Beside the sums of the terms, in evaluation: arrays with an entry for each sample."""


@dataclass(frozen=True, eq=False)
class Lookup:
    """The loss before whose embedding tables it is cut: it reads rows that were looked up."""

    ids: Callable[[PyTree], dict[str, jax.Array]]
    """A microbatch -> of each table, by path, the rows that it reads."""
    rows: Callable[[dict[str, jax.Array], dict[str, jax.Array]], dict[str, jax.Array]]
    """(tables, ids) -> rows. `Parts.sums` takes them in place of the tables."""
    gradients: Callable[[dict[str, jax.Array], dict[str, jax.Array]], dict[str, RowGradient]]
    """(ids, gradients of rows) of all microbatches -> the gradient of each table."""


@dataclass(frozen=True, eq=False)
class Parts:
    """A workload's loss over a microbatch."""

    sums: Callable[[PyTree, PyTree, PyTree, PyTree, jax.Array | None, Stack], Sums]
    """(params, inputs, variables, batch, key, stack) -> the sum of each term, and with a key
    `OBSERVED`; `inputs` None = as there is no state to read, when evaluating."""
    value: Callable[[Sums, PyTree], jax.Array]
    """(sums, seeds: total weights and loss scale) -> what they add to the scaled loss."""
    cut: Cut | None
    """None where the model is no stack of equal layers."""
    lookup: Lookup | None = None
    """None where the model has no large tables."""


class Runner(Protocol):
    """How a step's microbatches go through the layers: one after another, or in a pipeline."""

    @property
    def order(self) -> LayerOrder:
        """Where each layer rests in the stack."""
        ...

    @property
    def microbatches(self) -> int:
        """Parts of a step's batch."""
        ...

    @property
    def sums_gradients(self) -> bool:
        """Whether a step's gradient is added up of several, in the dtype for that."""
        ...

    def gradients(self, parts: Parts, placement: Placement, dtypes: Policy) -> Gradients:
        """The gradient function of a whole step.

        Args:
            parts: the loss.
            placement: where everything rests.
            dtypes: what gradients of several microbatches are added up in, and what they cross the
                network in.
        """
        ...

    def evaluation(self, parts: Parts, placement: Placement) -> Evaluation:
        """Sums over all microbatches, of all parameters, without dropout."""
        ...
