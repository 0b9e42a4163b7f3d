"""From parts to functions: shapes, then placements, then compiled functions.

Arrays are born where they rest.

Owns the assembly that is the same for a config-driven run and for somebody's own model; it reads no
config.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from shardtrain.models.lora import Everything, Training
from shardtrain.optim.host_update import OnHost
from shardtrain.optim.rounding import Nearest, Rounding, Stochastic
from shardtrain.optim.schedules import Schedule
from shardtrain.optim.sweep import Streamed, Sweep, stacked_paths
from shardtrain.optim.tables import RowRule, RowSgd, make_sweep
from shardtrain.optim.update import Optimizer
from shardtrain.sharding.disk import Disk, loaded
from shardtrain.sharding.disk_files import DiskFiles
from shardtrain.sharding.frozen import joined
from shardtrain.sharding.placement import (
    Placement,
    constrain_tree,
    names_by_path,
)
from shardtrain.sharding.row_gradient import densified
from shardtrain.sharding.rules import Active, Table, stored_table
from shardtrain.sharding.tiers import HOST, MASTER, Tiers
from shardtrain.strategies.loss_scale import LossScale, Unscaled
from shardtrain.strategies.model_state import ModelState
from shardtrain.strategies.order import (
    LayerOrder,
    grows_with_layers,
    is_stacked,
    map_stacked,
    model_order_sharding,
    take_rows,
)
from shardtrain.strategies.parts import Parts, Runner
from shardtrain.strategies.precision import Policy, cast
from shardtrain.strategies.zigzag import Arrange, in_order
from shardtrain.tasks.base import Batch, Task
from shardtrain.train.begin import at_rest, with_weights
from shardtrain.train.disk import on_disk, params_at_rest, params_on_disk
from shardtrain.train.kept import EMA, Kept, for_evaluation, together
from shardtrain.train.saved import Saved
from shardtrain.train.state import TrainState, state_shardings
from shardtrain.train.step import (
    Metrics,
    make_evaluation,
    make_gradient_fn,
    make_model_state,
    make_parts,
    make_step,
    products_in_layers,
    split,
)

PyTree = Any
Create = Callable[[Any, nnx.Rngs], nnx.Module]
"""(dtype, rngs) -> model."""


@dataclass(frozen=True)
class Layout:
    """Everything about a run that does not change what is computed."""

    mesh: Mesh | AbstractMesh
    compute: Table
    zero: int
    runner: Runner
    tiers: Tiers = Tiers()  # noqa: RUF009  # frozen
    arrange: Arrange = in_order
    """The order in which the positions of a batch are worked on."""
    disk_folder: str = ""
    """Where that is which rests on a disk."""

    @property
    def microbatches(self) -> int:
        """Parts of a step's batch."""
        return self.runner.microbatches


