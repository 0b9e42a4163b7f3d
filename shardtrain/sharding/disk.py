"""What rests on a disk, inside programs: rows are read and written where the program stands.

Owns: the two operations, how the devices of a mesh have their own parts of a row, and how a whole
tensor comes from there and goes there. Does not own: the files (`disk_files`), and which tensors
are there (`tiers`).

A tensor on a disk is in the state of a run by its version, an int32: a read takes it and a write
gives the next one, so programs wait for each other as they do for any array.

jax's own callbacks copy their arguments once more, to a device of the CPU, and wait for that
in the threads that would do it; on CPU devices all of them can wait at once. So these are
operations of their own, whose callback gets NumPy arrays.
"""

import errno
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import mlir
from jax.sharding import (
    AbstractMesh,
    Mesh,
    NamedSharding,
    PartitionSpec,
)
from numpy.typing import NDArray

from shardtrain.errors import ConfigError
from shardtrain.sharding.disk_files import Block, DiskFiles, Group, Speed, measure
from shardtrain.sharding.mesh import only_axes
from shardtrain.sharding.tiers import of_pieces

PyTree = Any
Flat = dict[str, Any]
Token = Any
"""An int32 that an operation gives, and that one which must come after it takes."""


@dataclass(frozen=True, eq=False)
class Apart:
    """A leaf that is in memory by itself only: leaves like it are read, or saved, in turn."""

    shape: tuple[int, ...]
    dtype: Any
    sharding: Any
    load: Callable[[], jax.Array]
    """Reads it."""
    store: Callable[[jax.Array], Any] | None = None
    """Writes it; what stands in its place in the state. None = it is only read."""


def loaded(leaf: Any) -> Any:
    """A leaf, read if it is `Apart`."""
    return leaf.load() if isinstance(leaf, Apart) else leaf


