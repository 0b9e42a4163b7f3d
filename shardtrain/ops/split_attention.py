"""Causal attention over a split `length`: what its ways (ring, Ulysses) have in common.

Owns: the custom derivative, written as two maps that are manual over every mesh axis not yet taken,
so that neither is ever differentiated through; and the attention of one device with itself.
Does not own: what devices send each other (`ring_attention`, `ulysses`), nor the loop over tiles
(`blockwise`).
"""

from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple, Protocol

import jax
from jax import lax
from jax.sharding import PartitionSpec

from shardtrain.ops.dropout import Thinning
from shardtrain.sharding.rules import Active, current

CONTEXT = "context"
"""The mesh axis that a sequence is split over."""

Operands = dict[str, Any]
"""`q`, `k`, `v`; where they apply `segments`, `alibi`, `thinning`; as `attention` takes them."""


class Way(Protocol):
    """What one device does, inside a map that is manual over `CONTEXT`."""

    @property
    def reads(self) -> tuple[str, ...]:
        """Operands that its backward wants as they came; its forward gives all else it wants."""
        ...

    def forward(self, operands: Operands) -> tuple[jax.Array, Operands]:
        """What the queries got, and what the backward wants besides."""
        ...

    def backward(
        self, kept: Mapping[str, Any], out: jax.Array, g: jax.Array
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Gradients of queries, keys and values, from `g`, that of what they got."""
        ...

    def specs(self, active: Active) -> dict[str, PartitionSpec]:
        """How what the forward gives to the backward is split."""
        ...


def context_degree(active: Active | None) -> int:
    """Devices that share a sequence inside attention."""
    if active is None:
        return 1
    if active.sizes:
        return active.degrees.get(CONTEXT, 1)
    axes = active.axes("length")
    return active.mesh.shape[CONTEXT] if CONTEXT in axes else 1


def context_axis(active: Active | None) -> str | None:
    """The mesh axis to send along; None where nothing is sent, or shapes alone are wanted."""
    return CONTEXT if active is not None and CONTEXT in active.axes("length") else None


def device_index(axis: str | None) -> jax.Array | int:
    """This device's number along the axis."""
    return 0 if axis is None else lax.axis_index(axis)


def split_attention(
    way: Way,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    segments: jax.Array | None,
    alibi: jax.Array | None,
    thinning: Thinning | None,
) -> jax.Array:
    """Runs attention in one of its ways; the arguments are those of `attention`."""
    return _attention(Static(current(), way), q, k, v, segments, alibi, thinning)


class Static(NamedTuple):
    """What is fixed when the code is traced."""

    active: Active | None
    way: Way


Saved = tuple[Operands, Operands, jax.Array]
"""Operands, what the forward gave to the backward, and what the queries got."""


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attention(
    static: Static,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    segments: jax.Array | None,
    alibi: jax.Array | None,
    thinning: Thinning | None,
) -> jax.Array:
    return _forward(static, q, k, v, segments, alibi, thinning)[0]


def _forward(
    static: Static,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    segments: jax.Array | None,
    alibi: jax.Array | None,
    thinning: Thinning | None,
) -> tuple[jax.Array, Saved]:
    active, way = static
    found = {"q": q, "k": k, "v": v, "segments": segments, "alibi": alibi, "thinning": thinning}
    operands = {name: x for name, x in found.items() if x is not None}
    run = way.forward
    if active is not None and not active.alone:
        specs = _specs(active)
        run = jax.shard_map(
            way.forward,
            mesh=active.context_mesh,
            axis_names=active.free,
            in_specs=({name: specs[name] for name in operands},),
            out_specs=(specs["q"], way.specs(active)),
            check_vma=False,
        )
    out, given = run(operands)
    return out, ({name: x for name, x in operands.items() if name in way.reads}, given, out)


def _backward(
    static: Static, saved: Saved, g: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array, None, None, None]:
    active, way = static
    operands, given, out = saved
    kept = operands | given
    run = way.backward
    if active is not None and not active.alone:
        specs = _specs(active)
        of_kept = {name: specs[name] for name in operands} | way.specs(active)
        run = jax.shard_map(
            way.backward,
            mesh=active.context_mesh,
            axis_names=active.free,
            in_specs=(of_kept, specs["q"], specs["q"]),
            out_specs=(specs["q"], specs["k"], specs["v"]),
            check_vma=False,
        )
    return *run(kept, out, g), None, None, None


_attention.defvjp(_forward, _backward)


def _specs(active: Active) -> dict[str, PartitionSpec]:
    assert active.axes("length") in ((), (CONTEXT,)), active.axes("length")
    one = active.spec("batch", "length", "kv_heads", None)
    return {
        "q": active.spec("batch", "length", "kv_heads", None, None),
        "k": one,
        "v": one,
        "segments": active.spec("batch", "length"),
        "alibi": active.spec("kv_heads", None),
        "thinning": active.spec("batch", "kv_heads", None, None),
    }
