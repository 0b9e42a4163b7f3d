"""A train step for somebody's own loss function, without any config.

Owns: the assembly of the parts that a run from a config is made of too (placement, accumulation,
update, state) around a plain function of parameters. Does not own: the parts, and nnx loops
(`own_model`).
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Key

from shardtrain.errors import ConfigError, ShardingError
from shardtrain.ops.sums import sum_dtype
from shardtrain.optim.rounding import Nearest, Stochastic
from shardtrain.optim.sweep import Whole
from shardtrain.optim.update import Optimizer
from shardtrain.sharding.mesh import data_axes, data_degree
from shardtrain.sharding.placement import Placement, path_name
from shardtrain.sharding.rules import stored_table, use_rules
from shardtrain.strategies.accumulate import has_convolution, make_gradients
from shardtrain.strategies.loss_scale import DynamicScale, LossScale, Unscaled
from shardtrain.strategies.precision import Policy, cast, cast_at_rest, policy
from shardtrain.train.own_model import check_layout, check_names, own_table, place_batch
from shardtrain.train.state import TrainState, state_shardings
from shardtrain.train.step import Metrics, make_step

PyTree = Any


class Loss(Protocol):
    """The mean loss over the samples of a batch, or of a part of one."""

    def __call__(
        self, params: PyTree, batch: PyTree, keys: Key[Array, " batch"], /
    ) -> Float[Array, ""]:
        """Computes it.

        Args:
            params: as given to `make_train_step`.
            batch: arrays [batch, ...].
            keys: one random key a sample, the same on every mesh and in every microbatch.
        """
        ...


@dataclass(frozen=True, eq=False)
class TrainStep:
    """A step (state, batch) -> (state, metrics), compiled when first called."""

    loss: Loss
    optimizer: Optimizer
    microbatches: int
    weight: Callable[[PyTree], Array]
    seed: int
    scaling: LossScale

    @property
    def placement(self) -> Placement:
        """Where parameters, gradients and optimizer state rest."""
        return self.optimizer.placement

    @property
    def mesh(self) -> Mesh:
        """The devices, by axis."""
        mesh = self.placement.mesh
        assert isinstance(mesh, Mesh)
        return mesh

    def init(self, params: PyTree) -> TrainState:
        """The state before the first update.

        Args:
            params: initial values, of the shapes given to `make_train_step`.
        """
        state: TrainState = self._init(_plain(params))
        return state

    def __call__(self, state: TrainState, batch: PyTree) -> tuple[TrainState, Metrics]:
        """One update; the old state's memory is given up.

        Args:
            state: from `init`, or from the step before.
            batch: the global batch, arrays [batch, ...]; placed if it is not yet.

        Returns:
            The new state, and `loss` and `grad_norm`. Where one of them is no finite number,
            nothing has moved but `cursor`, and `skipped` counts how often in a row. In float16 also
            `loss_scale`, and `retry`: the gradient overflowed, nothing has moved but the scale, and
            the same batch can be tried again.

        Raises:
            ShardingError: the samples do not divide by microbatches x data shards.
        """
        parts = self.microbatches * data_degree(self.mesh)
        for path, leaf in jax.tree.leaves_with_path(batch):
            if leaf.shape[0] % parts:
                raise ShardingError(
                    f"{leaf.shape[0]} samples do not divide by {self.microbatches} microbatches "
                    f"x {data_degree(self.mesh)} data shards",
                    where=f"batch {path_name(path)}".strip(),
                    allowed=f"a multiple of {parts}",
                )
        stepped: tuple[TrainState, Metrics] = self._step(state, place_batch(batch, self.mesh))
        return stepped

    # -- compiled

    def _initial(self, params: PyTree) -> TrainState:
        master = cast(params, self.optimizer.policy.master)
        return TrainState(
            step=jnp.zeros((), jnp.int32),
            cursor=jnp.zeros((), jnp.int32),
            params=cast(master, self.optimizer.policy.params),
            opt_state=self.optimizer.init(master),
            key=jax.random.key(self.seed),
            skipped=jnp.zeros((), jnp.int32),
            loss_scale=self.scaling.init(),
        )

    @cached_property
    def shardings(self) -> TrainState:
        """The sharding of every leaf of the state."""
        return state_shardings(self.placement, jax.eval_shape(self._initial, self.placement.shapes))

    @cached_property
    def _init(self) -> Any:
        return jax.jit(self._initial, out_shardings=self.shardings)

    @cached_property
    def _step(self) -> Any:
        step = make_step(self._gradients(), self.optimizer, self.scaling)
        scaled = ("loss_scale", "retry") if self.scaling.retries else ()

        def stepped(state: TrainState, batch: PyTree) -> tuple[TrainState, Metrics]:
            state, metrics, _ = step(state, batch)
            # The rate is the transformation's own business.
            return state, {name: metrics[name] for name in ("loss", "grad_norm", *scaled)}

        return jax.jit(
            stepped, donate_argnums=0, out_shardings=(self.shardings, self.placement.whole)
        )

    def _gradients(self) -> Any:
        """The gradients of a whole step; see `train.step.GradientFn`."""
        placement = self.placement

        def loss(
            params: PyTree, inputs: PyTree, part: PyTree, seeds: PyTree
        ) -> tuple[Array, Metrics]:
            del inputs  # a loss of somebody's own has no state
            (batch, keys), (total, scale) = part, seeds
            value = self.loss(params, batch, keys)
            value = value.astype(sum_dtype(value.dtype))
            value = value * (self.weight(batch) / total).astype(value.dtype) * scale
            return value, {"loss": value}

        shards, whole = (
            make_gradients(
                loss,
                placement,
                microbatches=self.microbatches,
                dtypes=self.optimizer.policy,
                whole=whole,
            )
            for whole in (False, True)
        )

        def gradients(
            params: PyTree,
            frozen: PyTree,
            inputs: PyTree,
            _variables: PyTree,
            batch: PyTree,
            key: Array,
            scale: Array | float,
        ) -> tuple[Metrics, PyTree, PyTree, PyTree]:
            assert frozen == (), "all parameters of a loss function are trained"
            samples = jnp.arange(_samples(batch), dtype=jnp.uint32)
            keys = jax.vmap(jax.random.fold_in, (None, 0))(key, samples)
            parts = jax.tree.map(self._cut, (batch, keys))
            params = cast_at_rest(params, self.optimizer.policy.compute, placement.params)
            with use_rules(placement.compute, placement.mesh):
                metrics: Metrics
                shared = (self.weight(batch), scale)
                first = jax.tree.map(lambda x: x[0], parts)
                way = whole if has_convolution(loss, params, inputs, first, shared) else shards
                metrics, grads, seen = way(params, inputs, parts, shared)
            return {"loss": metrics["loss"] / scale}, {}, grads, seen

        return gradients

    def _cut(self, x: Array) -> Array:
        """[batch, ...] -> [microbatch, batch, ...]: each data shard cuts its own samples."""
        x = x.reshape(data_degree(self.mesh), self.microbatches, -1, *x.shape[1:])
        x = x.swapaxes(0, 1).reshape(self.microbatches, -1, *x.shape[3:])
        sharding = NamedSharding(self.mesh, PartitionSpec(None, data_axes(self.mesh) or None))
        cut: Array = jax.lax.with_sharding_constraint(x, sharding)
        return cut


def make_train_step(
    loss: Loss,
    transform: optax.GradientTransformation,
    params: PyTree,
    mesh: Mesh,
    *,
    names: PyTree = None,
    zero: int = 0,
    microbatches: int = 1,
    precision: str = "float32",
    loss_scale: DynamicScale | None = None,
    clip_norm: float = 0.0,
    weight: Callable[[PyTree], Array] | None = None,
    seed: int = 0,
) -> TrainStep:
    """Makes the train step of a loss function on a mesh.

    Args:
        loss: (params, batch, keys) -> the mean loss over the samples it is given.
        transform: an optax optimizer, such as `optax.adamw(1e-3)`.
        params: a tree of arrays or of their shapes, or the `nnx.State` of a model's parameters.
        mesh: from `make_mesh`.
        names: a tuple of axis names for every parameter: words of `AXES`, mesh axes, or None. By
            default those of `nnx.with_partitioning`, where there are any.
        zero: ZeRO stage, 0 to 3: what rests split over the data axes; see `place`.
        microbatches: parts of a batch whose gradients are added up one after another.
        precision: "float32", "bfloat16" or "float16" (with float32 master weights), "float64", or
            parts such as "params=float32,compute=bfloat16"; see docs/precision.md. fp8 is for the
            layers of this package's models.
        loss_scale: how the loss is scaled in float16; by default as `DynamicScale()` does.
        clip_norm: largest norm of the whole gradient; 0 = any.
        weight: what `loss` divides by, when that is not the number of samples: a function of the
            batch (or part of one), such as its number of tokens that count. With it, parts that
            count differently add up to the loss of the whole batch.
        seed: of the random keys.

    Returns:
        `step`: `state = step.init(params)`, then `state, metrics = step(state, batch)`.

    Raises:
        ShardingError: a name, a stage or a mesh that cannot be.
        ConfigError: an unknown precision, or one that cannot be here.

    Example:
        >>> def loss(params, batch, keys):
        ...     return jnp.mean((batch["x"] @ params["w"] - batch["y"]) ** 2)
        >>> params = {"w": jnp.zeros((4, 1))}
        >>> from shardtrain.sharding.mesh import make_mesh
        >>> step = make_train_step(loss, optax.sgd(0.1), params, make_mesh())
        >>> state = step.init(params)
        >>> state, metrics = step(state, {"x": jnp.ones((8, 4)), "y": jnp.ones((8, 1))})
        >>> float(metrics["loss"])
        1.0
    """
    check_layout(mesh, zero)
    if names is None:
        names = _names(params)
    dtypes = policy(precision)
    _check_precision(dtypes, zero)
    shapes = jax.eval_shape(lambda p: cast(p, dtypes.master), _plain(params))
    table = own_table()
    placement = Placement(
        mesh=mesh,
        compute=table,
        stored=stored_table(table),
        zero=zero,
        names=jax.tree.map_with_path(
            lambda path, leaf, given: check_names(path_name(path), given, leaf.ndim), shapes, names
        ),
        shapes=shapes,
    )
    optimizer = Optimizer(
        # optax's updates are added to the parameters, ours are taken off.
        sweep=Whole(optax.chain(transform, optax.scale(-1.0))),
        schedule=_one,
        clip_norm=clip_norm,
        policy=dtypes,
        placement=placement,
        rounding=Stochastic() if dtypes.stochastic else Nearest(),
    )
    scaling = (loss_scale or DynamicScale()) if dtypes.is_narrow else Unscaled()
    return TrainStep(loss, optimizer, microbatches, weight or _number_of_samples, seed, scaling)


def _check_precision(dtypes: Policy, zero: int) -> None:
    """Refuses what a loss of somebody's own cannot have."""
    if dtypes.words.products:
        raise ConfigError(
            "which products of a loss are in fp8 nobody can tell",
            where="precision",
            value=dtypes.name,
            cure="use bfloat16, or products that round their operands themselves",
        )
    if dtypes.reduces_wider and zero >= 2:
        raise ConfigError(
            f"at ZeRO {zero} gradients are reduced as they are made",
            where="precision",
            value=dtypes.name,
            cure="use zero=1, or leave out reduce",
        )


def _plain(params: PyTree) -> PyTree:
    """A state of nnx as plain dicts; any other tree as it is."""
    return nnx.to_pure_dict(params) if isinstance(params, nnx.State) else params


def _names(params: PyTree) -> PyTree:
    """The names that a state of nnx has in its metadata; none for other trees."""
    if not isinstance(params, nnx.State):
        return jax.tree.map(lambda _: (), params)
    flat = [
        (path, variable.get_metadata("out_sharding", None) or ())
        for path, variable in nnx.to_flat_state(params)
    ]
    return nnx.to_pure_dict(nnx.from_flat_state(flat))


def _one(_: Array | int) -> Array:
    return jnp.ones((), jnp.float32)


def _samples(batch: PyTree) -> int:
    return int(jax.tree.leaves(batch)[0].shape[0])


def _number_of_samples(batch: PyTree) -> Array:
    return jnp.full((), _samples(batch), jnp.float32)
