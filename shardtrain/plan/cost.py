"""How long a step takes on a cluster, part by part, before anything is compiled.

Owns: which work is done how often, what goes on at the same time, and the range between the best
and the worst of that. Does not own: the work itself (`pieces`), links (`links`), schedules
(`strategies.schedules`).

Products take their FLOPs at the part of the chip's rate that large products reach; all else takes
its bytes at the part of the memory's rate that such work reaches. The range is from collectives
that hide behind products as far as these last, and good products, to collectives that hide behind
nothing, and poor products.
"""

import math
from dataclasses import dataclass, fields, replace
from functools import cache
from itertools import combinations

import jax.numpy as jnp
import numpy as np

from shardtrain.errors import ConfigError
from shardtrain.plan.hardware import Cluster
from shardtrain.plan.links import Group, group, seconds
from shardtrain.plan.memory import extrapolated
from shardtrain.plan.pieces import Pieces
from shardtrain.plan.recompute import layer_products
from shardtrain.plan.traffic import TENSOR, Sent, of_context, of_data, reductions_again
from shardtrain.plan.work import Work
from shardtrain.plan.workload import Layout, Workload
from shardtrain.sharding.chip import Chip
from shardtrain.sharding.mesh import PIPELINE
from shardtrain.strategies.schedules.simulate import Costs, lockstep_time

PRODUCTS_REACH = 0.65
"""Part of the dense rate that large products reach, where the chip's row does not say."""
MEMORY_REACHES = 0.8
"""Part of the memory's rate that work limited by it reaches."""
HOST_LINK_REACHES = 0.75
"""Part of the link's rate that large copies between device and host reach."""
_HOST_LINK = 16e9
"""Bytes/s of a link to the host that a chip's row does not give: 16 lanes of PCIe 3."""
_HOST_MEMORY = 40e9
"""Bytes/s that a host's processor reads and writes for one device: two channels of DDR5."""
DISK = 3e9
"""Bytes/s that a host's disk reads and writes, taken together: one NVMe disk of PCIe 4. A run
measures its own when it begins."""
SPREAD = 0.1
"""How far products may be off either way."""


Groups = dict[tuple[str, ...], Group]
"""Groups of a device by the mesh axes that they are along."""


@dataclass(frozen=True)
class Seconds:
    """A step's time by what it goes to; the collectives' part is what nothing hides."""

    products: float
    other: float
    """Work that is limited by memory: norms, softmax, activations."""
    tensor: float
    """Collectives between tensor shards."""
    context: float
    """Keys and values, or heads, between devices that share a sequence."""
    bubble: float
    """Waiting for other stages."""
    sends: float
    """Activations and their gradients between stages."""
    data: float
    """Gradients and parameters between data shards."""
    update: float
    host: float
    """Copies from the host and to it that no work hides."""
    disk: float
    """Reads and writes that no work hides."""

    @property
    def total(self) -> float:
        """The step."""
        return math.fsum(getattr(self, part.name) for part in fields(self))

    @property
    def bottleneck(self) -> str:
        """The largest part."""
        return max((part.name for part in fields(self)), key=lambda name: getattr(self, name))


@dataclass(frozen=True)
class Cost:
    """What a step costs."""

    low: Seconds
    high: Seconds
    model_flops: float
    """Of a step on all devices, recomputation not counted."""
    flops: float
    """Of a step on all devices, as the program does them."""
    groups: Groups

    @property
    def middle(self) -> float:
        """Seconds of a step, half-way between both ends."""
        return (self.low.total + self.high.total) / 2

    @property
    def bottleneck(self) -> str:
        """The part that takes most."""
        return self.high.bottleneck


def cost(workload: Workload, layout: Layout, cluster: Cluster) -> Cost:
    """What a step of a layout costs on a cluster.

    Args:
        workload: the work.
        layout: a legal layout.
        cluster: with as many devices as the layout's.

    Raises:
        ConfigError: the chip's row lacks a figure that is needed.
    """
    words = workload.program.policy.words
    wide_layers = min((words.first + words.last) / workload.model.num_layers, 1.0)
    rates = chip_rates(cluster.chip, words.compute, wide_layers)
    groups = _groups(cluster, tuple(layout.degrees.items()))
    model = _Model(workload, layout, rates, groups, cluster.per_host)
    return Cost(
        low=model.seconds(products=1 - SPREAD, hides=True),
        high=model.seconds(products=1 + SPREAD, hides=False),
        model_flops=model.flops(recomputed=False),
        flops=model.flops(recomputed=True),
        groups=groups,
    )


