"""A small run that engines start, and what it has written."""

import json
import os
import random
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

PATIENCE = 240.0
CONFIG = """
[run]
name = "tiny"
dir = "run"
steps = {steps}
cpu_devices = 4

[model]
num_layers = 2
embed_dim = 16
num_heads = 4
dropout = 0.1

[data]
path = "my.txt"
sequence_length = 16
batch_size = 8

[sharding]
zero = 1

[optimizer]
learning_rate = 1e-2
warmup_steps = 4

[checkpoint]
every = 20

[eval]
steps = 1
sample_tokens = 0

[log]
trackers = []
"""


def write_run(folder: Path, steps: int) -> Path:
    """A folder with a config and a text; both are the same in every call."""
    folder.mkdir(parents=True)
    words = random.Random(0)
    lines = [" ".join(words.choices(("to", "be", "or", "not", "that"), k=12)) for _ in range(600)]
    (folder / "my.txt").write_text("\n".join(lines))
    (folder / "tiny.toml").write_text(CONFIG.format(steps=steps))
    return folder


def begin(folder: Path, *flags: str, python: str = sys.executable) -> subprocess.Popen[str]:
    """Starts `shardtrain launch`; what it says goes to launch.log."""
    with (folder / "launch.log").open("a") as log:
        return subprocess.Popen(
            [python, "-m", "shardtrain", "launch", "tiny.toml", *flags],
            cwd=folder,
            env=os.environ | {"JAX_PLATFORMS": "cpu"},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            text=True,
        )


def launch(folder: Path, *flags: str, code: int = 0, python: str = sys.executable) -> str:
    """Runs `shardtrain launch` to an exit code; returns all that was said until now."""
    launcher = begin(folder, *flags, python=python)
    try:
        found = launcher.wait(PATIENCE)
    finally:
        launcher.kill()
    text = (folder / "launch.log").read_text()
    assert found == code, f"exit code {found}, not {code}:\n{text}"
    return text


def rows(folder: Path, *keys: str) -> list[tuple[Any, ...]]:
    """Some values of every step."""
    lines = (folder / "run" / "metrics.jsonl").read_text().splitlines()
    found = [json.loads(line) for line in lines]
    return [tuple(row[key] for key in keys) for row in found if "event" not in row]


def events(folder: Path, name: str) -> list[dict[str, Any]]:
    """The events of a name."""
    lines = (folder / "run" / "metrics.jsonl").read_text().splitlines()
    return [row for row in map(json.loads, lines) if row.get("event") == name]


def wait_for_step(folder: Path, step: int) -> None:
    """Returns when the row of a step is written."""
    limit = time.monotonic() + PATIENCE
    path = folder / "run" / "metrics.jsonl"
    while not path.exists() or f'"step": {step},' not in path.read_text():
        assert time.monotonic() < limit, f"no step {step}: {said(folder)}"
        time.sleep(0.01)


def said(folder: Path) -> str:
    """All logs of a folder."""
    return "\n".join(path.read_text() for path in [*folder.glob("*.log"), *folder.glob("*.out")])
