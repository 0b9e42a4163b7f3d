"""Accumulation: the gradient of a step from its microbatches. One wrapper of the gradient function.

With one microbatch the gradient is plain `jax.grad`, which XLA reduces inside the backward. With
several, the sums of each data shard are kept apart and reduced once after the last (ZeRO 0-1), or
each microbatch's gradient is reduce-scattered into a shard (ZeRO 2-3), as DeepSpeed does.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from shardtrain.sharding.frozen import joined
from shardtrain.sharding.mesh import DATA_AXES, data_axes, data_degree
from shardtrain.sharding.placement import Placement, constrain_tree
from shardtrain.sharding.rules import mapped_over
from shardtrain.strategies.order import LayerOrder
from shardtrain.strategies.parts import Gradients, Parts, Sums
from shardtrain.strategies.stack import Stack

PyTree = Any
LossFn = Callable[[PyTree, PyTree, PyTree], tuple[jax.Array, PyTree]]
"""(params, microbatch, shared) -> (loss, sums): the microbatch's part of both."""


@dataclass(frozen=True, eq=False)
class Accumulation:
    """Runs a batch's microbatches one after another, each through all layers (a `Runner`)."""

    stack: Stack
    """How the layers are run."""
    microbatches: int = 1
    """Parts of a step's batch."""
    order: LayerOrder = LayerOrder()  # noqa: RUF009  # frozen
    """As the model is."""

    @property
    def sums_gradients(self) -> bool:
        """Whether there are several microbatches."""
        return self.microbatches > 1

    def gradients(self, parts: Parts, placement: Placement, dtype: Any) -> Gradients:
        """The gradient function of a whole step; see `Runner`."""

        def loss(params: PyTree, batch: PyTree, shared: PyTree) -> tuple[jax.Array, Sums]:
            seeds, key, frozen = shared
            sums = parts.sums(joined(params, frozen), batch, key, self.stack)
            value = parts.value(sums, seeds)
            return value, {**sums, "loss": value}

        return make_gradients(loss, placement, microbatches=self.microbatches, dtype=dtype)

    def evaluation(self, parts: Parts, placement: Placement) -> Callable[[PyTree, PyTree], Sums]:
        """Sums over all microbatches; see `Runner`."""
        del placement

        def sums(params: PyTree, batch: PyTree) -> Sums:
            def part(_: None, batch: PyTree) -> tuple[None, Sums]:
                return None, parts.sums(params, batch, None, self.stack)

            return jax.tree.map(lambda s: s.sum(0), jax.lax.scan(part, None, batch)[1])  # type: ignore[no-any-return]

        return sums


def make_gradients(
    loss: LossFn, placement: Placement, *, microbatches: int, dtype: Any
) -> Callable[[PyTree, PyTree, PyTree], tuple[PyTree, PyTree]]:
    """Wraps a loss into the gradient function of a whole step.

    Args:
        loss: sums, not means: parts of microbatches and of data shards add up to the whole step's.
        placement: where parameters and gradients rest.
        microbatches: leading dim of every batch leaf.
        dtype: what several gradients are added up in.

    Returns:
        (params, batch, shared) -> (sums, gradients); batch leaves are [microbatches, batch, ...].
    """
    if microbatches == 1:
        gradients = _single(loss)
    elif placement.zero >= 2 or data_degree(placement.mesh) == 1:
        gradients = _scattered_each(loss, placement, dtype)
    else:
        gradients = _reduced_once(loss, placement, dtype)

    def placed(params: PyTree, batch: PyTree, shared: PyTree) -> tuple[PyTree, PyTree]:
        sums, grads = gradients(params, batch, shared)
        return sums, constrain_tree(grads, placement.optimizer)

    return placed


def _grad(loss: LossFn) -> Callable[[PyTree, PyTree, PyTree], tuple[PyTree, PyTree]]:
    """(params, microbatch, shared) -> (gradients, sums)."""
    return jax.grad(loss, has_aux=True)


def _single(loss: LossFn) -> Callable[[PyTree, PyTree, PyTree], tuple[PyTree, PyTree]]:
    def gradients(params: PyTree, batch: PyTree, shared: PyTree) -> tuple[PyTree, PyTree]:
        grads, sums = _grad(loss)(params, jax.tree.map(lambda x: x[0], batch), shared)
        return sums, grads

    return gradients


def _scattered_each(
    loss: LossFn, placement: Placement, dtype: Any
) -> Callable[[PyTree, PyTree, PyTree], tuple[PyTree, PyTree]]:
    """Adds up gradients that are each whole (one data shard) or each scattered (ZeRO 2-3)."""

    def gradients(params: PyTree, batch: PyTree, shared: PyTree) -> tuple[PyTree, PyTree]:
        def body(total: PyTree, part: PyTree) -> tuple[PyTree, PyTree]:
            grads, sums = _grad(loss)(params, part, shared)
            grads = constrain_tree(grads, placement.gradients)
            return jax.tree.map(lambda t, g: t + g.astype(t.dtype), total, grads), sums

        zeros = jax.tree.map(lambda p: jnp.zeros(p.shape, dtype), params)
        total, sums = jax.lax.scan(body, constrain_tree(zeros, placement.gradients), batch)
        return jax.tree.map(lambda s: s.sum(0), sums), total

    return gradients


def _reduced_once(
    loss: LossFn, placement: Placement, dtype: Any
) -> Callable[[PyTree, PyTree, PyTree], tuple[PyTree, PyTree]]:
    """Keeps the sums of each data shard apart, in a leading dim split over the data axes."""
    mesh = placement.mesh
    axes = data_axes(mesh)
    shards = data_degree(mesh)

    def apart(sharding: NamedSharding) -> NamedSharding:
        return NamedSharding(mesh, PartitionSpec(axes, *sharding.spec))

    def gradients(params: PyTree, batch: PyTree, shared: PyTree) -> tuple[PyTree, PyTree]:
        per_shard = jax.vmap(_grad(loss), in_axes=(None, 0, None), spmd_axis_name=axes)
        apart_each = jax.tree.map(apart, placement.computed)

        def body(total: PyTree, part: PyTree) -> tuple[PyTree, PyTree]:
            # The batch is split over the data axes already: cutting it there moves nothing.
            part = jax.tree.map(
                lambda x: jax.lax.with_sharding_constraint(
                    x.reshape(shards, -1, *x.shape[1:]), NamedSharding(mesh, PartitionSpec(axes))
                ),
                part,
            )
            with mapped_over(*DATA_AXES):
                grads, sums = per_shard(params, part, shared)
            return jax.tree.map(lambda t, g: t + g.astype(t.dtype), total, grads), sums

        zeros = jax.tree.map(lambda p: jnp.zeros((shards, *p.shape), dtype), params)
        total, sums = jax.lax.scan(body, constrain_tree(zeros, apart_each), batch)
        sums = jax.tree.map(lambda s: s.sum((0, 1)), sums)
        return sums, jax.tree.map(lambda g: g.sum(0), total)

    return gradients
