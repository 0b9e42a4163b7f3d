"""How an update goes through the leaves: all at once, or layer by layer through the device.

Owns: the loop over groups of leaves, and the copies between host and device in it. Does not own:
the arithmetic of an update (`update`), nor which leaves are on the host (`sharding.tiers`).

State on the host is never on the device as a whole: copying all of it in, updating and copying it
out would hold more than no offload at all. A leaf that is no layer's is a group of its own; the
layers of the stack are groups of one layer a stage. While one layer is computed the next is on its
way in, and the one before on its way out. XLA may fetch single leaves and the first layer early,
while the backward still runs, where there is room. With a disk it is the same: a layer is read
while the one before is computed, and written behind (`sharding.disk_files`).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding

from shardtrain.sharding.disk import Disk, OnDisk, Token
from shardtrain.sharding.mesh import PIPELINE, mesh_axes
from shardtrain.sharding.placement import (
    Placement,
    leaves_by_path,
    names_by_path,
    path_name,
)
from shardtrain.sharding.tiers import DEVICE, MASTER

UPDATE: Final = "update"
"""The scope of the loop over layers: the name of its operations in a compiled program."""

PyTree = Any
Flat = dict[str, Any]
MakeTransform = Callable[[PyTree], optax.GradientTransformation]
"""Names of some parameters' axes -> their transformation."""
Numbers = tuple[Any, Any, Any]
"""What gradients are multiplied by, the learning rate, and whether anything moves: of one update,
the same for all leaves."""
Advance = Callable[
    [optax.GradientTransformation, Numbers, PyTree, PyTree, PyTree, Any], tuple[PyTree, PyTree]
]
"""(transformation, numbers, gradients, state, parameters, rows) -> (parameters, state), of any part
of the leaves; all in one memory and resting like the optimizer's state. `rows`: which of the stack
the stacked leaves have, None = all."""
_One = Callable[..., tuple[PyTree, PyTree]]
"""The same with the numbers given."""


First = Callable[[Callable[[PyTree], PyTree], PyTree], PyTree]
"""(the transformation's `init`, parameters in the master dtype) -> the optimizer's state, of any
part of the leaves."""


class Sweep(Protocol):
    """How an update goes through the leaves."""

    @property
    def on_device(self) -> bool:
        """Whether the device computes, so that leaves can be told where to be."""
        ...

    def init(self, master: PyTree) -> PyTree:
        """The transformation's state for all parameters."""
        ...

    def first(self, make: First, master: PyTree) -> PyTree:
        """The state before the first update, as it rests.

        Args:
            make: makes that of some parameters.
            master: all of them, in the master dtype.
        """
        ...

    def __call__(
        self, advance: Advance, numbers: Numbers, grads: PyTree, state: PyTree, params: PyTree
    ) -> tuple[PyTree, PyTree]:
        """Updates every leaf.

        Args:
            advance: updates some leaves.
            numbers: for all of them.
            grads: of all parameters.
            state: the optimizer's, with `transform` and perhaps `master`.
            params: all parameters.

        Returns:
            The new parameters, and the new state. Parameters that rest away from the device are
            there; the others rest like the optimizer's state.
        """
        ...


@dataclass(frozen=True)
class Whole:
    """All leaves at once."""

    transform: optax.GradientTransformation
    on_device: bool = True

    def init(self, master: PyTree) -> PyTree:
        """The transformation's state for all parameters."""
        return self.transform.init(master)

    def first(self, make: First, master: PyTree) -> PyTree:
        """The state before the first update; see `Sweep`."""
        return make(self.init, master)

    def __call__(
        self, advance: Advance, numbers: Numbers, grads: PyTree, state: PyTree, params: PyTree
    ) -> tuple[PyTree, PyTree]:
        """Updates every leaf; see `Sweep`."""
        return advance(self.transform, numbers, grads, state, params, None)


