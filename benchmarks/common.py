"""What every script here shares: sizes, data, the optimizer's constants, timing, the line of JSON.

Needs NumPy only, so that it runs in the environment of any trainer. Does not own: any step.
"""

import argparse
import json
import resource
import statistics
import sysconfig
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

LEARNING_RATE, BETA1, BETA2, EPSILON, DECAY, CLIP = 3e-4, 0.9, 0.95, 1e-8, 0.1, 1.0
STDDEV = 0.02
"""Of the initial weights; those that write into the residual stream are `Size.residual`."""

Ids = NDArray[np.int32]


@dataclass(frozen=True)
class Size:
    """A GPT-2-style decoder (pre-norm, tied head, no biases, no dropout) and its global batch."""

    layers: int
    embed: int
    heads: int
    length: int
    batch: int
    vocab: int

    @property
    def head_dim(self) -> int:
        """Entries of one head."""
        return self.embed // self.heads

    @property
    def residual(self) -> float:
        """GPT-2's standard deviation of the weights that write into the residual stream."""
        return STDDEV / float((2 * self.layers) ** 0.5)

    @property
    def tokens(self) -> int:
        """Tokens of one step."""
        return self.batch * self.length

    @property
    def flops(self) -> int:
        """Of one step: 6 for each weight of a product and token, and attention in full."""
        weights = 12 * self.layers * self.embed**2 + self.vocab * self.embed
        return self.tokens * (6 * weights + 12 * self.layers * self.embed * self.length)


SIZES = {
    "tiny": Size(layers=2, embed=64, heads=2, length=128, batch=4, vocab=256),
    "small": Size(layers=6, embed=384, heads=6, length=256, batch=32, vocab=256),
    "medium": Size(layers=12, embed=768, heads=12, length=512, batch=4, vocab=50304),
}
"""Small and medium are the models of configs/bench_small.toml and bench_medium.toml."""


def parser(description: str | None) -> argparse.ArgumentParser:
    """The flags of every script; a script adds its own."""
    flags = argparse.ArgumentParser(description=description)
    flags.add_argument("--size", default="small", choices=list(SIZES))
    flags.add_argument("--steps", type=int, default=4, help="timed steps")
    flags.add_argument("--warmup", type=int, default=2, help="steps before them")
    flags.add_argument("--peak-gflops", type=float, help="the machine's, for the figure `mfu`")
    return flags


def batches(size: Size, count: int, seed: int = 0) -> list[tuple[Ids, Ids]]:
    """Inputs and targets: bytes of the standard library's source, or Zipf ids where half repeat.

    Args:
        size: sets shapes; a vocabulary over 256 means ids.
        count: batches.
        seed: of the draws.
    """
    rng = np.random.default_rng(seed)
    if size.vocab <= 256:
        files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))[:40]
        corpus: NDArray[Any] = np.frombuffer(
            b"".join(file.read_bytes() for file in files), np.uint8
        )
    else:
        corpus = rng.zipf(1.2, size=400_000) % size.vocab
        corpus[1::2] = (corpus[0::2] * 7 + 3) % size.vocab
    drawn = []
    for _ in range(count):
        starts = rng.integers(0, len(corpus) - size.length - 1, size=size.batch)
        rows = np.stack([corpus[i : i + size.length + 1] for i in starts]).astype(np.int32)
        drawn.append((rows[:, :-1].copy(), rows[:, 1:].copy()))
    return drawn


@dataclass
class Timings:
    """What was measured of one process."""

    first: float
    """Seconds of the first step, compiling included."""
    loss0: float
    loss: float = 0.0
    seconds: list[float] = field(default_factory=list)
    cpu_seconds: list[float] = field(default_factory=list)


def measure(
    step: Callable[[int], float], options: argparse.Namespace, barrier: Callable[[], object] = int
) -> Timings:
    """Times the steps after the warm-up.

    Args:
        step: runs a step by its number, waits for it and returns its loss.
        options: from `parser`.
        barrier: waits for the other ranks.
    """
    begun = time.perf_counter()
    loss = step(0)
    timings = Timings(time.perf_counter() - begun, loss)
    for index in range(1, options.warmup):
        step(index)
    for index in range(options.warmup, options.warmup + options.steps):
        barrier()
        wall, cpu = time.perf_counter(), time.process_time()
        timings.loss = step(index)
        barrier()
        timings.seconds.append(time.perf_counter() - wall)
        timings.cpu_seconds.append(time.process_time() - cpu)
    return timings


def peak_rss_mb() -> float:
    """The largest size of this process so far, in MiB (Linux)."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def report(
    peer: str,
    options: argparse.Namespace,
    timings: Timings,
    *,
    dtype: str = "f32",
    rss: float | None = None,
    cpu_s_step: float | None = None,
    **extra: Any,
) -> None:
    """Prints the figures as one line of JSON, by the names that `shardtrain bench` uses.

    Args:
        peer: what was timed.
        options: from `parser`.
        timings: from `measure`.
        dtype: of the products.
        rss: in MiB; where ranks were summed.
        cpu_s_step: the median; where ranks were summed.
        extra: more figures.
    """
    size = SIZES[options.size]
    median = statistics.median(timings.seconds)
    gflops = size.flops / median / 1e9
    if cpu_s_step is None:
        cpu_s_step = statistics.median(timings.cpu_seconds)
    figures = {
        "peer": peer,
        "size": options.size,
        "tokens_per_s": round(size.tokens / median, 1),
        "ms_step_median": round(median * 1e3, 1),
        "peak_rss_mb": round(rss or peak_rss_mb()),
        "mfu": round(gflops / options.peak_gflops, 4) if options.peak_gflops else None,
        "first_step_s": round(timings.first, 2),
        "final_loss": round(timings.loss, 4),
        "dtype": dtype,
        "gflops": round(gflops, 1),
        "ms_step_min": round(min(timings.seconds) * 1e3, 1),
        "ms_step_max": round(max(timings.seconds) * 1e3, 1),
        "steps": len(timings.seconds),
        "loss0": round(timings.loss0, 4),
        "tag": "",
        "cpu_s_step": round(cpu_s_step, 3),
    }
    print(json.dumps({**figures, **extra}), flush=True)
