"""Runs two commands by turns and prints the ratio of their CPU seconds per step.

Each command prints the figures of `shardtrain bench --json` as its last line of JSON. CPU seconds
are compared, not wall time, as others may use the machine meanwhile.
"""

import argparse
import json
import os
import shlex
import statistics
import subprocess
import sys
from typing import Any

Figures = dict[str, Any]
SIDES = ("ours", "peer")
KEPT = ("cpu_s_step", "ms_step_median", "peak_rss_mb", "first_step_s")


def main() -> int:
    """The command line."""
    flags = argparse.ArgumentParser(description=__doc__)
    flags.add_argument("ours", help="a command, quoted")
    flags.add_argument("peer", help="the other")
    flags.add_argument("--rounds", type=int, default=5, help="runs of each (default 5)")
    flags.add_argument("--jemalloc", metavar="PATH", help="preload this library on both sides")
    options = flags.parse_args()
    environment = with_jemalloc(options.jemalloc) if options.jemalloc else dict(os.environ)
    runs: dict[str, list[Figures]] = {side: [] for side in SIDES}
    for index in range(options.rounds):
        # The side that goes first changes, so that neither always follows the other.
        for side in SIDES if index % 2 == 0 else reversed(SIDES):
            figures = run(shlex.split(getattr(options, side)), environment)
            runs[side].append(figures)
            shown = " ".join(f"{name} {figures.get(name)}" for name in KEPT)
            print(f"{index + 1}/{options.rounds} {side:4} {shown}", file=sys.stderr, flush=True)
    print(json.dumps(summary(runs)))
    return 0


def with_jemalloc(path: str) -> dict[str, str]:
    """The environment with the allocator that `shardtrain` advises."""
    from shardtrain.train.machine import JEMALLOC_OPTIONS

    return {**os.environ, "LD_PRELOAD": path, "MALLOC_CONF": JEMALLOC_OPTIONS}


def run(command: list[str], environment: dict[str, str]) -> Figures:
    """The figures that a command prints last.

    Raises:
        SystemExit: it fails or prints none.
    """
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode or not lines:
        raise SystemExit(f"{shlex.join(command)}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}")
    figures: Figures = json.loads(lines[-1])
    return figures


def summary(runs: dict[str, list[Figures]]) -> Figures:
    """Medians of each side, the span of their CPU seconds, and the ratios ours / peer."""
    result: Figures = {"rounds": len(runs["ours"])}
    for side in SIDES:
        figures = runs[side]
        cpu = [f["cpu_s_step"] for f in figures]
        medians = {name: round(statistics.median(f[name] for f in figures), 3) for name in KEPT}
        result[side] = {
            "peer": figures[0]["peer"],
            **medians,
            "cpu_s_step_span": [min(cpu), max(cpu)],
        }
    for name, label in (("cpu_s_step", "cpu_ratio"), ("ms_step_median", "wall_ratio")):
        result[label] = round(result["ours"][name] / result["peer"][name], 3)
    return result


if __name__ == "__main__":
    sys.exit(main())
