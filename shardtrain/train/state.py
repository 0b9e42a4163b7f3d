"""The state of a run: all that a step reads and writes, and all that a checkpoint holds."""

from dataclasses import dataclass, replace
from typing import Any

import jax

from shardtrain.sharding.frozen import joined
from shardtrain.sharding.placement import Placement

PyTree = Any


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TrainState:
    """What a step maps to its successor."""

    step: jax.Array
    """Updates done."""
    cursor: jax.Array
    """The next batch."""
    params: PyTree
    """Parameters, in the compute dtype."""
    opt_state: PyTree
    """The transformation's state and, in mixed precision, the master weights."""
    key: jax.Array
    """The run's random key; each step folds its number in."""
    skipped: jax.Array
    """Batches in a row whose loss or gradient was no number; nothing but the cursor moved."""
    loss_scale: PyTree = ()
    """The loss scale and its counts; nothing where the loss is not scaled."""
    model_state: PyTree = ()
    """What is kept beside the parameters and handed on by steps, a tree a part (`train.kept`,
    `strategies.model_state`); nothing without any."""
    frozen: PyTree = ()
    """Parameters that are not trained, in the compute dtype; nothing where all are. Checkpoints
    hold them once, beside the steps."""

    @property
    def weights(self) -> PyTree:
        """All parameters that the model is merged of."""
        return joined(self.params, self.frozen)

    def replace(self, **changes: Any) -> "TrainState":
        """A copy with some fields changed."""
        return replace(self, **changes)


def state_shardings(placement: Placement, shapes: TrainState) -> TrainState:
    """The sharding of every leaf of a state.

    Args:
        placement: where parameters and optimizer state rest.
        shapes: the state's shapes.
    """
    whole: Any = placement.whole
    return TrainState(
        step=whole,
        cursor=whole,
        params=placement.params,
        opt_state=placement.optimizer_state(shapes.opt_state),
        key=whole,
        skipped=whole,
        loss_scale=jax.tree.map(lambda _: whole, shapes.loss_scale),
        model_state=placement.beside(shapes.model_state),
        frozen=placement.frozen.params,
    )
