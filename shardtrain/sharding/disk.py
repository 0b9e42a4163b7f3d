"""What rests on a disk, inside programs: rows are read and written where the program stands.

Owns: the two operations, and how devices of a mesh have their own parts of a row. Does not own: the
files (`disk_files`), and which tensors are there.

A tensor on a disk is in the state of a run by its versions, int32 [rows]: a read takes the row's
version and a write gives the next one, so programs wait for each other as they do for any array.
jax's own callbacks copy their arguments once more, to a device of the CPU, and wait for that
in the threads that would do it; on CPU devices all of them can wait at once. So these are
operations of their own, whose callback gets NumPy arrays.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import mlir
from jax.sharding import PartitionSpec

from shardtrain.sharding.disk_files import DiskFiles, Group

read_row = Primitive("disk_read")
read_row.multiple_results = True
write_row = Primitive("disk_write")


def read(
    files: DiskFiles, group: Group, specs: Mapping[str, PartitionSpec], row: Any, version: Any, mesh: Any, axes: frozenset[str]
) -> dict[str, jax.Array]:
    """A row of a group, each device its own part.

    Args:
        files: where it is.
        group: what of.
        specs: how each tensor's row is split, by path.
        row: its number, on each device the same.
        version: which is meant.
        mesh: all devices.
        axes: mesh axes that are not manual yet.
    """
    names = [block.path for block in group.blocks]

    def own(row: jax.Array, version: jax.Array) -> tuple[jax.Array, ...]:
        device = _device_number(mesh)
        return tuple(read_row.bind(row, device, version, files=files, group=group))

    run = jax.shard_map(
        own,
        mesh=mesh,
        axis_names=axes,
        in_specs=(PartitionSpec(), PartitionSpec()),
        out_specs=tuple(specs[name] for name in names),
        check_vma=False,
    )
    return dict(zip(names, run(row, version), strict=True))


def _device_number(mesh: Any) -> jax.Array:
    number = jnp.zeros((), jnp.int32)
    for axis in mesh.axis_names:
        number = number * mesh.shape[axis] + jax.lax.axis_index(axis).astype(jnp.int32)
    return number


@read_row.def_abstract_eval
def _read_shapes(*_: Any, files: DiskFiles, group: Group) -> list[Any]:
    del files
    return [jax.core.ShapedArray(block.shape, jnp.dtype(block.dtype)) for block in group.blocks]


@write_row.def_abstract_eval
def _write_shape(*_: Any, files: DiskFiles, group: Group) -> Any:
    del files, group
    return jax.core.ShapedArray((), jnp.dtype(jnp.int32))


def _lower(ctx: Any, *operands: Any, files: DiskFiles, group: Group, writes: bool) -> Any:
    def call(row: Any, device: Any, version: Any, *arrays: Any) -> tuple[Any, ...]:
        if writes:
            return (np.int32(files.write(group, int(device), int(row), arrays)),)
        return tuple(files.read(group, int(device), int(row), int(version)))

    results, _, _ = mlir.emit_python_callback(
        ctx,
        call,
        None,
        list(operands),
        ctx.avals_in,
        ctx.avals_out,
        has_side_effect=writes,
        returns_token=False,
        sharding=_on_each_device(ctx),
    )
    return results


def _on_each_device(ctx: Any) -> Any:
    from jax._src.callback import _callback_op_sharding  # says "each device by itself" to Shardy

    return _callback_op_sharding(ctx.module_context.axis_context, None, ctx.avals_out)


mlir.register_lowering(read_row, partial(_lower, writes=False), cacheable=False)
mlir.register_lowering(write_row, partial(_lower, writes=True), cacheable=False)
