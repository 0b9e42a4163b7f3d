"""What a workload is: named loss terms as sums, and the weights that turn them into means.

A task never returns a mean. The weight of a term is known from the batch before the backward pass,
for the whole global step; each part of the batch is seeded with coefficient / total weight. So
accumulation, ragged batches, padding and data parallelism agree by construction.
"""

from collections.abc import Mapping
from typing import Any, Protocol

import jax
import jax.numpy as jnp

from shardtrain.strategies.stack import Stack

Batch = Mapping[str, jax.Array]


class Task(Protocol):
    """A workload."""

    @property
    def coefficients(self) -> Mapping[str, float]:
        """The terms of the loss and their coefficients."""
        ...

    @property
    def reported(self) -> Mapping[str, str]:
        """What evaluation reports, by name, and the term that each is the mean of: `val_loss`."""
        ...

    def totals(self, batch: Batch) -> dict[str, jax.Array]:
        """The weight of each term over a batch with any leading dims.

        There may be terms that are no part of the loss: they are reported beside it.
        """
        ...

    def terms(
        self, model: Any, batch: Batch, key: jax.Array | None, stack: Stack
    ) -> dict[str, jax.Array]:
        """The sum of each term over a part of the batch, in at least float32.

        Args:
            model: the module, with its parameters.
            batch: arrays [batch, ...].
            key: the step's dropout key, or None when evaluating.
            stack: how the model's layers are run.
        """
        ...


class LayeredTask(Task, Protocol):
    """A workload whose model is a stack of equal layers between two ends, so that it can be cut.

    Such a model has `context(batch, key)`, what every layer reads besides its input: a tree of
    arrays; `embed(batch, context)`, the first layer's input; and `layers`, each of which is called
    as `layer(x, index, context)`.
    """

    def head(self, model: Any, x: jax.Array, batch: Batch) -> dict[str, jax.Array]:
        """The sum of each term, from the last layer's output.

        Args:
            model: the module, with its parameters.
            x: the residual stream [batch, residual_length, embed].
            batch: arrays [batch, ...].
        """
        ...


def weighted_loss(
    task: Task, sums: Mapping[str, jax.Array], totals: Mapping[str, jax.Array]
) -> jax.Array:
    """The part of the loss that these sums make: sum of coefficient x sum / total weight."""
    parts = [
        coefficient * mean(sums[name], totals[name])
        for name, coefficient in task.coefficients.items()
    ]
    return jnp.sum(jnp.stack(parts))


def mean(total: jax.Array, weight: jax.Array) -> jax.Array:
    """A sum by its weight; zero where nothing counts, as in a batch without any target."""
    return total / jnp.maximum(weight, 1).astype(total.dtype)
