"""The losses of one run under several layouts, step by step, beside those of one device.

    python -m benchmarks.same_losses

trains GPT-2 small (124,439,808 parameters) in float32 on the source text of Python's standard
library: on one device, and on 8 virtual CPU devices with ZeRO 1, or in the layouts that `--layout`
names. Each run is a process of its own, `shardtrain train`, as a user would start it; losses are
read from its metrics.jsonl. It ends with 1 if a loss differs from one device's by more than the
bound.
"""

import argparse
import json
import math
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

Column = list[float]
ONE = "--sharding.zero 0 --run.cpu_devices 1" + "".join(
    f" --mesh.{axis} 1" for axis in ("pipeline", "replica", "data", "context", "tensor")
)
LAYOUTS = ("--mesh.data 8 --sharding.zero 1",)
USUAL = (
    "--data.sequence_length 64 --data.batch_size 16 --data.separate_documents False "
    "--optimizer.warmup_steps 5 --train.microbatches 1 --train.precision float32"
)
QUIET = "--eval.steps 0 --eval.sample_tokens 0 --checkpoint.every 0"


def main() -> int:
    """The command line."""
    flags = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    flags.add_argument("--config", default="gpt2_124m", help="a shipped config or a file")
    flags.add_argument("--steps", type=int, default=20)
    flags.add_argument("--devices", type=int, default=8, help="virtual CPU devices")
    flags.add_argument("--keys", default=USUAL, help="flags of every run, quoted")
    flags.add_argument("--layout", action="append", help="flags of one layout; once for each")
    flags.add_argument("--bound", type=float, default=1e-5, help="of the relative difference")
    options = flags.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        columns = [train(options, ONE, Path(folder) / "one")]
        for index, layout in enumerate(options.layout or LAYOUTS):
            words = f"--run.cpu_devices {options.devices} {layout}"
            columns.append(train(options, words, Path(folder) / str(index)))
    one, *others = columns
    print(table(one, others, options.layout or LAYOUTS))
    worst = max(gap(one, other) for other in others)
    print(f"\nlargest relative difference {worst:.1e}, bound {options.bound:.0e}")
    return 0 if worst <= options.bound else 1


def train(options: argparse.Namespace, layout: str, folder: Path) -> Column:
    """The losses of a run, one a step.

    Args:
        options: from the command line.
        layout: flags that only this run has.
        folder: where it writes.

    Raises:
        SystemExit: it fails, or has not written every step.
    """
    command = [sys.executable, "-m", "shardtrain", "train", options.config]
    command += shlex.split(f"{options.keys} {QUIET} --run.steps {options.steps} {layout}")
    done = subprocess.run(
        [*command, "--run.dir", str(folder)], capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise SystemExit(f"{shlex.join(command)}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}")
    losses = read_losses(folder / "metrics.jsonl")
    if len(losses) != options.steps:
        raise SystemExit(f"{shlex.join(command)}\nwrote {len(losses)} of {options.steps} steps")
    return losses


def read_losses(path: Path) -> Column:
    """The losses of a run's metrics.jsonl; lines of events have none."""
    rows = map(json.loads, path.read_text("utf-8").splitlines())
    return [row["loss"] for row in rows if "event" not in row and "loss" in row]


def gap(one: Column, other: Column) -> float:
    """The largest relative difference; infinite where a loss is no number."""
    gaps = [abs(a - b) / abs(a) for a, b in zip(one, other, strict=True)]
    return max((g if math.isfinite(g) else math.inf) for g in gaps)


def table(one: Column, others: list[Column], names: list[str] | tuple[str, ...]) -> str:
    """A row a step, a column a layout, in Markdown."""
    heads = ["step", "one device", *(f"`{name}`" for name in names), "largest difference"]
    lines = [f"| {' | '.join(heads)} |", f"|{' --- |' * len(heads)}"]
    for step, losses in enumerate(zip(one, *others, strict=True)):
        worst = max(gap([losses[0]], [loss]) for loss in losses[1:])
        cells = [str(step + 1), *(f"{loss:.6f}" for loss in losses), f"{worst:.1e}"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
