"""The pipeline: one program that runs any proven table of a schedule, and its gradient.

Owns: the loop over ticks, the buffers between them, who sends what when, and where gradients are
added up and reduced. Does not own: tables (`schedules`), one layer's forward and backward
(`layer_vjp`), the loss and the model (`parts`).

The program is one `lax.scan` over the table's ticks inside a `jax.shard_map` that is manual over
`pipeline` and the data axes and leaves `tensor` to XLA. Each stage takes its own branches, so an
idle tick costs nothing; sends join the stages at the end of each part of a tick. Gradients are
summed where their data is and reduced once after the last tick (ZeRO 0-1), or layer by layer into
the shard that rests (ZeRO 2-3).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from shardtrain.errors import ShardingError
from shardtrain.sharding.mesh import DATA_AXES
from shardtrain.sharding.placement import Placement, constrain_tree
from shardtrain.sharding.rules import manual_over
from shardtrain.strategies.layer_vjp import Arrays
from shardtrain.strategies.order import LayerOrder
from shardtrain.strategies.parts import LAYERS, Cut, Gradients, Parts, Sums
from shardtrain.strategies.reductions import psum_scatter
from shardtrain.strategies.remat import remat
from shardtrain.strategies.schedules.layout import Layout
from shardtrain.strategies.schedules.table import Schedule, with_slots, without_backward
from shardtrain.strategies.stage import AXIS, Model, Stage, at

PyTree = Any
MANUAL = (AXIS, *DATA_AXES)
"""Mesh axes that the program itself is written for; all others are XLA's."""


@dataclass(frozen=True, eq=False)
class Pipeline:
    """Runs a batch's microbatches through stages, as a table says (a `Runner`)."""

    schedule: Schedule
    """A proven table."""
    layout: Layout
    """The layers of each virtual stage."""
    remat: str = "none"
    """What a layer's forward keeps for its backward; see `remat`."""
    loop: str = "scan"
    """How the layers of one virtual stage run: "scan" or "unroll"."""

    @cached_property
    def order(self) -> LayerOrder:
        """Where each layer rests: stage by stage, virtual stage by virtual stage."""
        return LayerOrder.of(self.layout.rows())

    @property
    def microbatches(self) -> int:
        """Parts of a step's batch."""
        return self.schedule.work.num_microbatches

    def gradients(self, parts: Parts, placement: Placement, dtype: Any) -> Gradients:
        """The gradient function of a whole step; see `Runner`.

        Raises:
            ShardingError: the model cannot be cut.
        """
        region = _Region(self, _cut(parts), parts, placement, dtype)

        def gradients(params: PyTree, batch: PyTree, shared: PyTree) -> tuple[Sums, PyTree]:
            specs = (PartitionSpec(), region.specs(placement.optimizer))
            sums, grads = region.mapped(region.gradients, specs)(params, batch, shared)
            return sums, constrain_tree(grads, placement.optimizer)

        return gradients

    def evaluation(self, parts: Parts, placement: Placement) -> Callable[[PyTree, PyTree], Sums]:
        """Sums over all microbatches, by the table's forwards alone; see `Runner`."""
        region = _Region(self, _cut(parts), parts, placement, None)

        def sums(params: PyTree, batch: PyTree) -> Sums:
            found: Sums = region.mapped(region.sums, PartitionSpec())(params, batch)
            return found

        return sums


def _cut(parts: Parts) -> Cut:
    if parts.cut is None:
        raise ShardingError(
            "this model is no stack of equal layers that stages could share",
            where=f"mesh.{AXIS}",
            allowed="1",
        )
    return parts.cut


@dataclass(frozen=True)
class _Dims:
    """The dim of one leaf that is split over `data`, in each of the places where it lies."""

    params: int | None
    gradients: int | None
    optimizer: int | None


