"""A state tree as named arrays, and the Orbax calls that write and read them.

Owns: the names of leaves, their records, random keys as plain bits, what fits what, and every line
that touches Orbax. Does not own: the folder around the arrays, when a step is complete, the thread.

Only arrays are stored, under the path of their keys (`params/embedding`, `opt_state/0/mu/...`), so
a checkpoint does not depend on the classes that hold them. Nothing of the saved mesh is stored.
"""

import dataclasses
import functools
import logging
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from numpy.typing import NDArray

from shardtrain.checkpoint.folder import APART, STATE, LeafRecord
from shardtrain.errors import CheckpointError
from shardtrain.ops.digest import host_digest, pieces
from shardtrain.sharding.disk import Apart, loaded

PyTree = Any
Leaf = jax.Array | np.ndarray | jax.ShapeDtypeStruct | Apart

_ALONE = "value"  # what a leaf is called in a folder of its own
SMALL = 64 << 20
"""Bytes of leaves that may be in memory together with others, however they rest."""
_SHOWN = 8  # differences named in one refusal
_TIMEOUT_SECONDS = 24 * 3600  # a slow disk is not an error; a stuck one is the watchdog's affair


Digests = Mapping[str, Callable[[], NDArray[np.uint32]]]


@dataclasses.dataclass(frozen=True)
class Leaves:
    """A tree taken apart: leaves by name, and what puts them together again."""

    by_name: dict[str, Leaf]
    paths: dict[str, tuple[str, ...]]
    treedef: jax.tree_util.PyTreeDef

    def records(self) -> dict[str, LeafRecord]:
        """Describe every leaf.

        Returns:
            Records by name.
        """
        return {name: _record(leaf) for name, leaf in self.by_name.items()}

    def digests(self) -> "Digests":
        """Begin to compute what this process's pieces add to the digest of every leaf.

        Returns:
            By name, a function that waits for uint32 [2].
        """
        return {name: _digest(leaf) for name, leaf in self.by_name.items()}

    def apart(self) -> tuple["Leaves", dict[str, Apart]]:
        """Separate the leaves that must not be in memory together.

        Returns:
            All others, small ones of them read, as a tree of their names; and these by name.
        """
        turns = {
            name: leaf
            for name, leaf in self.by_name.items()
            if isinstance(leaf, Apart) and _num_bytes(leaf) > SMALL
        }
        rest: dict[str, Leaf] = {
            name: loaded(leaf) for name, leaf in self.by_name.items() if name not in turns
        }
        tree: dict[str, Any] = {}
        for name, leaf in rest.items():
            _insert(tree, self.paths[name], leaf)
        paths = {name: self.paths[name] for name in rest}
        return Leaves(rest, paths, jax.tree.structure(tree)), turns

    def num_bytes(self) -> int:
        """Add up the bytes of the leaves.

        Returns:
            Bytes, each leaf counted once however often it is replicated.
        """
        return sum(_num_bytes(leaf) for leaf in self.by_name.values())


def flatten(tree: PyTree) -> Leaves:
    """Take a tree apart into named leaves.

    Args:
        tree: Nested containers of arrays or of `jax.ShapeDtypeStruct`.

    Returns:
        The leaves under names such as `opt_state/0/mu/embedding`.

    Raises:
        TypeError: A leaf is not an array.
    """
    flat, treedef = jax.tree_util.tree_flatten_with_path(tree)
    by_name: dict[str, Leaf] = {}
    paths: dict[str, tuple[str, ...]] = {}
    for path, leaf in flat:
        parts = tuple(jax.tree_util.keystr((key,), simple=True) for key in path) or ("value",)
        name = "/".join(parts)
        if isinstance(leaf, int | float | np.generic):
            leaf = np.asarray(leaf)
        if not isinstance(leaf, jax.Array | np.ndarray | jax.ShapeDtypeStruct | Apart):
            raise TypeError(f"{name}: expected an array, got {type(leaf).__name__}")
        assert name not in by_name, f"two leaves are called {name}"
        assert name.count("/") == len(parts) - 1, f"a key of {name} has a slash"
        by_name[name], paths[name] = leaf, parts
    return Leaves(by_name, paths, treedef)


def _digest(leaf: Leaf) -> Callable[[], NDArray[np.uint32]]:
    nothing = np.zeros(2, np.uint32)
    if not _num_bytes(leaf):
        return lambda: nothing
    if isinstance(leaf, jax.Array):
        return pieces(leaf).total
    assert isinstance(leaf, np.ndarray)
    if jax.process_index():
        return lambda: nothing  # every process has it whole; process 0's counts
    copy = leaf.copy()  # read in the background, while the loop may change it
    return lambda: host_digest(copy)


def tree_bytes(tree: PyTree) -> int:
    """Return the bytes that a tree takes in a checkpoint.

    Args:
        tree: Arrays or `jax.ShapeDtypeStruct`.

    Returns:
        Bytes, each leaf counted once however often it is replicated.
    """
    return flatten(tree).num_bytes()


