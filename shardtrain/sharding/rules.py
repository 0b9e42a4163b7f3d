"""Names and tables: which mesh axes a named axis of a tensor is split over.

Models name the axes of their tensors with the words of `AXES`. A table maps those words to mesh
axes.
Two tables make a layout: COMPUTE (where things are while they are used) and STORED (where state
rests between uses). This file owns the tables and the one context variable by which `constrain`
finds them; where a whole tree rests is `placement`'s.
"""

import contextlib
import contextvars
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from shardtrain.errors import ShardingError
from shardtrain.sharding.mesh import MESH_AXES, abstract_mesh, mesh_platform

AXES = {
    "batch": "samples of a (micro)batch",
    "length": "positions of a sequence, inside attention and the MLP",
    "residual_length": "positions of a sequence, in the residual stream (sequence parallel)",
    "embed": "the model's width",
    "heads": "attention heads",
    "kv_heads": "key/value heads",
    "group": "query heads of one key/value head, and the key and the value beside them",
    "head_dim": "width of a head",
    "mlp": "hidden width of the MLP",
    "gate": "the one or two halves of a (gated) MLP",
    "vocab": "token ids",
    "position": "rows of a learned position table",
    "segment": "rows of a table of the parts of a sample, such as first and second sentence",
    "features": "width that a head's own dense map reads (what it makes is `embed`)",
    "layers": "layers of the stack",
    "kernel": "height and width of a convolution's window",
    "channels": "channels that a convolution reads (those that it makes are `embed`)",
    "classes": "classes of images",
    "rank": "inner width of a weight's change of low rank (LoRA)",
    "rows": "rows of embedding tables that are split row by row",
    "tables": "rows of whole embedding tables, in as many blocks as there may be devices",
    "columns": "width of embedding tables that are split by it",
}
"""The vocabulary: the words for shapes in signatures, in sharding rules and in the docs."""

Table = Mapping[str, tuple[str, ...]]
"""From an axis name to the mesh axes that split it, outermost first."""


def compute_table(
    *,
    sequence_parallel: bool = False,
    overrides: Mapping[str, str | list[str] | None] | None = None,
) -> Table:
    """The COMPUTE table: tensor parallel is three rows, sequence parallel one, expert parallel one.

    Args:
        sequence_parallel: split the residual stream by position over `tensor` too
            (Korthikanti et al. 2022, arXiv 2205.05198).
        overrides: rows to replace; None or "" or [] keeps that axis whole.

    Raises:
        ShardingError: an override names an unknown axis or mesh axis.
    """
    table: dict[str, tuple[str, ...]] = dict.fromkeys(AXES, ())
    table["batch"] = ("replica", "data")
    table["length"] = ("context",)
    table["residual_length"] = ("context", "tensor") if sequence_parallel else ("context",)
    for name in ("heads", "kv_heads", "mlp", "vocab"):
        table[name] = ("tensor",)
    table["layers"] = ("pipeline",)
    for name in ("rows", "tables", "columns"):  # over all that share out the batch
        table[name] = table["batch"]
    for name, axes in (overrides or {}).items():
        axes = [axes] if isinstance(axes, str) else list(axes or ())
        axes = [axis for axis in axes if axis]
        if name not in AXES:
            raise ShardingError(
                "unknown axis name",
                where=f"sharding.rules.{name}",
                value=name,
                allowed=", ".join(AXES),
            )
        for axis in axes:
            if axis not in MESH_AXES:
                raise ShardingError(
                    "unknown mesh axis",
                    where=f"sharding.rules.{name}",
                    value=axis,
                    allowed=", ".join(MESH_AXES),
                )
        table[name] = tuple(axes)
    return table


def stored_table(compute: Table) -> Table:
    """The STORED table: COMPUTE, with the width also split over axes that otherwise hold copies.

    It is what ZeRO means here (Rajbhandari et al. 2020, arXiv 1910.02054): which state trees rest
    under it. `replica` is not in it, which is hybrid sharding: copies across, shards within.
    """
    return {**compute, "embed": (*compute["embed"], "data", "context")}


MAPPED: Final = "mapped"
"""The `axis_name` of a `vmap` over mesh axes."""


