"""A number for each leaf that any wrong bit changes, whatever mesh or process holds its pieces.

Owns: the digest, on devices and on the host. Does not own: where it is kept, when it is compared.

Every entry is mixed with its place in the whole array, and the results are added up modulo 2^32, in
two lanes with constants of their own: sums do not care who adds which part first, so no leaf is
gathered. It finds faults; it is no protection against somebody who makes them on purpose (the
SHA-256 of files is). The mixing has the form of MurmurHash3's finaliser.
"""

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from numpy.typing import NDArray

_AT_ONCE: Final = 64 << 20
"""Bytes of a block on the host whose digest is computed in one go."""
SMALL = 1 << 20
"""Bytes of a piece that the host digests in less time than a CPU device takes to compile it."""
_LANES: Final = ((0x9E3779B1, 0x85EBCA6B, 0xC2B2AE35), (0x27D4EB2F, 0x165667B1, 0x2545F491))


@dataclass(frozen=True)
class Pieces:
    """The digests of the pieces of a leaf that this process holds; perhaps still computed."""

    by_device: Callable[[], dict[int, NDArray[np.uint32]]]
    """Waits for uint32 [2] of each device's piece."""
    counted: frozenset[int]
    """Devices whose pieces make up the whole leaf, copies left out."""

    def total(self) -> NDArray[np.uint32]:
        """What this process's pieces add to the digest of the leaf: uint32 [2]."""
        found = self.by_device()
        parts = [found[device] for device in sorted(self.counted)]
        return np.sum(parts, axis=0, dtype=np.uint32) if parts else np.zeros(2, np.uint32)


def pieces(leaf: jax.Array) -> Pieces:
    """Begin to compute the digests of the pieces of a leaf, each on the device that holds it.

    There is no collective in it: on CPU devices two that do not depend on each other can wait for
    each other for ever, and a save must not wait for other processes.

    Args:
        leaf: any shape, dtype and sharding; random keys count as their bits.

    Returns:
        The pieces held by this process.
    """
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    here = leaf.addressable_shards
    counted = frozenset(shard.device.id for shard in here if shard.replica_id == 0)
    shape, sharding = leaf.shape, leaf.sharding
    if here[0].device.platform == "cpu" and max(s.data.nbytes for s in here) <= SMALL:
        found = {s.device.id: _piece(np.asarray(s.data), s.index, shape) for s in here}
        return Pieces(lambda: found, counted)
    on_device = sharding.memory_kind in (None, here[0].device.default_memory().kind)
    if isinstance(sharding, NamedSharding) and isinstance(sharding.mesh, Mesh) and on_device:
        rows = _by_device(sharding.mesh, sharding.spec)(leaf)
        return Pieces(
            lambda: {s.device.id: np.asarray(s.data).reshape(2) for s in rows.addressable_shards},
            counted,
        )
    # Copied now, for the array may be given up, and read when it is asked for.
    copies = [(s.device.id, np.array(s.data), s.index) for s in here]
    return Pieces(lambda: {d: _piece(block, at, shape) for d, block, at in copies}, counted)


@functools.lru_cache(maxsize=256)
def _by_device(mesh: Mesh, spec: PartitionSpec) -> Callable[[jax.Array], jax.Array]:
    """A compiled function: leaf -> uint32 [device, 2], a row on each device."""

    def local(block: jax.Array) -> jax.Array:
        names = [*spec, *[None] * (block.ndim - len(spec))]
        axes = [(n,) if isinstance(n, str) else tuple(n or ()) for n in names]
        degrees = [math.prod(mesh.shape[axis] for axis in some) for some in axes]
        sizes = tuple(size * degree for size, degree in zip(block.shape, degrees, strict=True))
        starts = [
            jax.lax.axis_index(some).astype(jnp.uint32) * jnp.uint32(size) if some else 0
            for some, size in zip(axes, block.shape, strict=True)
        ]
        row: jax.Array = _sums(block, starts, sizes)[None]
        return row

    mapped = jax.shard_map(
        local,
        mesh=mesh,
        in_specs=spec,
        out_specs=PartitionSpec(mesh.axis_names),
        check_vma=False,
    )
    return jax.jit(mapped)