def check_fit(
    stored: Mapping[str, LeafRecord], wanted: Mapping[str, LeafRecord], *, subset: bool, where: str
) -> None:
    """Refuse a target that is not what was saved; nothing is padded, cut or cast.

    Args:
        stored: Leaves of the checkpoint.
        wanted: Leaves of the target.
        subset: Leaves of the checkpoint that the target lacks are fine.
        where: The step, for the message.

    Raises:
        CheckpointError: Names, shapes or dtypes differ.
    """
    missing = sorted(set(wanted) - set(stored))
    extra = [] if subset else sorted(set(stored) - set(wanted))
    changed = [name for name in wanted if name in stored and wanted[name] != stored[name]]
    if not (missing or extra or changed):
        return
    lines = [f"{n}: saved {_words(stored[n])}, wanted {_words(wanted[n])}" for n in changed]
    lines += [f"{n}: not in the checkpoint, wanted {_words(wanted[n])}" for n in missing]
    lines += [f"{n}: saved {_words(stored[n])}, not wanted" for n in extra]
    more = [f"and {len(lines) - _SHOWN} more"] if len(lines) > _SHOWN else []
    raise CheckpointError(
        "the checkpoint does not fit this run",
        where=where,
        value="\n    ".join(["", *lines[:_SHOWN], *more]),
        cure="use the model and optimizer of the saved run, or another run directory",
    )


class Writer:
    """Writes the leaves of one step with Orbax: `start` copies, `finish` waits for the disk."""

    def __init__(self) -> None:
        logging.getLogger("absl").addFilter(_not_a_failed_save)
        registry = ocp.type_handlers.create_type_handler_registry(
            (
                jax.Array,
                # Slicing replicas apart costs a compile and 30 ms per save in one process.
                ocp.type_handlers.ArrayHandler(
                    use_replica_parallel=jax.process_count() > 1, enable_write_sharding_file=False
                ),
            ),
            (np.ndarray, ocp.type_handlers.NumpyHandler()),
        )
        # Random bits do not compress: zstd saves 8 % of the bytes for five times the time.
        handler = ocp.PyTreeCheckpointHandler(
            use_ocdbt=True, use_compression=False, type_handler_registry=registry
        )
        self._orbax = ocp.AsyncCheckpointer(
            handler,
            async_options=ocp.options.AsyncOptions(
                timeout_secs=_TIMEOUT_SECONDS, create_directories_asynchronously=False
            ),
        )

    def start(self, path: Path, leaves: Leaves) -> None:
        """Take a copy of all leaves and begin to write it.

        Args:
            path: A folder that does not exist yet.
            leaves: Arrays; their buffers may be donated as soon as this returns.

        Raises:
            OSError: The folder cannot be made.
        """
        item: dict[str, Any] = {}
        for name, leaf in leaves.by_name.items():
            if _num_bytes(leaf):
                _insert(item, leaves.paths[name], _bits(leaf))
        self._orbax.save(path, args=ocp.args.PyTreeSave(item))

    def finish(self) -> None:
        """Wait until everything is written.

        Raises:
            Exception: Whatever stopped the write.
        """
        self._orbax.wait_until_finished()

    def close(self) -> None:
        """Let go of the threads."""
        self._orbax.close()


def single(name: str, leaf: Leaf) -> Leaves:
    """Return a leaf as a tree of its own.

    Args:
        name: What it is called.
        leaf: The array, or its shape.
    """
    return Leaves({name: leaf}, {name: (_ALONE,)}, jax.tree.structure({_ALONE: 0}))


def read(
    path: Path, wanted: Leaves, values: Mapping[str, int] | None = None
) -> tuple[PyTree, Digests]:
    """Read leaves straight to where they belong.

    Args:
        path: The folder of a step: `STATE` in it has all leaves but those that were saved by
            themselves.
        wanted: Abstract leaves; without a sharding a leaf comes back as a NumPy array. One that is
            `Apart` is read when no other one of them is in memory.
        values: What leaves are filled with that are not in the folder.

    Returns:
        The tree of `wanted`, and what `Leaves.digests` gives for it.

    Raises:
        ValueError: The files are damaged.
    """
    values = values or {}
    stored = {
        name: leaf
        for name, leaf in wanted.by_name.items()
        if _num_bytes(leaf) and name not in values
    }
    by_itself = {name for name in stored if (path / APART / name).is_dir()}
    large = {name for name, leaf in stored.items() if isinstance(leaf, Apart)}
    large = {name for name in large if _num_bytes(stored[name]) > SMALL}
    together = {
        name: leaf for name, leaf in stored.items() if name not in by_itself and name not in large
    }
    found = _read(path / STATE, together, wanted.paths)
    digests = {name: _digest(leaf) for name, leaf in found.items()}
    for name, leaf in stored.items():
        if name not in together:
            folder, paths = (
                (path / APART / name, {name: (_ALONE,)})
                if name in by_itself
                else (path / STATE, wanted.paths)
            )
            found |= _read(folder, {name: leaf}, paths)
            digests[name] = known(_digest(found[name])())
        if isinstance(leaf, Apart) and leaf.store:
            found[name] = leaf.store(found[name])
    for name, leaf in wanted.by_name.items():
        if name not in stored:
            found[name] = _filled(leaf, values.get(name, 0))
            digests[name] = _digest(found[name])
    leaves = [found[name] for name in wanted.by_name]
    return jax.tree.unflatten(wanted.treedef, leaves), digests


