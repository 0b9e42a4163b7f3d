"""Accumulation: the gradient of a step from its microbatches. One wrapper of the gradient function.

With one microbatch the gradient is plain `jax.grad`, which XLA reduces inside the backward, as it
is made. With several, or where it is to be reduced in wider numbers than it is made in, the sums of
each data shard are kept apart and reduced once after the last (ZeRO 0-1); or each microbatch's
gradient is reduce-scattered into a shard (ZeRO 2-3), as DeepSpeed does.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from shardtrain.sharding.frozen import joined
from shardtrain.sharding.mesh import DATA_AXES, data_axes, data_degree
from shardtrain.sharding.placement import LAYERS, Placement, constrain_tree
from shardtrain.sharding.rules import MAPPED, mapped_over
from shardtrain.strategies.offload import FetchedStack, split, with_resting
from shardtrain.strategies.order import LayerOrder
from shardtrain.strategies.parts import GATHERED, Evaluation, Gradients, Parts, Sums
from shardtrain.strategies.precision import Policy
from shardtrain.strategies.stack import Stack, make_stack

PyTree = Any
LossFn = Callable[[PyTree, PyTree, PyTree, PyTree], tuple[jax.Array, PyTree]]
"""(params, inputs, microbatch, shared) -> (loss, sums): the microbatch's part of both. The gradient
of `inputs` is what was seen in their place (`strategies.model_state`)."""
Whole = Callable[[PyTree, PyTree, PyTree, PyTree], tuple[PyTree, PyTree, PyTree]]
"""(params, inputs, batch, shared) -> (sums, gradients, seen)."""


@dataclass(frozen=True, eq=False)
class Accumulation:
    """Runs a batch's microbatches one after another, each through all layers (a `Runner`)."""

    remat: str = "none"
    """What a layer's backward computes again."""
    loop: str = "scan"
    """How layers run one after another, where they are on the device; see `make_stack`."""
    microbatches: int = 1
    """Parts of a step's batch."""
    order: LayerOrder = LayerOrder()  # noqa: RUF009  # frozen
    """As the model is."""
    whole: bool = False
    """Whether the loss must see whole microbatches; see `make_gradients`."""

    @property
    def sums_gradients(self) -> bool:
        """Whether there are several microbatches."""
        return self.microbatches > 1

    def gradients(self, parts: Parts, placement: Placement, dtypes: Policy) -> Gradients:
        """The gradient function of a whole step; see `Runner`."""

        def loss(
            trained: PyTree, inputs: PyTree, batch: PyTree, shared: PyTree
        ) -> tuple[jax.Array, Sums]:
            (seeds, key, variables, frozen), away = shared
            params, stack = with_resting(trained, away), self._stack(placement, trained)
            sums = parts.sums(joined(params, frozen), inputs, variables, batch, key, stack)
            value = parts.value(sums, seeds)
            return value, {**sums, "loss": value}

        whole = make_gradients(
            loss, placement, microbatches=self.microbatches, dtypes=dtypes, whole=self.whole
        )

        def gradients(
            params: PyTree, inputs: PyTree, batch: PyTree, shared: PyTree
        ) -> tuple[Sums, PyTree, PyTree]:
            trained, away = split(placement, params)
            return whole(trained, inputs, batch, (shared, away))

        return gradients

    def evaluation(self, parts: Parts, placement: Placement) -> Evaluation:
        """Sums over all microbatches; see `Runner`."""
        stack = self._stack(placement)

        def sums(params: PyTree, variables: PyTree, batch: PyTree) -> Sums:
            def part(_: None, batch: PyTree) -> tuple[None, Sums]:
                return None, parts.sums(params, None, variables, batch, None, stack)

            found: Sums = jax.lax.scan(part, None, batch)[1]
            gathered = {GATHERED: found.pop(GATHERED)} if GATHERED in found else {}
            return {**jax.tree.map(lambda s: s.sum(0), found), **gathered}

        return sums

    def _stack(self, placement: Placement, trained: PyTree = None) -> Stack:
        """How the layers are run, whether they are on the device or not."""
        if not placement.all.any_away:
            return make_stack(policy=self.remat, loop=self.loop)
        return FetchedStack(placement, self.remat, trained and trained[LAYERS])


def make_gradients(
    loss: LossFn, placement: Placement, *, microbatches: int, dtypes: Policy, whole: bool = False
) -> Whole:
    """Wraps a loss into the gradient function of a whole step.

    Args:
        loss: sums, not means: parts of microbatches and of data shards add up to the whole step's.
        placement: where parameters and gradients rest.
        microbatches: leading dim of every batch leaf.
        dtypes: what several gradients are added up in, and what they cross the network in.
        whole: whether the loss must see whole microbatches, so that each is reduced: samples depend
            on each other, as with batch norm, or there are convolutions (`has_convolution`).

    Returns:
        (params, inputs, batch, shared) -> (sums, gradients, seen); batch leaves are
        [microbatches, batch, ...].
    """
    shards = data_degree(placement.mesh)
    if microbatches == 1 and (shards == 1 or not dtypes.reduces_wider):
        gradients = _single(loss)
    elif whole or placement.zero >= 2 or shards == 1:
        assert shards == 1 or not dtypes.reduces_wider, "refused with the config"
        gradients = _scattered_each(loss, placement, dtypes.accumulate)
    else:
        reduce = dtypes.reduce_dtype(summed=True)
        gradients = _reduced_once(loss, placement, dtypes.accumulate, reduce)

    def placed(
        params: PyTree, inputs: PyTree, batch: PyTree, shared: PyTree
    ) -> tuple[PyTree, PyTree, PyTree]:
        sums, grads, seen = gradients(params, inputs, batch, shared)
        return sums, constrain_tree(grads, placement.optimizer), seen

    return placed


