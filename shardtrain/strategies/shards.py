"""Parameters and gradients as one device of a pipeline has them: its stage's, its data shard's.

Owns: how a parameter that rests split over `data` is gathered for use, and where its gradient is
summed: whole on each data shard until the last tick (ZeRO 0-1), or scattered after each microbatch
(ZeRO 2-3). Does not own: where things rest (`Placement`), and when they are used (`stage`).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from shardtrain.sharding.mesh import DATA_AXES, PIPELINE
from shardtrain.sharding.placement import Placement, mesh_axes
from shardtrain.sharding.rules import current
from shardtrain.strategies.layer_vjp import Arrays
from shardtrain.strategies.parts import LAYERS

PyTree = Any

MANUAL = (PIPELINE, *DATA_AXES)
"""Mesh axes that the pipeline's program itself is written for; all others are XLA's."""


@dataclass(frozen=True)
class Dims:
    """The dim of one leaf that is split over `data`, in each of the places where it lies."""

    params: int | None
    gradients: int | None
    optimizer: int | None


def manual_specs(shardings: PyTree) -> PyTree:
    """The part of partitions over the mesh axes of `MANUAL`."""

    def spec(sharding: NamedSharding) -> PartitionSpec:
        kept = (tuple(a for a in mesh_axes(dim) if a in MANUAL) for dim in sharding.spec)
        return PartitionSpec(*(axes or None for axes in kept))

    return jax.tree.map(spec, shardings)


@dataclass(frozen=True, eq=False)
class Shard:
    """What one device has, inside the `shard_map`."""

    placement: Placement
    params: PyTree
    """As they rest here; the layers of this stage, and whatever else there is (the ends)."""
    dtype: Any
    """What gradients are added up in."""

    # -- parameters

    def ends(self) -> PyTree:
        """The parameters that belong to no layer, gathered for use."""
        dims = _without_layers(self._dims)
        return jax.tree.map(lambda p, d: _gather(p, d.params), _without_layers(self.params), dims)

    def whole(self, ends: PyTree) -> PyTree:
        """All parameters, from the ends."""
        return {**ends, LAYERS: self.params[LAYERS]}

    def layer(self, place: Any) -> PyTree:
        """One layer's parameters, gathered for use."""

        def use(leaf: jax.Array, dims: Dims) -> jax.Array:
            own = jax.lax.dynamic_index_in_dim(leaf, place, keepdims=False)
            return _gather(own, _of_entry(dims.params))

        return jax.tree.map(use, self.params[LAYERS], self._dims[LAYERS])

    def gathered(self) -> PyTree:
        """All parameters, the ends gathered for use."""
        return self.whole(self.ends())

    # -- gradients

    def no_gradients(self) -> tuple[Arrays, PyTree]:
        """Sums of nothing: of each leaf of the layers, and of the ends."""
        degree = self.placement.mesh.shape["data"]

        def zeros(leaf: jax.Array, dims: Dims) -> jax.Array:
            shape = list(leaf.shape)
            if dims.params is not None:
                shape[dims.params] *= degree
            if dims.gradients is not None:
                shape[dims.gradients] //= degree
            return jnp.zeros(shape, self.dtype)

        sums = jax.tree.map(zeros, self.params, self._dims)
        return jax.tree.leaves(sums[LAYERS]), _without_layers(sums)

    def add_layer(
        self, sums: Arrays, leaves: Sequence[int], place: Any, gradients: Sequence[jax.Array]
    ) -> Arrays:
        """Adds a microbatch's gradients of some leaves of one layer."""
        dims = jax.tree.leaves(self._dims[LAYERS])
        sums = list(sums)
        for leaf, gradient in zip(leaves, gradients, strict=True):
            part = _scatter(gradient, _of_entry(dims[leaf].gradients))
            sums[leaf] = sums[leaf].at[place].add(part.astype(self.dtype))
        return sums

    def add_ends(self, sums: PyTree, gradients: PyTree) -> PyTree:
        """Adds a microbatch's gradients of the ends."""
        return jax.tree.map(
            lambda s, g, dims: s + _scatter(g, dims.gradients).astype(self.dtype),
            sums,
            gradients,
            _without_layers(self._dims),
        )

    def reduced(self, layers: Arrays, ends: PyTree) -> PyTree:
        """The step's gradients, from what stages and data shards have summed by themselves."""

        def reduce(total: jax.Array, dims: Dims, *axes: str) -> jax.Array:
            if dims.optimizer is None:
                axes = (*axes, "data")
            elif dims.gradients is None:
                total = _scatter(total, dims.optimizer)
            whole: jax.Array = jax.lax.psum(total, (*axes, "replica"))
            return whole

        stacked = jax.tree.unflatten(jax.tree.structure(self.params[LAYERS]), layers)
        dims = self._dims
        return {
            **jax.tree.map(lambda s, d: reduce(s, d, PIPELINE), ends, _without_layers(dims)),
            LAYERS: jax.tree.map(reduce, stacked, dims[LAYERS]),
        }

    @cached_property
    def _dims(self) -> PyTree:
        """`Dims` of every parameter."""
        placement = self.placement
        trees = (placement.params, placement.gradients, placement.optimizer)
        return jax.tree.map(lambda *shardings: Dims(*map(_data_dim, shardings)), *trees)


def _without_layers(tree: PyTree) -> PyTree:
    return {name: part for name, part in tree.items() if name != LAYERS}


def _data_dim(sharding: NamedSharding) -> int | None:
    assert not any("replica" in mesh_axes(entry) for entry in sharding.spec), "copies differ"
    dims = [dim for dim, entry in enumerate(sharding.spec) if "data" in mesh_axes(entry)]
    return dims[0] if dims else None


def _of_entry(dim: int | None) -> int | None:
    """A dim of a stacked leaf, in one entry of it."""
    return None if dim is None else dim - 1


def _gather(leaf: jax.Array, dim: int | None) -> jax.Array:
    if dim is None:
        return leaf
    whole: jax.Array = jax.lax.all_gather(leaf, "data", axis=dim, tiled=True)
    return whole


def _scatter(leaf: jax.Array, dim: int | None) -> jax.Array:
    """This device's part of the sum over `data`, along a dim; perhaps in a wider dtype.

    XLA:CPU aborts on 16-bit sums in a region that is manual over some axes only ("Invalid binary
    instruction opcode copy"): there they are made in 32 bits.
    """
    if dim is None:
        return leaf
    active = current()
    if active is not None and active.platform == "cpu" and leaf.dtype.itemsize == 2:
        leaf = leaf.astype(jnp.float32)
    part: jax.Array = jax.lax.psum_scatter(leaf, "data", scatter_dimension=dim, tiled=True)
    return part
