"""State that a step's forward and backward hand on and no optimizer moves: fp8's largest entries.

Owns: what of it is in `TrainState.model_state`, what a step reads of it, and what comes after. Does
not own: how a step finds what it hands on (`ops.fp8`).

A step reads `inputs`, and the gradient function returns what was seen in their place: the largest
over microbatches and data shards.
"""

from dataclasses import dataclass
from typing import Any, Final, Protocol

import jax
import jax.numpy as jnp

PyTree = Any
FP8: Final = "fp8"
"""Its key in `TrainState.model_state`."""
HISTORY: Final = 16
"""Steps whose largest entries are kept. With more, scales follow more slowly (Transformer Engine
keeps up to 1,024); what overflows meanwhile is cut off."""
TENSORS: Final = 3
"""Of a product: activation, weight, gradient."""


class ModelState(Protocol):
    """What a step hands on besides parameters."""

    def init(self) -> PyTree:
        """What of it is in the state at first."""
        ...

    def inputs(self, state: PyTree) -> PyTree:
        """What the next step reads."""
        ...

    def after(self, state: PyTree, seen: PyTree, moved: jax.Array) -> PyTree:
        """The state after a step.

        Args:
            state: before it.
            seen: what the gradient function returns for `inputs`.
            moved: whether the step has moved anything.
        """
        ...


@dataclass(frozen=True)
class Stateless:
    """Nothing is handed on."""

    def init(self) -> PyTree:
        """Nothing."""
        return ()

    def inputs(self, state: PyTree) -> PyTree:
        """Nothing."""
        del state
        return ()

    def after(self, state: PyTree, seen: PyTree, moved: jax.Array) -> PyTree:
        """Nothing."""
        del state, seen, moved
        return ()


@dataclass(frozen=True)
class LargestEntries:
    """The largest entries of every product's tensors in the last steps, newest first.

    [layers, products of a layer, `TENSORS`, `HISTORY`], the layers as the model has them; zero
    where nothing was seen yet.
    """

    num_layers: int
    num_products: int
    """Of a layer with weights, in the order in which it makes them."""

    def init(self) -> PyTree:
        """Nothing was seen."""
        return {FP8: jnp.zeros((self.num_layers, self.num_products, TENSORS, HISTORY), jnp.float32)}

    def inputs(self, state: PyTree) -> PyTree:
        """The largest of the last steps, [layers, products, `TENSORS`]."""
        return jnp.max(state[FP8], -1)

    def after(self, state: PyTree, seen: PyTree, moved: jax.Array) -> PyTree:
        """The history moves on by one step, if that moved anything."""
        old = state[FP8]
        new = jnp.concatenate([seen[..., None], old[..., :-1]], -1)
        return {FP8: jnp.where(moved, new, old)}
