"""All legal layouts of a workload on a cluster, ranked, and why the others are not among the best.

Owns: which layouts there are, their order, and the reasons. Does not own: what is legal (`layout`),
what fits (`memory`), how fast it is (`cost`).

Every layout is looked at with rough figures first; those that lead are then worked out in full.
"""

import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace

from shardtrain.data.config import DataConfig
from shardtrain.errors import ConfigError
from shardtrain.plan.cost import Cost, Seconds, cost
from shardtrain.plan.hardware import Cluster
from shardtrain.plan.layout import all_divisors, layout_faults
from shardtrain.plan.memory import MARGIN, Memory, memory
from shardtrain.plan.traffic import TENSOR
from shardtrain.plan.workload import Layout, Workload
from shardtrain.sharding.config import ShardingConfig

POLICIES = ("none", "dots", "full")
"""Remat policies that are tried."""
SCHEDULES = (("1f1b", 1), ("interleaved", 2), ("interleaved", 4), ("interleaved", 8), ("gpipe", 1))
"""Schedules that are tried, with their virtual stages."""
MOST_SAMPLES = 8
"""Sequences of a microbatch on one device that are tried at most, besides the whole batch."""
WORTH_SAYING = 1.05
"""A family whose best layout is slower than the best of all by this factor gets a reason."""


@dataclass(frozen=True)
class Candidate:
    """A layout with its figures."""

    layout: Layout
    memory: Memory
    cost: Cost


@dataclass(frozen=True)
class Rejected:
    """A family of layouts that is not among the best."""

    family: str
    reason: str


@dataclass(frozen=True)
class Found:
    """What a search found."""

    best: tuple[Candidate, ...]
    """Those that fit, best first."""
    rejected: tuple[Rejected, ...]
    tried: int
    """Legal layouts that were looked at."""
    seconds: float
    smallest: Layout | None = None
    """The legal layout that takes least of a device, whether or not it fits; None = none is."""


def room(cluster: Cluster) -> float:
    """Bytes on one device that a step may use.

    Raises:
        ConfigError: the chip's row does not give its memory.
    """
    if cluster.chip.memory is None:
        raise ConfigError(
            "the row of the chip has no memory",
            where="target",
            value=cluster.chip.name,
            cure="give memory_gb in a TOML file of chips (--chips)",
        )
    return cluster.chip.memory * (1 - MARGIN)


def candidate(workload: Workload, layout: Layout, cluster: Cluster) -> Candidate:
    """A layout's figures in full."""
    return Candidate(layout, memory(workload, layout), cost(workload, layout, cluster))


