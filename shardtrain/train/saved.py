"""The state as it is saved and compared: layers in model order, and nothing that says where it was.

Owns: the way between a state as it rests and as it is saved. Does not own: the order itself
(`strategies.order`), the disk (`sharding.disk`), and checkpoints.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import jax
from jax.sharding import NamedSharding

from shardtrain.sharding.disk import Apart, Disk
from shardtrain.sharding.placement import leaves_by_path, path_name
from shardtrain.sharding.tiers import HOST
from shardtrain.strategies.order import LayerOrder, map_stacked, model_order_sharding, take_rows
from shardtrain.train.state import TrainState

PyTree = Any


@dataclass(frozen=True, eq=False)
class Saved:
    """How the states of one program are saved."""

    order: LayerOrder
    resting: TrainState
    """Shapes and shardings of the state as it rests."""
    stacked: TrainState
    """Which leaves hold one entry a layer."""
    disk: Disk
    """What of it rests there."""
    _movers: dict[Any, Callable[[jax.Array], jax.Array]] = field(default_factory=dict)

    @cached_property
    def whole(self) -> TrainState:
        """Shapes and shardings of the state in stack order, each leaf whole.

        What is on a disk passes through the memory of the host.
        """
        on_disk = self.disk.by_path

        def where(path: tuple[Any, ...], leaf: Any) -> Any:
            name = path_name(path[1:])
            if name not in on_disk:
                return leaf
            whole = on_disk[name].leaves[name]
            return whole.update(sharding=whole.sharding.with_memory_kind(HOST))

        state: TrainState = jax.tree.map_with_path(where, self.resting)
        return state

    @cached_property
    def abstract(self) -> TrainState:
        """Shapes and shardings of the state in model order."""

        def unstack(leaf: Any) -> Any:
            bare = jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)  # in whatever memory it rests
            return jax.eval_shape(self.order.unstack, bare)

        def where(saved: Any, leaf: Any) -> Any:
            there = leaf.sharding
            if saved.shape != leaf.shape:
                there = model_order_sharding(there, saved.shape)
            return jax.ShapeDtypeStruct(saved.shape, saved.dtype, sharding=there)

        shapes = map_stacked(unstack, self.whole, self.stacked)
        state: TrainState = jax.tree.map(where, shapes, self.whole)
        return state

    @cached_property
    def wanted(self) -> TrainState:
        """The same for a checkpoint to fill: what belongs on a disk goes there leaf by leaf."""
        return self._with_apart(self.abstract)

    def save(self, state: TrainState) -> TrainState:
        """A state as it is saved; what is on a disk is read when its turn comes."""
        return self._moved(self._with_apart(state), self.order.places, to_saved=True)

    def rest(self, state: TrainState) -> TrainState:
        """The state of one that was saved: of `wanted`, or whole. It may lack `opt_state`."""
        on_disk, saved = self.disk.by_path, dict(leaves_by_path(self.abstract))

        def store(path: tuple[Any, ...], leaf: Any) -> Any:
            name = path_name(path[1:])
            if name not in on_disk or not leaf.ndim:
                return leaf
            return self._store(name, path_name(path), saved, leaf)

        state = jax.tree.map_with_path(store, state)
        return self._moved(state, self.order.rows, to_saved=False)

    # -- what is on a disk

    def _with_apart(self, state: TrainState) -> TrainState:
        """A state whose leaves on a disk are `Apart`."""
        on_disk, saved = self.disk.by_path, dict(leaves_by_path(self.abstract))

        def apart(path: tuple[Any, ...], leaf: Any) -> Any:
            name, full = path_name(path[1:]), path_name(path)
            if name not in on_disk:
                return leaf
            as_saved = saved[full]
            return Apart(
                as_saved.shape,
                as_saved.dtype,
                as_saved.sharding,
                load=lambda: self._load(name, full, saved, leaf),
                store=lambda whole: self._store(name, full, saved, whole),
            )

        made: TrainState = jax.tree.map_with_path(apart, state)
        return made

    def _load(
        self, name: str, path: str, saved: Mapping[str, Any], version: jax.Array
    ) -> jax.Array:
        rows = self.disk.by_path[name]
        stack = rows.leaves[name].sharding.with_memory_kind(HOST)
        leaf = rows.load(name, stack, version)
        return self._one(path, leaf, self.order.places, stack, saved[path].sharding)

    def _store(self, name: str, path: str, saved: Mapping[str, Any], whole: jax.Array) -> jax.Array:
        rows = self.disk.by_path[name]
        stack = rows.leaves[name].sharding.with_memory_kind(HOST)
        whole = self._one(path, whole, self.order.rows, saved[path].sharding, stack)
        return rows.store(name, whole)

    # -- the order of layers

    @cached_property
    def _is_stacked(self) -> dict[str, bool]:
        return dict(leaves_by_path(self.stacked))

    def _moved(self, state: TrainState, rows: Sequence[int], *, to_saved: bool) -> TrainState:
        """A state with its stacked leaves in the other order; what is on a disk is left alone."""
        if self.order.is_model_order:
            return state
        source, target = (
            {path: leaf.sharding for path, leaf in leaves_by_path(form)}
            for form in ((self.whole, self.abstract) if to_saved else (self.abstract, self.whole))
        )

        def move(path: tuple[Any, ...], leaf: Any) -> Any:
            name = path_name(path)
            if not isinstance(leaf, jax.Array) or not leaf.ndim:
                return leaf
            return self._one(name, leaf, rows, source[name], target[name])

        made: TrainState = jax.tree.map_with_path(move, state)
        return made

    def _one(
        self,
        path: str,
        leaf: jax.Array,
        rows: Sequence[int],
        source: NamedSharding,
        target: NamedSharding,
    ) -> jax.Array:
        """A leaf in the other order."""
        if self.order.is_model_order or not self._is_stacked[path]:
            return leaf
        key = (tuple(rows), source, target)
        if key not in self._movers:
            # Leaves of one shape share what is compiled: a parameter and its moments do.
            move = partial(take_rows, rows=rows, source=source, target=target)
            self._movers[key] = jax.jit(move, out_shardings=target)
        # One at a time: a CPU's collectives of many programs in flight lack threads.
        moved: jax.Array = jax.block_until_ready(self._movers[key](jax.block_until_ready(leaf)))
        return moved
