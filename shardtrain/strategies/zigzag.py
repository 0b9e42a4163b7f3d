"""The zig-zag order of a batch whose sequences are split over `context`, for ring attention.

Owns: the order, and bringing a batch into it. Does not own: why (`ops.ring_attention`).

Of 2n chunks of a sequence, device i of n gets i and 2n - 1 - i. A loss is a sum over positions, so
nothing has to be brought back.
"""

from collections.abc import Callable, Mapping
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AbstractMesh, Mesh, PartitionSpec

from shardtrain.sharding.rules import Active, Table

CONTEXT = "context"

Batch = Mapping[str, jax.Array]
Arrange = Callable[[Batch], Batch]
"""From a batch as it was read to the same in the order in which its positions are worked on."""


def in_order(batch: Batch) -> Batch:
    """The batch as it is."""
    return batch


def make_zigzag(table: Table, mesh: Mesh | AbstractMesh) -> Arrange:
    """Brings batches into zig-zag order.

    Args:
        table: the COMPUTE table; `length` is split over `context` alone.
        mesh: the devices.

    Returns:
        From arrays [microbatch, batch, length], and others that have no length, to the same in the
        new order, and `places`: where each position is in its sequence.
    """
    num, active = mesh.shape[CONTEXT], Active(table, mesh)
    spec = PartitionSpec(None, *active.spec("batch", "length"))

    def arrange(batch: Batch) -> Batch:
        long = {name: leaf for name, leaf in batch.items() if leaf.ndim == 3}
        run = jax.shard_map(
            partial(_exchanged, num=num),
            mesh=mesh,
            in_specs=spec,
            out_specs=spec,
            check_vma=False,
        )
        return {**batch, **run(long)}

    return arrange


def _exchanged(leaves: dict[str, jax.Array], num: int) -> dict[str, jax.Array]:
    """This device's chunks in the new order, from those of all in theirs.

    In order, device d has chunks 2d and 2d + 1. Each device gives up one chunk of even number and
    one of odd number, and gets one of each.
    """
    like = next(iter(leaves.values()))
    chunk = like.shape[2] // 2
    device = lax.axis_index(CONTEXT)
    places = jnp.arange(like.shape[2], dtype=jnp.int32) + device * like.shape[2]
    leaves = {**leaves, "places": jnp.broadcast_to(places, like.shape)}
    even, odd = ([(d, _owner(2 * d + odd, num)) for d in range(num)] for odd in (0, 1))

    def exchange(leaf: jax.Array) -> jax.Array:
        parts = leaf[:, :, :chunk], leaf[:, :, chunk:]
        evens, odds = (
            lax.ppermute(part, CONTEXT, to) for part, to in zip(parts, (even, odd), strict=True)
        )
        # Device i has chunk i first; its other one has the other parity.
        straight, crossed = ([evens, odds], [odds, evens])
        one, other = (jnp.concatenate(both, 2) for both in (straight, crossed))
        return jnp.where(device % 2 == 0, one, other)

    return {name: exchange(leaf) for name, leaf in leaves.items()}


def _owner(chunk: int, num: int) -> int:
    """Which of so many devices has a chunk in zig-zag order."""
    return min(chunk, 2 * num - 1 - chunk)
