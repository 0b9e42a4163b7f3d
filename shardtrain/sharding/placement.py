"""Where trees rest: a sharding for every leaf of parameters, gradients and optimizer state.

Owns how names, tables and the ZeRO stage become shardings and bytes per device, for the run and for
whoever asks before there is one. It knows no model and no optimizer.
"""

import math
from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from shardtrain.errors import ShardingError
from shardtrain.sharding.disk import Rows
from shardtrain.sharding.frozen import joined
from shardtrain.sharding.rules import Table
from shardtrain.sharding.tiers import HOST, Tiers

PyTree = Any
Names = tuple[str | None, ...]

LAYERS = "layers"
"""Where the tree of parameters holds the stacked layers."""


@dataclass(frozen=True)
class Resting:
    """How one leaf rests."""

    spec: PartitionSpec
    note: str = ""
    """Why the leaf takes another dim than the rule's, or stays whole; empty when the rule holds."""


def split_size(mesh: Mesh | AbstractMesh, axes: tuple[str, ...]) -> int:
    """Into how many pieces these mesh axes cut a dim."""
    return math.prod(mesh.shape[axis] for axis in axes)


def rest(
    path: str,
    shape: tuple[int, ...],
    names: Names,
    mesh: Mesh | AbstractMesh,
    compute: Table,
    stored: Table | None = None,
) -> Resting:
    """Finds how a leaf rests.

    Args:
        path: the leaf's path, for messages.
        shape: the global shape.
        names: one axis name a dim.
        mesh: the mesh.
        compute: the table in force while the leaf is used; it must divide the shape.
        stored: the table at rest, if the leaf is split further there.

    Returns:
        The partition, and a note where the stored table could not be followed to the letter.

    Raises:
        ShardingError: a dim does not divide by what `compute` asks.
    """
    assert len(shape) == len(names), (path, shape, names)
    base: list[tuple[str, ...]] = []
    for size, name in zip(shape, names, strict=True):
        axes = () if name is None else tuple(a for a in compute[name] if mesh.shape[a] > 1)
        pieces = split_size(mesh, axes)
        if size % pieces:
            raise ShardingError(
                f"the {name} axis of {path} has {size} entries, which do not divide by {pieces}",
                where=" x ".join(f"mesh.{axis}" for axis in axes),
                value=str(pieces),
                allowed=f"a divisor of {size}",
            )
        base.append(axes)
    if stored is None:
        return Resting(_spec(base))
    extra = _extra(mesh, compute, stored)
    used = {axis for axes in base for axis in axes}
    extra = tuple(axis for axis in extra if axis not in used)
    pieces = split_size(mesh, extra)
    if pieces == 1:
        return Resting(_spec(base))
    wanted = [i for i, name in enumerate(names) if name and set(extra) & set(stored[name])]
    # "layers" is never split further: the loop over layers would gather all of them at once.
    others = [i for i, name in enumerate(names) if i not in wanted and name != "layers"]
    others.sort(key=lambda i: -shape[i])
    for i in wanted + others:
        if shape[i] % (split_size(mesh, base[i]) * pieces) == 0:
            note = "" if i in wanted else f"split along {names[i] or f'dim {i}'}"
            return Resting(
                _spec([(*axes, *extra) if j == i else axes for j, axes in enumerate(base)]), note
            )
    return Resting(_spec(base), f"whole: no dim of {shape} divides by {pieces} more")


def _extra(mesh: Mesh | AbstractMesh, compute: Table, stored: Table) -> tuple[str, ...]:
    """Mesh axes of degree above 1 that the stored table adds, by whatever row."""
    added: list[str] = []
    for name in stored:
        for axis in stored[name]:
            if axis not in compute[name] and mesh.shape[axis] > 1 and axis not in added:
                added.append(axis)
    return tuple(added)


def _spec(axes: list[tuple[str, ...]]) -> PartitionSpec:
    return PartitionSpec(*(a if len(a) > 1 else (a[0] if a else None) for a in axes))


