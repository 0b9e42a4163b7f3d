"""The train step: one pure function, with no branch on any feature."""

from collections.abc import Callable
from typing import Any, cast

import jax
import jax.numpy as jnp
from flax import nnx

from shardtrain.optim.update import Optimizer
from shardtrain.sharding.placement import Placement
from shardtrain.sharding.rules import use_rules
from shardtrain.strategies.loss_scale import LossScale
from shardtrain.strategies.parts import LAYERS, Cut, Gradients, Parts
from shardtrain.strategies.stack import Stack
from shardtrain.strategies.zigzag import Arrange, in_order
from shardtrain.tasks.base import Batch, LayeredTask, Task, mean, weighted_loss
from shardtrain.train.state import TrainState

PyTree = Any
Metrics = dict[str, jax.Array]
Step = Callable[[TrainState, Batch], tuple[TrainState, Metrics, PyTree]]
GradientFn = Callable[[PyTree, PyTree, Batch, jax.Array, jax.Array | float], tuple[Metrics, PyTree]]
"""(params, frozen, batch, key, scale) -> (metrics, gradients of the loss times `scale`)."""
_NO_LIMIT = 2**31 - 1


def make_parts(task: Task, graph: nnx.GraphDef[Any], params: PyTree) -> Parts:
    """A task's loss as functions of plain trees of parameters.

    Args:
        task: terms and weights.
        graph: the model without its parameters.
        params: their shapes.
    """

    def sums(params: PyTree, batch: Batch, key: jax.Array | None, stack: Stack) -> Metrics:
        return task.terms(nnx.merge(graph, params), batch, key, stack)

    def value(sums: Metrics, seeds: PyTree) -> jax.Array:
        totals, scale = seeds
        scaled: jax.Array = weighted_loss(task, sums, totals) * scale
        return scaled

    return Parts(sums, value, _cut(task, graph, params))


def _cut(task: Task, graph: nnx.GraphDef[Any], params: PyTree) -> Cut | None:
    """The same loss cut at the layers of its model, if that has equal ones."""
    if not hasattr(task, "head") or LAYERS not in params:
        return None
    layered = cast(LayeredTask, task)
    layer_graph = nnx.split(nnx.merge(graph, params).layers)[0]

    def model(params: PyTree) -> Any:
        return nnx.merge(graph, params)

    return Cut(
        context=lambda params, batch, key: model(params).context(batch, key),
        embed=lambda params, batch, context: model(params).embed(batch, context),
        layer=lambda params, index, x, context: nnx.merge(layer_graph, params)(x, index, context),
        head=lambda params, x, batch: layered.head(model(params), x, batch),
    )


def make_gradient_fn(
    task: Task, gradients: Gradients, placement: Placement, arrange: Arrange = in_order
) -> GradientFn:
    """The gradient of a whole step; see `GradientFn`.

    Args:
        task: terms and weights.
        gradients: from a `Runner`.
        placement: where everything rests.
        arrange: the order in which the positions of a batch are worked on.
    """

    def whole(
        params: PyTree, frozen: PyTree, batch: Batch, key: jax.Array, scale: jax.Array | float
    ) -> tuple[Metrics, PyTree]:
        totals = task.totals(batch)
        with use_rules(placement.compute, placement.mesh):
            sums, grads = gradients(params, arrange(batch), ((totals, scale), key, frozen))
        means = {name: mean(sums[name], totals[name]) for name in task.coefficients}
        return {"loss": sums["loss"] / scale, **means}, grads

    return whole


def make_step(
    gradients: GradientFn,
    optimizer: Optimizer,
    scaling: LossScale,
    skip_limit: int = _NO_LIMIT,
) -> Step:
    """The step: (state, batch) -> (state, metrics, gradients).

    A batch whose loss or gradient is no finite number moves the cursor and nothing else: not
    parameters, moments, schedule or step. After more than `skip_limit` of them in a row nothing
    moves at all, so that the state stays as it was until the loop, one step behind, has noticed.
    Where `retry` is true, not even the cursor has moved: the gradient overflowed, the loss scale is
    smaller now, and the same batch is wanted again.

    The gradients are for `verify`; whoever does not return them from its jit does not pay for them.
    """

    def step(state: TrainState, batch: Batch) -> tuple[TrainState, Metrics, PyTree]:
        key = jax.random.fold_in(state.key, state.step)
        scale = scaling.scale(state.loss_scale)
        metrics, grads = gradients(state.params, state.frozen, batch, key, scale)
        halted = state.skipped > skip_limit
        allowed = jnp.isfinite(metrics["loss"]) & ~halted
        params, opt_state, numbers = optimizer.update(
            grads, state.opt_state, state.params, state.step + 1, allowed, scale
        )
        moved = numbers["moved"]
        loss_scale, retry = scaling.after(state.loss_scale, moved, allowed)
        more = (~halted & ~retry).astype(state.skipped.dtype)
        state = state.replace(
            step=state.step + moved.astype(state.step.dtype),
            cursor=state.cursor + more,
            params=params,
            opt_state=opt_state,
            skipped=jnp.where(moved, 0, state.skipped + more),
            loss_scale=loss_scale,
        )
        numbers = {**numbers, **scaling.metrics(loss_scale), "retry": retry}
        return state, {**metrics, **numbers}, grads

    return step


def make_evaluation(
    task: Task,
    evaluation: Callable[[PyTree, Batch], Metrics],
    placement: Placement,
    arrange: Arrange = in_order,
) -> Callable[[PyTree, Batch], tuple[Metrics, Metrics]]:
    """(params, batch) -> (sums, weights) of each term, without dropout, for one batch of parts.

    Args:
        task: terms and weights.
        evaluation: from a `Runner`.
        placement: where everything rests.
        arrange: the order in which the positions of a batch are worked on.
    """

    def evaluate(params: PyTree, batch: Batch) -> tuple[Metrics, Metrics]:
        with use_rules(placement.compute, placement.mesh):
            sums = evaluation(params, arrange(batch))
        return sums, task.totals(batch)

    return evaluate
