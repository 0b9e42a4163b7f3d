"""How long a collective takes on the links of a cluster: the alpha-beta model.

Owns: which link a group of devices is tied to, and the time of rings, trees and sends. Does not
own: what is sent (`cost`), and the links' figures (`hardware`).

A ring sends (n - 1) / n of the data once (all-gather, reduce-scatter) or twice (all-reduce) in as
many rounds as it has members; a double tree sends all of it twice in twice the logarithm of them
(Thakur et al. 2005; Sanders et al. 2009, as in NCCL). The faster one counts.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from shardtrain.plan.hardware import Cluster
from shardtrain.sharding.mesh import MESH_AXES

Kind = Literal[
    "all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute", "send"
]

REACHED = 0.8
"""Part of a link's rate that large collectives reach: NCCL's own tests show 75 to 90 %."""
FAST_LATENCY, NETWORK_LATENCY = 4e-6, 15e-6
"""Seconds of a round inside the domain of the fast link, and between hosts."""


@dataclass(frozen=True)
class Group:
    """Devices that work together, as one of them sees it."""

    size: int
    inside: int
    """Members in the same domain of the fast link, this one counted in."""
    bandwidth: float
    """Bytes/s that a member can send on the way round, over the slowest link of it."""
    latency: float

    @property
    def crosses(self) -> bool:
        """Whether it leaves the domain of the fast link."""
        return self.inside < self.size


def group(cluster: Cluster, degrees: Mapping[str, int], axes: Sequence[str]) -> Group:
    """The group of a device along mesh axes.

    Devices are numbered in row-major order of the axes, hosts one after another.

    Args:
        cluster: where they are.
        degrees: of every mesh axis.
        axes: those that vary inside the group.
    """
    size = math.prod(degrees[axis] for axis in axes)
    inside, stride = 1, 1
    for axis in reversed(MESH_AXES):
        if axis in axes:
            inside *= max(1, min(degrees[axis], cluster.domain // stride))
        stride *= degrees[axis]
    inside = min(inside, size)
    fast, slow = cluster.fast_link, _slow_link(cluster)
    if inside == size and fast:
        return Group(size, inside, fast * REACHED, FAST_LATENCY)
    # Members of one domain share its ring's way out, and so use the cards of all of them.
    bandwidth = slow * inside
    if fast and inside > 1:
        bandwidth = min(bandwidth, fast)
    return Group(size, inside, bandwidth * REACHED, NETWORK_LATENCY)


def _slow_link(cluster: Cluster) -> float:
    """Bytes/s of a device to those that the fast link does not join: the network, or the bus."""
    network = cluster.network_per_device if cluster.hosts > 1 else None
    rate = network or cluster.chip.host_link or cluster.chip.memory_bandwidth
    return float(rate or math.inf)


def seconds(kind: Kind, payload: float, group: Group) -> float:
    """How long a collective takes.

    Args:
        kind: what it does.
        payload: bytes of the whole: the gathered result, or an operand before it is reduced,
            exchanged or sent.
        group: who takes part.
    """
    n, bandwidth, latency = group.size, group.bandwidth, group.latency
    if n == 1 or payload == 0:
        return 0.0
    if kind in ("send", "collective-permute"):
        return payload / bandwidth + latency
    turns = 2 if kind == "all-reduce" else 1
    ring = turns * ((n - 1) / n * payload / bandwidth + (n - 1) * latency)
    if kind != "all-reduce":
        return ring
    tree = 2 * payload / bandwidth + 2 * math.ceil(math.log2(n)) * latency
    return min(ring, tree)