@dataclass(frozen=True, eq=False)
class Streamed:
    """Group by group, so that what rests on the host is on the device for its own update only."""

    make_transform: MakeTransform
    placement: Placement
    stacked: Callable[[], frozenset[str]]
    """Paths of the state and of the parameters that hold one entry a layer."""
    disk: Callable[[], Disk] = Disk
    """What rests on a disk."""
    on_device: bool = True

    def init(self, master: PyTree) -> PyTree:
        """The transformation's state for all parameters."""
        return self.make_transform(self.placement.names).init(master)

    def first(self, make: First, master: PyTree) -> PyTree:
        """The state before the first update, layer by layer what goes to a disk; see `Sweep`."""
        state, disk = make(self.init, master), self.disk()
        masters, whole = dict(leaves_by_path(master)), dict(leaves_by_path(state))
        versions: Flat = {}
        for path, end in disk.ends.items():
            versions[path] = end.write(0, {path: whole[path]})
        if disk.state:
            stacked = self.stacked()
            layers = [path for path in masters if path in stacked]
            stages = self._stages(layers)
            names = names_by_path(self.placement.names)
            transform = self.make_transform(_nested({path: names[path] for path in layers}))

            def values(index: Any) -> Flat:
                row = _nested({path: take_row(masters[path], index, stages) for path in layers})
                return dict(leaves_by_path(make(transform.init, row)))

            versions |= dict.fromkeys(disk.state.paths, disk.state.write_all(values))
        return _filled(state, whole | versions)

    def __call__(
        self, advance: Advance, numbers: Numbers, grads: PyTree, state: PyTree, params: PyTree
    ) -> tuple[PyTree, PyTree]:
        """Updates every leaf; see `Sweep`."""
        shardings = self.placement.optimizer_state(jax.eval_shape(lambda: state))
        at_hand = self.placement.constrain_here(params, self.placement.optimizer)
        old = _Leaves(
            grads=dict(leaves_by_path(grads)),
            params=dict(leaves_by_path(at_hand)),
            state=dict(leaves_by_path(state)),
            places=dict(leaves_by_path(shardings)) | dict(leaves_by_path(self.placement.params)),
            disk=self.disk(),
        )
        stacked = self.stacked()
        ends, layers = ([p for p in old.params if (p in stacked) is want] for want in (False, True))

        def one(transform: optax.GradientTransformation, *trees: PyTree) -> tuple[PyTree, PyTree]:
            return advance(transform, numbers, *trees)

        done = [self._leaf(one, old, path) for path in ends]
        done += [self._layers(one, old, layers, stacked)] if layers else []
        new_params = {p: x for some, _ in done for p, x in some.items()}
        new_state = {p: x for _, some in done for p, x in some.items()}
        return _filled(params, new_params), _filled(state, new_state)

    def _leaf(self, advance: _One, old: "_Leaves", path: str) -> tuple[Flat, Flat]:
        """Updates a leaf that is no layer's."""
        transform, part = self._part([path], old)
        state = {name: old.state[name] for name, _ in leaves_by_path(part)}
        on_disk = {name: old.disk.ends[name] for name in state if name in old.disk.ends}
        read = {name: rows.read(0, state[name]) for name, rows in on_disk.items()}
        here = {name: found[name] for name, (found, _) in read.items()}
        new_params, new = advance(
            transform,
            _nested({path: old.grads[path]}),
            _filled(part, old.to_device(state | here)),
            _nested({path: old.params[path]}),
            None,
        )
        made = {path: old.to_rest(path, x) for path, x in leaves_by_path(new)}
        written = {
            name: rows.write(0, {name: made[name]}, read[name][1]) for name, rows in on_disk.items()
        }
        return dict(leaves_by_path(new_params)), made | written

    def _layers(
        self, advance: _One, old: "_Leaves", layers: Sequence[str], stacked: frozenset[str]
    ) -> tuple[Flat, Flat]:
        """Updates the stack, a layer of each stage at a time."""
        stages = self._stages(layers)
        count = dict(leaves_by_path(self.placement.shapes))[layers[0]].shape[0] // stages
        transform, part = self._part(layers, old, rows=stages)
        names = [name for name, _ in leaves_by_path(part)]
        disk = OnDisk(old.disk, old.state | old.params)
        rows = [path for path in names if path in stacked and path not in disk.paths]
        # Counts and the like: each layer begins with the old ones.
        shared = {path: old.state[path] for path in names if path not in {*rows, *disk.paths}}
        stacks = {path: old.state[path] for path in rows}
        params = {path: old.params[path] for path in layers if path not in disk.paths}

        def load(stacks: Flat, params: Flat, index: Any) -> tuple[Flat, Flat, Token]:
            read, token = disk.read(index)
            return (
                old.to_device({p: take_row(x, index, stages) for p, x in stacks.items()})
                | {p: x for p, x in read.items() if p not in old.params},
                # Those that the device has are read in their own turn.
                old.to_device({p: take_row(params[p], index, stages) for p in old.away})
                | {p: x for p, x in read.items() if p in old.params},
                token,
            )

        def turn(carry: Any, index: Any) -> tuple[Any, None]:
            (here, fetched, _), stacks, params, written, _ = carry
            # The last turn loads its own layer once more: a branch would hold both at once.
            following = load(stacks, params, jnp.minimum(index + 1, count - 1))
            at_hand = {p: take_row(params[p], index, stages) for p in layers if p not in fetched}
            new_params, new = advance(
                transform,
                _nested({p: take_row(old.grads[p], index, stages) for p in layers}),
                _filled(part, here | shared),
                _nested(at_hand | fetched),
                index + count * jnp.arange(stages),
            )
            found, made = dict(leaves_by_path(new)), dict(leaves_by_path(new_params))
            written = disk.write(index, found | made, written, following[2])
            # Read before it is written: otherwise a whole stack would be copied on the host.
            following, stacks, params = jax.lax.optimization_barrier((following, stacks, params))
            stacks, params = (
                {p: _put(x, old.to_rest(p, rows[p]), index, stages) for p, x in leaves.items()}
                for leaves, rows in ((stacks, found), (params, made))
            )
            return (following, stacks, params, written, {p: found[p] for p in shared}), None

        carry = (load(stacks, params, 0), stacks, params, disk.versions, shared)
        with jax.named_scope(UPDATE):
            (_, stacks, params, written, counts), _ = jax.lax.scan(turn, carry, jnp.arange(count))
        now = disk.by_path(written)
        return (
            params | {path: x for path, x in now.items() if path in old.params},
            stacks | counts | {path: x for path, x in now.items() if path not in old.params},
        )

    # -- parts of trees

    def _stages(self, layers: Sequence[str]) -> int:
        """Into how many stages the layers are split."""
        places = dict(leaves_by_path(self.placement.optimizer))
        axes = {mesh_axes(places[path].spec[0]) for path in layers}
        assert axes <= {(), (PIPELINE,)}, axes
        stages: int = self.placement.mesh.shape[PIPELINE]
        return stages

    def _part(
        self, paths: Sequence[str], old: "_Leaves", rows: int | None = None
    ) -> tuple[optax.GradientTransformation, PyTree]:
        """The transformation of some parameters, of `rows` layers each, and its state's tree."""
        names, shapes = names_by_path(self.placement.names), self.placement.shapes
        transform = self.make_transform(_nested({path: names[path] for path in paths}))
        some = {path: leaf for path, leaf in leaves_by_path(shapes) if path in paths}
        masters = _nested({
            path: leaf if rows is None else leaf.update(shape=(rows, *leaf.shape[1:]))
            for path, leaf in some.items()
        })  # fmt: skip
        state = {"transform": jax.eval_shape(transform.init, masters)}
        has_master = any(path.startswith(f"{MASTER}/") for path in old.state)
        return transform, {**state, MASTER: masters} if has_master else state


