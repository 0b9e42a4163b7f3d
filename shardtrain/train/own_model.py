"""Somebody's own nnx model on a mesh: three lines make a one-device loop one over many devices.

Owns: where modules, optimizers and batches are put, and a `jit` that keeps them there. Does not
own: the model and the loop, which stay as they are; nor training without nnx (`functional`).

Every step is one global step: the loss is over the whole batch, statistics (batch norm) too, and
random bits are those of one device. So nothing is averaged, scaled or synchronised by hand.
"""

import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any, ParamSpec, TypeVar, overload

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from shardtrain.errors import ShardingError
from shardtrain.sharding.mesh import MESH_AXES, data_axes, data_degree
from shardtrain.sharding.placement import Names, path_name, rest
from shardtrain.sharding.rules import AXES, Table, compute_table, stored_table

PyTree = Any
T = TypeVar("T")
P = ParamSpec("P")
R = TypeVar("R")

ZERO_STAGES = (0, 1, 2, 3)
RESTS = "shardtrain_rests"
"""A variable's metadata: its sharding between two steps."""
USED = "shardtrain_used"
"""Its sharding within a step."""


# -- names


def own_table() -> Table:
    """The COMPUTE table for models that are not ours: mesh axes are words too."""
    return {**compute_table(), **{axis: (axis,) for axis in MESH_AXES}}


def check_names(path: str, names: Any, ndim: int) -> Names:
    """The names of a leaf's axes, one a dim.

    Args:
        path: the leaf's path, for messages.
        names: as in `nnx.with_partitioning`; None where there are none.
        ndim: dims of the leaf; those without a name are whole.

    Raises:
        ShardingError: an unknown name, or too many.
    """
    given = tuple(names or ())
    for name in given:
        if name is not None and name not in AXES and name not in MESH_AXES:
            raise ShardingError(
                f"unknown axis name of {path}",
                value=str(name),
                allowed=f"{', '.join(AXES)}; or an axis of the mesh: {', '.join(MESH_AXES)}",
            )
    if len(given) > ndim:
        raise ShardingError(
            f"{path} has more names than dims", value=str(given), allowed=f"{ndim} names"
        )
    return (*given, *(None,) * (ndim - len(given)))


def check_layout(mesh: Mesh, zero: int) -> None:
    """Refuses a mesh that is not ours and a stage that does not exist."""
    if set(MESH_AXES) - set(mesh.axis_names):
        raise ShardingError(
            "this mesh has other axes",
            where="mesh",
            value=", ".join(map(str, mesh.axis_names)),
            allowed=", ".join(MESH_AXES),
            cure="make it with shardtrain.make_mesh",
        )
    if zero not in ZERO_STAGES:
        raise ShardingError(
            "no such stage", where="zero", value=str(zero), allowed=", ".join(map(str, ZERO_STAGES))
        )


# -- putting things on the mesh


def place(tree: T, mesh: Mesh, *, zero: int = 0) -> T:
    """Puts modules and optimizers on a mesh.

    Parameters and optimizer state are split as their names say (`nnx.with_partitioning`, with words
    of `AXES` or mesh axes); without names they are whole on every device. ZeRO splits them
    further, along `embed` or else the largest dim that divides.

    Args:
        tree: nnx modules and optimizers, alone or in tuples, lists and dicts: their variables are
            put there in place. Or a tree of arrays, taken as parameters.
        mesh: from `make_mesh`.
        zero: 0 splits nothing further, 1 and 2 optimizer state, 3 parameters too. (When gradients
            are scattered is up to XLA here, so 2 is the same as 1.)

    Returns:
        The same objects; or a tree of new arrays.

    Raises:
        ShardingError: an unknown name, or a dim that does not divide by what its name asks.

    Example:
        >>> model = nnx.Linear(8, 8, rngs=nnx.Rngs(0))
        >>> place(model, jax.make_mesh((1,), ("data",)))  # not from make_mesh
        Traceback (most recent call last):
        shardtrain.errors.ShardingError: mesh: this mesh has other axes
          value: data
          allowed: pipeline, replica, data, context, tensor
          to do: make it with shardtrain.make_mesh
    """
    check_layout(mesh, zero)
    table = own_table()
    found = list(_variables(tree))
    for path, variable in found:
        value = variable.get_value()
        names = check_names(path, variable.get_metadata("out_sharding", None), value.ndim)
        is_param, is_state = isinstance(variable, nnx.Param), isinstance(variable, nnx.OptState)
        further = (is_param and zero >= 3) or (is_state and zero >= 1)
        rests = _sharding(path, value.shape, names, mesh, table, further=further)
        used = _sharding(path, value.shape, names, mesh, table, further=further and not is_param)
        variable.set_metadata(**{RESTS: rests, USED: used})
        variable.set_value(jax.device_put(value, rests))
    if found:
        return tree

    def put(path: tuple[Any, ...], leaf: Any) -> jax.Array:
        names = (None,) * np.ndim(leaf)
        shape = np.shape(leaf)
        where = _sharding(path_name(path), shape, names, mesh, table, further=zero >= 3)
        on_mesh: jax.Array = jax.device_put(leaf, where)
        return on_mesh

    placed: T = jax.tree.map_with_path(put, tree)
    return placed