@cache
def _groups(cluster: Cluster, degrees: tuple[tuple[str, int], ...]) -> Groups:
    """The groups along every mesh axis, and along those together that share out positions."""
    sizes = dict(degrees)
    split = [axis for axis in ("replica", "data", "context") if sizes[axis] > 1]
    several = [some for size in (2, 3) for some in combinations(split, size)]
    return {some: group(cluster, sizes, some) for some in [*((a,) for a in sizes), *several]}


@dataclass(frozen=True)
class Rates:
    """What a chip does a second, as far as it is reached."""

    products: float
    """FLOP/s of products in what is computed with."""
    eight: float
    """FLOP/s of products in fp8."""
    memory: float
    """Bytes/s."""
    host: float
    """Bytes/s from the host's memory, and as many back."""

    def seconds(self, work: Work) -> tuple[float, float]:
        """Time of a piece's products, and of all else."""
        eight = sum(p.flops for p in work.products if p.dtype.startswith("float8"))
        made = (work.flops - eight) / self.products + eight / self.eight
        products = max(made, work.product_bytes / self.memory)
        return products, work.other_bytes / self.memory


def chip_rates(chip: Chip, precision: str, wide_layers: float = 0.0) -> Rates:
    """The rates of a chip at a precision.

    Args:
        chip: its row.
        precision: what is computed with.
        wide_layers: part of the layers that fp8 leaves out. A chip without products in 8 bits makes
            them as those of `precision`, and so does XLA for it.

    Raises:
        ConfigError: its row does not give them.
    """
    kind = precision
    if precision == "bfloat16" and "bfloat16" not in chip.flops:
        kind = "float16"
    if kind not in chip.flops or not chip.memory_bandwidth:
        missing = "memory_bandwidth" if kind in chip.flops else f"flops.{precision}"
        raise ConfigError(
            f"the row of {chip.name} has no {missing}",
            where="target",
            value=chip.name,
            cure="give it in a TOML file of chips (--chips); docs/plan.md shows how",
        )
    reach = chip.products_reach or PRODUCTS_REACH
    wide = chip.flops[kind]
    eight = chip.flops.get("float8", wide)
    return Rates(
        wide * reach,
        reach / (wide_layers / wide + (1 - wide_layers) / eight),
        chip.memory_bandwidth * MEMORY_REACHES,
        (chip.host_link or _HOST_LINK) * HOST_LINK_REACHES,
    )


