"""Timing the step of a config.

Owns: which steps are timed and the names of the figures, which are those that scripts for other
trainers print too, so that results can be laid side by side. Does not own: the step.
"""

import json as json_
import resource
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import jax
from rich.table import Table

from shardtrain.config import RunConfig
from shardtrain.errors import ConfigError
from shardtrain.run import Run, build
from shardtrain.run_program import abstract_batch
from shardtrain.sharding.mesh import split_axes
from shardtrain.train.flops import utilisation
from shardtrain.train.machine import allocator
from shardtrain.train.screen import make_console

Figures = dict[str, Any]
DTYPES = {"float32": "f32", "bfloat16": "bf16", "float16": "f16", "float64": "f64"}


@dataclass
class Timings:
    """What a bench has measured."""

    first: float = 0.0
    """Seconds of compiling and of the first step."""
    seconds: list[float] = field(default_factory=list)
    cpu_seconds: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    """Of every step, those of the warm-up too."""


def bench(config: RunConfig, *, steps: int = 12, warmup: int = 3) -> Figures:
    """Times the run's own step on real batches.

    Args:
        config: from `load_config`.
        steps: steps to time.
        warmup: steps before them, the first included, which compiles.

    Returns:
        The figures, by name; speeds are those of the median step, batches are read outside of it.

    Raises:
        UserError: the run cannot be built, or there is nothing to time.
    """
    for name, value in (("steps", steps), ("warmup", warmup)):
        if value < 1:
            raise ConfigError(f"bench needs at least one: {value}", where=f"--{name}")
    run = build(config)
    return _figures(run, _time(run, steps=steps, warmup=warmup))


def _time(run: Run, *, steps: int, warmup: int) -> Timings:
    timings = Timings()
    begun = time.perf_counter()
    step = run.program.compile_step(abstract_batch(run.config, run.program))
    compiling = time.perf_counter() - begun
    state = jax.block_until_ready(run.init())
    for index, batch in enumerate(_batches(run, warmup + steps)):
        wall, cpu = time.perf_counter(), time.process_time()
        state, metrics = step(state, batch)
        timings.losses.append(float(metrics["loss"]))
        jax.block_until_ready(state)
        wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
        if index == 0:
            timings.first = compiling + wall
        if index >= warmup:
            timings.seconds.append(wall)
            timings.cpu_seconds.append(cpu)
    return timings


def _batches(run: Run, count: int) -> Iterator[dict[str, jax.Array]]:
    for cursor in range(count):
        yield jax.block_until_ready(run.batch_at(cursor))


def _figures(run: Run, timings: Timings) -> Figures:
    config, devices = run.config, list(run.mesh.devices.flat)
    median, work = statistics.median(timings.seconds), run.work
    flops = work.flops(run.size)
    mfu = utilisation(flops / median, devices, config.train.precision)
    return {
        "peer": "shardtrain",
        "size": config.run.name.removeprefix("bench_"),
        f"{work.unit}_per_s": round(work.units / median, 1),
        "ms_step_median": round(median * 1e3, 1),
        "peak_rss_mb": round(_peak_rss_mb()),
        "mfu": None if mfu is None else round(mfu, 4),
        "first_step_s": round(timings.first, 2),
        "final_loss": round(timings.losses[-1], 4),
        "dtype": DTYPES.get(config.train.precision, config.train.precision),
        "gflops": round(flops / median / 1e9, 1),
        "ms_step_min": round(min(timings.seconds) * 1e3, 1),
        "ms_step_max": round(max(timings.seconds) * 1e3, 1),
        "steps": len(timings.seconds),
        "loss0": round(timings.losses[0], 4),
        "tag": _layout(run),
        "cpu_s_step": round(statistics.median(timings.cpu_seconds), 2),
        "device": devices[0].device_kind,
        "devices": len(devices),
        "peak_device_mb": _peak_device_mb(devices[0]),
        "allocator": allocator(),
        "jax": jax.__version__,
    }


def _layout(run: Run) -> str:
    """The layout in a few words; empty for one device without microbatches."""
    config, words = run.config, split_axes(run.mesh)
    if config.sharding.zero:
        words.append(f"zero {config.sharding.zero}")
    if config.train.microbatches > 1:
        words.append(f"{config.train.microbatches} microbatches")
    return ", ".join(words)


def _peak_rss_mb() -> float:
    """The largest size of this process so far, in MiB; macOS counts in bytes, Linux in KiB."""
    unit = 2**20 if sys.platform == "darwin" else 2**10
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / unit


def _peak_device_mb(device: jax.Device) -> int | None:
    """The largest use of a device's memory so far, in MiB, where the device counts it."""
    counted = device.memory_stats() or {}
    peak = counted.get("peak_bytes_in_use")
    return None if peak is None else round(peak / 2**20)


def bench_command(config: RunConfig, *, steps: int, warmup: int, json: bool) -> int:
    """`shardtrain bench`: prints the figures, as one line of JSON or as a table."""
    figures = bench(config, steps=steps, warmup=warmup)
    if json:
        print(json_.dumps(figures))
        return 0
    table = Table(show_header=False, box=None)
    for name, value in figures.items():
        table.add_row(name, "-" if value in (None, "") else str(value))
    make_console(stderr=False).print(table)
    return 0