@dataclass(frozen=True)
class _Leaves:
    """All leaves by path, those of the state where they rest."""

    grads: Flat
    params: Flat
    state: Flat
    places: Mapping[str, NamedSharding]
    """Of the state and of the parameters."""
    disk: Disk

    @property
    def on_host(self) -> frozenset[str]:
        """Leaves that rest on the host."""
        return frozenset(p for p, s in self.places.items() if s.memory_kind not in (None, DEVICE))

    @property
    def away(self) -> frozenset[str]:
        """Parameters among them."""
        return self.on_host & frozenset(self.params)

    def to_device(self, leaves: Flat) -> Flat:
        """Leaves, or layers of them, brought to the device if they are not there."""
        return {
            path: jax.device_put(x, self.places[path].with_memory_kind(DEVICE))
            if path in self.on_host
            else x
            for path, x in leaves.items()
        }

    def to_rest(self, path: str, leaf: Any) -> Any:
        """A leaf, or a layer of it, brought to the host if it rests there."""
        return jax.device_put(leaf, self.places[path]) if path in self.on_host else leaf


def stacked_paths(stacked_params: PyTree, stacked_state: PyTree) -> frozenset[str]:
    """The paths of the leaves that hold one entry a layer, from trees of booleans."""
    flags = [*leaves_by_path(stacked_params), *leaves_by_path(stacked_state)]
    return frozenset(path for path, is_stacked in flags if is_stacked)


def take_row(stack: Any, index: Any, stages: int) -> Any:
    """Layer `index` of each stage, [stages, ...], of a stack [layers, ...]."""
    if stages == 1:
        return jax.lax.dynamic_slice_in_dim(stack, index, 1)
    apart = stack.reshape(stages, -1, *stack.shape[1:])
    return jax.lax.dynamic_index_in_dim(apart, index, 1, keepdims=False)


def _put(stack: Any, row: Any, index: Any, stages: int) -> Any:
    """The stack with that layer of each stage replaced."""
    if stages == 1:
        return jax.lax.dynamic_update_slice_in_dim(stack, row, index, 0)
    apart = stack.reshape(stages, -1, *stack.shape[1:])
    return jax.lax.dynamic_update_index_in_dim(apart, row, index, 1).reshape(stack.shape)


def _nested(leaves: Flat) -> PyTree:
    """A tree of dicts from its leaves by path."""
    tree: dict[str, Any] = {}
    for path, leaf in leaves.items():
        *folders, name = path.split("/")
        inner = tree
        for folder in folders:
            inner = inner.setdefault(folder, {})
        inner[name] = leaf
    return tree


def _filled(tree: PyTree, leaves: Flat) -> PyTree:
    """A tree with other leaves, by path."""
    return jax.tree.map_with_path(lambda path, _: leaves[path_name(path)], tree)
