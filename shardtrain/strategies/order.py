"""Where each layer of the model lies in the stack that rests on the devices.

Owns: the permutation between model order, in which states are saved and compared, and the order of
the stack, in which each stage of a pipeline holds its own layers side by side. Does not own: which
layers a stage has (`schedules.layout`).

The stack is cut into equal parts over the stages. A stage with fewer layers than the largest has
places that no layer uses: their parameters are zero and never get a gradient, so they stay zero
under every optimizer, and count in no norm. What an optimizer keeps for them means nothing.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from shardtrain.sharding.mesh import PIPELINE, mesh_axes
from shardtrain.sharding.placement import Names, split_size
from shardtrain.sharding.tiers import HOST
from shardtrain.strategies.schedules.table import NOTHING

PyTree = Any


@dataclass(frozen=True)
class LayerOrder:
    """The layer in each place of the stack; -1 where there is none."""

    rows: tuple[int, ...] = ()
    """Empty = as the model is, however many layers there are."""

    @classmethod
    def of(cls, rows: npt.NDArray[np.intp] | Sequence[int]) -> "LayerOrder":
        """The order of rows of any shape, such as [stages, virtual stages, slots]."""
        return cls(tuple(int(row) for row in np.asarray(rows).ravel()))

    @cached_property
    def places(self) -> tuple[int, ...]:
        """The place of each layer."""
        found = {row: place for place, row in enumerate(self.rows) if row != NOTHING}
        return tuple(found[layer] for layer in range(len(found)))

    @property
    def is_model_order(self) -> bool:
        """Whether the stack is as the model is."""
        return self.rows == tuple(range(len(self.rows)))

    @property
    def is_padded(self) -> bool:
        """Whether some places have no layer."""
        return NOTHING in self.rows

    def stack(self, leaf: jax.Array) -> jax.Array:
        """Puts a stacked parameter [layers, ...] from model order in its places [places, ...]."""
        if self.is_model_order:
            return leaf
        rows = np.array(self.rows)
        stacked = jnp.take(leaf, np.maximum(rows, 0), axis=0)
        if not self.is_padded:
            return stacked
        there = (rows != NOTHING).reshape(-1, *(1,) * (leaf.ndim - 1))
        return jnp.where(there, stacked, 0)

    def unstack(self, leaf: jax.Array) -> jax.Array:
        """Puts a stacked parameter [places, ...] back into model order [layers, ...]."""
        return leaf if self.is_model_order else jnp.take(leaf, np.array(self.places), axis=0)


def take_rows(
    leaf: jax.Array, rows: Sequence[int], source: NamedSharding, target: NamedSharding
) -> jax.Array:
    """The rows of a leaf along its first dim, moved between stages one at a time.

    XLA would gather the whole leaf on every device.

    Args:
        leaf: resting as `source`.
        rows: which of its rows, in order; -1 for one of zeros.
        source: where it rests; `pipeline` may split one dim.
        target: where the result rests; likewise.

    Returns:
        An array with as many rows as `rows`, bit for bit.
    """
    mesh, wanted = target.mesh, jnp.asarray(rows, jnp.int32)
    split, ends_split = (_stage_dim(sharding) for sharding in (source, target))
    stages = mesh.shape[PIPELINE]
    here = len(rows) // stages if ends_split == 0 else len(rows)

    def own(part: jax.Array, row: jax.Array) -> jax.Array:
        piece: jax.Array = jax.lax.dynamic_index_in_dim(part, row, keepdims=False)
        if source.memory_kind == HOST:
            piece = jax.device_put(piece, jax.memory.Space.Device)
        return piece

    def fetch(part: jax.Array, row: jax.Array, stage: jax.Array) -> jax.Array:
        """A whole row, from the stage that has it, or from the pieces on all stages."""
        if split == 0:
            return _sent(own(part, row % len(part)), row // len(part) == stage)
        piece = own(part, row)
        if split is None:
            return piece
        whole: jax.Array = jax.lax.all_gather(piece, PIPELINE, axis=split - 1, tiled=True)
        return whole

    def run(part: jax.Array, stage: jax.Array) -> jax.Array:
        stage = stage[0]

        def put(index: Any, out: jax.Array) -> jax.Array:
            row = wanted[index]
            value = jnp.where(row >= 0, fetch(part, jnp.maximum(row, 0), stage), 0)
            if ends_split == 0:
                owner, place = index // here, index % here
                kept = jax.lax.dynamic_index_in_dim(out, place, keepdims=False)
                return out.at[place].set(jnp.where(owner == stage, value, kept))
            if ends_split is not None:
                size = out.shape[ends_split]
                value = jax.lax.dynamic_slice_in_dim(value, stage * size, size, ends_split - 1)
            return out.at[index].set(value)

        whole = list(part.shape)
        if split:
            whole[split] *= stages
        if ends_split:
            whole[ends_split] //= stages
        empty = jnp.zeros((here, *whole[1:]), part.dtype)
        return jax.lax.fori_loop(0, len(rows), put, empty)  # type: ignore[no-any-return]

    moved: jax.Array = jax.shard_map(
        run,
        mesh=mesh,
        axis_names={PIPELINE},
        in_specs=(_only_stages(split), PartitionSpec(PIPELINE)),
        out_specs=_only_stages(ends_split),
        check_vma=False,
    )(_as_bits(leaf), stage_numbers(mesh))
    return _from_bits(moved, leaf.dtype)


def stage_numbers(mesh: Mesh | AbstractMesh) -> jax.Array:
    """[stages], to be split over them: XLA cannot partition `axis_index` where axes are its own."""
    return jnp.arange(mesh.shape[PIPELINE], dtype=jnp.int32)


def sent_by(value: jax.Array, is_mine: jax.Array) -> jax.Array:
    """The value of the one stage where `is_mine`, on all of them, bit for bit."""
    return _from_bits(_sent(_as_bits(value), is_mine), value.dtype)


def _sent(bits: jax.Array, is_mine: jax.Array) -> jax.Array:
    sent: jax.Array = jax.lax.psum(jnp.where(is_mine, bits, 0), PIPELINE)
    return sent


def _as_bits(leaf: jax.Array) -> jax.Array:
    """Floats as integers: their sums with zeros keep every bit, that of -0.0 and of NaN too."""
    if not jnp.issubdtype(leaf.dtype, jnp.floating):
        return leaf
    return jax.lax.bitcast_convert_type(leaf, f"uint{8 * leaf.dtype.itemsize}")


def _from_bits(leaf: jax.Array, dtype: Any) -> jax.Array:
    if leaf.dtype == dtype:
        return leaf
    floats: jax.Array = jax.lax.bitcast_convert_type(leaf, dtype)
    return floats


def _stage_dim(sharding: NamedSharding) -> int | None:
    """The dim that is split over stages."""
    dims = [dim for dim, entry in enumerate(sharding.spec) if PIPELINE in mesh_axes(entry)]
    return dims[0] if dims else None


def _only_stages(dim: int | None) -> PartitionSpec:
    return PartitionSpec() if dim is None else PartitionSpec(*(None,) * dim, PIPELINE)


def is_stacked(names: Names) -> bool:
    """Whether a parameter with these axes holds one entry a layer."""
    return names[:1] == ("layers",)


def map_stacked(function: Callable[[Any], Any], tree: PyTree, stacked: PyTree) -> PyTree:
    """Maps the leaves that hold one entry a layer, and leaves all others alone.

    Args:
        function: leaf -> leaf.
        tree: arrays or shapes.
        stacked: the same tree of booleans.
    """
    return jax.tree.map(lambda leaf, s: function(leaf) if s else leaf, tree, stacked)


def grows_with_layers(make: Callable[[PyTree], PyTree], params: PyTree, stacked: PyTree) -> PyTree:
    """Which leaves of what is made of parameters hold one entry a layer.

    Found by making it for one layer more: so it holds for every optimizer, whatever its state is.

    Args:
        make: parameters -> a tree.
        params: shapes of the parameters.
        stacked: which of them are stacked.
    """

    def more(leaf: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((leaf.shape[0] + 1, *leaf.shape[1:]), leaf.dtype)

    few = jax.eval_shape(make, params)
    many = jax.eval_shape(make, map_stacked(more, params, stacked))
    return jax.tree.map(lambda a, b: a.shape[:1] != b.shape[:1], few, many)


def model_order_sharding(sharding: NamedSharding, shape: tuple[int, ...]) -> NamedSharding:
    """Where a stacked leaf in model order rests, beside its sharding in the stack's order.

    Args:
        sharding: of the leaf [places, ...].
        shape: of the leaf [layers, ...].

    Returns:
        The same, but where the layers do not divide, another dim is split over the stages; or none,
        where none divides.
    """
    mesh = sharding.mesh
    spec = [*sharding.spec, *(None,) * (len(shape) - len(sharding.spec))]
    first = mesh_axes(spec[0])
    if shape[0] % split_size(mesh, first) == 0:
        return sharding
    spec[0] = None
    # A dim of its own if there is one: two kinds of axes on one dim are moved twice.
    for dim in sorted(range(1, len(shape)), key=lambda d: (bool(mesh_axes(spec[d])), -shape[d])):
        axes = (*first, *mesh_axes(spec[dim]))
        if shape[dim] % split_size(mesh, axes) == 0:
            spec[dim] = axes
            break
    return NamedSharding(mesh, PartitionSpec(*spec))