@dataclass(frozen=True, eq=False)
class _Region:
    """What is traced within the `shard_map`: each method sees one stage's and data shard's part."""

    pipeline: Pipeline
    cut: Cut
    parts: Parts
    placement: Placement
    dtype: Any

    # -- around it

    def mapped(self, function: Callable[..., Any], out_specs: Any) -> Callable[..., Any]:
        """A method below as a function of global arrays (params, batch, then whole ones)."""

        def run(*args: PyTree) -> Any:
            with manual_over(*MANUAL):
                return function(*args)

        def call(params: PyTree, batch: PyTree, *shared: PyTree) -> Any:
            whole = (PartitionSpec(),) * len(shared)
            samples = PartitionSpec(None, DATA_AXES)
            return jax.shard_map(
                run,
                mesh=self.placement.mesh,
                axis_names=frozenset(MANUAL),
                in_specs=(self.specs(self.placement.params), samples, *whole),
                out_specs=out_specs,
                check_vma=False,
            )(params, batch, *shared)

        return call

    def specs(self, shardings: PyTree) -> PyTree:
        """The part of partitions that the program itself is written for."""
        return jax.tree.map(lambda s: _manual(s.spec), shardings)

    @cached_property
    def _dims(self) -> PyTree:
        """`_Dims` of every parameter."""
        placement = self.placement
        trees = (placement.params, placement.gradients, placement.optimizer)
        return jax.tree.map(lambda *s: _Dims(*map(_data_dim, s)), *trees)

    # -- within it

    def gradients(self, params: PyTree, batch: PyTree, shared: PyTree) -> tuple[Sums, PyTree]:
        """Sums and gradients of a step."""
        totals, key = shared
        model = self._model(params, batch, key, partial(self._value, totals))
        sums, layers, ends = self._run(model, self.pipeline.schedule, trains=True)
        treedef = jax.tree.structure(params[LAYERS])
        grads = {**ends, LAYERS: jax.tree.unflatten(treedef, layers)}
        return sums, {
            name: jax.tree.map(
                partial(self._reduce, () if name == LAYERS else (AXIS,)), grads[name], dims
            )
            for name, dims in self._dims.items()
        }

    def sums(self, params: PyTree, batch: PyTree) -> Sums:
        """Sums of a step without a gradient."""
        schedule = self.pipeline.schedule
        forwards = with_slots(schedule.name, without_backward(schedule.work))
        return self._run(self._model(params, batch, None, None), forwards, trains=False)[0]

    def _run(self, model: Model, schedule: Schedule, *, trains: bool) -> tuple[Sums, Any, Any]:
        pipeline = self.pipeline
        stage = Stage(model, schedule, pipeline.layout, pipeline.loop, trains=trains)
        sums, layers, ends = stage.run()
        return jax.tree.map(lambda s: jax.lax.psum(s, MANUAL), sums), layers, ends

    def _model(self, params: PyTree, batch: PyTree, key: Any, value: Any) -> Model:
        """What lies here, as one stage uses it."""
        ends = {name: tree for name, tree in params.items() if name != LAYERS}
        end_dims = {name: tree for name, tree in self._dims.items() if name != LAYERS}
        layers, treedef = jax.tree.flatten(params[LAYERS])
        layer_dims = jax.tree.leaves(self._dims[LAYERS])

        def weights(place: Any) -> PyTree:
            own = [
                _gather(at(leaf, place), _less(dims.params))
                for leaf, dims in zip(layers, layer_dims, strict=True)
            ]
            return jax.tree.unflatten(treedef, own)

        def zeros(leaf: jax.Array, dims: _Dims) -> jax.Array:
            shape = list(leaf.shape)
            if dims.params is not None:
                shape[dims.params] *= self._degree
            if dims.gradients is not None:
                shape[dims.gradients] //= self._degree
            return jnp.zeros(shape, self.dtype)

        def add_layer(
            totals: Arrays, leaves: Sequence[int], place: Any, gradients: Arrays
        ) -> Arrays:
            totals = list(totals)
            for leaf, gradient in zip(leaves, gradients, strict=True):
                part = _scatter(gradient, _less(layer_dims[leaf].gradients))
                totals[leaf] = totals[leaf].at[place].add(part.astype(self.dtype))
            return totals

        def add_end(total: jax.Array, gradient: jax.Array, dims: _Dims) -> jax.Array:
            return total + _scatter(gradient, dims.gradients).astype(self.dtype)

        return Model(
            cut=self.cut,
            layer=remat(self.pipeline.remat)(self.cut.layer),
            value=value,
            batch=batch,
            key=key,
            params=params,
            ends=lambda: jax.tree.map(lambda p, d: _gather(p, d.params), ends, end_dims),
            with_layers=lambda ends: {**ends, LAYERS: params[LAYERS]},
            weights=weights,
            zeros=lambda: (
                [zeros(leaf, dims) for leaf, dims in zip(layers, layer_dims, strict=True)],
                jax.tree.map(zeros, ends, end_dims),
            ),
            add_layer=add_layer,
            add_ends=lambda total, part: jax.tree.map(add_end, total, part, end_dims),
        )

    def _value(self, totals: PyTree, sums: Sums) -> jax.Array:
        return self.parts.value(sums, totals)

    @property
    def _degree(self) -> int:
        return int(self.placement.mesh.shape["data"])

    def _reduce(self, axes: tuple[str, ...], total: jax.Array, dims: _Dims) -> jax.Array:
        """Adds up what stages or data shards have summed by themselves."""
        if dims.optimizer is None:
            axes = (*axes, "data")
        elif dims.gradients is None:
            total = _scatter(total, dims.optimizer)
        whole: jax.Array = jax.lax.psum(total, (*axes, "replica"))
        return whole


def _gather(leaf: jax.Array, dim: int | None) -> jax.Array:
    """A parameter as it is used, from one that rests split over `data` along a dim."""
    if dim is None:
        return leaf
    whole: jax.Array = jax.lax.all_gather(leaf, "data", axis=dim, tiled=True)
    return whole


def _scatter(leaf: jax.Array, dim: int | None) -> jax.Array:
    """This device's part of the sum over `data`, along a dim."""
    return leaf if dim is None else psum_scatter(leaf, "data", dim)


def _less(dim: int | None) -> int | None:
    """A dim of a stacked leaf, in one entry of it."""
    return None if dim is None else dim - 1


def _axes(entry: Any) -> tuple[str, ...]:
    """The mesh axes of one dim of a partition."""
    return () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)


def _manual(spec: PartitionSpec) -> PartitionSpec:
    """The part of a partition over the mesh axes that the program is written for."""
    kept = (tuple(axis for axis in _axes(entry) if axis in MANUAL) for entry in spec)
    return PartitionSpec(*(axes or None for axes in kept))


def _data_dim(sharding: NamedSharding) -> int | None:
    """The dim that is split over `data`."""
    dims = [dim for dim, entry in enumerate(sharding.spec) if "data" in _axes(entry)]
    return dims[0] if dims else None
