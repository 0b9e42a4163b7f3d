"""Ulysses: devices that share a sequence exchange positions for heads, and back (all-to-all).

Jacobs et al. 2023, arXiv 2309.14509. Owns: what is exchanged. Does not own: the map around it
(`split_attention`), and the attention of whole sequences over some heads, which is a ring of one
device (`ring_attention`).

The sequence comes in its own order. There are as many parts of the heads as devices, so
`kv_heads` has to divide by them.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int

from shardtrain.ops.attention_blocks import row_products
from shardtrain.ops.dropout import Thinning
from shardtrain.ops.platform import platform
from shardtrain.ops.ring_attention import Ring
from shardtrain.ops.split_attention import (
    CONTEXT,
    Operands,
    context_axis,
    context_degree,
    device_index,
    split_attention,
)
from shardtrain.sharding.rules import Active, current


def ulysses(
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
        An array of the shape and dtype of `q`.
    """
    active = current()
    way = Ulysses(context_degree(active), context_axis(active), platform())
    return split_attention(way, q, k, v, segments, alibi, thinning)


@dataclass(frozen=True)
class Ulysses:
    """One device of those that share a sequence."""

    degree: int
    axis: str | None
    """The mesh axis; None where nothing is sent."""
    platform: str

    @property
    def reads(self) -> tuple[str, ...]:
        """Operands that the backward wants as they came."""
        return ("segments", "alibi", "thinning")

    def specs(self, active: Active) -> dict[str, PartitionSpec]:
        """How what the forward gives to the backward is split: by heads."""
        batch = active.axes("batch") or None
        context = () if self.axis is None else (CONTEXT,)
        heads = (*active.axes("kv_heads"), *context) or None
        return {
            "heads_q": PartitionSpec(batch, None, heads, None, None),
            "heads_k": PartitionSpec(batch, None, heads, None),
            "heads_v": PartitionSpec(batch, None, heads, None),
            "log_sum": PartitionSpec(batch, heads, None, None),
        }

    def forward(self, operands: Operands) -> tuple[jax.Array, Operands]:
        """What the queries got; whole sequences of some heads, and the logs of their sums."""
        given = {f"heads_{name}": self._to_heads(operands[name]) for name in "qkv"}
        out, sums = self._alone.forward(self._whole(operands, given))
        return self._to_positions(out), given | sums

    def backward(
        self, kept: Mapping[str, Any], out: jax.Array, g: jax.Array
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Gradients of queries, keys and values."""
        along = row_products(g, out, by_product=self.platform == "cpu")
        whole = self._whole(kept, kept) | {"log_sum": kept["log_sum"]}
        # [batch, kv_heads, group, length], so that heads are where `_to_heads` has them
        along = self._to_heads(along.transpose(0, 3, 1, 2)).transpose(0, 2, 3, 1)
        dq, dk, dv = self._alone.gradients(whole, self._to_heads(g), along)
        return self._to_positions(dq), self._to_positions(dk), self._to_positions(dv)

    # -- pieces

    @property
    def _alone(self) -> Ring:
        return Ring(1, None, self.platform)

    def _whole(self, operands: Mapping[str, Any], given: Mapping[str, jax.Array]) -> Operands:
        """The operands of attention over whole sequences and some heads."""
        whole = {name: given[f"heads_{name}"] for name in "qkv"}
        if "segments" in operands:
            whole["segments"] = self._gathered(operands["segments"])
        if "alibi" in operands:
            whole["alibi"] = self._own_heads(operands["alibi"], 0)
        if "thinning" in operands:
            words = self._own_heads(operands["thinning"].words, 1)
            whole["thinning"] = replace(operands["thinning"], words=words)
        return whole

    def _own_heads(self, x: jax.Array, dim: int) -> jax.Array:
        """What belongs to the heads that are worked on here, of what is here of all."""
        heads = x.shape[dim] // self.degree
        own: jax.Array = lax.dynamic_slice_in_dim(x, device_index(self.axis) * heads, heads, dim)
        return own

    def _to_heads(self, x: jax.Array) -> jax.Array:
        """Some positions of all heads here, [batch, length, kv_heads, ...], for all of some."""
        if self.axis is None:  # in shape alone, if at all
            return x.reshape(x.shape[0], -1, x.shape[2] // self.degree, *x.shape[3:])
        here: jax.Array = lax.all_to_all(x, self.axis, split_axis=2, concat_axis=1, tiled=True)
        return here

    def _to_positions(self, x: jax.Array) -> jax.Array:
        """The other way."""
        if self.axis is None:
            return x.reshape(x.shape[0], -1, x.shape[2] * self.degree, *x.shape[3:])
        here: jax.Array = lax.all_to_all(x, self.axis, split_axis=1, concat_axis=2, tiled=True)
        return here

    def _gathered(self, segments: jax.Array) -> jax.Array:
        if self.axis is None:
            return jnp.tile(segments, (1, self.degree))
        whole: jax.Array = lax.all_gather(segments, self.axis, axis=1, tiled=True)
        return whole
