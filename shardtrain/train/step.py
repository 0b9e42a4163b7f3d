"""The train step: one pure function, with no branch on any feature."""

from collections.abc import Callable
from typing import Any

import jax
from flax import nnx

from shardtrain.optim.update import Optimizer
from shardtrain.sharding.placement import Placement
from shardtrain.sharding.rules import use_rules
from shardtrain.strategies.accumulate import make_gradients
from shardtrain.strategies.precision import Policy
from shardtrain.strategies.stack import Stack
from shardtrain.tasks.base import Batch, Task, mean, weighted_loss
from shardtrain.train.state import TrainState

PyTree = Any
Metrics = dict[str, jax.Array]
Step = Callable[[TrainState, Batch], tuple[TrainState, Metrics, PyTree]]
GradientFn = Callable[[PyTree, Batch, jax.Array], tuple[Metrics, PyTree]]


def make_gradient_fn(
    task: Task,
    graph: nnx.GraphDef[Any],
    stack: Stack,
    placement: Placement,
    policy: Policy,
    *,
    microbatches: int,
) -> GradientFn:
    """The gradient of a whole step: (params, batch, key) -> (metrics, gradients).

    Args:
        task: terms and weights.
        graph: the model without its parameters.
        stack: how its layers are run.
        placement: where everything rests.
        policy: dtypes.
        microbatches: the leading dim of the batch.
    """

    def loss(params: PyTree, batch: Batch, shared: PyTree) -> tuple[jax.Array, Metrics]:
        totals, key = shared
        sums = task.terms(nnx.merge(graph, params), batch, key, stack)
        value = weighted_loss(task, sums, totals)
        return value, {**sums, "loss": value}

    accumulated = make_gradients(
        loss, placement, microbatches=microbatches, dtype=policy.accumulate
    )

    def gradients(params: PyTree, batch: Batch, key: jax.Array) -> tuple[Metrics, PyTree]:
        totals = task.totals(batch)
        with use_rules(placement.compute, placement.mesh):
            sums, grads = accumulated(params, batch, (totals, key))
        means = {name: mean(sums[name], totals[name]) for name in task.coefficients}
        return {"loss": sums["loss"], **means}, grads

    return gradients


def make_step(gradients: GradientFn, optimizer: Optimizer) -> Step:
    """The step: (state, batch) -> (state, metrics, gradients).

    The gradients are for `verify`; whoever does not return them from its jit does not pay for them.
    """

    def step(state: TrainState, batch: Batch) -> tuple[TrainState, Metrics, PyTree]:
        key = jax.random.fold_in(state.key, state.step)
        metrics, grads = gradients(state.params, batch, key)
        params, opt_state, norms = optimizer.update(
            grads, state.opt_state, state.params, state.step + 1
        )
        state = state.replace(
            step=state.step + 1, cursor=state.cursor + 1, params=params, opt_state=opt_state
        )
        return state, {**metrics, **norms}, grads

    return step


def make_evaluation(
    task: Task, graph: nnx.GraphDef[Any], stack: Stack, placement: Placement
) -> Callable[[PyTree, Batch], tuple[Metrics, Metrics]]:
    """(params, batch) -> (sums, weights) of each term, without dropout, for one batch of parts."""

    def evaluate(params: PyTree, batch: Batch) -> tuple[Metrics, Metrics]:
        model = nnx.merge(graph, params)

        def part(_: None, batch: Batch) -> tuple[None, Metrics]:
            return None, task.terms(model, batch, None, stack)

        with use_rules(placement.compute, placement.mesh):
            sums = jax.lax.scan(part, None, batch)[1]
        return jax.tree.map(lambda s: s.sum(0), sums), task.totals(batch)

    return evaluate