def known(total: NDArray[np.uint32]) -> Callable[[], NDArray[np.uint32]]:
    """Return a digest that is computed already, as `Leaves.digests` has them."""
    return lambda: total


def _read(
    path: Path, leaves: Mapping[str, Leaf], paths: Mapping[str, tuple[str, ...]]
) -> dict[str, Any]:
    """Leaves of one folder that Orbax wrote, by name."""
    item: dict[str, Any] = {}
    how: dict[str, Any] = {}
    for name, leaf in leaves.items():
        _insert(item, paths[name], 0)
        _insert(how, paths[name], _restore_args(leaf))
    if item:
        handler = ocp.PyTreeCheckpointHandler(use_ocdbt=True)
        with ocp.Checkpointer(handler) as reader:
            item = reader.restore(
                path, args=ocp.args.PyTreeRestore(item, restore_args=how, partial_restore=True)
            )
    return {name: _value(_lookup(item, paths[name]), leaf) for name, leaf in leaves.items()}


def nested(records: Mapping[str, LeafRecord]) -> Leaves:
    """Return abstract leaves, all on the host, for everything that a step holds.

    Args:
        records: Leaves of the step.

    Returns:
        Leaves whose tree is nested dicts; a random key is its bits.
    """
    tree: dict[str, Any] = {}
    for name, record in records.items():
        shape, dtype = record.shape, record.dtype
        for impl, key in _keys().items():
            if dtype == f"key<{impl}>":
                bits = jax.eval_shape(jax.random.key_data, key)
                shape, dtype = (*shape, *bits.shape), bits.dtype.name
        _insert(tree, tuple(name.split("/")), jax.ShapeDtypeStruct(shape, jax.numpy.dtype(dtype)))
    return flatten(tree)


@functools.cache
def _keys() -> dict[str, jax.ShapeDtypeStruct]:
    return {
        impl: jax.eval_shape(functools.partial(jax.random.key, 0, impl=impl))
        for impl in ("threefry2x32", "rbg", "unsafe_rbg")
    }


def _is_key(leaf: Leaf) -> bool:
    return jax.numpy.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _not_a_failed_save(line: logging.LogRecord) -> bool:
    # Orbax prints sixty lines of traceback; `finish` raises the same error.
    return not (line.filename == "async_checkpointer.py" and line.levelno == logging.ERROR)


def _key_impl(leaf: Leaf) -> str:
    return next(impl for impl, key in _keys().items() if key.dtype == leaf.dtype)


def _record(leaf: Leaf) -> LeafRecord:
    dtype = f"key<{_key_impl(leaf)}>" if _is_key(leaf) else np.dtype(leaf.dtype).name
    return LeafRecord(tuple(leaf.shape), dtype)


def _num_bytes(leaf: Leaf) -> int:
    return math.prod(leaf.shape) * leaf.dtype.itemsize


def _words(record: LeafRecord) -> str:
    return f"{record.dtype}[{', '.join(map(str, record.shape))}]"


def _bits(leaf: Any) -> Any:
    return jax.random.key_data(leaf) if _is_key(leaf) else leaf


def _restore_args(leaf: Any) -> ocp.RestoreArgs:
    if isinstance(leaf, np.ndarray) or leaf.sharding is None:
        return ocp.RestoreArgs(restore_type=np.ndarray)
    bits = jax.eval_shape(jax.random.key_data, leaf) if _is_key(leaf) else leaf
    return ocp.ArrayRestoreArgs(
        sharding=leaf.sharding, global_shape=bits.shape, dtype=bits.dtype, strict=True
    )


def _value(stored: Any, leaf: Leaf) -> Any:
    sharding = None if isinstance(leaf, np.ndarray) else leaf.sharding
    if _is_key(leaf) and sharding is not None:
        return jax.random.wrap_key_data(stored, impl=_key_impl(leaf))
    return stored


def _filled(leaf: Leaf, value: int) -> Any:
    """A leaf that is not stored."""
    whole = np.full(leaf.shape, value, leaf.dtype)
    if isinstance(leaf, np.ndarray) or leaf.sharding is None:
        return whole
    return jax.make_array_from_callback(whole.shape, leaf.sharding, lambda index: whole[index])


def _insert(tree: dict[str, Any], path: tuple[str, ...], value: Any) -> None:
    for part in path[:-1]:
        tree = tree.setdefault(part, {})
    tree[path[-1]] = value


def _lookup(tree: dict[str, Any], path: tuple[str, ...]) -> Any:
    node: Any = tree
    for part in path:
        node = node[part]
    return node