@dataclass(frozen=True, eq=False)
class Active:
    """The rules in force while a model is traced; compared by identity, so it can be static."""

    table: Table
    mesh: Mesh | AbstractMesh
    manual: frozenset[str] = frozenset()
    """Mesh axes that an enclosing `shard_map` is manual over."""
    mapped: frozenset[str] = frozenset()
    """Mesh axes that an enclosing `vmap` runs over (`spmd_axis_name`): it puts them into every spec
    itself, so no spec may name them, yet a `shard_map` inside must be manual over them."""
    sizes: Mapping[str, int] = field(default_factory=dict)
    """What a dim of that name has on one device, for code that is traced as one device of many runs
    it, for its shapes alone (`one_of_many`)."""
    degrees: Mapping[str, int] = field(default_factory=dict)
    """Of mesh axes that such code sends along."""

    def axes(self, name: str | None) -> tuple[str, ...]:
        """The mesh axes that really split `name` here: of degree above 1, and nameable."""
        if name is None:
            return ()
        return tuple(
            axis
            for axis in self.table[name]
            if self.mesh.shape[axis] > 1 and axis not in self.manual | self.mapped
        )

    def spec(self, *names: str | None) -> PartitionSpec:
        """The partition of a tensor whose dims have these names (None: whole)."""
        return PartitionSpec(*(self.axes(name) or None for name in names))

    def is_sharded(self, name: str) -> bool:
        """Whether dims of this name are split here."""
        return bool(self.axes(name))

    @property
    def free(self) -> frozenset[str]:
        """Mesh axes that a `shard_map` inside takes: all that are not manual yet."""
        return frozenset(self.mesh.axis_names) - self.manual

    @property
    def alone(self) -> bool:
        """Whether one device holds all that the traced code sees: nothing is left to split over."""
        return all(self.mesh.shape[axis] == 1 for axis in self.free)

    @property
    def context_mesh(self) -> Mesh | AbstractMesh:
        """The mesh to name inside the traced code: within a `shard_map` it is the tracer's own."""
        return jax.sharding.get_abstract_mesh() if self.manual else self.mesh

    @property
    def platform(self) -> str:
        """The platform of the devices: "cpu", "gpu", "tpu"."""
        return mesh_platform(self.mesh)


_ACTIVE: contextvars.ContextVar[Active | None] = contextvars.ContextVar("rules", default=None)


def current() -> Active | None:
    """The rules in force, or None: then models run plain, on one device."""
    return _ACTIVE.get()


@contextlib.contextmanager
def use_rules(table: Table, mesh: Mesh | AbstractMesh) -> Iterator[Active]:
    """Puts rules in force for the code traced inside."""
    with _in_force(Active(table, mesh)) as active:
        yield active


@contextlib.contextmanager
def mapped_over(*mesh_axes: str) -> Iterator[None]:
    """For code traced inside a `vmap` over mesh axes; needs rules in force."""
    active = _ACTIVE.get()
    assert active is not None
    with _in_force(replace(active, mapped=active.mapped | frozenset(mesh_axes))):
        yield


@contextlib.contextmanager
def manual_over(*mesh_axes: str) -> Iterator[None]:
    """For code traced inside a `shard_map` over mesh axes; needs rules in force."""
    active = _ACTIVE.get()
    assert active is not None
    with _in_force(replace(active, manual=active.manual | frozenset(mesh_axes))):
        yield


@contextlib.contextmanager
def one_of_many(
    platform: str, sizes: Mapping[str, int], degrees: Mapping[str, int] | None = None
) -> Iterator[None]:
    """For code that is traced as one device of many runs it, to learn its shapes; never run.

    The model is that device's part: its heads, its columns. Where the whole program would bring an
    activation into another layout, it gets that layout's shape.

    Args:
        platform: of the devices.
        sizes: entries of a dim of that name on one device, for each name that has several layouts.
        degrees: of mesh axes along which the code itself sends; what is left out is 1.
    """
    table: Table = dict.fromkeys(AXES, ())
    mesh = abstract_mesh({}, platform)
    with _in_force(Active(table, mesh, sizes=sizes, degrees=degrees or {})):
        yield


@contextlib.contextmanager
def _in_force(active: Active) -> Iterator[Active]:
    token = _ACTIVE.set(active)
    try:
        yield active
    finally:
        _ACTIVE.reset(token)


def constrain(x: jax.Array, *names: str | None) -> jax.Array:
    """Says where an activation is; the identity outside `use_rules`.

    Args:
        x: an array with as many dims as names.
        names: one word of `AXES` a dim, or None.
    """
    active = current()
    if active is None:
        return x
    assert x.ndim == len(names), (x.shape, names)
    if active.sizes:
        return _resized(x, [active.sizes.get(name or "") for name in names])
    if isinstance(active.mesh, AbstractMesh) or active.alone:
        return x
    placed: jax.Array = jax.lax.with_sharding_constraint(
        x, NamedSharding(active.context_mesh, active.spec(*names))
    )
    return placed


def constrain_in_steps(
    x: jax.Array, first: Sequence[str | None], then: Sequence[str | None]
) -> jax.Array:
    """`constrain` to one layout, by way of another that splits some dim less far but does split it.

    The gradient takes the same way back. Otherwise XLA finds positions of a weight gradient's two
    operands split in two ways, of which neither is whole, and gathers both.

    Args:
        x: an array.
        first: names of its dims on the way.
        then: names of its dims in the end.
    """
    active = current()
    if active is not None:
        ways = zip(map(active.axes, first), map(active.axes, then), strict=True)
        if any(way and way != end for way, end in ways):
            x = constrain(x, *first)
    return constrain(x, *then)


def _resized(x: jax.Array, sizes: Sequence[int | None]) -> jax.Array:
    """An array with these sizes (None: as it is), of whatever values."""
    for dim, size in enumerate(sizes):
        if size is None or size == x.shape[dim]:
            continue
        if size < x.shape[dim]:
            x = jax.lax.slice_in_dim(x, 0, size, axis=dim)
        else:
            x = jnp.concatenate([x] * (size // x.shape[dim]), dim)
    return x
