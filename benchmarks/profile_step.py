"""Where the time of our step goes on a CPU: the share of each part, and the longest operations.

Run it on one core (`taskset -c 0`), so that the durations of operations add up to the step's. Each
operation counts with its shortest duration, as others may use the machine meanwhile.
"""

import argparse
import re
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import jax
from jax.profiler import ProfileData

from shardtrain.config import load_config
from shardtrain.run import build
from shardtrain.run_program import abstract_batch

PARTS = (
    ("optimizer and clipping", ("/optim/", "optax")),
    ("loss", ("cross_entropy.py",)),
    ("attention", ("ops/attention.py",)),
    ("products", ("ops/dense.py",)),
    ("norms", ("ops/norm.py",)),
    ("activation", ("ops/activation.py",)),
    ("embedding", ("ops/embedding.py",)),
    ("residual stream", ("models/transformer.py",)),
    ("stacking of layers", ("strategies/stack.py",)),
)
"""A part owns an operation when the innermost of these files on its stack is one of the part's."""


@dataclass(frozen=True)
class Operation:
    """An instruction of the compiled step."""

    shape: str
    part: str
    traced: str
    """What it was in the traced program."""


def main() -> None:
    """Prints the shares."""
    flags = argparse.ArgumentParser(description=__doc__)
    flags.add_argument("config", nargs="?", default="bench_medium")
    flags.add_argument("--steps", type=int, default=3)
    flags.add_argument("--precision", default="float32")
    flags.add_argument("--microbatches", type=int, default=1)
    flags.add_argument("--longest", type=int, default=0, help="groups of operations to print")
    options = flags.parse_args()
    precision = {"train.precision": options.precision, "train.microbatches": options.microbatches}
    config = load_config(options.config, precision)
    text, durations = profile(config, options.steps)
    known = operations(text, vocab=config.model.vocab_size)
    parts: Counter[str] = Counter()
    groups: Counter[tuple[str, ...]] = Counter()
    for name, seconds in durations.items():
        if name in known:
            operation = known[name]
            parts[operation.part] += seconds
            groups[operation.part, operation.shape, operation.traced] += seconds
    total = sum(parts.values())
    for part, seconds in parts.most_common():
        print(f"{part:28} {seconds:8.3f} s {seconds / total:7.1%}")
    print(f"{'all':28} {total:8.3f} s")
    for group, seconds in groups.most_common(options.longest):
        print(f"{seconds * 1e3:9.1f} ms  {'  '.join(group)}")


def profile(config: object, steps: int) -> tuple[str, dict[str, float]]:
    """The compiled step's text, and the seconds of each operation in a step."""
    run = build(config)
    step = run.program.compile_step(abstract_batch(run.config, run.program))
    state, batch = run.init(), run.batch_at(0)
    state, _ = jax.block_until_ready(step(state, batch))
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            for _ in range(steps):
                state, _ = jax.block_until_ready(step(state, batch))
        (file,) = Path(folder).rglob("*.xplane.pb")
        return step.as_text(), durations_of(ProfileData.from_file(str(file)), steps)


def durations_of(data: ProfileData, steps: int) -> dict[str, float]:
    """Seconds a step of each operation: its shortest duration times how often it runs."""
    shortest: dict[str, float] = {}
    count: Counter[str] = Counter()
    for event in (e for plane in data.planes for line in plane.lines for e in line.events):
        shortest[event.name] = min(shortest.get(event.name, 1e99), event.duration_ns / 1e9)
        count[event.name] += 1
    return {name: seconds * count[name] / steps for name, seconds in shortest.items()}


# -- the compiled text


def operations(text: str, *, vocab: int) -> dict[str, Operation]:
    """The instructions that are run, by name; loops and calls are left to what they contain."""
    stacks = Stacks(text)
    found = {}
    pattern = r"^\s+(?:ROOT )?%([\w.\-]+) = (\(?\w+\[[^ ]*).*? ([\w\-]+)\(.*$"
    for match in re.finditer(pattern, text, re.MULTILINE):
        name, shape, kind = match.groups()
        if kind in ("while", "call", "conditional"):
            continue
        frame = re.search(r"stack_frame_id=(\d+)", match[0])
        traced = re.search(r'op_name="([^"]*)"', match[0])
        part = part_of(stacks.files(int(frame[1])) if frame else iter(()))
        if part == "products" and re.search(rf"\b{vocab}\b", match[0]):
            part = "products of the head"
        found[name] = Operation(shape.split("{")[0], part, traced[1][-60:] if traced else kind)
    return found


def part_of(files: Iterator[str]) -> str:
    """The part of the step that a stack of files, innermost first, belongs to."""
    for file in files:
        for part, owned in PARTS:
            if any(name in file for name in owned):
                return part
    return "other"


class Stacks:
    """The tables of source locations at the head of a compiled text."""

    def __init__(self, text: str) -> None:
        self.names = dict(re.findall(r'^(\d+) "([^"]*)"$', _table(text, "FileNames"), re.MULTILINE))
        locations = re.findall(r"^(\d+) {file_name_id=(\d+)", _table(text, "FileLocations"), re.M)
        self.locations = dict(locations)
        frames = r"^(\d+) {file_location_id=(\d+) parent_frame_id=(\d+)"
        self.frames = {
            frame: (location, parent)
            for frame, location, parent in re.findall(frames, _table(text, "StackFrames"), re.M)
        }

    def files(self, frame: int) -> Iterator[str]:
        """The files of a stack, innermost first."""
        at = str(frame)
        while at in self.frames:
            location, parent = self.frames[at]
            yield self.names.get(self.locations.get(location, ""), "")
            at = str(int(parent) - 1)  # counted from one more; that of an outermost frame is 0


def _table(text: str, name: str) -> str:
    found = re.search(rf"^{name}\n(.*?)\n\n", text, re.MULTILINE | re.DOTALL)
    return found[1] if found else ""


if __name__ == "__main__":
    main()
