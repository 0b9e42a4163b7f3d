"""A model's loss as plain functions of arrays: whole, and cut at its layers.

Owns: the contract between a workload and what runs a batch through it (`Runner`): accumulation, or
the pipeline, which needs the loss cut open. Does not own: any of the functions.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import jax

from shardtrain.sharding.placement import Placement
from shardtrain.strategies.order import LayerOrder
from shardtrain.strategies.stack import Stack

PyTree = Any
Sums = dict[str, jax.Array]
Gradients = Callable[[PyTree, PyTree, PyTree], tuple[Sums, PyTree]]
"""(params, batch, (seeds, key, frozen)) -> (sums with the `loss`, gradients); for a whole step.

`params` are those that are trained, `frozen` the others; a `Parts` takes both as one tree."""

LAYERS = "layers"
"""Where the tree of parameters holds the stacked layers."""


@dataclass(frozen=True, eq=False)
class Cut:
    """The loss between whose pieces a pipeline sends: `head(layer(... layer(embed)))`."""

    context: Callable[[PyTree, PyTree, jax.Array | None], PyTree]
    """(params, batch, key) -> arrays that every layer reads; of parameters only the config."""
    embed: Callable[[PyTree, PyTree, PyTree], jax.Array]
    """(params, batch, context) -> the first layer's input."""
    layer: Callable[[PyTree, jax.Array, jax.Array, PyTree], jax.Array]
    """(one layer's parameters, its index in the model, x, context) -> x."""
    head: Callable[[PyTree, jax.Array, PyTree], Sums]
    """(params, x, batch) -> sums."""


@dataclass(frozen=True, eq=False)
class Parts:
    """A workload's loss over a microbatch."""

    sums: Callable[[PyTree, PyTree, jax.Array | None, Stack], Sums]
    """(params, batch, key, stack) -> the sum of each term."""
    value: Callable[[Sums, PyTree], jax.Array]
    """(sums, seeds: total weights and loss scale) -> what they add to the scaled loss."""
    cut: Cut | None
    """None where the model is no stack of equal layers."""


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

    def gradients(self, parts: Parts, placement: Placement, dtype: Any) -> Gradients:
        """The gradient function of a whole step.

        Args:
            parts: the loss.
            placement: where everything rests.
            dtype: what gradients of several microbatches are added up in.
        """
        ...

    def evaluation(self, parts: Parts, placement: Placement) -> Callable[[PyTree, PyTree], Sums]:
        """(all parameters, batch) -> sums over all microbatches, without dropout."""
        ...
