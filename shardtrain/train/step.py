"""The train step: one pure function, with no branch on any feature."""

from collections.abc import Callable
from typing import Any, cast

import jax
import jax.numpy as jnp
from flax import nnx

from shardtrain.errors import ConfigError
from shardtrain.models.tables import TABLES, Tables
from shardtrain.ops.fp8 import LayersInFp8
from shardtrain.ops.tables import bring_home, look_up
from shardtrain.optim.optimizers import is_matrix
from shardtrain.optim.update import Optimizer
from shardtrain.sharding.frozen import joined
from shardtrain.sharding.placement import LAYERS, Placement, constrain_tree
from shardtrain.sharding.row_gradient import RowGradient
from shardtrain.sharding.rules import use_rules
from shardtrain.strategies.loss_scale import LossScale
from shardtrain.strategies.model_state import LargestEntries, ModelState, Stateless
from shardtrain.strategies.parts import EARLIER, OBSERVED, Cut, Evaluation, Gradients, Lookup, Parts
from shardtrain.strategies.precision import cast_at_rest
from shardtrain.strategies.precision_words import Words
from shardtrain.strategies.remat import Block
from shardtrain.strategies.stack import Stack
from shardtrain.strategies.zigzag import Arrange, in_order
from shardtrain.tasks.base import Batch, LayeredTask, Task, mean, weighted_loss
from shardtrain.train.kept import Kept, for_evaluation, observation, together, variables_of
from shardtrain.train.state import TrainState

PyTree = Any
Metrics = dict[str, jax.Array]
Step = Callable[[TrainState, Batch], tuple[TrainState, Metrics, PyTree]]
GradientFn = Callable[
    [PyTree, PyTree, PyTree, PyTree, Batch, jax.Array, jax.Array | float],
    tuple[Metrics, PyTree, PyTree, PyTree],
]
"""(params, frozen, inputs, the model's variables, batch, key, scale) -> (metrics, what the model
has observed for its variables, gradients of the loss times `scale`, what was seen in the place of
`inputs`, those of a `ModelState`)."""
_NO_LIMIT = 2**31 - 1
_STATELESS = Stateless()


InLayers = Callable[[Block, PyTree], Block]
"""(function of a layer, a model state's inputs or None) -> the same with other products."""


def _as_it_is(layer: Block, inputs: PyTree) -> Block:
    del inputs
    return layer


def split(model: nnx.Module) -> tuple[nnx.GraphDef[Any], PyTree, PyTree]:
    """A model as its graph, its parameters, and all other variables, as plain dicts."""
    graph, *states = nnx.split(model, nnx.Param, ...)
    params, variables = map(nnx.to_pure_dict, states)
    return graph, params, variables


def make_parts(
    task: Task,
    graph: nnx.GraphDef[Any],
    params: PyTree,
    in_layers: InLayers = _as_it_is,
) -> Parts:
    """A task's loss as functions of plain trees of parameters.

    Args:
        task: terms and weights.
        graph: the model without its parameters and variables.
        params: their shapes.
        in_layers: wraps a function of a layer, its index and more, with a model state's inputs;
            see `products_in_layers`.
    """

    def sums(
        params: PyTree,
        inputs: PyTree,
        variables: PyTree,
        batch: Batch,
        key: jax.Array | None,
        stack: Stack,
    ) -> dict[str, PyTree]:
        def wrapped(layers: nnx.Module, block: Block, x: PyTree) -> Any:
            return stack(layers, in_layers(block, inputs), x)

        model = nnx.merge(graph, params, variables)
        terms: dict[str, PyTree] = task.terms(model, batch, key, wrapped)
        if key is None or not variables:
            return terms
        _, _, seen = split(model)
        return {**terms, OBSERVED: observation(seen)}

    def value(sums: Metrics, seeds: PyTree) -> jax.Array:
        totals, scale = seeds
        scaled: jax.Array = weighted_loss(task, sums, totals) * scale
        return scaled

    return Parts(sums, value, _cut(task, graph, params, in_layers), _lookup(graph, params))


def products_in_layers(words: Words, params: PyTree) -> InLayers:
    """The wrapper of a function of a layer by which its products are as a precision says.

    Args:
        words: of the precision.
        params: shapes in model order.

    Raises:
        ConfigError: fp8, and no layers that it could be for.
    """
    if not words.products:
        return _as_it_is
    if LAYERS not in params:
        raise ConfigError(
            "this model is no stack of equal layers, whose products fp8 is for",
            where="train.precision",
            value=words.products,
            cure="use bfloat16",
        )
    num_layers = jax.tree.leaves(params[LAYERS])[0].shape[0]
    in_fp8 = LayersInFp8(num_layers, words.first, words.last)
    if words.products == "fp8":
        return lambda layer, _: in_fp8(layer)
    return in_fp8


def make_model_state(words: Words, params: PyTree, names: PyTree) -> ModelState:
    """What a precision hands on from step to step.

    Args:
        words: of the precision.
        params: shapes in model order.
        names: of their axes; a layer makes one product with each of its matrices.
    """
    if words.products != "fp8_delayed":
        return Stateless()
    layers = jax.tree.leaves(names[LAYERS], is_leaf=lambda node: isinstance(node, tuple))
    num_layers = jax.tree.leaves(params[LAYERS])[0].shape[0]
    return LargestEntries(num_layers, sum(map(is_matrix, layers)))


