"""The first state of weights from elsewhere, where the device has no room for all of them.

Owns: bringing weights from the host's memory to where they rest, one leaf at a time. Does not own:
where that is, nor the rest of the state.
"""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

from shardtrain.sharding.disk import Apart, Disk, loaded
from shardtrain.sharding.placement import Placement, leaves_by_path, path_name
from shardtrain.sharding.tiers import HOST, MASTER, of_pieces
from shardtrain.strategies.precision import Policy
from shardtrain.train.state import TrainState

PyTree = Any


def with_weights(
    others: TrainState, weights: PyTree, placement: Placement, policy: Policy, disk: Disk
) -> TrainState:
    """A state with the parameters, and the masters if it has an optimizer that keeps them.

    Args:
        others: the state without both.
        weights: in the memory of the host, in the master dtype, split as the optimizer's state; or
            each `Apart`.
        placement: where parameters rest.
        policy: their dtypes.
        disk: what rests there; `others` has its versions.
    """
    opt_state, places = others.opt_state, {}
    if opt_state and policy.has_master:
        shapes = jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(leaf.shape, policy.master), placement.shapes
        )
        opt_state = {**opt_state, MASTER: shapes}
        places = dict(leaves_by_path(placement.optimizer_state(opt_state)[MASTER]))
    masters: dict[str, Any] = {}

    def settle(path: tuple[Any, ...], leaf: Any, target: NamedSharding) -> Any:
        name, whole = path_name(path), loaded(leaf)
        if places:
            master = f"{MASTER}/{name}"
            masters[master] = _settled(master, whole, policy.master, places[name], disk)
            if master in disk.by_path:  # what is written together has one version
                masters.update(dict.fromkeys(disk.by_path[master].paths, masters[master]))
        return _settled(name, whole, policy.params, target, disk)

    params = jax.tree.map_with_path(settle, weights, placement.params)
    opt_state = jax.tree.map_with_path(
        lambda path, leaf: masters.get(path_name(path), leaf), opt_state
    )
    return others.replace(params=params, opt_state=opt_state)


def in_turn(abstract: PyTree, read: Callable[[str, Any], jax.Array]) -> PyTree:
    """Weights that are read when each one's turn comes.

    Args:
        abstract: shapes, dtypes and shardings of all.
        read: path, and shape, dtype and sharding -> the weight.
    """

    def apart(path: tuple[Any, ...], leaf: Any) -> Apart:
        name = path_name(path)
        return Apart(leaf.shape, leaf.dtype, leaf.sharding, load=lambda: read(name, leaf))

    return jax.tree.map_with_path(apart, abstract)


def at_rest(weights: PyTree, dtype: Any, shardings: PyTree, disk: Disk) -> PyTree:
    """Weights where they rest.

    Args:
        weights: in the memory of the host, or each `Apart`.
        dtype: what they become.
        shardings: where they rest; of what is on a disk, of its version.
        disk: what rests there.
    """
    return jax.tree.map_with_path(
        lambda path, leaf, target: _settled(path_name(path), loaded(leaf), dtype, target, disk),
        weights,
        shardings,
    )


def _settled(name: str, whole: jax.Array, dtype: Any, target: NamedSharding, disk: Disk) -> Any:
    """A leaf where it rests, or the version of one that is on the disk."""
    rows = disk.by_path.get(name)
    if rows is None:
        return _placed(whole, dtype, target)
    there: Any = rows.leaves[name].sharding
    return rows.store(name, _placed(whole, dtype, there.with_memory_kind(HOST)))


def _placed(leaf: jax.Array, dtype: Any, target: NamedSharding) -> jax.Array:
    """A leaf in the memory of the host as another type and somewhere else.

    Where it is split as before the device has no part in it.
    """
    source: Any = leaf.sharding
    if not source.with_memory_kind(target.memory_kind).is_equivalent_to(target, leaf.ndim):
        brought = jax.jit(
            lambda x: jax.device_put(x, jax.memory.Space.Device).astype(dtype),
            out_shardings=target,
        )
        moved: jax.Array = brought(leaf)
        return moved
    if leaf.dtype == dtype and source.memory_kind == target.memory_kind:
        return leaf
    here = {shard.device: shard.data for shard in leaf.addressable_shards}
    return of_pieces(
        leaf.shape, target, lambda device: np.asarray(here[device]).astype(dtype, copy=False)
    )
