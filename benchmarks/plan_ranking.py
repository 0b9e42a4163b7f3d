"""How well plans rank layouts: planned and measured step times of many layouts on this machine.

    python -m benchmarks.plan_ranking --devices 2 --layouts 14     # virtual CPU devices
    python -m benchmarks.plan_ranking --layouts 14                 # all GPUs of the host

The machine is measured first, which gives the row of the table of chips that the plans use. On CPU
devices set NPROC=1, so that a device is a core.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

SECTIONS: dict[str, dict[str, Any]] = {
    "run": {"steps": 100},
    "model": {
        "num_layers": 6,
        "embed_dim": 256,
        "num_heads": 4,
        "vocab_size": 512,
        "position": "rope",
        "layer_loop": "scan",
    },
    "data": {"sequence_length": 128, "batch_size": 32, "separate_documents": False},
    "optimizer": {"learning_rate": 1e-3},
    "eval": {"steps": 0},
    "log": {"trackers": []},
}
MEASURE = """
import sys
from shardtrain.sharding.devices import prepare_devices
prepare_devices(int(sys.argv[1]))
from shardtrain.plan.calibrate import measure
print(measure().toml("here"))
"""


def main() -> None:
    """Measures, plans, runs, compares."""
    flags = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    flags.add_argument("--devices", type=int, default=0, help="virtual CPU devices")
    flags.add_argument("--layouts", type=int, default=14)
    flags.add_argument("--steps", type=int, default=6)
    flags.add_argument("--precision", default="float32")
    options = flags.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        compare(options, Path(folder))


def compare(options: argparse.Namespace, folder: Path) -> None:
    """All of it, with files in a folder."""
    chips = folder / "chips.toml"
    words = [sys.executable, "-c", MEASURE, str(options.devices)]
    chips.write_text(subprocess.run(words, check=True, capture_output=True, text=True).stdout)
    print(chips.read_text())
    planned = plans(chips, options)
    rows = []
    for index, (layout, seconds) in enumerate(planned):
        measured = run(folder / f"{index}.toml", layout, options)
        rows.append((seconds, measured))
        print(f"planned {seconds:.3f} s  measured {measured:.3f} s  {layout}", flush=True)
    print(json.dumps({"layouts": len(rows), "spearman": round(spearman(rows), 3)}))


def plans(chips: Path, options: argparse.Namespace) -> list[tuple[Any, float]]:
    """Layouts with their planned seconds, evenly spaced in time from the fastest on."""
    from shardtrain.commands_plan import make_plan
    from shardtrain.config import load_config
    from shardtrain.plan.hardware import read_chips

    config = load_config({**SECTIONS, "train": {"precision": options.precision}})
    devices = options.devices
    if not devices:
        import jax

        devices = jax.device_count()
    plan = make_plan(config, f"here:1x{devices}", chips=read_chips(chips), keep=100_000)
    assert plan.found is not None
    found = list(plan.found.best)
    times = [candidate.cost.middle for candidate in found]
    ratio = (times[-1] / times[0]) ** (1 / (options.layouts - 1))
    some = []
    for index in range(options.layouts):
        nearest = min(found, key=lambda c: abs(c.cost.middle - times[0] * ratio**index))
        found.remove(nearest)
        some.append(nearest)
    return [(candidate.layout, candidate.cost.middle) for candidate in some]


def run(path: Path, layout: Any, options: argparse.Namespace) -> float:
    """Measured seconds of a step of a layout."""
    from shardtrain.config import load_config, to_toml

    sections = json.loads(json.dumps(SECTIONS))
    for name, part in layout.sections.items():
        sections[name] = {**sections.get(name, {}), **part}
    sections["train"]["precision"] = options.precision
    sections["run"]["cpu_devices"] = options.devices
    path.write_text(to_toml(load_config(sections)))
    words = [sys.executable, "-m", "shardtrain", "bench", str(path), "--json"]
    words += ["--steps", str(options.steps), "--warmup", "2"]
    done = subprocess.run(words, check=True, capture_output=True, text=True)
    return float(json.loads(done.stdout)["ms_step_min"]) / 1e3


def spearman(rows: list[tuple[float, float]]) -> float:
    """Rank correlation of planned and measured seconds."""
    import numpy as np

    ranks = [np.argsort(np.argsort(column)) for column in zip(*rows, strict=True)]
    return float(np.corrcoef(*ranks)[0, 1])


if __name__ == "__main__":
    main()
