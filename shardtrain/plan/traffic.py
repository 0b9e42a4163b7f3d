"""What a step sends between devices, by mesh axes: predicted before anything is compiled.

Owns: which collectives there are, how often, and of which bytes, from the sizes of parameters
(`workload`) and of the residual stream (`pieces`). Does not own: how long they take (`links`,
`cost`), nor what a compiled program does (`collectives`); a test holds the two together.

Collectives of a few numbers (norms, sums of the loss, biases' gradients between tensor shards) are
left out.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import jax.numpy as jnp

from shardtrain.ops.sums import sum_dtype
from shardtrain.plan.links import Kind
from shardtrain.plan.workload import Layout, Workload
from shardtrain.sharding.mesh import PIPELINE

TENSOR = ("tensor",)
CONTEXT = ("context",)
SHARDS = ("data", "context")
"""The axes that state is split over by ZeRO, and that have parts of its gradient."""


@dataclass(frozen=True)
class Sent:
    """Collectives of one kind over the same mesh axes."""

    kind: Kind
    axes: tuple[str, ...]
    """Of degree above 1."""
    size: int
    """Devices of a group."""
    payload: float
    """Bytes of the whole array of one of them."""
    times: float
    """How many a step has."""
    hides: bool
    """Whether there is work of the step beside it; else it comes before or after all of that."""


def traffic(workload: Workload, layout: Layout) -> tuple[Sent, ...]:
    """What one device sends in a step.

    Args:
        workload: the work.
        layout: a legal layout.
    """
    return (
        *of_data(workload, layout),
        *of_context(workload, layout),
        *of_tensor(workload, layout),
    )


def of_data(workload: Workload, layout: Layout) -> tuple[Sent, ...]:
    """Gradients and parameters between data shards, and the ends' gradients between stages.

    Devices that share a sequence are data shards too: each has the gradient of its positions.
    """
    return tuple(_made(layout, rows) for rows in _of_data(workload, layout) if _split(layout, rows))


def of_tensor(workload: Workload, layout: Layout) -> tuple[Sent, ...]:
    """The residual stream between tensor shards, of the layers of one stage and of both ends."""
    if layout.tensor == 1:
        return ()
    payload = workload.pieces(layout).whole_activation * workload.samples(layout)
    layers = workload.model.num_layers / layout.pipeline
    counts: dict[Kind, int] = {"all-reduce": 4 + reductions_again(layout.recomputes)}
    if layout.sequence_parallel:
        # Each half of a layer gathers before it and scatters after it; backward the other way.
        gathers = 4 + (0 if layout.remat == "none" else 2)  # what is not kept is gathered again
        counts = {"all-gather": gathers, "reduce-scatter": counts["all-reduce"]}
    return tuple(
        Sent(kind, TENSOR, layout.tensor, payload, (layers * n + 2) * layout.microbatches, False)
        for kind, n in counts.items()
    )


def of_context(workload: Workload, layout: Layout) -> tuple[Sent, ...]:
    """Keys, values and their gradients, or heads, between devices that share a sequence."""
    if layout.context == 1:
        return ()
    rows = _of_ulysses if workload.model.attention == "ulysses" else _of_ring
    layers = workload.model.num_layers / layout.pipeline * layout.microbatches
    return tuple(
        Sent(kind, CONTEXT, size, payload, layers * times, True)
        for kind, size, payload, times in rows(workload, layout)
    )


def _of_ring(workload: Workload, layout: Layout) -> Iterator[tuple[Kind, int, float, float]]:
    """Kind, size of the group, payload, and how many a layer has.

    Stages of a pipeline send in pairs, by gathers; each of two gives a device one array of two.
    """
    degree, model = layout.context, workload.model
    entries = _entries(workload, layout, model.kv_heads)
    narrow, wide = _widths(workload)
    forwards = _forwards(layout.remat)
    # What a forward that is made again sends first, the backward sends too: once for both.
    turns = (degree - 1) * (forwards + 1) - (forwards - 1)
    held, sums = narrow * entries, wide * entries
    # Sums of keys' and values' gradients go home rounded.
    sent = [(held, 2 * turns), (sums, 2 * (degree - 1)), (held, 2)]
    if workload.separate_documents:
        tokens = workload.samples(layout) * workload.length / degree
        sent.append((4 * tokens, turns))
    for payload, times in sent:
        if layout.pipeline > 1:
            yield "all-gather", 2, 2 * payload, 2 * times
        else:
            yield "collective-permute", degree, payload, times


def _of_ulysses(workload: Workload, layout: Layout) -> Iterator[tuple[Kind, int, float, float]]:
    """The same: queries, keys, values and what they got, and their gradients."""
    model, degree = workload.model, layout.context
    narrow, wide = _widths(workload)
    times = _forwards(layout.remat) + 1
    for heads in (model.num_heads, model.kv_heads):
        yield "all-to-all", degree, narrow * _entries(workload, layout, heads), 2 * times
    # Of each position and head the product of the result and its gradient.
    sums = _entries(workload, layout, model.num_heads) / model.head_size
    yield "all-to-all", degree, wide * sums, 1
    if workload.separate_documents:
        yield "all-gather", degree, 4.0 * workload.samples(layout) * workload.length, times


def _forwards(remat: str) -> int:
    """How often a layer's attention is made before its backward: no name keeps all it reads."""
    return 1 if remat == "none" else 2