@dataclass(frozen=True)
class Placement:
    """Where the state of one run rests.

    ZeRO-n says which trees rest under `stored`: optimizer state (n >= 1), gradients (n >= 2),
    parameters (n >= 3).
    """

    mesh: Mesh | AbstractMesh
    compute: Table
    stored: Table
    zero: int
    names: PyTree
    """A tuple of axis names for every parameter."""
    shapes: PyTree
    """A `jax.ShapeDtypeStruct` for every parameter."""
    tiers: Tiers = Tiers()  # noqa: RUF009  # frozen
    """What of the state is not in the memory of the device."""
    disk: Rows | None = None
    """The parameters that rest on a disk, trained or not."""
    stays: frozenset[str] = frozenset()
    """Parameters of the layers that rest on the device in any case, such as adapters."""
    frozen_names: PyTree = ()
    """Names of parameters that are not trained: they have no gradient and no optimizer state."""
    frozen_shapes: PyTree = ()

    @property
    def frozen(self) -> "Placement":
        """Where parameters that are not trained rest: under the same tables."""
        return replace(
            self,
            names=self.frozen_names,
            shapes=self.frozen_shapes,
            frozen_names=(),
            frozen_shapes=(),
        )

    @property
    def all(self) -> "Placement":
        """Where every parameter of the model rests, trained or not."""
        return replace(
            self,
            names=joined(self.names, self.frozen_names),
            shapes=joined(self.shapes, self.frozen_shapes),
            frozen_names=(),
            frozen_shapes=(),
        )

    def resting(self, *, stored: bool) -> PyTree:
        """A `Resting` for every parameter, under one table or the other."""
        table = self.stored if stored else None
        return jax.tree.map_with_path(
            lambda path, leaf, names: rest(
                path_name(path), leaf.shape, names, self.mesh, self.compute, table
            ),
            self.shapes,
            self.names,
        )

    def _shardings(self, stored: bool) -> PyTree:
        return jax.tree.map(
            lambda r: NamedSharding(self.mesh, r.spec),
            self.resting(stored=stored),
            is_leaf=lambda r: isinstance(r, Resting),
        )

    @property
    def params(self) -> PyTree:
        """A sharding for every parameter; of what is on a disk, for its version."""
        on_disk = self.disk.paths if self.disk else ()

        def where(path: tuple[Any, ...], place: NamedSharding, away: bool) -> NamedSharding:
            if path_name(path) in on_disk:
                return self.whole
            return place.with_memory_kind(HOST) if away else place

        return jax.tree.map_with_path(where, self.stored_params, self.away)

    @property
    def stored_params(self) -> PyTree:
        """A sharding for every parameter as it is stored, in whatever memory."""
        return self._shardings(self.zero >= 3)

    @property
    def away(self) -> PyTree:
        """Whether each parameter rests away from the device, on its host or on a disk."""
        chosen = self.layers_in("host") | self.layers_in("disk")
        return jax.tree.map_with_path(lambda path, _: path_name(path) in chosen, self.shapes)

    def layers_in(self, tier: str) -> frozenset[str]:
        """The parameters that rest in a tier, by path."""
        leaves = leaves_by_path(self.shapes)
        sizes = [
            (path, math.prod(leaf.shape))
            for path, leaf in leaves
            if path.split("/")[0] == LAYERS and path not in self.stays
        ]
        return self.tiers.layers_in(tier, sizes)

    @property
    def any_away(self) -> bool:
        """Whether any parameter rests away from the device."""
        return any(jax.tree.leaves(self.away))

    @property
    def computed(self) -> PyTree:
        """A sharding for every parameter while it is used."""
        return self._shardings(False)

    @property
    def gradients(self) -> PyTree:
        """A sharding for every gradient while it is made, microbatch by microbatch."""
        return self._shardings(self.zero >= 2)

    @property
    def optimizer(self) -> PyTree:
        """A sharding for every tensor of the optimizer that has a parameter's shape.

        Also for the whole step's gradient: ZeRO 1 reduces it straight into the shards that use it.
        """
        return self._shardings(self.zero >= 1)

    @property
    def whole(self) -> NamedSharding:
        """The sharding of what every device holds."""
        return NamedSharding(self.mesh, PartitionSpec())

    def constrain_here(self, params: PyTree, shardings: PyTree) -> PyTree:
        """Says where every parameter is that is on the device; what is away is left alone."""
        return jax.tree.map(
            lambda x, place, away: x if away else jax.lax.with_sharding_constraint(x, place),
            params,
            shardings,
            self.away,
        )

    def optimizer_state(self, abstract: PyTree) -> PyTree:
        """A sharding for every leaf of an optimizer's state.

        A leaf rests like the parameter that owns it where the shapes agree, also where it has one
        entry in place of the last dim (a cell for each row of a table); what has no parameter's
        shape (counts, factored moments, the versions of what is on a disk) is whole.

        Args:
            abstract: the state's shapes.
        """
        places, sizes = self._owned(abstract)
        for path in self.tiers.state_in("host", sizes.items()):
            places[path] = places[path].with_memory_kind(HOST)
        return jax.tree.map_with_path(lambda path, _: places[path_name(path)], abstract)

    def state_on_disk(self, abstract: PyTree) -> frozenset[str]:
        """The leaves of an optimizer's state that rest on a disk.

        Args:
            abstract: the whole state's shapes.
        """
        return self.tiers.state_in("disk", self._owned(abstract)[1].items())

    def beside(self, abstract: PyTree) -> PyTree:
        """A sharding for every leaf of what is kept beside parameters and optimizer, on the device.

        A leaf of a parameter's name and shape rests as the optimizer's state does; all else is
        whole.

        Args:
            abstract: its shapes.
        """
        places = self._owned(abstract)[0]
        return jax.tree.map_with_path(lambda path, _: places[path_name(path)], abstract)

    def _owned(self, abstract: PyTree) -> tuple[dict[str, NamedSharding], dict[str, int]]:
        """Where each leaf rests on the device, and the bytes of those that a parameter owns."""
        shapes = dict(leaves_by_path(self.shapes))
        shardings = dict(leaves_by_path(self.optimizer))

        places: dict[str, NamedSharding] = {}
        sizes: dict[str, int] = {}
        for path, leaf in leaves_by_path(abstract):
            owner = owner_of(path, shapes)
            if owner and shapes[owner].shape == leaf.shape:
                places[path] = shardings[owner]
                sizes[path] = math.prod(leaf.shape) * leaf.dtype.itemsize
            elif owner and leaf.shape and leaf.shape == (*shapes[owner].shape[:-1], 1):
                places[path] = NamedSharding(self.mesh, _without_last(shardings[owner].spec, leaf))
            else:
                places[path] = self.whole
        return places, sizes