def _sums(block: Any, starts: Sequence[Any], sizes: tuple[int, ...]) -> Any:
    """The digest of a block of a larger array, on a device."""
    if block.dtype == jnp.bool_:
        block = block.astype(jnp.uint8)
    unsigned = {1: jnp.uint8, 2: jnp.uint16}.get(block.dtype.itemsize, jnp.uint32)
    bits = jax.lax.bitcast_convert_type(block, unsigned).astype(jnp.uint32)
    if bits.ndim > len(sizes):  # 64-bit entries are two words each
        starts, sizes = [*starts, 0], (*sizes, bits.shape[-1])
    place = jnp.zeros(bits.shape, jnp.uint32)
    for dim, (start, stride) in enumerate(zip(starts, _strides(sizes), strict=True)):
        index = jax.lax.broadcasted_iota(jnp.uint32, bits.shape, dim) + start
        place += index * jnp.uint32(stride)
    sums = [
        jnp.sum(_mixed(bits, place, *map(jnp.uint32, lane)), dtype=jnp.uint32) for lane in _LANES
    ]
    return jnp.stack(sums)


def _piece(
    block: NDArray[Any], index: tuple[slice, ...], shape: tuple[int, ...]
) -> NDArray[np.uint32]:
    """The digest of a block of a larger array, on the host."""
    rows = max(1, _AT_ONCE * len(block) // max(block.nbytes, 1)) if block.ndim else 1
    if block.ndim and rows < len(block):  # what is computed takes more bytes than the block
        begin, found = (index[0].start or 0) if index else 0, np.zeros(2, np.uint32)
        for start in range(0, len(block), rows):
            part = block[start : start + rows]
            found += _piece(part, (slice(begin + start, None), *index[1:]), shape)
        return found
    words = np.ascontiguousarray(block).view(np.uint8).reshape(*block.shape, -1)
    width = {1: np.uint8, 2: np.uint16}.get(block.dtype.itemsize, np.uint32)
    bits = np.ascontiguousarray(words).view(width).astype(np.uint32)
    sizes = (*shape, bits.shape[-1])
    place = np.zeros(bits.shape, np.uint32)
    with np.errstate(over="ignore"):
        for dim, stride in enumerate(_strides(sizes)):
            start = index[dim].start or 0 if dim < len(index) else 0
            along = (np.arange(bits.shape[dim], dtype=np.uint64) + start).astype(np.uint32)
            place += (along * np.uint32(stride)).reshape([-1, *[1] * (bits.ndim - dim - 1)])
        sums = [
            np.sum(_mixed(bits, place, *map(np.uint32, lane)), dtype=np.uint32) for lane in _LANES
        ]
    return np.stack(sums)


def host_digest(leaf: NDArray[Any]) -> NDArray[np.uint32]:
    """The digest of a whole array on the host.

    Args:
        leaf: any shape and dtype; random keys as their bits.

    Returns:
        uint32 [2].
    """
    flat = np.ascontiguousarray(leaf).reshape(-1)
    total = np.zeros(2, np.uint32)
    block = 1 << 20  # a few times 4 MiB, however large the leaf
    with np.errstate(over="ignore"):
        for start in range(0, flat.size, block):
            total += _piece(flat[start : start + block], (slice(start, None),), flat.shape)
    return total


def text(digest: NDArray[np.uint32]) -> str:
    """A digest as 16 hexadecimal digits."""
    first, second = (int(n) for n in digest)
    return f"{first:08x}{second:08x}"


def _strides(shape: tuple[int, ...]) -> list[int]:
    """Entries between neighbours of each dim, row by row, modulo 2^32."""
    return [math.prod(shape[dim + 1 :]) % 2**32 for dim in range(len(shape))]


def _mixed(bits: Any, place: Any, first: Any, second: Any, third: Any) -> Any:
    mixed = (bits ^ (place * first)) + first
    mixed = (mixed ^ (mixed >> 16)) * second
    mixed = (mixed ^ (mixed >> 13)) * third
    return mixed ^ (mixed >> 16)