@dataclass(frozen=True, eq=False)
class Rows:
    """Tensors of one mesh that are read and written together, a row at a time."""

    name: str
    files: DiskFiles
    mesh: Mesh | AbstractMesh
    leaves: Mapping[str, jax.ShapeDtypeStruct]
    """Each tensor, whole and with its sharding, by path: [rows, ...]."""
    stages: int = 1
    """Into how many stages the first dim is split; a row has an entry of each."""

    @property
    def paths(self) -> tuple[str, ...]:
        """The tensors."""
        return tuple(self.leaves)

    @cached_property
    def group(self) -> Group:
        """A row as one device has it."""
        rows = next(iter(self.leaves.values())).shape[0] // self.stages
        return Group(self.name, rows, tuple(self._block(path) for path in self.paths))

    @property
    def nbytes(self) -> int:
        """Bytes of one device's files."""
        return self.group.rows * self.group.nbytes

    @property
    def here(self) -> list[int]:
        """The numbers of the devices of this process."""
        mine = jax.process_index()
        return [i for device, i in self._numbers.items() if device.process_index == mine]

    def _block(self, path: str) -> Block:
        leaf = self.leaves[path]
        row = (self.stages, *leaf.shape[1:])
        assert isinstance(leaf.sharding, NamedSharding)
        return Block(path, leaf.sharding.shard_shape(row), np.dtype(leaf.dtype).name)

    @property
    def _specs(self) -> tuple[PartitionSpec, ...]:
        return tuple(leaf.sharding.spec for leaf in self.leaves.values())

    def read(self, row: Any, version: Any) -> tuple[Flat, Token]:
        """A row of every tensor, on the devices; in a traced function.

        Args:
            row: its number, the same in each stage.
            version: of the tensors.

        Returns:
            By path [stages, ...], and a token for writes that must come later.
        """

        def own(row: jax.Array, version: jax.Array) -> tuple[jax.Array, ...]:
            device = device_number(self.mesh)
            return tuple(_read_row.bind(row, device, version, files=self.files, group=self.group))

        whole = PartitionSpec()
        run = self._on_each_device(own, (whole, whole), (whole, *self._specs))
        token, *found = run(jnp.asarray(row, jnp.int32), jnp.asarray(version, jnp.int32))
        return dict(zip(self.paths, found, strict=True)), token

    def write(self, row: Any, values: Flat, *after: Token) -> Token:
        """Writes a row of every tensor; in a traced function.

        Args:
            row: its number, the same in each stage.
            values: by path, [stages, ...].
            after: tokens of what must come before.

        Returns:
            The row's version from now on, which is a token too.
        """
        after = tuple(jnp.asarray(token, jnp.int32) for token in after)

        def own(row: jax.Array, after: tuple[jax.Array, ...], values: list[jax.Array]) -> jax.Array:
            device = device_number(self.mesh)
            found: jax.Array = _write_row.bind(
                row, device, *values, *after, files=self.files, group=self.group
            )
            return found

        whole = PartitionSpec()
        run = self._on_each_device(own, (whole, whole, list(self._specs)), whole)
        version: jax.Array = run(
            jnp.asarray(row, jnp.int32), after, [values[path] for path in self.paths]
        )
        return version

    def write_all(self, values: Callable[[Any], Flat]) -> Token:
        """Writes all rows, one after another; in a traced function.

        Args:
            values: a row's number -> its tensors, by path.

        Returns:
            The version of all.
        """

        def put(token: Token, row: Any) -> tuple[Token, None]:
            return self.write(row, values(row), token), None

        return jax.lax.scan(put, jnp.int32(0), jnp.arange(self.group.rows))[0]

    def _on_each_device(
        self, function: Callable[..., Any], in_specs: Any, out_specs: Any
    ) -> Callable[..., Any]:
        """A function over all axes of the mesh; some may be manual already."""
        around = jax.sharding.get_abstract_mesh()
        free = frozenset(self.mesh.axis_names) - frozenset(around.manual_axes)
        in_specs, out_specs = jax.tree.map(
            lambda spec: only_axes(spec, free),
            (in_specs, out_specs),
            is_leaf=lambda node: isinstance(node, PartitionSpec),
        )
        run: Callable[..., Any] = jax.shard_map(
            function,
            mesh=around if around.manual_axes else self.mesh,
            axis_names=free,
            in_specs=in_specs,
            out_specs=out_specs,
            check_vma=False,
        )
        return run

    # -- whole tensors, outside of programs

    def load(self, path: str, target: NamedSharding, version: jax.Array) -> jax.Array:
        """A whole tensor.

        Args:
            path: which.
            target: its sharding, in any memory.
            version: what stands for it in the state; the programs that write it may still run.
        """
        # Waits for them on all devices: the last of their writes gives this number.
        wanted = int(jax.block_until_ready(version).addressable_data(0))

        def piece(device: jax.Device) -> NDArray[Any]:
            rows = self.files.load(self.group, self._numbers[device], path, wanted)
            # A row has an entry of each stage that this device is in, which is one or all.
            return np.concatenate(rows)

        return of_pieces(self.leaves[path].shape, target, piece)

    def store(self, path: str, whole: jax.Array) -> jax.Array:
        """Writes a whole tensor.

        Args:
            path: which.
            whole: split over the mesh as it is to rest.

        Returns:
            Its version.
        """
        rows = self.group.rows
        for piece in whole.addressable_shards:
            parts = np.split(np.asarray(piece.data), rows)
            self.files.store(self.group, self._numbers[piece.device], path, parts)
        assert isinstance(self.mesh, Mesh)
        version: jax.Array = jax.device_put(
            jnp.zeros((), jnp.int32), NamedSharding(self.mesh, PartitionSpec())
        )
        return version

    @cached_property
    def _numbers(self) -> dict[jax.Device, int]:
        """Where in the mesh each device is, as `device_number` counts."""
        assert isinstance(self.mesh, Mesh), "nothing rests on a disk of devices that are not here"
        return {device: number for number, device in enumerate(self.mesh.devices.flat)}


STATE: Final = "state"
PARAMETERS: Final = "parameters"
"""What of the layers there is on a disk, as names of files."""


