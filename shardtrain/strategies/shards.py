"""Parameters and gradients as one device of a pipeline has them: its stage's, its data shard's.

Owns: how a parameter that rests split over `data` is gathered for use, and where its gradient is
summed: whole on each data shard until the last tick (ZeRO 0-1), or scattered after each microbatch
(ZeRO 2-3). Does not own: where things rest (`Placement`), and when they are used (`stage`).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from shardtrain.sharding.frozen import joined
from shardtrain.sharding.mesh import DATA_AXES, PIPELINE, mesh_axes, only_axes
from shardtrain.sharding.placement import LAYERS, Placement, split_size
from shardtrain.sharding.rules import current
from shardtrain.strategies.layer_vjp import Arrays
from shardtrain.strategies.offload import fetched, row_of
from shardtrain.strategies.precision import Policy

PyTree = Any

MANUAL = (PIPELINE, *DATA_AXES)
"""Mesh axes that the pipeline's program itself is written for; all others are XLA's."""


@dataclass(frozen=True)
class Dims:
    """The dim of one leaf that is split over `data`, in each of the places where it lies."""

    params: int | None
    gradients: int | None
    optimizer: int | None
    others: PartitionSpec
    """How its dims are split over mesh axes that are not of `MANUAL`, while it is used."""

    @property
    def of_entry(self) -> "Dims":
        """The same of one entry of a stacked leaf."""

        def less(dim: int | None) -> int | None:
            return None if dim is None else dim - 1

        return Dims(
            less(self.params),
            less(self.gradients),
            less(self.optimizer),
            PartitionSpec(*self.others[1:]),
        )


def manual_specs(shardings: PyTree) -> PyTree:
    """The part of partitions over the mesh axes of `MANUAL`."""
    return jax.tree.map(lambda sharding: only_axes(sharding.spec, MANUAL), shardings)


@dataclass(frozen=True, eq=False)
class Shard:
    """What one device has, inside the `shard_map`."""

    placement: Placement
    params: PyTree
    """As they rest here; the layers of this stage, and whatever else there is (the ends)."""
    frozen: PyTree
    """Parameters that are not trained, likewise."""
    dtypes: Policy | None
    """What gradients are added up in and cross the network in; None where there are none."""

    # -- parameters

    def ends(self) -> PyTree:
        """The parameters that are trained and belong to no layer, gathered for use."""
        return _gathered_ends(self.params, self._dims)

    def whole(self, ends: PyTree) -> PyTree:
        """All parameters, from the ends."""
        frozen = self.frozen
        if frozen != ():
            frozen = {
                **_gathered_ends(frozen, self._frozen_dims),
                LAYERS: frozen[LAYERS],
            }
        return joined({**ends, LAYERS: self.params[LAYERS]}, frozen)

    def layer(self, place: Any) -> tuple[PyTree, PyTree]:
        """One layer's parameters, gathered for use: those that are trained, and the others."""

        def use(leaf: jax.Array, dims: Dims) -> jax.Array:
            return _gather(leaf, dims.of_entry.params, dims.of_entry.others)

        def row(leaf: jax.Array) -> jax.Array:
            return row_of(leaf, place)

        trained = fetched(self.placement, jax.tree.map(row, self.params[LAYERS]), place)
        frozen = jax.tree.map(row, _layers(self.frozen))
        if frozen != ():
            frozen = fetched(self.placement.frozen, frozen, place)
        return (
            jax.tree.map(use, trained, self._dims[LAYERS]),
            jax.tree.map(use, frozen, _layers(self._frozen_dims)),
        )

    def resting(self) -> PyTree:
        """All parameters, as they rest."""
        return joined(self.params, self.frozen)

    def gathered(self) -> PyTree:
        """All parameters, the ends gathered for use."""
        return self.whole(self.ends())

    # -- gradients

    def no_gradients(self) -> tuple[Arrays, PyTree]:
        """Sums of nothing: of each leaf of the layers, and of the ends."""
        degree = self.placement.mesh.shape["data"]

        def zeros(leaf: Any, there: NamedSharding, dims: Dims) -> jax.Array:
            shape = [
                size
                // split_size(self.placement.mesh, tuple(a for a in mesh_axes(dim) if a in MANUAL))
                for size, dim in zip(leaf.shape, there.spec, strict=True)
            ]
            if dims.params is not None:
                shape[dims.params] *= degree
            if dims.gradients is not None:
                shape[dims.gradients] //= degree
            return jnp.zeros(shape, self._dtype)

        sums = jax.tree.map(zeros, self.placement.shapes, self.placement.stored_params, self._dims)
        return jax.tree.leaves(sums[LAYERS]), _without_layers(sums)

    def add_layer(
        self, sums: Arrays, leaves: Sequence[int], place: Any, gradients: Sequence[jax.Array]
    ) -> Arrays:
        """Adds a microbatch's gradients of some leaves of one layer."""
        dims = jax.tree.leaves(self._dims[LAYERS])
        sums = list(sums)
        for leaf, gradient in zip(leaves, gradients, strict=True):
            entry = dims[leaf].of_entry
            part = _scatter(self._sent(gradient), entry.gradients, entry.others)
            sums[leaf] = sums[leaf].at[place].add(part.astype(self._dtype))
        return sums

    def add_ends(self, sums: PyTree, gradients: PyTree) -> PyTree:
        """Adds a microbatch's gradients of the ends."""
        return jax.tree.map(
            lambda s, g, d: s + _scatter(self._sent(g), d.gradients, d.others).astype(self._dtype),
            sums,
            gradients,
            _without_layers(self._dims),
        )

    def reduced(self, layers: Arrays, ends: PyTree) -> PyTree:
        """The step's gradients, from what stages and data shards have summed by themselves."""

        def reduce(total: jax.Array, dims: Dims, *axes: str) -> jax.Array:
            total = self._sent(total)
            if dims.optimizer is None:
                axes = (*axes, "data")
            elif dims.gradients is None:
                total = _scatter(total, dims.optimizer, dims.others)
            whole: jax.Array = jax.lax.psum(total, (*axes, "replica"))
            return whole

        stacked = jax.tree.unflatten(jax.tree.structure(self.params[LAYERS]), layers)
        dims = self._dims
        return {
            **jax.tree.map(lambda s, d: reduce(s, d, PIPELINE), ends, _without_layers(dims)),
            LAYERS: jax.tree.map(reduce, stacked, dims[LAYERS]),
        }

    @property
    def _dtype(self) -> Any:
        assert self.dtypes is not None, "no gradients here"
        return self.dtypes.accumulate

    def _sent(self, gradient: jax.Array) -> jax.Array:
        """A gradient as it crosses the network."""
        assert self.dtypes is not None, "no gradients here"
        return gradient if self.dtypes.reduce is None else gradient.astype(self.dtypes.reduce)

    @cached_property
    def _dims(self) -> PyTree:
        """`Dims` of every parameter that is trained."""
        return _dims_of(self.placement)

    @cached_property
    def _frozen_dims(self) -> PyTree:
        """`Dims` of the others."""
        return _dims_of(self.placement.frozen)


