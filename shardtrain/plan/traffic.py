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

from shardtrain.plan.links import Kind
from shardtrain.plan.workload import Layout, Workload
from shardtrain.sharding.mesh import DATA_AXES, PIPELINE

TENSOR = ("tensor",)


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
    return (*of_data(workload, layout), *of_tensor(workload, layout))


def of_data(workload: Workload, layout: Layout) -> tuple[Sent, ...]:
    """Gradients and parameters between data shards, and the ends' gradients between stages."""
    return tuple(_made(layout, rows) for rows in _of_data(workload, layout) if _split(layout, rows))


def of_tensor(workload: Workload, layout: Layout) -> tuple[Sent, ...]:
    """The residual stream between tensor shards, of the layers of one stage and of both ends."""
    if layout.tensor == 1:
        return ()
    payload = workload.pieces(layout).whole_activation * workload.samples(layout)
    layers = workload.model.num_layers / layout.pipeline
    counts: dict[Kind, int] = {"all-reduce": 4 + reductions_again(layout.remat)}
    if layout.sequence_parallel:
        # Each half of a layer gathers before it and scatters after it; backward the other way.
        gathers = 4 + (0 if layout.remat == "none" else 2)  # what is not kept is gathered again
        counts = {"all-gather": gathers, "reduce-scatter": counts["all-reduce"]}
    return tuple(
        Sent(kind, TENSOR, layout.tensor, payload, (layers * n + 2) * layout.microbatches, False)
        for kind, n in counts.items()
    )


def reductions_again(remat: str) -> int:
    """Reductions of a layer that its backward does again.

    That after the attention, if its result is not kept; that after the MLP is needed by nobody.
    """
    return 0 if remat in ("none", "dots") or "attention_out" in remat else 1


Row = tuple[Kind, tuple[str, ...], float, float, bool]
"""Kind, mesh axes, payload, times, hides."""


def _of_data(workload: Workload, layout: Layout) -> Iterator[Row]:
    policy, entries = workload.program.policy, workload.state(layout).entries
    summed = layout.microbatches > 1 or layout.pipeline > 1
    narrow = jnp.dtype(policy.compute).itemsize
    wide = jnp.dtype(policy.gradient_dtype(summed=summed)).itemsize
    times = layout.microbatches
    shards = ("data",)
    if layout.pipeline > 1:
        ends = entries.ends if layout.zero == 0 else entries.split_ends
        yield "all-reduce", (PIPELINE,), wide * ends, 1, False
    if layout.zero == 0:
        yield "all-reduce", DATA_AXES, wide * entries.used, 1, not summed
        return
    if layout.zero == 1:
        yield "reduce-scatter", shards, wide * entries.used, 1, not summed
    else:
        yield "reduce-scatter", shards, narrow * entries.used, times, True
    yield "all-reduce", ("replica",), wide * entries.split, 1, False
    if layout.zero < 3:
        yield "all-gather", shards, narrow * entries.used, 1, False
        return
    yield "all-gather", shards, narrow * entries.layers, 2 * times, True
    # XLA gathers the ends once for all microbatches, a pipeline for each that uses them.
    yield "all-gather", shards, narrow * entries.ends, times if layout.pipeline > 1 else 1, True


def _split(layout: Layout, row: Row) -> bool:
    return any(layout.degrees[axis] > 1 for axis in row[1])


def _made(layout: Layout, row: Row) -> Sent:
    kind, axes, payload, times, hides = row
    axes = tuple(axis for axis in axes if layout.degrees[axis] > 1)
    size = math.prod(layout.degrees[axis] for axis in axes)
    return Sent(kind, axes, size, payload, times, hides)