@dataclass(frozen=True)
class _Model:
    workload: Workload
    layout: Layout
    rates: Rates
    groups: Groups
    devices_a_disk: int

    @property
    def pieces(self) -> Pieces:
        return self.workload.pieces(self.layout)

    def flops(self, *, recomputed: bool) -> float:
        """FLOPs of a step on all devices, with or without what is computed again."""
        workload, layout = self.workload, self.layout
        pieces = self.pieces if recomputed else workload.pieces(replace(layout, remat="none"))
        layer = pieces.layer.forward.flops + pieces.layer.backward.flops
        whole = layer * workload.model.num_layers + pieces.head.flops + pieces.embed.flops
        return whole * workload.batch_size * layout.tensor * layout.context

    def seconds(self, *, products: float, hides: bool) -> Seconds:
        layout, samples = self.layout, self.workload.samples(self.layout)
        layer = self.pieces.layer
        forward = _Part.of(self.rates, layer.forward, samples, products, self._reduced(2))
        again = reductions_again(layout.recomputes)
        backward = _Part.of(self.rates, layer.backward, samples, products, self._reduced(2 + again))
        head = _Part.of(self.rates, self.pieces.head, samples, products, self._reduced(1))
        embed = _Part.of(self.rates, self.pieces.embed, samples, products, self._reduced(1))
        if layout.pipeline > 1:
            parts, waiting, sends = self._piped(forward, backward, head, embed, hides)
        else:
            layers = (forward + backward) * self.workload.model.num_layers
            parts = (layers + head + embed) * layout.microbatches
            waiting = sends = 0.0
        hidden = parts.products * (2 / 3) if hides else 0.0
        context = self._sent(of_context(self.workload, layout), self._attention(parts, hides))
        update, work = self._update(), parts.total + waiting
        return Seconds(
            products=parts.products,
            other=parts.other,
            tensor=parts.tensor,
            context=context,
            bubble=waiting,
            sends=sends,
            data=self._data(hidden),
            update=update,
            host=max(self._host() - work - update, 0.0) if hides else self._host(),
            disk=self._disk(),
        )

    def _reduced(self, times: int) -> float:
        """Time of so many reductions of the residual stream over tensor shards."""
        payload = self.pieces.whole_activation * self.workload.samples(self.layout)
        return times * seconds("all-reduce", payload, self.groups[TENSOR])

    def _piped(
        self, forward: "_Part", backward: "_Part", head: "_Part", embed: "_Part", hides: bool
    ) -> tuple["_Part", float, float]:
        """The busiest stage's work, its waiting, and its sends."""
        layout = self.layout
        workload = self.workload
        spread = workload.spread(layout)
        share = spread.share()
        if workload.rough:
            share = np.full_like(share, workload.model.num_layers / share.size)
        forwards, backwards = share * forward.total, share * backward.total
        forwards[-1, -1] += head.total
        backwards[0, 0] += embed.total
        weight = backwards * self.pieces.layer.weight_share
        costs = Costs(forwards, backwards, weight)

        def time(microbatches: int) -> float:
            if workload.rough:
                whole = float((forwards + backwards).sum(1).max())
                return workload.figures(layout, microbatches).time * whole
            return lockstep_time(workload.stages(layout, microbatches)[0], costs)

        def ticks(microbatches: int) -> float:
            return workload.figures(layout, microbatches).ticks

        busiest = int((forwards + backwards).sum(1).argmax())
        layers = float(share[busiest].sum())
        parts = (forward + backward) * layers
        if busiest == len(share) - 1:
            parts += head
        if busiest == 0:
            parts += embed
        parts *= layout.microbatches
        waiting = extrapolated(time, layout) - parts.total
        payload = self.pieces.activation * self.workload.samples(layout)
        send = seconds("send", payload, self.groups[PIPELINE,])
        # The forward's send travels while the backward computes; the backward's does not.
        sends = send * extrapolated(ticks, layout) * (1 if hides else 2)
        return parts, float(np.maximum(waiting, 0.0)), sends

    def _data(self, hidden: float) -> float:
        """What of gradients and parameters between data shards nothing hides."""
        return self._sent(of_data(self.workload, self.layout), hidden)

    def _attention(self, parts: "_Part", hides: bool) -> float:
        """Time of attention's own products, beside which a ring sends; heads are sent before."""
        workload, layout = self.workload, self.layout
        if not hides or workload.model.attention == "ulysses":
            return 0.0
        scores = 7 * layer_products(workload.model, workload.length)["attention"] / 2
        tokens = workload.batch_size * workload.length / math.prod(layout.degrees.values())
        flops = scores * tokens * workload.model.num_layers
        return min(flops / self.rates.products, parts.products)

    def _sent(self, all_sent: tuple[Sent, ...], hidden: float) -> float:
        """What of some collectives is not hidden by work of so many seconds."""
        hiding = alone = 0.0
        for sent in all_sent:
            spent = sent.times * seconds(sent.kind, sent.payload, self.groups[sent.axes])
            if sent.hides:
                hiding += spent
            else:
                alone += spent
        return max(hiding - hidden, 0.0) + alone

    def _update(self) -> float:
        """The optimizer reads and writes its state, and reads gradients twice (norm, update)."""
        state, policy = self.workload.state(self.layout), self.workload.program.policy
        entries = state.entries.split if self.layout.zero >= 1 else state.entries.used
        itemsize: int = jnp.dtype(policy.accumulate).itemsize
        moved = 2 * state.optimizer + state.parameters + state.away + 2 * entries * itemsize
        if self.workload.program.layout.tiers.updates:
            # Read and written once by the host, which waits for all gradients.
            travels = sum(self.workload.updated(self.layout)) / self.rates.host
            return entries * itemsize / self.rates.memory + 2 * state.host / _HOST_MEMORY + travels
        return (moved + 4 * (state.host + state.disk)) / self.rates.memory

    def _disk(self) -> float:
        """Reads and writes, which the device waits for; the devices of a host share its disk."""
        travels = self.workload.to_disk(self.layout)
        return (travels.loaded + travels.stored) * self.devices_a_disk / DISK

    def _host(self) -> float:
        """Copies from the host and back, both ways at once."""
        travels = self.workload.to_host(self.layout)
        return max(travels.loaded, travels.stored) / self.rates.host


@dataclass(frozen=True)
class _Part:
    products: float
    other: float
    tensor: float

    @classmethod
    def of(cls, rates: Rates, work: Work, samples: int, slower: float, tensor: float) -> "_Part":
        products, other = rates.seconds(work)
        return cls(products * samples * slower, other * samples, tensor)

    @property
    def total(self) -> float:
        return self.products + self.other + self.tensor

    def __add__(self, other: "_Part") -> "_Part":
        return _Part(
            self.products + other.products, self.other + other.other, self.tensor + other.tensor
        )

    def __mul__(self, times: float) -> "_Part":
        return _Part(self.products * times, self.other * times, self.tensor * times)