@dataclass(frozen=True, eq=False)
class Disk:
    """All that a program has on a disk; nothing by default."""

    state: Rows | None = None
    """The optimizer's state of the layers."""
    parameters: Rows | None = None
    """Parameters of the layers that are trained."""
    frozen: Rows | None = None
    """Those that are not: steps read them and write none, so their version stays."""
    ends: Mapping[str, Rows] = field(default_factory=dict)
    """All other state of the optimizer, a tensor each by its path: one row."""

    @cached_property
    def by_path(self) -> dict[str, Rows]:
        """The rows of every tensor."""
        return {path: rows for rows in self.all for path in rows.paths}

    @property
    def all(self) -> tuple[Rows, ...]:
        """All rows."""
        some = (self.state, self.parameters, self.frozen, *self.ends.values())
        return tuple(rows for rows in some if rows)

    @property
    def nbytes(self) -> int:
        """Bytes of one device's files."""
        return sum(rows.nbytes for rows in self.all)

    def traffic(self, microbatches: int, *, masters: bool) -> tuple[int, int]:
        """Bytes that one device reads and writes in a step.

        Args:
            microbatches: of a step, each of which reads every layer twice.
            masters: whether the update reads those in the place of parameters.
        """
        params, frozen = (rows.nbytes if rows else 0 for rows in (self.parameters, self.frozen))
        updated = self.nbytes - frozen
        read = updated - params * masters + (params + frozen) * 2 * microbatches
        return read, updated

    def begin(self) -> Speed:
        """Makes the files at their full size and measures the disk.

        Raises:
            ConfigError: the folder cannot be written, or the disk is too small.
        """
        files = self.all[0].files
        count = len(self.all[0].here)
        try:
            speed = measure(files.folder)
            for rows in self.all:
                for number in rows.here:
                    files.allocate(rows.group, number)
        except OSError as error:
            raise _cannot_rest(error, files.parent, count, self.nbytes) from error
        return speed


def _cannot_rest(error: OSError, folder: Path, count: int, nbytes: int) -> ConfigError:
    """What is said where the files cannot be made: too little space, or no such folder."""
    reason, where = error.strerror or str(error), "offload.disk_path"
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return ConfigError(
            "the disk has no room for what is to rest on it",
            where=where,
            value=f"{folder}: {reason}; {count} devices with {nbytes:,} bytes each",
            cure="name a folder on a larger disk, or offload less",
        )
    return ConfigError(
        "this folder cannot be made or written",
        where=where,
        value=f"{folder}: {reason}",
        cure="name a folder that you may write in, on a disk of this machine",
    )


@dataclass(frozen=True, eq=False)
class OnDisk:
    """The layers of a disk that an update goes through, once each; perhaps none."""

    disk: Disk
    leaves: Mapping[str, Any]
    """What stands for each tensor in the state, by path."""

    @property
    def _all(self) -> tuple[Rows, ...]:
        return tuple(rows for rows in (self.disk.state, self.disk.parameters) if rows)

    @property
    def paths(self) -> frozenset[str]:
        """The tensors."""
        return frozenset(path for rows in self._all for path in rows.paths)

    @property
    def versions(self) -> list[Token]:
        """Those before, which are equal for all tensors of some rows."""
        return [
            functools.reduce(jnp.maximum, [self.leaves[path] for path in rows.paths])
            for rows in self._all
        ]

    def read(self, row: Any) -> tuple[Flat, list[Token]]:
        """A row that was not written yet, by path; and tokens for writes that come later."""
        found: Flat = {}
        tokens = []
        for rows, version in zip(self._all, self.versions, strict=True):
            some, token = rows.read(row, version)
            found |= some
            tokens.append(token)
        return found, tokens

    def write(self, row: Any, values: Flat, before: list[Token], after: list[Token]) -> list[Token]:
        """Writes a row after what was written before and read; the versions from now on."""
        return [
            rows.write(row, values, *tokens)
            for rows, *tokens in zip(self._all, before, after, strict=True)
        ]

    def by_path(self, versions: list[Token]) -> Flat:
        """What stands for each tensor at these versions."""
        return {
            path: version
            for rows, version in zip(self._all, versions, strict=True)
            for path in rows.paths
        }