def search(
    workload: Workload,
    cluster: Cluster,
    *,
    own: Layout | None = None,
    objective: str = "time",
    keep: int = 10,
    shared: bool = False,
) -> Found:
    """Looks at all layouts.

    Args:
        workload: the work.
        cluster: where it is to run.
        own: a layout to look at besides.
        objective: "time", "memory" or "cost"; on a given cluster the cost of a step goes by its
            time.
        keep: how many of the best to return.
        shared: whether devices may share a sequence; with `own` that does so they may anyway.

    Returns:
        The best, worked out in full, and the reasons for the families that have none of them.
    """
    begun = time.perf_counter()
    key = _KEYS[objective]
    rough = replace(workload, rough=True)
    families = _Families(room(cluster))
    fitting: list[Candidate] = []
    tried = 0
    smallest: tuple[float, Layout | None] = (math.inf, None)
    shared = shared or (own is not None and own.context > 1)
    for layout, fault in _layouts(rough, cluster, shared=shared):
        if fault:
            families.illegal(layout, fault)
            continue
        tried += 1
        held = memory(rough, layout)
        smallest = min(smallest, (held.total, layout), key=lambda pair: pair[0])
        if held.total > families.room:
            families.too_large(layout, held)
            continue
        found = Candidate(layout, held, cost(rough, layout, cluster))
        families.fits(found, key(found))
        fitting.append(found)
    fitting.sort(key=key)
    best = [found.layout for found in fitting[: keep + keep // 2]]
    if own is not None and own not in best:
        best.append(own)
    full = [candidate(workload, layout, cluster) for layout in best]
    full = sorted((c for c in full if c.memory.total <= families.room), key=key)[:keep]
    among = {family for found in full for family in _families(found.layout)}
    return Found(
        best=tuple(full),
        rejected=tuple(r for r in families.reasons() if r.family not in among),
        tried=tried,
        seconds=time.perf_counter() - begun,
        smallest=smallest[1],
    )


def fewest_shards(workload: Workload, cluster: Cluster, *, shared: bool = False) -> int | None:
    """The fewest data shards that any layout has; a batch of a multiple of them is legal.

    Args:
        workload: the work, whatever its batch.
        cluster: where it is to run.
        shared: whether devices may share a sequence.

    Returns:
        The number, or None where no mesh is legal.
    """
    bases = _judged_bases(workload, cluster, shared=shared)
    return min((base.shards for base, fault in bases if not fault), default=None)


_KEYS: dict[str, Callable[[Candidate], float]] = {
    "time": lambda found: found.cost.middle,
    "memory": lambda found: found.memory.total,
    "cost": lambda found: found.cost.middle,
}


# -- which there are


def _layouts(workload: Workload, cluster: Cluster, *, shared: bool) -> Iterator[tuple[Layout, str]]:
    """Every layout, or one of its family with the reason why it is not legal.

    Args:
        workload: the work.
        cluster: where it is to run.
        shared: whether devices may share a sequence.
    """
    for base, fault in _judged_bases(workload, cluster, shared=shared):
        if fault:
            yield base, fault
            continue
        for layout in _meshes(base, cluster):
            yield from _rest(workload, layout)


def _judged_bases(
    workload: Workload, cluster: Cluster, *, shared: bool
) -> Iterator[tuple[Layout, str]]:
    """All degrees, each with the reason why it is not legal, if it is not; whatever the batch."""
    layers = workload.model.num_layers
    for base in _bases(cluster.num_devices, max(16, cluster.domain), shared=shared):
        deep = base.pipeline > layers
        yield base, f"the model has {layers} layers" if deep else _fault(workload, base)


def _bases(devices: int, most: int, *, shared: bool) -> Iterator[Layout]:
    """All degrees of `tensor`, of `context` and of `pipeline`; `data` takes what they leave."""
    for tensor in (t for t in _powers(devices) if t <= most):
        for context in _powers(devices // tensor) if shared else (1,):
            for pipeline in all_divisors(devices // (tensor * context)):
                data = devices // (tensor * context * pipeline)
                yield Layout(pipeline=pipeline, data=data, context=context, tensor=tensor)


def _meshes(base: Layout, cluster: Cluster) -> Iterator[Layout]:
    """All shards as one group, or hybrid: groups within a fast domain."""
    yield base
    inside = cluster.domain // (base.tensor * base.context)
    if base.pipeline == 1 and 1 < inside < base.data and base.data % inside == 0:
        yield replace(base, replica=base.data // inside, data=inside)


def _rest(workload: Workload, mesh: Layout) -> Iterator[tuple[Layout, str]]:
    shards = mesh.shards
    if workload.batch_size % shards:
        yield mesh, f"the batch of {workload.batch_size} does not divide by {shards} data shards"
        return
    each = workload.batch_size // shards
    samples = [b for b in _powers(each) if b <= MOST_SAMPLES or b == each]
    stages = SCHEDULES if mesh.pipeline > 1 else (("1f1b", 1),)
    hybrid = mesh.replica > 1
    for schedule, virtual in stages:
        if mesh.pipeline * virtual > workload.model.num_layers:
            continue
        for zero in (1, 2, 3) if hybrid else (0, 1, 2, 3):
            if zero and mesh.data * mesh.context == 1:
                continue
            for remat in POLICIES:
                for b in samples:
                    yield (
                        replace(
                            mesh,
                            schedule=schedule,
                            virtual_stages=virtual,
                            zero=zero,
                            remat=remat,
                            microbatches=each // b,
                            sequence_parallel=mesh.tensor > 1
                            and workload.length % (mesh.context * mesh.tensor) == 0,
                        ),
                        "",
                    )


def _fault(workload: Workload, layout: Layout) -> str:
    """Why a mesh is not legal, in one line; empty if it is."""
    faults = layout_faults(
        workload.model,
        DataConfig(sequence_length=workload.length, batch_size=layout.shards),
        ShardingConfig(rules=dict(workload.rules)),
        layout.degrees,
        1,
        workload.vocab_size,
    )
    return faults[0].message if faults else ""


def _powers(number: int) -> list[int]:
    """The powers of two that divide a number, and the number itself."""
    found = [1]
    while number % (2 * found[-1]) == 0:
        found.append(2 * found[-1])
    return found


# -- why the others are not


class _Families:
    """The best of each family of layouts, a family being all with one value of one choice."""

    def __init__(self, room: float) -> None:
        self.room = room
        self._faults: dict[str, str] = {}
        self._least: dict[str, Memory] = {}
        self._best: dict[str, tuple[float, Candidate]] = {}

    def illegal(self, layout: Layout, fault: str) -> None:
        for family in _mesh_families(layout):
            self._faults.setdefault(family, fault)

    def too_large(self, layout: Layout, held: Memory) -> None:
        for family in _families(layout):
            least = self._least.get(family)
            if least is None or held.total < least.total:
                self._least[family] = held

    def fits(self, found: Candidate, value: float) -> None:
        for family in _families(found.layout):
            if family not in self._best or value < self._best[family][0]:
                self._best[family] = (value, found)

    def reasons(self) -> Iterator[Rejected]:
        """A line for each family that has none of the best."""
        groups: dict[str, list[str]] = defaultdict(list)
        names = dict.fromkeys([*self._best, *self._least, *self._faults])
        for name in names:
            groups[name.rsplit(" ", 1)[0]].append(name)
        first = min(self._best.values(), key=lambda pair: pair[0], default=None)
        for families in groups.values():
            for family in sorted(families, key=_order):
                reason = self._reason(family, first[1] if first else None)
                if reason:
                    yield Rejected(family, reason)

    def _reason(self, family: str, first: Candidate | None) -> str:
        if family in self._best and first is not None:
            found = self._best[family][1]
            if found.cost.middle < WORTH_SAYING * first.cost.middle:
                return ""
            return slower(found, first)
        if family in self._least:
            held = self._least[family]
            parts = held.by_class()
            total = parts.pop("total")
            largest = max(parts, key=lambda name: parts[name])
            return (
                f"does not fit: at least {total / 2**30:.1f} GiB a device of "
                f"{self.room / 2**30:.1f}, {parts[largest] / 2**30:.1f} of them {largest}"
            )
        return self._faults.get(family, "")


def slower(found: Candidate, first: Candidate) -> str:
    """Which part of the step makes a layout slower than another, in words."""
    names = [part.name for part in fields(Seconds)]
    high, base = found.cost.high, first.cost.high
    worst = max(names, key=lambda name: getattr(high, name) - getattr(base, name))
    share = getattr(high, worst) / high.total
    by = f"{found.cost.middle / first.cost.middle - 1:.0%} slower: "
    group = found.cost.groups[TENSOR]
    if worst == "tensor" and group.crosses:
        return (
            f"{by}tensor {group.size} crosses the domain of the fast link ({group.inside} devices "
            f"of it in one), {share:.0%} of the step on the slow link"
        )
    again, less = (c.cost.flops / c.cost.model_flops - 1 for c in (found, first))
    if worst == "products" and again > less:
        return f"{by}{again:.0%} of the model's FLOPs are made again, in the best {less:.0%}"
    return f"{by}{_WORDS[worst]} take {share:.0%} of the step"


_WORDS = {
    "products": "products",
    "other": "norms, softmax and other work that memory limits",
    "tensor": "collectives between tensor shards",
    "context": "collectives between devices that share a sequence",
    "bubble": "bubbles of the pipeline",
    "sends": "sends between stages",
    "data": "collectives between data shards",
    "update": "reads and writes of the optimizer",
    "host": "copies between the host and the device",
    "disk": "reads and writes of the disk",
}


def _mesh_families(layout: Layout) -> list[str]:
    context = [f"context {layout.context}"] * (layout.context > 1)
    return [f"tensor {layout.tensor}", *context, f"pipeline {layout.pipeline}"]


def _families(layout: Layout) -> list[str]:
    names = [
        *_mesh_families(layout),
        f"replica {layout.replica}",
        f"zero {layout.zero}",
        f"remat {layout.remat}",
    ]
    if layout.pipeline > 1:
        names.append(f"schedule {layout.schedule}")
    return names


def _order(family: str) -> tuple[int, str]:
    word = family.rsplit(" ", 1)[1]
    return (int(word), "") if word.isdigit() else (0, word)