def place_batch(batch: T, mesh: Mesh) -> T:
    """Puts a batch on a mesh, its samples shared out over the data axes.

    Args:
        batch: arrays [batch, ...], in any containers; scalars go to every device. With several
            processes each gives the samples of its own devices.
        mesh: from `make_mesh`.

    Returns:
        The batch on the devices.

    Raises:
        ShardingError: the samples do not divide by the number of data shards.
    """
    check_layout(mesh, 0)
    shards = data_degree(mesh) // jax.process_count() or 1

    def put(path: tuple[Any, ...], leaf: Any) -> jax.Array:
        if np.ndim(leaf) and np.shape(leaf)[0] % shards:
            raise ShardingError(
                f"{np.shape(leaf)[0]} samples do not divide by {shards} data shards",
                where=f"batch {path_name(path)}".strip(),
                allowed=f"a multiple of {shards}",
                cure="drop the ragged last batch, or fill it up with samples of weight 0",
            )
        return _put_batch(leaf, mesh)

    placed: T = jax.tree.map_with_path(put, batch)
    return placed


def _put_batch(leaf: Any, mesh: Mesh) -> jax.Array:
    sharding = NamedSharding(
        mesh, PartitionSpec(data_axes(mesh) or None) if np.ndim(leaf) else PartitionSpec()
    )
    placed: jax.Array
    if jax.process_count() == 1 or not np.ndim(leaf):
        placed = jax.device_put(leaf, sharding)
    else:
        placed = jax.make_array_from_process_local_data(sharding, np.asarray(leaf))
    return placed


def _sharding(
    path: str, shape: tuple[int, ...], names: Names, mesh: Mesh, table: Table, *, further: bool
) -> NamedSharding:
    stored = stored_table(table) if further else None
    return NamedSharding(mesh, rest(path, shape, names, mesh, table, stored).spec)


def _variables(tree: PyTree) -> Iterator[tuple[str, nnx.Variable[Any]]]:
    """The variables of modules and optimizers that hold an array, each once."""
    for path, node in nnx.iter_graph(tree):
        if isinstance(node, nnx.Variable) and isinstance(node.get_value(), jax.Array | np.ndarray):
            yield "/".join(map(str, path)), node


# -- keeping them there


@overload
def jit(
    function: Callable[P, R],
    *,
    static_argnums: int | Iterable[int] | None = None,
    static_argnames: str | Iterable[str] | None = None,
    donate_argnums: int | Iterable[int] | None = None,
    donate_argnames: str | Iterable[str] | None = None,
) -> Callable[P, R]: ...


@overload
def jit(
    *,
    static_argnums: int | Iterable[int] | None = None,
    static_argnames: str | Iterable[str] | None = None,
    donate_argnums: int | Iterable[int] | None = None,
    donate_argnames: str | Iterable[str] | None = None,
) -> Callable[[Callable[P, R]], Callable[P, R]]: ...


def jit(
    function: Callable[P, R] | None = None,
    *,
    static_argnums: Any = None,
    static_argnames: Any = None,
    donate_argnums: Any = None,
    donate_argnames: Any = None,
) -> Any:
    """`nnx.jit` for what `place` has put on a mesh: after each call everything rests where it was.

    Without it XLA chooses where results lie: state drifts to other devices from step to step, and
    the function is compiled anew. What is no part of a module and lies on no mesh yet, such as a
    batch from NumPy, is put there first as `place_batch` does (whole where it does not divide).

    Args:
        function: takes and changes nnx modules and optimizers.
        static_argnums: as in `nnx.jit`; the others likewise.
        static_argnames: see there.
        donate_argnums: see there.
        donate_argnames: see there.

    Returns:
        The compiled function; without placed modules among its arguments it is `nnx.jit`'s.
    """
    options = {
        "static_argnums": static_argnums,
        "static_argnames": static_argnames,
        "donate_argnums": donate_argnums,
        "donate_argnames": donate_argnames,
    }
    if function is None:
        return functools.partial(jit, **options)
    inner = function

    @functools.wraps(inner)
    def kept(*args: P.args, **kwargs: P.kwargs) -> R:
        _constrain((args, kwargs), USED)
        result = inner(*args, **kwargs)
        _constrain((args, kwargs, result), RESTS)
        return result

    compiled = nnx.jit(kept, **options)

    @functools.wraps(inner)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        mesh = _mesh_of((args, kwargs))
        if mesh is not None:
            args, kwargs = _put_loose((args, kwargs), mesh)
        result: R = compiled(*args, **kwargs)
        return result

    return call


def _constrain(tree: PyTree, which: str) -> None:
    """Sets where the variables that `place` has seen lie, from here on."""
    for _, variable in _variables(tree):
        where = variable.get_metadata(which, None)
        if where is not None:
            variable.set_value(jax.lax.with_sharding_constraint(variable.get_value(), where))


def _mesh_of(tree: PyTree) -> Mesh | None:
    """The mesh that `place` has put modules among these arguments on."""
    for node in jax.tree.leaves(tree, is_leaf=_is_node):
        for _, variable in _variables(node) if _is_node(node) else ():
            where = variable.get_metadata(RESTS, None)
            if where is not None:
                return where.mesh  # type: ignore[no-any-return]
    return None


def _put_loose(tree: T, mesh: Mesh) -> T:
    """Puts arrays that lie on no mesh yet, and are no part of a module, on one."""
    shards = data_degree(mesh)

    def put(leaf: Any) -> Any:
        if not isinstance(leaf, jax.Array | np.ndarray) or isinstance(leaf, jax.core.Tracer):
            return leaf
        if isinstance(leaf, jax.Array) and len(leaf.sharding.device_set) > 1:
            return leaf
        if leaf.ndim and leaf.shape[0] % shards == 0:
            return _put_batch(leaf, mesh)
        return jax.device_put(leaf, NamedSharding(mesh, PartitionSpec()))

    placed: T = jax.tree.map(put, tree, is_leaf=_is_node)
    return placed


def _is_node(x: Any) -> bool:
    return isinstance(x, nnx.Pytree | nnx.Variable)
