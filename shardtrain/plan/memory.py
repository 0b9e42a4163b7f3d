"""Bytes on one device, by what they are for, before anything is compiled.

Owns: which of a step's arrays are there at once. Does not own: where state rests (`sharding`),
what a layer keeps (`pieces`), slots of a pipeline (`strategies.schedules`): all are asked.
"""

import math
from collections.abc import Callable
from dataclasses import astuple, dataclass, fields

import jax.numpy as jnp

from shardtrain.plan.resting import State
from shardtrain.plan.work import Work
from shardtrain.plan.workload import Layout, Workload
from shardtrain.sharding.disk_files import BUFFERS

MARGIN = 0.08
"""Part of a chip's memory left to the driver, to communication libraries and to fragments."""


@dataclass(frozen=True)
class Memory:
    """Bytes on one device at the moment of a step when most is held."""

    parameters: float
    master: float
    """The wider copy of the parameters that mixed precision keeps."""
    moments: float
    """The rest of the optimizer's state, and an average of the parameters if there is one."""
    gradients: float
    """Of the whole step, sums of microbatches counted in."""
    activations: float
    """What forwards keep for backwards, and what waits between stages."""
    logits: float
    """What the head holds while it makes the loss and its gradient."""
    buffers: float
    """What the layer under way works with: its results, gathered weights, its gradients."""
    batch: float
    host: float = 0.0
    """In the memory of the device's host; in no sum below."""
    disk: float = 0.0
    """On a disk, likewise."""

    @property
    def state(self) -> float:
        """What rests between two steps."""
        return self.parameters + self.master + self.moments

    @property
    def total(self) -> float:
        """All of it."""
        return math.fsum(getattr(self, name) for name in _ON_DEVICE)

    def by_class(self) -> dict[str, float]:
        """The parts by name, and the `total`."""
        return {name: getattr(self, name) for name in _ON_DEVICE} | {"total": self.total}


_ON_DEVICE = tuple(part.name for part in fields(Memory) if part.name not in ("host", "disk"))


def memory(workload: Workload, layout: Layout) -> Memory:
    """What one device holds.

    Args:
        workload: the work.
        layout: a legal layout.
    """
    state = workload.state(layout)
    piped = layout.pipeline > 1
    held = _in_pipeline(workload, layout, state) if piped else _in_a_row(workload, layout, state)
    length = workload.length // layout.context
    tokens = workload.samples(layout) * layout.microbatches * length
    words = 5 if workload.separate_documents else 3
    # What comes from the host for its update, when activations are gone.
    streamed = max(_streamed(workload, layout, state) - held.activations - held.logits, 0.0)
    disk = state.disk + state.disk_parameters
    # Of what is on a disk a few layers are there, for those that read and write.
    host = state.host + state.away - state.disk_parameters + BUFFERS * disk / workload.rows(layout)
    if workload.program.layout.tiers.updates:
        # New state is written beside the old; gradients come, and new parameters are made there.
        streamed, host = 0.0, 2 * host + sum(workload.updated(layout))
    kept = workload.kept(layout).host * workload.samples(layout) * workload.model.num_layers
    return Memory(
        parameters=state.parameters,
        master=state.master,
        moments=state.optimizer - state.master,
        gradients=held.gradients,
        activations=held.activations,
        logits=held.logits,
        buffers=max(held.buffers, streamed) + _casts(workload, layout, state),
        batch=4.0 * words * tokens,
        host=host + kept,
        disk=float(disk),
    )


_IN_FLIGHT = 3
"""Layers from the host that are on the device at once: one coming, one in work, one going."""


def _streamed(workload: Workload, layout: Layout, state: State) -> float:
    """Most of the state away from the device that is on it at once."""
    entries, rows = state.entries, workload.rows(layout)
    layers, ends = (
        (entries.split_layers, entries.split_ends)
        if layout.zero >= 1
        else (entries.layers, entries.ends)
    )
    each = (state.host + state.disk) / max(layers + ends, 1)
    stages = layout.pipeline
    # Without masters the parameters come too, if they are trained.
    params = state.away if workload.updates_away and not workload.program.policy.has_master else 0
    a_layer = (each * layers + params) * stages / rows
    return max(_IN_FLIGHT * a_layer, 2.0 * each * ends)


def _casts(workload: Workload, layout: Layout, state: State) -> float:
    """What parameters that rest wider are cast to at the beginning of a step."""
    policy, entries = workload.program.policy, state.entries
    if policy.params == policy.compute:
        return 0.0
    resting = entries.split if layout.zero >= 3 else entries.used
    return float(jnp.dtype(policy.compute).itemsize * resting)


@dataclass(frozen=True)
class _Held:
    gradients: float
    activations: float
    logits: float
    buffers: float