# -- the operations


READ: Final = "disk_read"
WRITE: Final = "disk_write"
"""Names of the operations, also in a compiled program."""
_read_row = Primitive(READ)
_read_row.multiple_results = True
_write_row = Primitive(WRITE)


def device_number(mesh: Mesh | AbstractMesh) -> jax.Array:
    """Where in the mesh this device is, inside a `shard_map` over all axes."""
    number = jnp.zeros((), jnp.int32)
    for axis in mesh.axis_names:
        number = number * mesh.shape[axis] + jax.lax.axis_index(axis).astype(jnp.int32)
    return number


def _read_shapes(*_: Any, files: DiskFiles, group: Group) -> list[Any]:
    del files
    blocks = [jax.core.ShapedArray(block.shape, jnp.dtype(block.dtype)) for block in group.blocks]
    return [jax.core.ShapedArray((), jnp.dtype(jnp.int32)), *blocks]


def _write_shape(*_: Any, files: DiskFiles, group: Group) -> Any:
    del files, group
    return jax.core.ShapedArray((), jnp.dtype(jnp.int32))


def _reads(files: DiskFiles, group: Group, row: Any, device: Any, version: Any) -> tuple[Any, ...]:
    return np.int32(0), *files.read(group, int(device), int(row), int(version))


def _writes(files: DiskFiles, group: Group, row: Any, device: Any, *values: Any) -> tuple[Any, ...]:
    blocks = values[: len(group.blocks)]  # and what came before it
    return (np.int32(files.write(group, int(device), int(row), blocks)),)


def _lower(ctx: Any, *operands: Any, files: DiskFiles, group: Group, call: Any) -> Any:
    if not _is_here(ctx):
        return _lower_for_elsewhere(ctx, *operands)
    results, _, _ = mlir.emit_python_callback(
        ctx,
        partial(call, files, group),
        None,
        list(operands),
        ctx.avals_in,
        ctx.avals_out,
        # Also a read: it must not be made once for two versions, nor moved out of a loop.
        has_side_effect=True,
        returns_token=False,
        sharding=_on_each_device(ctx),
    )
    return results


def require_disk(devices: Sequence[jax.Device]) -> None:
    """Refuses devices whose programs cannot read and write files.

    Raises:
        ConfigError: they are neither GPUs nor CPUs.
    """
    kinds = sorted({device.platform for device in devices} - {"cpu", "gpu", "cuda", "rocm"})
    if kinds:
        raise ConfigError(
            "programs of these devices cannot read and write files as they run",
            where="offload",
            value=", ".join(kinds),
            allowed='"disk" with GPUs and CPUs',
            cure='use "host"',
        )


def _is_here(ctx: Any) -> bool:
    """Whether what is lowered can run in this process."""
    try:
        ctx.module_context.get_backend()
    except ValueError:
        return False
    return True


def _lower_for_elsewhere(ctx: Any, *operands: Any) -> Any:
    """The same call in a program that is compiled for GPUs that are not here: to be read."""
    from jax._src.interpreters.mlir import set_sharding  # has no public name

    lower = jax.ffi.ffi_lowering("xla_ffi_python_gpu_callback", has_side_effect=True)
    results = lower(ctx, *operands, index=np.uint64(0))
    first: Any = results[0]
    set_sharding(ctx.module_context, first.owner, _on_each_device(ctx))
    return results


def _on_each_device(ctx: Any) -> Any:
    from jax._src.callback import _callback_op_sharding  # says "each device by itself" to Shardy

    return _callback_op_sharding(ctx.module_context.axis_context, None, ctx.avals_out)


_read_row.def_abstract_eval(_read_shapes)
_write_row.def_abstract_eval(_write_shape)
mlir.register_lowering(_read_row, partial(_lower, call=_reads), cacheable=False)
mlir.register_lowering(_write_row, partial(_lower, call=_writes), cacheable=False)