@dataclass(frozen=True, eq=False)
class Program:
    """The functions of a run: initial state, step, evaluation; compiled at their first call."""

    create: Create
    task: Task
    layout: Layout
    policy: Policy
    make_transform: Callable[[PyTree], Any]
    schedule: Schedule
    clip_norm: float
    seed: int
    skip_limit: int = 0
    """Batches in a row that may be left out because a number in them is none; see `make_step`."""
    scaling: LossScale = Unscaled()  # noqa: RUF009  # frozen
    """What the loss is multiplied by."""
    kept: Kept = Kept()  # noqa: RUF009  # frozen
    """What is kept beside the parameters."""
    training: Training = Everything()  # noqa: RUF009  # frozen
    """Which parameters are trained."""
    row_rule: RowRule = RowSgd()  # noqa: RUF009  # frozen
    """What moves the rows of tables that have a gradient of rows, where there are any."""

    # -- shapes and placements

    @cached_property
    def _abstract(self) -> tuple[nnx.GraphDef[Any], Any, Any]:
        """The model without its arrays; shapes of parameters, in the master dtype, and the rest."""
        model = nnx.eval_shape(lambda: self._model(jax.random.key(0)))
        graph, params, variables = nnx.split(model, nnx.Param, ...)  # type: ignore[misc]
        return graph, jax.eval_shape(lambda s: cast(s, self.policy.master), params), variables

    @property
    def graph(self) -> nnx.GraphDef[Any]:
        """The model without its arrays."""
        return self._abstract[0]

    @cached_property
    def placement(self) -> Placement:
        """Where parameters, gradients and optimizer state rest."""
        state = self._abstract[1]
        flat = [
            (path, variable.get_metadata().get("out_sharding") or (None,) * variable.ndim)
            for path, variable in nnx.to_flat_state(state)
        ]
        names = nnx.to_pure_dict(nnx.from_flat_state(flat))
        layout = self.layout
        stacked = partial(jax.eval_shape, self.order.stack)
        shapes = map_stacked(stacked, nnx.to_pure_dict(state), self._stacked_params(names))
        trained, frozen = self.training.split(names)
        trained_shapes, frozen_shapes = self.training.split(shapes)
        placement = Placement(
            mesh=layout.mesh,
            compute=layout.compute,
            stored=stored_table(layout.compute),
            zero=layout.zero,
            names=trained,
            shapes=trained_shapes,
            tiers=layout.tiers,
            # Beside frozen weights what is trained is small.
            stays=frozenset(names_by_path(trained)) if frozen != () else frozenset(),
            frozen_names=frozen,
            frozen_shapes=frozen_shapes,
        )
        # Where any rests away, parameters have the type that they are computed in.
        return replace(placement, disk=params_on_disk(placement, self.policy.params, self._files))

    @staticmethod
    def _stacked_params(names: PyTree) -> PyTree:
        if names == ():  # no parameters, and not one without dims
            return ()
        return jax.tree.map(is_stacked, names, is_leaf=lambda node: isinstance(node, tuple))

    @property
    def _masters(self) -> PyTree:
        """Shapes of the parameters that are trained, in the master dtype."""
        return jax.tree.map(
            lambda a: jax.ShapeDtypeStruct(a.shape, self.policy.master), self.placement.shapes
        )

    @cached_property
    def _stacked(self) -> TrainState:
        """Which leaves of the state hold one entry a layer."""
        params = self._stacked_params(self.placement.names)
        opt_state = grows_with_layers(self.optimizer.init, self._masters, params)
        variables = nnx.to_pure_dict(self._abstract[2])

        def kept(masters: PyTree) -> PyTree:
            zeros = jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), variables)
            return self.kept.init(masters, zeros)

        model_state = grows_with_layers(kept, self._masters, params)
        no: Any = False
        scale = jax.tree.map(lambda _: no, jax.eval_shape(self.scaling.init))
        # Its layers are always as the model has them.
        handed_on = jax.tree.map(lambda _: no, jax.eval_shape(self.handing_on.init))
        return TrainState(
            no,
            no,
            params,
            opt_state,
            key=no,
            skipped=no,
            loss_scale=scale,
            model_state=together(model_state, handed_on),
            frozen=self._stacked_params(self.placement.frozen_names),
        )

    @cached_property
    def _sweep(self) -> Sweep:
        if not self.layout.tiers.any:
            return make_sweep(self.make_transform, self.placement, self.row_rule)
        if self.layout.tiers.updates:
            return OnHost(self.make_transform(self.placement.names), self.placement)
        return Streamed(
            self.make_transform,
            self.placement,
            self._stacked_paths,
            lambda: self.disk,
        )

    @cached_property
    def disk(self) -> Disk:
        """What rests on a disk."""
        if not self.layout.tiers.uses("disk"):
            return Disk()
        state = jax.eval_shape(self.optimizer.init, self._masters)
        return on_disk(self.placement, state, self._stacked_paths(), self._files)

    @cached_property
    def _files(self) -> DiskFiles:
        return DiskFiles(Path(self.layout.disk_folder))

    @cached_property
    def optimizer(self) -> Optimizer:
        """The update."""
        return Optimizer(
            sweep=self._sweep,
            schedule=self.schedule,
            clip_norm=self.clip_norm,
            policy=self.policy,
            placement=self.placement,
            rounding=self._rounding,
        )

    @property
    def _rounding(self) -> Rounding:
        if not self.policy.stochastic:
            return Nearest()
        return Stochastic(self.order.rows, self._stacked_paths)

    def _stacked_paths(self) -> frozenset[str]:
        return stacked_paths(self._stacked.params, self._stacked.opt_state)

    @cached_property
    def shapes(self) -> TrainState:
        """The shape and dtype of every leaf of the state."""
        abstract: TrainState = jax.eval_shape(self._init)
        return abstract

    @cached_property
    def shardings(self) -> TrainState:
        """The sharding of every leaf of the state."""
        return state_shardings(self.placement, self.shapes)

    @cached_property
    def abstract_state(self) -> TrainState:
        """Shapes with shardings: what a checkpoint is restored into and a compiler is shown."""
        state: TrainState = jax.tree.map(
            lambda a, s: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=s),
            self.shapes,
            self.shardings,
        )
        return state

    def batch_sharding(self, ndim: int) -> NamedSharding:
        """The sharding of a batch array [microbatch, batch, length, ...] of that many dims."""
        active = Active(self.layout.compute, self.layout.mesh)
        spec = PartitionSpec(None, *active.spec("batch", "length"))
        return NamedSharding(self.layout.mesh, PartitionSpec(*spec[:ndim]))

    # -- functions

    def _model(self, key: jax.Array) -> nnx.Module:
        with nnx.use_eager_sharding(False):
            # Drawn wide, then rounded: the same values whatever they rest in.
            create = self.training.model(self.create)
            return create(self.policy.wide, nnx.Rngs(params=key))

    def _drawn(self) -> tuple[PyTree, PyTree, PyTree]:
        """Initial parameters, trained and frozen, in model order, and the model's variables."""
        model = self._model(jax.random.fold_in(jax.random.key(self.seed), 0))
        _, params, variables = split(model)
        return (*self.training.split(params), variables)

    def _init(self) -> TrainState:
        return self._first_state(*self._drawn())

    def _first_state(self, master: PyTree, frozen: PyTree, variables: PyTree) -> TrainState:
        """The state before the first update, of parameters in model order.

        Without `frozen` it has none of them.
        """
        key = jax.random.key(self.seed)
        master = self._stacked_at_rest(cast(master, self.policy.master), self.placement)
        if frozen != ():
            frozen = self._stacked_at_rest(frozen, self.placement.frozen)
            frozen = params_at_rest(cast(frozen, self.policy.compute), self.disk.frozen)
        return TrainState(
            step=jnp.zeros((), jnp.int32),
            cursor=jnp.zeros((), jnp.int32),
            params=params_at_rest(cast(master, self.policy.params), self.disk.parameters),
            opt_state=self.optimizer.first(master),
            key=jax.random.fold_in(key, 1),
            skipped=jnp.zeros((), jnp.int32),
            loss_scale=self.scaling.init(),
            model_state=together(self.kept.init(master, variables), self.handing_on.init()),
            frozen=frozen,
        )

    def _stacked_at_rest(self, master: PyTree, placement: Placement) -> PyTree:
        """Initial parameters in the order of the stack, born split over the stages."""
        order, mesh = self.order, self.layout.mesh
        stacked = self._stacked_params(placement.names)
        if order.is_model_order or isinstance(mesh, AbstractMesh):
            return map_stacked(order.stack, master, stacked)

        def move(leaf: jax.Array, target: NamedSharding, stacked: bool) -> jax.Array:
            if not stacked:
                return leaf
            source = model_order_sharding(target, leaf.shape)
            leaf = jax.lax.with_sharding_constraint(leaf, source)
            return take_rows(leaf, order.rows, source, target)

        return jax.tree.map(move, master, placement.optimizer, stacked)

    @cached_property
    def init(self) -> Callable[[], TrainState]:
        """Makes the initial state; its random bits are the same on every mesh."""
        init: Callable[[], TrainState] = jax.jit(self._init, out_shardings=self.shardings)
        return init

    def init_from(self, weights: PyTree, *, evaluates: bool = False) -> TrainState:
        """Makes the initial state of parameters from elsewhere.

        Args:
            weights: as `abstract_weights` describes them, or each `Apart`; what is trained beside
                them begins as `init` has it.
            evaluates: whether nothing is trained, so that the state has no `opt_state`.
        """
        shardings = self.shardings.replace(opt_state=()) if evaluates else self.shardings
        if self._begins_on_host:
            return self._from_host(weights, evaluates=evaluates)

        def first(weights: PyTree) -> TrainState:
            trained, _, variables = self._drawn()
            state = self._first_state(*self.training.begin(weights, trained), variables)
            return state.replace(opt_state=()) if evaluates else state

        weights = jax.tree.map(loaded, weights)
        made: TrainState = jax.jit(first, out_shardings=shardings)(weights)
        return made

    @property
    def _begins_on_host(self) -> bool:
        """Whether weights from elsewhere need not fit on the device."""
        tiers = self.layout.tiers
        master = tiers.master if self.placement.frozen_names == () else "device"
        off = {master, tiers.parameters} != {"device"}
        return off and not self.kept.parts and self.order.is_model_order

    def _from_host(self, weights: PyTree, *, evaluates: bool) -> TrainState:
        """The initial state of weights that come through the host's memory, leaf by leaf."""
        placement, policy = self.placement, self.policy

        def zeros(shapes: PyTree) -> PyTree:
            return jax.tree.map(lambda a: jnp.zeros(a.shape, policy.master), shapes)

        def beside_frozen() -> TrainState:
            trained, _, variables = self._drawn()
            return without_frozen(self._first_state(trained, (), variables))

        def without_frozen(state: TrainState) -> TrainState:
            return state.replace(frozen=(), opt_state=() if evaluates else state.opt_state)

        def others() -> TrainState:
            _, _, variables = self._drawn()
            # No optimizer of ours begins with what depends on its parameters but the masters.
            return without(self._first_state(zeros(placement.shapes), (), variables))

        def without(state: TrainState) -> TrainState:
            moments = {name: part for name, part in state.opt_state.items() if name != MASTER}
            return state.replace(params=(), opt_state=() if evaluates else moments)

        if placement.frozen_names != ():
            state: TrainState = jax.jit(
                beside_frozen, out_shardings=without_frozen(self.shardings)
            )()
            frozen = self.training.begin(weights, ())[1]
            frozen = at_rest(frozen, policy.compute, placement.frozen.params, self.disk)
            return state.replace(frozen=frozen)
        made = jax.jit(others, out_shardings=without(self.shardings))()
        return with_weights(made, weights, placement, policy, self.disk)

    @cached_property
    def abstract_weights(self) -> PyTree:
        """Shapes and shardings of the model's own parameters: in model order, in the master dtype.

        They rest like the optimizer's state, which is split at ZeRO 1 already; in the memory of the
        host where they come to rest away from the device.
        """
        saved, rests, weights = self.abstract_saved, self.placement, self.training.weights
        on_host = self._begins_on_host

        def where(saved: Any, there: NamedSharding) -> Any:
            there = model_order_sharding(there, saved.shape)
            if on_host:
                there = there.with_memory_kind(HOST)
            return jax.ShapeDtypeStruct(saved.shape, self.policy.master, sharding=there)

        return jax.tree.map(
            where,
            weights(saved.params, saved.frozen),
            weights(rests.optimizer, rests.frozen.optimizer),
        )

    @cached_property
    def handing_on(self) -> ModelState:
        """What steps hand on besides parameters."""
        shapes = nnx.to_pure_dict(self._abstract[1])
        return make_model_state(self.policy.words, shapes, self.placement.names)

    @cached_property
    def parts(self) -> Parts:
        """The loss as functions of plain trees."""
        shapes = nnx.to_pure_dict(self._abstract[1])
        in_layers = products_in_layers(self.policy.words, shapes)
        return make_parts(self.task, self.graph, shapes, in_layers)

    @cached_property
    def _step(self) -> Callable[..., Any]:
        runner = self.layout.runner
        gradients = runner.gradients(self.parts, self.placement, self.policy)
        whole = make_gradient_fn(
            self.task, gradients, self.placement, self.policy.compute, self.layout.arrange
        )
        return make_step(
            whole, self.optimizer, self.scaling, self.skip_limit, self.kept, self.handing_on
        )

    @cached_property
    def step(self) -> Any:
        """The compiled step (state, batch) -> (state, metrics); the state is donated."""

        def step(state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
            return self._step(state, batch)[:2]  # type: ignore[no-any-return]

        return jax.jit(step, donate_argnums=0, out_shardings=(self.shardings, self.placement.whole))

    @cached_property
    def step_with_gradients(self) -> Any:
        """The same step, also returning the gradients, also those of tables whole; to compare."""

        def step(state: TrainState, batch: Batch) -> tuple[TrainState, Metrics, PyTree]:
            state, metrics, grads = self._step(state, batch)
            return state, metrics, densified(grads, state.params)

        return jax.jit(
            step,
            out_shardings=(self.shardings, self.placement.whole, self.placement.optimizer),
        )

    @cached_property
    def update_with(self) -> Callable[[TrainState, PyTree], PyTree]:
        """(state, gradients in model order) -> the parameters after that update; to compare."""

        def update(state: TrainState, grads: PyTree) -> PyTree:
            grads = constrain_tree(self.in_stack_order(grads), self.placement.optimizer)
            key = jax.random.fold_in(state.key, state.step)
            return self.optimizer.update(grads, state.opt_state, state.params, state.step + 1, key)[
                0
            ]

        compiled: Callable[[TrainState, PyTree], PyTree] = jax.jit(
            update, in_shardings=(self.shardings, None), out_shardings=self.placement.params
        )
        return compiled

    @cached_property
    def evaluate(self) -> Callable[..., tuple[Metrics, Metrics]]:
        """(params, batch, model_state, frozen) -> (sums, weights) of each term, without dropout.

        What has no `model_state` or nothing frozen may leave it out.
        """
        evaluation = self.layout.runner.evaluation(self.parts, self.placement)
        function = make_evaluation(
            self.task, evaluation, self.placement, self.policy.compute, self.layout.arrange
        )
        evaluate: Callable[..., tuple[Metrics, Metrics]] = jax.jit(
            function, out_shardings=self.placement.whole
        )
        return evaluate

    @cached_property
    def evaluated_params(self) -> Callable[[TrainState], PyTree]:
        """All parameters that a state is evaluated with: averages, where they are kept."""

        def params(state: TrainState) -> PyTree:
            return joined(for_evaluation(state.params, state.model_state)[0], state.frozen)

        chosen: Callable[[TrainState], PyTree] = jax.jit(
            params, out_shardings=self.placement.all.params
        )
        return chosen if EMA in self.shapes.model_state else lambda state: state.weights

    # -- model order, in which states are saved and compared

    @property
    def order(self) -> LayerOrder:
        """Where each layer rests in the stack."""
        return self.layout.runner.order

    def in_model_order(self, params: PyTree) -> PyTree:
        """Parameters or gradients with the layers as the model has them."""
        return map_stacked(self.order.unstack, params, self._stacked.params)

    def in_stack_order(self, params: PyTree) -> PyTree:
        """Parameters or gradients in model order as the stack has them."""
        return map_stacked(self.order.stack, params, self._stacked_params(self.placement.names))

    @cached_property
    def saved(self) -> Saved:
        """How states are saved."""
        return Saved(self.order, self.abstract_state, self._stacked, self.disk)

    @property
    def abstract_saved(self) -> TrainState:
        """Shapes and shardings of the state as it is saved: in model order."""
        return self.saved.abstract

    def compile_step(self, batch: Mapping[str, Any]) -> Any:
        """Compiles the step for batches of these shapes, ahead of the first call."""
        return self.step.lower(self.abstract_state, batch).compile()