def _cut(task: Task, graph: nnx.GraphDef[Any], params: PyTree, in_layers: InLayers) -> Cut | None:
    """The same loss cut at the layers of its model, if that has equal ones."""
    if not hasattr(task, "head") or LAYERS not in params:
        return None
    layered = cast(LayeredTask, task)
    layer_graph = nnx.split(nnx.merge(graph, params).layers)[0]

    def model(params: PyTree) -> Any:
        return nnx.merge(graph, params)

    def plain(params: PyTree, index: jax.Array, x: jax.Array, context: PyTree) -> Any:
        return nnx.merge(layer_graph, params)(x, index, context)

    def layer(params: PyTree, index: jax.Array, x: jax.Array, context: PyTree) -> Any:
        own = {name: part for name, part in params.items() if name != EARLIER}
        return in_layers(plain, params.get(EARLIER))(own, index, x, context)

    return Cut(
        context=lambda params, batch, key: model(params).context(batch, key),
        embed=lambda params, batch, context: model(params).embed(batch, context),
        layer=layer,
        head=lambda params, x, batch: layered.head(model(params), x, batch),
    )


def _lookup(graph: nnx.GraphDef[Any], params: PyTree) -> Lookup | None:
    """How rows of large tables come and go, if the model has such tables."""
    if TABLES not in params:
        return None
    tables = nnx.merge(graph, params).banks
    if not isinstance(tables, Tables) or not tables.layout.split:
        return None
    kinds = {f"{TABLES}/{bank.kind}": bank for bank in tables.layout.split}

    def ids(batch: Batch) -> dict[str, jax.Array]:
        return {path: bank.ids(batch["ids"], jnp.where) for path, bank in kinds.items()}

    def rows(tables: dict[str, jax.Array], ids: dict[str, jax.Array]) -> dict[str, jax.Array]:
        return {path: look_up(tables[path], ids[path], split=kinds[path].kind) for path in tables}

    def gradients(ids: dict[str, jax.Array], grads: dict[str, jax.Array]) -> dict[str, RowGradient]:
        return {
            path: bring_home(ids[path], grads[path], num_rows=bank.rows, split=bank.kind)
            for path, bank in kinds.items()
        }

    return Lookup(ids, rows, gradients)


def make_gradient_fn(
    task: Task,
    gradients: Gradients,
    placement: Placement,
    dtype: Any,
    arrange: Arrange = in_order,
) -> GradientFn:
    """The gradient of a whole step; see `GradientFn`.

    Args:
        task: terms and weights.
        gradients: from a `Runner`.
        placement: where everything rests.
        dtype: what parameters are computed with.
        arrange: the order in which the positions of a batch are worked on.
    """

    def whole(
        params: PyTree,
        frozen: PyTree,
        inputs: PyTree,
        variables: PyTree,
        batch: Batch,
        key: jax.Array,
        scale: jax.Array | float,
    ) -> tuple[Metrics, PyTree, PyTree, PyTree]:
        totals = task.totals(batch)
        params = cast_at_rest(params, dtype, placement.params)
        with use_rules(placement.compute, placement.mesh):
            shared = ((totals, scale), key, variables, frozen)
            sums, grads, seen = gradients(params, inputs, arrange(batch), shared)
        means = {name: mean(sums[name], total) for name, total in totals.items()}
        return {"loss": sums["loss"] / scale, **means}, sums.get(OBSERVED, {}), grads, seen

    return whole


def make_step(
    gradients: GradientFn,
    optimizer: Optimizer,
    scaling: LossScale,
    skip_limit: int = _NO_LIMIT,
    kept: Kept = Kept(),  # noqa: B008  # frozen
    handing_on: ModelState = _STATELESS,
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
        inputs, variables = handing_on.inputs(state.model_state), variables_of(state.model_state)
        metrics, observed, grads, seen = gradients(
            state.params, state.frozen, inputs, variables, batch, key, scale
        )
        halted = state.skipped > skip_limit
        allowed = jnp.isfinite(metrics["loss"]) & ~halted
        params, opt_state, numbers = optimizer.update(
            grads, state.opt_state, state.params, state.step + 1, key, allowed, scale
        )
        moved = numbers["moved"]
        model_state = kept.after(
            state.model_state,
            optimizer.masters(opt_state, params),
            observed,
            state.step + 1,
            moved,
        )
        loss_scale, retry = scaling.after(state.loss_scale, moved, allowed)
        more = (~halted & ~retry).astype(state.skipped.dtype)
        state = state.replace(
            step=state.step + moved.astype(state.step.dtype),
            cursor=state.cursor + more,
            params=params,
            opt_state=opt_state,
            skipped=jnp.where(moved, 0, state.skipped + more),
            loss_scale=loss_scale,
            model_state=together(model_state, handing_on.after(state.model_state, seen, moved)),
        )
        numbers = {**numbers, **scaling.metrics(loss_scale), "retry": retry}
        return state, {**metrics, **numbers}, grads

    return step


def make_evaluation(
    task: Task,
    evaluation: Evaluation,
    placement: Placement,
    dtype: Any,
    arrange: Arrange = in_order,
) -> Callable[[PyTree, Batch, PyTree], tuple[Metrics, Metrics]]:
    """(params, batch, model_state, frozen) -> (sums, weights) of each term, without dropout.

    Args:
        task: terms and weights.
        evaluation: from a `Runner`; for one batch of parts.
        placement: where everything rests.
        dtype: what parameters are computed with.
        arrange: the order in which the positions of a batch are worked on.
    """

    def evaluate(
        params: PyTree, batch: Batch, model_state: PyTree = (), frozen: PyTree = ()
    ) -> tuple[Metrics, Metrics]:
        params, variables = for_evaluation(params, model_state)
        params = cast_at_rest(constrain_tree(params, placement.params), dtype, placement.params)
        params = joined(params, frozen)
        with use_rules(placement.compute, placement.mesh):
            sums = evaluation(params, variables, arrange(batch))
        return sums, task.totals(batch)

    return evaluate
