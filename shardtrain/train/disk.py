"""What of a program's state rests on a disk, and how parameters come there at first.

Owns: which tensors are read and written together. Does not own: how that is done
(`sharding.disk`), which tensors are there (`Placement`), and the state of the optimizer as it comes
there (`optim.sweep`).
"""

from collections.abc import Collection
from typing import Any

import jax

from shardtrain.optim.sweep import take_row
from shardtrain.sharding.disk import PARAMETERS, STATE, Disk, Rows
from shardtrain.sharding.disk_files import DiskFiles
from shardtrain.sharding.mesh import PIPELINE
from shardtrain.sharding.placement import Placement, leaves_by_path, path_name

PyTree = Any


def on_disk(
    placement: Placement, state: PyTree, stacked: Collection[str], files: DiskFiles
) -> Disk:
    """All that rests there.

    Args:
        placement: where everything rests.
        state: shapes of the optimizer's state, whole.
        stacked: paths of what holds one entry a layer.
        files: where it is.
    """
    chosen, places = placement.state_on_disk(state), placement.beside(state)
    leaves = _leaves(state, places, chosen)
    layers = {path: leaf for path, leaf in leaves.items() if path in stacked}
    mesh, some_frozen = placement.mesh, placement.frozen_names != ()
    return Disk(
        state=Rows(STATE, files, mesh, layers, mesh.shape[PIPELINE]) if layers else None,
        # Beside frozen weights what is trained is on the device.
        parameters=None if some_frozen else placement.disk,
        frozen=placement.disk if some_frozen else None,
        ends={
            path: Rows(path, files, mesh, {path: leaf}, leaf.shape[0])
            for path, leaf in leaves.items()
            if path not in stacked
        },
    )


def params_on_disk(placement: Placement, dtype: Any, files: DiskFiles) -> Rows | None:
    """The parameters that rest there, trained or not; None without any.

    Args:
        placement: where everything rests.
        dtype: of parameters.
        files: where they are.
    """
    every, mesh = placement.all, placement.mesh
    shapes = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, dtype), every.shapes)
    leaves = _leaves(shapes, every.stored_params, every.layers_in("disk"))
    return Rows(PARAMETERS, files, mesh, leaves, mesh.shape[PIPELINE]) if leaves else None


def params_at_rest(params: PyTree, rows: Rows | None) -> PyTree:
    """Parameters, those that rest on a disk written there; in a traced function.

    Args:
        params: all of them, in the order of the stack.
        rows: those that do.
    """
    if rows is None:
        return params
    leaves = dict(leaves_by_path(params))
    version = rows.write_all(
        lambda index: {path: take_row(leaves[path], index, rows.stages) for path in rows.paths}
    )
    return jax.tree.map_with_path(
        lambda path, leaf: version if path_name(path) in rows.paths else leaf, params
    )


def _leaves(
    shapes: PyTree, places: PyTree, chosen: Collection[str]
) -> dict[str, jax.ShapeDtypeStruct]:
    """Some leaves with their shardings, by path; what has no dims has no row."""
    there = dict(leaves_by_path(places))
    return {
        path: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=there[path])
        for path, leaf in leaves_by_path(shapes)
        if path in chosen and leaf.ndim
    }