def _entries(workload: Workload, layout: Layout, heads: int) -> float:
    """Entries of queries, keys or values that a device has of a microbatch."""
    positions = workload.samples(layout) * workload.length / layout.context
    return positions * heads / layout.tensor * workload.model.head_size


def _widths(workload: Workload) -> tuple[int, int]:
    """Bytes of an entry, and of an entry of a sum."""
    dtype = jnp.dtype(workload.program.policy.compute)
    return dtype.itemsize, sum_dtype(dtype).itemsize


def reductions_again(remat: str) -> int:
    """Reductions of a layer that its backward does again.

    That after the attention, if its result is not kept; that after the MLP is needed by nobody.
    """
    return 0 if remat in ("none", "dots") or "attention_out" in remat else 1


Row = tuple[Kind, tuple[str, ...], float, float, bool]
"""Kind, mesh axes, payload, times, hides."""


def _of_data(workload: Workload, layout: Layout) -> Iterator[Row]:
    policy, state = workload.program.policy, workload.state(layout)
    entries, weights = state.entries, state.weights
    summed = layout.microbatches > 1 or layout.pipeline > 1 or policy.reduces_wider
    narrow = jnp.dtype(policy.compute).itemsize
    wide = jnp.dtype(policy.reduce_dtype(summed=summed)).itemsize
    resting = jnp.dtype(policy.params).itemsize
    times = layout.microbatches
    if layout.pipeline > 1:
        ends = entries.ends if layout.zero == 0 else entries.split_ends
        yield "all-reduce", (PIPELINE,), wide * ends, 1, False
    shards: tuple[str, ...] = SHARDS
    if summed and layout.zero <= 1:
        # Sums are kept apart by data shards alone.
        yield "all-reduce", CONTEXT, narrow * entries.layers, times, True
        ends_times = times if layout.pipeline > 1 else 1
        yield "all-reduce", CONTEXT, narrow * entries.ends, ends_times, False
        shards = ("data",)
    if layout.zero == 0:
        yield "all-reduce", ("replica", *shards), wide * entries.used, 1, not summed
        return
    if layout.zero == 1:
        # XLA does not scatter what is summed over `data` and rests split over `context` too.
        whole = summed and layout.pipeline == 1 and layout.context > 1
        kind: Kind = "all-reduce" if whole else "reduce-scatter"
        yield kind, shards, wide * entries.used, 1, not summed
    else:
        each = jnp.dtype(policy.reduce_dtype(summed=False)).itemsize
        yield "reduce-scatter", shards, each * entries.used, times, True
    shards = SHARDS
    yield "all-reduce", ("replica",), wide * entries.split, 1, False
    if layout.zero < 3:
        yield "all-gather", shards, resting * entries.used, 1, False
        return
    # XLA rounds a matrix to 8 bits where it rests and gathers that. A pipeline gathers it as it is,
    # and so does a layer of which only the running program knows whether it is in fp8.
    words = policy.words
    is_eight = words.products and layout.pipeline == 1 and not (words.first or words.last)
    yield "all-gather", shards, (1 if is_eight else narrow) * weights.layers, 2 * times, True
    # XLA gathers the ends once for all microbatches, a pipeline for each that uses them.
    yield "all-gather", shards, narrow * weights.ends, times if layout.pipeline > 1 else 1, True


def _split(layout: Layout, row: Row) -> bool:
    return any(layout.degrees[axis] > 1 for axis in row[1])


def _made(layout: Layout, row: Row) -> Sent:
    kind, axes, payload, times, hides = row
    axes = tuple(axis for axis in axes if layout.degrees[axis] > 1)
    size = math.prod(layout.degrees[axis] for axis in axes)
    return Sent(kind, axes, size, payload, times, hides)
