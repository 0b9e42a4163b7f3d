"""What would make a layout fit: the largest things on a device, and the cheapest changes.

Owns: which changes are tried, and their order. Does not own: what fits (`memory`) and how fast it
is (`cost`).
"""

import itertools
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace

import jax
import jax.numpy as jnp

from shardtrain.plan.hardware import Cluster
from shardtrain.plan.memory import memory
from shardtrain.plan.search import Candidate, candidate, room
from shardtrain.plan.workload import Layout, Workload
from shardtrain.sharding.placement import bytes_per_device, leaves_by_path

_LESS = 0.95
"""What is left of the memory at most, also where the figures say that the layout fits."""
MOST_CHANGES = 3
"""Changes that are made at once at most."""


@dataclass(frozen=True)
class Large:
    """Something that takes much of a device."""

    name: str
    """A parameter's path, with its gradient and optimizer state; or a class of `Memory`."""
    nbytes: float


def largest(workload: Workload, layout: Layout, count: int = 6) -> list[Large]:
    """The largest things on one device, largest first.

    Args:
        workload: the work.
        layout: a legal layout.
        count: how many.
    """
    held = memory(workload, layout)
    state = workload.state(layout)
    each = (held.parameters + held.master + held.moments + held.gradients) / state.entries.used
    placement = workload.placement(layout, workload.rows(layout))
    computed = jax.tree.leaves(placement.computed)
    found = [
        Large(f"{path} {tuple(leaf.shape)}", each * bytes_per_device(leaf.shape, jnp.int8, where))
        for (path, leaf), where in zip(leaves_by_path(placement.shapes), computed, strict=True)
    ]
    found += [Large(name, getattr(held, name)) for name in ("activations", "logits", "buffers")]
    return sorted(found, key=lambda large: -large.nbytes)[:count]


def cures(workload: Workload, layout: Layout, cluster: Cluster, count: int = 3) -> list[Candidate]:
    """The fastest layouts that fit, of those with the fewest changes.

    Args:
        workload: the work.
        layout: one that does not fit.
        cluster: where it is to run.
        count: how many.
    """
    limit = min(room(cluster), _LESS * memory(workload, layout).total)
    for number in range(1, MOST_CHANGES + 1):
        tried = dict.fromkeys(_changed(workload, layout, number))
        fitting = [other for other in tried if memory(workload, other).total <= limit]
        if fitting:
            found = [candidate(workload, other, cluster) for other in fitting]
            return sorted(found, key=lambda c: c.cost.middle)[:count]
    return []


def changes(layout: Layout, other: Layout) -> str:
    """What differs, in words."""
    before, after = asdict(layout), asdict(other)
    return ", ".join(
        f"{key} {before[key]} -> {after[key]}" for key in before if before[key] != after[key]
    )


def _changed(workload: Workload, layout: Layout, number: int) -> Iterator[Layout]:
    """Legal layouts with so many changes."""
    for some in itertools.combinations(_STEPS, number):
        options: list[Layout] = [layout]
        for step in some:
            options = [new for old in options for new in step(workload, old)]
        yield from options


def _remat(_: Workload, layout: Layout) -> Iterator[Layout]:
    order = ("none", "dots", "full")
    known = order.index(layout.remat) if layout.remat in order else 0
    for policy in order[known + 1 :]:
        yield replace(layout, remat=policy)


def _zero(_: Workload, layout: Layout) -> Iterator[Layout]:
    if layout.data * layout.context > 1:
        for stage in range(layout.zero + 1, 4):
            yield replace(layout, zero=stage)


def _microbatches(workload: Workload, layout: Layout) -> Iterator[Layout]:
    each = workload.batch_size // layout.shards
    for factor in (2, 4, 8):
        if each % (layout.microbatches * factor) == 0 and not layout.table:
            yield replace(layout, microbatches=layout.microbatches * factor)


def _sequence(workload: Workload, layout: Layout) -> Iterator[Layout]:
    tensor = layout.tensor
    if tensor > 1 and workload.length % tensor == 0 and not layout.sequence_parallel:
        yield replace(layout, sequence_parallel=True)


def _tensor(workload: Workload, layout: Layout) -> Iterator[Layout]:
    model = workload.model
    rows = model.padded_vocab(workload.vocab_size)
    for factor in (2, 4):
        tensor = layout.tensor * factor
        sizes = (model.num_heads, model.kv_heads, model.mlp_size, rows)
        if layout.data % factor == 0 and not any(size % tensor for size in sizes):
            yield replace(layout, tensor=tensor, data=layout.data // factor)


def _context(workload: Workload, layout: Layout) -> Iterator[Layout]:
    for factor in (2, 4):
        context = layout.context * factor
        heads = workload.model.kv_heads // layout.tensor
        unit = 2 * context * (layout.tensor if layout.sequence_parallel else 1)
        is_legal = {"auto": True, "ring": True, "ulysses": heads % context == 0}
        if layout.data % factor or workload.length % unit or layout.pipeline > 1:
            continue
        if is_legal.get(workload.model.attention, False):
            yield replace(layout, context=context, data=layout.data // factor)


# Devices that share a sequence have more of them, and so microbatches to make.
_STEPS = (_remat, _zero, _context, _microbatches, _sequence, _tensor)