def _without_last(spec: PartitionSpec, leaf: Any) -> PartitionSpec:
    """A partition of a leaf with as many dims, whose last one is not split."""
    return PartitionSpec(*tuple(spec)[: len(leaf.shape) - 1])


def owner_of(path: str, params: Collection[str]) -> str:
    """The parameter that a leaf of the optimizer's state belongs to.

    Args:
        path: the leaf's path.
        params: the paths of the parameters.

    Returns:
        The longest of them that the path ends with, or "".
    """
    words = path.split("/")
    ends = ("/".join(words[start:]) for start in range(len(words)))
    return next((end for end in ends if end in params), "")


def constrain_tree(tree: PyTree, shardings: PyTree) -> PyTree:
    """Says where every leaf of a tree is, inside a traced function."""
    return jax.tree.map(jax.lax.with_sharding_constraint, tree, shardings)


def leaves_by_path(tree: PyTree) -> list[tuple[str, Any]]:
    """The leaves of a tree with their paths, in order."""
    return [(path_name(path), leaf) for path, leaf in jax.tree.leaves_with_path(tree)]


def names_by_path(names: PyTree) -> dict[str, Names]:
    """The axis names of every parameter by its path, in order."""
    flat = jax.tree.leaves_with_path(names, is_leaf=lambda node: isinstance(node, tuple))
    return {path_name(path): leaf for path, leaf in flat}


def path_name(path: tuple[Any, ...]) -> str:
    """A leaf's path, such as `layers/mlp/up`."""
    return "/".join(
        str(getattr(key, "key", getattr(key, "name", getattr(key, "idx", key)))) for key in path
    )


def bytes_per_device(shape: tuple[int, ...], dtype: Any, sharding: NamedSharding) -> int:
    """Bytes that one device holds of an array."""
    return int(math.prod(sharding.shard_shape(shape)) * np.dtype(dtype).itemsize)


def bytes_by_memory(abstract: PyTree, shardings: PyTree) -> tuple[dict[str, int], dict[str, int]]:
    """Bytes of each leaf of a tree by its path: on one device, and in its host's memory."""
    device: dict[str, int] = {}
    host: dict[str, int] = {}
    places = jax.tree.leaves(shardings)
    for (path, leaf), place in zip(leaves_by_path(abstract), places, strict=True):
        memory = host if place.memory_kind == HOST else device
        memory[path] = bytes_per_device(leaf.shape, leaf.dtype, place)
    return device, host


def tree_bytes(abstract: PyTree, shardings: PyTree) -> int:
    """Bytes that one device holds of a tree."""
    sizes = jax.tree.map(lambda a, s: bytes_per_device(a.shape, a.dtype, s), abstract, shardings)
    return sum(jax.tree.leaves(sizes))
