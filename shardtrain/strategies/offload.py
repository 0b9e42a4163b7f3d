"""Layers whose parameters rest away from the device: each comes there for its own use only.

Owns: how a layer is fetched, and how a loop over such layers is differentiated: a forward fetches a
layer, its backward fetches it again, and its gradient stays on the device. Does not own: which
parameters rest where (`Placement`), and how they are written after an update (`optim.sweep`).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from shardtrain.sharding.frozen import joined
from shardtrain.sharding.placement import LAYERS, Placement, leaves_by_path, path_name
from shardtrain.strategies import traced
from shardtrain.strategies.layer_vjp import LayerVjp
from shardtrain.strategies.remat import Block, remat

PyTree = Any
Layer = Callable[[PyTree, jax.Array, PyTree], Any]
"""(weights, index, x) -> y."""


@dataclass(frozen=True, eq=False)
class FetchedStack:
    """Runs layers of which some parameters are not on the device (a `Stack`); always as a scan."""

    placement: Placement
    policy: str = "none"
    """See `remat`."""
    stand_ins: PyTree = None
    """What is differentiated in place of the parameters: leaves of zeros that nobody reads. None =
    nothing is differentiated."""

    def __call__(self, layers: nnx.Module, block: Block, x: PyTree) -> Any:
        """Runs them; see `Stack`."""
        graph, state = nnx.split(layers)
        resting = nnx.to_pure_dict(state)
        num_layers = jax.tree.leaves(self.placement.all.shapes[LAYERS])[0].shape[0]
        indices = jnp.arange(num_layers, dtype=jnp.uint32)
        # A version on a disk is that of every layer.
        resting = jax.tree.map(
            lambda leaf: leaf if leaf.ndim else jnp.broadcast_to(leaf, indices.shape), resting
        )

        def layer(weights: PyTree, index: jax.Array, x: PyTree) -> Any:
            return block(nnx.merge(graph, weights), index, x)

        def plain(_: PyTree, resting: PyTree, index: jax.Array, x: PyTree) -> Any:
            return layer(fetched(self.placement.all, resting, index), index, x)

        run: Any = plain if self.stand_ins is None else self._differentiable(layer, resting, x)
        rows = (self.stand_ins, resting, indices)
        return jax.lax.scan(lambda x, row: (run(*row, x), None), x, rows)[0]

    def _differentiable(self, layer: Layer, resting: PyTree, x: jax.Array) -> Any:
        """(stand-ins, what rests, index, x) -> x, of one layer; `resting` for shapes."""
        index = jax.ShapeDtypeStruct((), jnp.uint32)
        trained, frozen = (
            names[LAYERS] if names != () else ()
            for names in (self.placement.names, self.placement.frozen_names)
        )

        def fetch(resting: PyTree, index: jax.Array) -> tuple[PyTree, PyTree]:
            here = fetched(self.placement.all, resting, index)
            return _part(here, trained), _part(here, frozen)

        row = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), resting)
        weights = jax.eval_shape(fetch, row, index)
        like = jax.ShapeDtypeStruct(x.shape, x.dtype)
        whole, around = traced.opened(remat(self.policy)(layer), joined(*weights), index, like)
        cut = LayerVjp(whole, weights[0], index, like, around, frozen=weights[1])

        @jax.custom_vjp
        def run(_: PyTree, resting: PyTree, index: jax.Array, x: jax.Array, around: PyTree) -> Any:
            return cut.forward(fetch(resting, index), index, x, around)[0]

        def forward(
            _: PyTree, resting: PyTree, index: jax.Array, x: jax.Array, around: PyTree
        ) -> Any:
            y, kept = cut.forward(fetch(resting, index), index, x, around)
            return y, (resting, index, kept, around)

        def backward(saved: Any, g: jax.Array) -> Any:
            resting, index, kept, around = saved
            found, gx, _ = cut.backward(fetch(resting, index), index, kept, g, around)
            return jax.tree.unflatten(jax.tree.structure(weights[0]), found), None, None, gx, None

        run.defvjp(forward, backward)
        return lambda *row_and_x: run(*row_and_x, around)


def _part(tree: PyTree, like: PyTree) -> PyTree:
    """The leaves of a tree of dicts that another one has too; nothing of nothing."""
    if not isinstance(like, dict):
        return () if like == () else tree
    return {name: _part(tree[name], inner) for name, inner in like.items()}


def row_of(leaf: jax.Array, place: Any) -> jax.Array:
    """A layer's part of a stacked leaf, where that rests; the version of what is on a disk."""
    if not leaf.ndim:
        return leaf
    row: jax.Array = jax.lax.dynamic_index_in_dim(leaf, place, keepdims=False)
    return row


def fetched(placement: Placement, resting: PyTree, place: Any) -> PyTree:
    """One layer's parameters on the device.

    Args:
        placement: where they rest; those of its disk are among them, or none of those.
        resting: the layer's part of each stacked leaf, where that rests; the version of what is on
            a disk.
        place: which row of the stack the layer is, or of its stage's part.
    """
    read: dict[str, Any] = {}
    there, disk = dict(leaves_by_path({LAYERS: resting})), placement.disk
    if disk and disk.paths[0] in there:
        read, _ = disk.read(place, there[disk.paths[0]])

    def here(path: tuple[Any, ...], leaf: jax.Array, is_away: bool) -> jax.Array:
        name = f"{LAYERS}/{path_name(path)}"
        if name in read:
            row: jax.Array = read[name][0]
            return row
        return jax.device_put(leaf, jax.memory.Space.Device) if is_away else leaf

    return jax.tree.map_with_path(here, resting, placement.away[LAYERS])


def split(placement: Placement, params: PyTree) -> tuple[PyTree, PyTree]:
    """What is differentiated, and what rests away from the device.

    Returns:
        The parameters, with leaves of zeros that nobody reads for what is away; and what is away,
        with None for all else.
    """
    on_disk = placement.disk.leaves if placement.disk else {}

    def stand_in(path: tuple[Any, ...], leaf: jax.Array, shape: Any, is_away: bool) -> jax.Array:
        dtype = on_disk.get(path_name(path), leaf).dtype
        return jnp.zeros(shape.shape, dtype) if is_away else leaf

    away = placement.away
    return (
        jax.tree.map_with_path(stand_in, params, placement.shapes, away),
        jax.tree.map(lambda leaf, is_away: leaf if is_away else None, params, away),
    )


def with_resting(trained: PyTree, away: PyTree) -> PyTree:
    """The parameters of both parts that `split` makes."""
    return jax.tree.map(
        lambda rest, leaf: leaf if rest is None else rest,
        away,
        trained,
        is_leaf=lambda node: node is None,
    )
