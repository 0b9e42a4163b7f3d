"""A row of the table of chips for the machine at hand, measured in seconds.

Owns: the measurements and the row. Does not own: what the figures mean (`sharding.chip`), nor what
a plan makes of them (`cost`).

The rates are those that are reached, so the row says that products reach all of them.
"""

import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from shardtrain.plan.cost import MEMORY_REACHES
from shardtrain.plan.links import REACHED

ROUNDS = 7
PRECISIONS = ("float32", "bfloat16")


@dataclass(frozen=True)
class Measured:
    """What one device reaches while all others work too."""

    flops: dict[str, float]
    """FLOP/s of large products by precision."""
    memory: float
    """Bytes/s that fused elementwise work reads and writes."""
    link: float | None
    """Bytes/s that a device sends in a large all-reduce; None for one device."""
    memory_bytes: float
    """Of one device."""
    devices: int

    def toml(self, name: str) -> str:
        """The row as a table of a TOML file of chips."""
        lines = [
            f"[{name}]",
            f'source = "measured on {self.devices} devices of this machine"',
            f"memory_gb = {self.memory_bytes / 1e9:.3f}",
            # Figures of the table are peaks, of which plans take a part.
            f"memory_bandwidth = {self.memory / MEMORY_REACHES:.4g}",
            "products_reach = 1.0",
            *(f"flops.{kind} = {rate:.4g}" for kind, rate in self.flops.items()),
        ]
        if self.link:
            lines.append(f"fast_link.bandwidth = {self.link / REACHED:.4g}")
            lines.append(f"fast_link.chips = {self.devices}")
        return "\n".join(lines) + "\n"


def measure(side: int = 0, megabytes: int = 64) -> Measured:
    """Measures all devices of this process at once.

    Args:
        side: rows and columns of the product; 0 = 1024 on CPU, 8192 elsewhere.
        megabytes: size of the array of the other measurements, on each device.
    """
    devices = jax.devices()
    mesh = Mesh(np.array(devices), ("all",))
    split = NamedSharding(mesh, PartitionSpec("all"))
    count = len(devices)
    side = side or (1024 if devices[0].platform == "cpu" else 8192)
    flops = {}
    for precision in PRECISIONS:
        x = jax.device_put(jnp.ones((count, side, side), precision), split)
        product = jax.jit(lambda x: jnp.einsum("bij,bjk->bik", x, x), out_shardings=split)
        flops[precision] = 2.0 * side**3 / _seconds(product, x)
    entries = megabytes * 2**20 // 4
    x = jax.device_put(jnp.ones((count, entries), jnp.float32), split)
    add = jax.jit(lambda x: x * 1.5 + 1.0, out_shardings=split, donate_argnums=0)
    memory = 2.0 * 4 * entries / _seconds_donated(add, x)
    link = None
    if count > 1:
        x = jax.device_put(jnp.ones((count, entries), jnp.float32), split)
        whole = NamedSharding(mesh, PartitionSpec())
        reduce = jax.jit(lambda x: x.sum(0), out_shardings=whole)
        link = 2.0 * (count - 1) / count * 4 * entries / _seconds(reduce, x)
    return Measured(flops, memory, link, _memory_of(devices[0], count), count)


def _seconds(function: Callable[[Any], Any], x: jax.Array) -> float:
    """Median time of a call."""
    jax.block_until_ready(function(x))
    times = []
    for _ in range(ROUNDS):
        begin = time.perf_counter()
        jax.block_until_ready(function(x))
        times.append(time.perf_counter() - begin)
    return statistics.median(times)


def _seconds_donated(function: Callable[[Any], Any], x: jax.Array) -> float:
    """Median time of a call that takes its argument's memory for the result."""
    x = jax.block_until_ready(function(x))
    times = []
    for _ in range(ROUNDS):
        begin = time.perf_counter()
        x = jax.block_until_ready(function(x))
        times.append(time.perf_counter() - begin)
    return statistics.median(times)


def _memory_of(device: jax.Device, count: int) -> float:
    """Bytes of a device; virtual ones share the machine's."""
    stats = device.memory_stats() if device.platform != "cpu" else None
    if stats and "bytes_limit" in stats:
        return float(stats["bytes_limit"])
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / count
