"""Ring attention: keys and values travel once around the devices that share a sequence.

Liu et al. 2023, arXiv 2310.01889. Owns: what is sent when, and which tiles a device works on with
what it has got. Does not own: the map around it (`split_attention`), the tiles (`blockwise`), and
the order in which a batch comes (`strategies.zigzag`).

The sequence comes in zig-zag order, as chunks: of 2n, device i of n holds i and 2n - 1 - i, an
early and a late one. With what another device holds, causality then leaves just two pairs of
chunks, whole, and hides two; so each device does the same work in each turn, nothing of which is
masked, but in the first, when it sees its own keys.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int

from shardtrain.ops.attention_blocks import heads_first, row_products
from shardtrain.ops.blockwise import (
    Gradients,
    Mixed,
    Rows,
    Side,
    Sight,
    Tiles,
    add_gradients,
    below_diagonal,
    block_size,
    every_pair,
    mix,
    no_gradients,
    nothing_mixed,
)
from shardtrain.ops.dropout import Thinning
from shardtrain.ops.platform import platform
from shardtrain.ops.split_attention import (
    Operands,
    context_axis,
    context_degree,
    device_index,
    split_attention,
)
from shardtrain.sharding.mesh import PIPELINE
from shardtrain.sharding.rules import Active, current

T = TypeVar("T")


def ring_attention(
    q: Float[Array, "batch length kv_heads group head_dim"],
    k: Float[Array, "batch length kv_heads head_dim"],
    v: Float[Array, "batch length kv_heads head_dim"],
    *,
    segments: Int[Array, "batch length"] | None = None,
    alibi: Float[Array, "kv_heads group"] | None = None,
    thinning: Thinning | None = None,
) -> Float[Array, "batch length kv_heads group head_dim"]:
    """Causal attention, tile by tile, over a `length` that may be split over `context`.

    Args:
        q: queries; `group` of them share one key/value head.
        k: keys.
        v: values.
        segments: document of each position; a query sees keys of its own document only.
        alibi: slope of each head: scores fall by slope x distance.
        thinning: dropout of the weights.

    Returns:
        An array of the shape and dtype of `q`. Where `length` is split, all are in zig-zag order.
    """
    active = current()
    in_branch = active is not None and PIPELINE in active.manual
    ring = Ring(context_degree(active), context_axis(active), platform(), in_branch)
    return split_attention(ring, q, k, v, segments, alibi, thinning)


class Held(NamedTuple):
    """What travels."""

    k: jax.Array
    v: jax.Array
    segments: jax.Array | None


@dataclass(frozen=True)
class Ring:
    """One device of a ring; of one device it is attention tile by tile."""

    degree: int
    axis: str | None
    """The mesh axis; None where nothing is sent."""
    platform: str
    in_branch: bool = False
    """Whether some devices of the mesh may be elsewhere in the program meanwhile."""

    @property
    def reads(self) -> tuple[str, ...]:
        """Operands that the backward wants as they came."""
        return ("q", "k", "v", "segments", "alibi", "thinning")

    def specs(self, active: Active) -> dict[str, PartitionSpec]:
        """How what the forward gives to the backward is split."""
        return {"log_sum": active.spec("batch", "kv_heads", None, "length")}

    def forward(self, operands: Operands) -> tuple[jax.Array, Operands]:
        """What the queries got, and the logs of their sums."""
        q, held = heads_first(operands["q"]), self._held(operands)

        def turn(mixed: Mixed, held: Held, number: jax.Array | int) -> Mixed:
            sight = self._sight(operands, held, number)
            return mix(mixed, q, held.k, held.v, sight, self._tiles(q.shape[3], number))

        def step(
            carry: tuple[Mixed, Held], number: jax.Array | int
        ) -> tuple[tuple[Mixed, Held], None]:
            mixed, held = carry
            arriving = self._next(held)  # while this is worked on
            return (turn(mixed, held, number), arriving), None

        carry, last = (nothing_mixed(q), held), self.degree - 1
        if last:
            carry, _ = step(carry, 0)
            carry, _ = lax.scan(step, carry, jnp.arange(1, last, dtype=jnp.int32))
        mixed = turn(*carry, last)
        out = mixed.out.astype(q.dtype).transpose(0, 3, 1, 2, 4)
        return out, {"log_sum": mixed.log_sum}

    def backward(
        self, kept: Mapping[str, Any], out: jax.Array, g: jax.Array
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Gradients of queries, keys and values."""
        by_product = self.platform == "cpu"
        return self.gradients(kept, g, row_products(g, out, by_product=by_product))

    def gradients(
        self, kept: Mapping[str, Any], g: jax.Array, along: jax.Array
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """The same from `along`, the sums over head_dim of `g` times what the queries got."""
        rows = Rows(heads_first(kept["q"]), heads_first(g), kept["log_sum"], along)
        held = self._held(kept)
        none = no_gradients(rows.q, held.k)

        def turn(dq: jax.Array, held: Held, number: jax.Array | int) -> Gradients:
            sight = self._sight(kept, held, number)
            sums = none._replace(q=dq)
            tiles = self._tiles(rows.q.shape[3], number)
            return add_gradients(sums, rows, held.k, held.v, sight, tiles)

        def step(
            carry: tuple[Gradients, Held], number: jax.Array | int
        ) -> tuple[tuple[Gradients, Held], None]:
            sums, held = carry
            arriving, far = self._next((held, (sums.k, sums.v)))
            new = turn(sums.q, held, number)
            return (Gradients(new.q, far[0] + new.k, far[1] + new.v), arriving), None

        last = self.degree - 1
        if not last:
            sums = turn(none.q, held, 0)
        else:
            # Sums of keys travel with their keys, one turn behind the work on them.
            arriving = self._next(held)
            carry = (turn(none.q, held, 0), arriving)
            carry, _ = lax.scan(step, carry, jnp.arange(1, last, dtype=jnp.int32))
            sums, held = carry
            far = self._next((sums.k, sums.v))
            new = turn(sums.q, held, last)
            sums = Gradients(new.q, far[0] + new.k, far[1] + new.v)
        dk, dv = (a.astype(rows.q.dtype).transpose(0, 2, 1, 3) for a in (sums.k, sums.v))
        if last:
            dk, dv = self._next((dk, dv))  # home
        return sums.q.astype(rows.q.dtype).transpose(0, 3, 1, 2, 4), dk, dv

    # -- pieces

    @staticmethod
    def _held(operands: Mapping[str, Any]) -> Held:
        k, v = (heads_first(operands[name]) for name in "kv")
        return Held(k, v, operands.get("segments"))

    def _next(self, tree: T) -> T:
        """What the device before sends, which gets its own from the one before it."""
        send = self._in_pairs if self.in_branch else self._to_next
        sent: T = jax.tree.map(send, tree)
        return sent

    def _to_next(self, x: jax.Array) -> jax.Array:
        if self.axis is None:  # for shapes alone: another array, as what arrives is
            return lax.rev(x, (0,))
        pairs = [(i, (i + 1) % self.degree) for i in range(self.degree)]
        sent: jax.Array = lax.ppermute(x, self.axis, pairs)
        return sent

    def _in_pairs(self, x: jax.Array) -> jax.Array:
        """The same by gathers within pairs, which wait for nobody else.

        A permutation waits for all devices of the mesh, and stages of a pipeline are each in a
        branch of their own. Each device gets its own array back too.
        """
        assert self.degree % 2 == 0, self.degree
        ring = list(range(self.degree))
        evens = [[i, i + 1] for i in ring[::2]]
        odds = [[i, (i + 1) % self.degree] for i in ring[1::2]]
        from_even, from_odd = (
            lax.all_gather(x, self.axis, axis_index_groups=groups)[0] for groups in (evens, odds)
        )
        return jnp.where(device_index(self.axis) % 2 == 1, from_even, from_odd)

    def _source(self, number: jax.Array | int) -> jax.Array | int:
        """The device whose keys are here in a turn."""
        return (device_index(self.axis) - number) % self.degree

    def _sight(self, operands: Mapping[str, Any], held: Held, number: jax.Array | int) -> Sight:
        length = held.k.shape[2]
        rows = self._places(device_index(self.axis), length)
        keys = self._places(self._source(number), length)
        return Sight(
            rows=Side(rows, operands.get("segments")),
            keys=Side(keys, held.segments),
            slopes=operands.get("alibi"),
            thinning=operands.get("thinning"),
        )

    def _places(self, index: jax.Array | int, length: int) -> jax.Array:
        """Places in the sequence of what a device holds."""
        if self.degree == 1:
            return jnp.arange(length, dtype=jnp.int32)
        half = length // 2
        at = jnp.arange(half, dtype=jnp.int32)
        return jnp.concatenate([index * half + at, (2 * self.degree - 1 - index) * half + at])

    def _tiles(self, length: int, number: jax.Array | int) -> Tiles:
        """The tiles of a turn; 0 is the one with its own keys."""
        half = length if self.degree == 1 else length // 2
        block = block_size(half, self.platform)
        if isinstance(number, int) and number == 0:
            return Tiles(below_diagonal(length // block), block, causal=True)
        num = half // block
        pairs = jnp.asarray(every_pair(num))
        # Late queries see the early keys of all; besides, early queries those of devices before
        # this one, or late queries the late keys of devices after it.
        is_after = self._source(number) > device_index(self.axis)
        shift = jnp.asarray(is_after, jnp.int32) * num
        late_rows = pairs + jnp.array([[num, 0]], jnp.int32)
        return Tiles(jnp.concatenate([late_rows, pairs + shift]), block, causal=False)
