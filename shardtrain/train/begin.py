"""The first state of weights from elsewhere, where the device has no room for all of them.

Owns: bringing weights from the host's memory to where they rest, one leaf at a time. Does not own:
where that is, nor the rest of the state.
"""

from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

from shardtrain.sharding.disk import Disk
from shardtrain.sharding.placement import Placement, path_name
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
        weights: in the memory of the host, in the master dtype, split as the optimizer's state.
        placement: where parameters rest.
        policy: their dtypes.
        disk: what rests there; `others` has its versions.
    """
    versions: dict[str, Any] = {}

    def settled(path: str, leaf: jax.Array, dtype: Any, target: NamedSharding) -> Any:
        rows = disk.by_path.get(path)
        if rows is None:
            return placed(leaf, dtype, target)
        there: Any = rows.leaves[path].sharding
        version = rows.store(path, placed(leaf, dtype, there.with_memory_kind(HOST)))
        versions.update(dict.fromkeys(rows.paths, version))
        return version

    def tree(prefix: str, dtype: Any, shardings: PyTree) -> PyTree:
        return jax.tree.map_with_path(
            lambda path, leaf, target: settled(prefix + path_name(path), leaf, dtype, target),
            weights,
            shardings,
        )

    params = tree("", policy.params, placement.params)
    opt_state = others.opt_state
    if opt_state and policy.has_master:
        shapes = jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(leaf.shape, policy.master), placement.shapes
        )
        places = placement.optimizer_state({**opt_state, MASTER: shapes})[MASTER]
        opt_state = {**opt_state, MASTER: tree(f"{MASTER}/", policy.master, places)}
    # What is written together has one version.
    opt_state = jax.tree.map_with_path(
        lambda path, leaf: versions.get(path_name(path), leaf), opt_state
    )
    return others.replace(params=params, opt_state=opt_state)


def placed(leaf: jax.Array, dtype: Any, target: NamedSharding) -> jax.Array:
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