def _dims_of(placement: Placement) -> PyTree:
    """`Dims` of every parameter of a placement."""
    trees = (placement.stored_params, placement.gradients, placement.optimizer)

    def dims(
        computed: NamedSharding, params: NamedSharding, grads: NamedSharding, opt: NamedSharding
    ) -> Dims:
        return Dims(_data_dim(params), _data_dim(grads), _data_dim(opt), _others(computed))

    return jax.tree.map(dims, placement.computed, *trees)


def _gathered_ends(params: PyTree, dims: PyTree) -> PyTree:
    """Parameters that belong to no layer, gathered for use."""
    return jax.tree.map(
        lambda p, d: _gather(p, d.params, d.others), _without_layers(params), _without_layers(dims)
    )


def _layers(tree: PyTree) -> PyTree:
    """The layers of a tree; nothing of an empty one."""
    return tree[LAYERS] if tree != () else ()


def _without_layers(tree: PyTree) -> PyTree:
    return {name: part for name, part in tree.items() if name != LAYERS}


def _data_dim(sharding: NamedSharding) -> int | None:
    assert not any("replica" in mesh_axes(entry) for entry in sharding.spec), "copies differ"
    dims = [dim for dim, entry in enumerate(sharding.spec) if "data" in mesh_axes(entry)]
    return dims[0] if dims else None


def _others(sharding: NamedSharding) -> PartitionSpec:
    """The part of a partition that is not over mesh axes of `MANUAL`."""
    return only_axes(sharding.spec, set(sharding.mesh.axis_names) - set(MANUAL))


def _gather(leaf: jax.Array, dim: int | None, others: PartitionSpec) -> jax.Array:
    """A leaf from its parts on all data shards."""
    if dim is None:
        return leaf
    return _of_pieces(
        lambda x: jax.lax.all_gather(x, "data", axis=dim, tiled=True), leaf, dim, others
    )


def _scatter(leaf: jax.Array, dim: int | None, others: PartitionSpec) -> jax.Array:
    """This device's part of the sum over `data`, along a dim; perhaps in a wider dtype.

    XLA:CPU aborts on 16-bit sums in a region that is manual over some axes only ("Invalid binary
    instruction opcode copy"): there they are made in 32 bits.
    """
    if dim is None:
        return leaf
    active = current()
    if active is not None and active.platform == "cpu" and leaf.dtype.itemsize == 2:
        leaf = leaf.astype(jnp.float32)
    return _of_pieces(
        lambda x: jax.lax.psum_scatter(x, "data", scatter_dimension=dim, tiled=True),
        leaf,
        dim,
        others,
    )


def _of_pieces(
    collective: Callable[[jax.Array], jax.Array], leaf: jax.Array, dim: int, others: PartitionSpec
) -> jax.Array:
    """Runs a collective over `data` on the pieces that other axes split a leaf into.

    Left to XLA, the pieces would be gathered first, for every tensor shard to do the whole. Where
    `dim` itself is split over other axes too that is the only way: which part of it a data shard
    has is counted in the whole.
    """
    active = current()
    axes = tuple(others) + (None,) * (leaf.ndim - len(others))
    if active is None or not any(axes) or axes[dim]:
        return collective(leaf)
    run: Callable[[jax.Array], jax.Array] = jax.shard_map(
        collective,
        mesh=active.context_mesh,
        axis_names=active.free,
        in_specs=PartitionSpec(*axes),
        out_specs=PartitionSpec(*axes),
        check_vma=False,
    )
    return run(leaf)