def has_convolution(
    loss: LossFn, params: PyTree, inputs: PyTree, part: PyTree, shared: PyTree
) -> bool:
    """Whether a loss must see whole microbatches because there is a convolution in it.

    XLA (of jax 0.10.2 and 0.12) partitions the gradient of a convolution's window wrongly where it
    is mapped over shards: with one sample a shard or a window of 1 x 1 the numbers are others.
    """
    return "conv_general_dilated" in str(jax.make_jaxpr(loss)(params, inputs, part, shared))


def _grad(
    loss: LossFn,
) -> Callable[[PyTree, PyTree, PyTree, PyTree], tuple[tuple[PyTree, PyTree], PyTree]]:
    """(params, inputs, microbatch, shared) -> ((gradients, seen), sums)."""
    return jax.grad(loss, argnums=(0, 1), has_aux=True)


def _single(loss: LossFn) -> Whole:
    def gradients(
        params: PyTree, inputs: PyTree, batch: PyTree, shared: PyTree
    ) -> tuple[PyTree, PyTree, PyTree]:
        first = jax.tree.map(lambda x: x[0], batch)
        (grads, seen), sums = _grad(loss)(params, inputs, first, shared)
        return sums, grads, seen

    return gradients


def _added(total: PyTree, new: PyTree) -> PyTree:
    """Gradients so far, and the largest that was seen so far."""
    grads, seen = (
        jax.tree.map(lambda t, g: t + g.astype(t.dtype), total[0], new[0]),
        jax.tree.map(jnp.maximum, total[1], new[1]),
    )
    return grads, seen


def _summed(apart: jax.Array) -> jax.Array:
    """The sum over data shards, in the dtype that it has: `jnp.sum` would widen 16 bits first."""
    zero = jnp.zeros((), apart.dtype)
    total: jax.Array = jax.lax.reduce(apart, zero, jax.lax.add, (0,))
    return total


def _scattered_each(loss: LossFn, placement: Placement, dtype: Any) -> Whole:
    """Adds up gradients of whole microbatches, each where `placement.gradients` says."""

    def gradients(
        params: PyTree, inputs: PyTree, batch: PyTree, shared: PyTree
    ) -> tuple[PyTree, PyTree, PyTree]:
        def body(total: PyTree, part: PyTree) -> tuple[PyTree, PyTree]:
            (grads, seen), sums = _grad(loss)(params, inputs, part, shared)
            return _added(total, (constrain_tree(grads, placement.gradients), seen)), sums

        zeros = jax.tree.map(lambda p: jnp.zeros(p.shape, dtype), params)
        begin = constrain_tree(zeros, placement.gradients), jax.tree.map(jnp.zeros_like, inputs)
        (grads, seen), sums = jax.lax.scan(body, begin, batch)
        return jax.tree.map(lambda s: s.sum(0), sums), grads, seen

    return gradients


def _reduced_once(loss: LossFn, placement: Placement, dtype: Any, reduce: Any) -> Whole:
    """Keeps the sums of each data shard apart, in a leading dim split over the data axes."""
    mesh = placement.mesh
    axes = data_axes(mesh)
    shards = data_degree(mesh)

    def apart(sharding: NamedSharding) -> NamedSharding:
        return NamedSharding(mesh, PartitionSpec(axes, *sharding.spec))

    def gradients(
        params: PyTree, inputs: PyTree, batch: PyTree, shared: PyTree
    ) -> tuple[PyTree, PyTree, PyTree]:
        per_shard = jax.vmap(
            _grad(loss), in_axes=(None, None, 0, None), axis_name=MAPPED, spmd_axis_name=axes
        )
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
                new, sums = per_shard(params, inputs, part, shared)
            return _added(total, new), sums

        def zeros(like: PyTree, kind: Any = None) -> PyTree:
            return jax.tree.map(lambda p: jnp.zeros((shards, *p.shape), kind or p.dtype), like)

        begin = constrain_tree(zeros(params, dtype), apart_each), zeros(inputs)
        (grads, seen), sums = jax.lax.scan(body, begin, batch)
        sums = jax.tree.map(lambda s: s.sum((0, 1)), sums)
        grads = jax.tree.map(lambda g: _summed(g.astype(reduce)), grads)
        return sums, grads, jax.tree.map(lambda s: s.max(0), seen)

    return gradients