def _in_a_row(workload: Workload, layout: Layout, state: State) -> _Held:
    """Microbatches one after another, each through all layers."""
    pieces, samples = workload.pieces(layout), workload.samples(layout)
    narrow, wide = _itemsizes(workload)
    entries, weights, layers = state.entries, state.weights, workload.model.num_layers
    kept = workload.kept(layout)
    activations = layers * samples * kept.device + _IN_FLIGHT * samples * kept.host
    made = narrow * (entries.split if layout.zero >= 1 else entries.used)
    sums = 0.0
    if layout.microbatches == 1 and workload.program.policy.reduces_wider:
        # Each leaf is widened as it is sent.
        made = narrow * entries.used
        sums = wide * (entries.split if layout.zero >= 1 else entries.used)
    if layout.microbatches > 1:
        made = narrow * (entries.split if layout.zero >= 2 else entries.used)
        sums = wide * (entries.split if layout.zero >= 2 else entries.used)
    # One layer's gradients before they are reduced; with ZeRO 3 its gathered weights.
    work = max(pieces.layer.backward.peak, pieces.layer.forward.peak) * samples
    work += narrow * entries.layers / layers
    work += narrow * weights.layers / layers if layout.zero >= 3 else 0.0
    # The layer in work and the one that comes; the gradient above is that of one more. Weights that
    # are frozen are done with so early that the next ones take their place.
    work += (2 if workload.updates_away else 1) * state.away / layers
    # With several microbatches the ends are gathered once, before the first.
    ends = narrow * weights.ends if layout.zero >= 3 and layout.microbatches > 1 else 0.0
    head = _of_samples(pieces.head, pieces.head_sums, samples)
    head += pieces.head_weights if layout.zero >= 3 and not ends else 0.0
    # In the end the embedding's gradient is summed up; the others may not have been sent yet.
    embed = _of_samples(pieces.embed, pieces.embed_sums, samples)
    embed += narrow * entries.ends if layout.zero >= 1 else 0.0
    return max(
        # Gradients of the layers are made after the head is done with its scores.
        _Held(sums, activations, head, ends),
        _Held(sums + made, activations, 0.0, ends + work),
        _Held(sums + made, 0.0, 0.0, ends + embed),
        key=lambda held: math.fsum(astuple(held)),
    )


def _of_samples(work: Work, fixed: float, samples: int) -> float:
    """The peak of so many samples, of which a part is that of one."""
    return (work.peak - fixed) * samples + fixed


def _in_pipeline(workload: Workload, layout: Layout, state: State) -> _Held:
    """Microbatches through stages: what lies in slots, sums in wide numbers, one piece of work."""
    pieces, samples = workload.pieces(layout), workload.samples(layout)
    narrow, wide = _itemsizes(workload)
    entries, weights = state.entries, state.weights
    spread = workload.spread(layout)
    places = spread.virtual_stages * spread.num_slots

    def slots(buffer: str) -> float:
        return extrapolated(lambda count: workload.figures(layout, count).slots[buffer], layout)

    kept = slots("residual") * pieces.layer.kept + slots("pending") * pieces.layer.pending
    # Each stream has one slot more, to throw away into.
    streams = (slots("activation") + slots("gradient") + 2) * pieces.activation
    activations = samples * (kept * spread.num_slots + streams)
    sums = wide * (entries.split if layout.zero >= 2 else entries.used)
    work = max(pieces.layer.backward.peak, pieces.layer.forward.peak) * samples
    work += narrow * entries.layers / places
    work += narrow * weights.layers / places if layout.zero >= 3 else 0.0
    head = _of_samples(pieces.head, pieces.head_sums, samples) + 2 * pieces.activation * samples
    head += pieces.head_weights
    embed = _of_samples(pieces.embed, pieces.embed_sums, samples) + narrow * entries.ends
    if max(head, embed) > work:
        return _Held(sums, activations, max(head, embed), 0.0)
    return _Held(sums, activations, 0.0, work)


def extrapolated(figure: Callable[[int], float], layout: Layout) -> float:
    """A figure of a schedule with very many microbatches, from two with fewer.

    Beyond a few rounds through the stages every further round is like the one before, so the figure
    grows by as much (or not at all).

    Args:
        figure: of a number of microbatches.
        layout: with a pipeline.
    """
    stages, microbatches = layout.pipeline, layout.microbatches
    few, more = 2 * stages, 3 * stages
    if microbatches <= more or layout.table:
        return figure(microbatches)
    first, second = figure(few), figure(more)
    return second + (second - first) / stages * (microbatches - more)


def _itemsizes(workload: Workload) -> tuple[int, int]:
    """Bytes of an entry of a gradient, and of a sum of several."""
    policy = workload.program.policy
    return jnp.dtype(policy.compute).itemsize, jnp.dtype(policy.accumulate).itemsize
