"""What the optimizer's state on a disk saves of the memory of a CPU run, and what it costs.

    NPROC=1 python -m benchmarks.disk --folder /mnt/nvme/scratch

A small run saves a checkpoint; two processes then go on from it, one with the state in memory and
one with it on the disk, and report the most memory that each has ever had and the time of a step.
What the disk can do is measured beside every step by as many reads and writes of the same files.
"""

import argparse
import itertools
import json
import mmap
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax

from shardtrain.checkpoint.checkpointer import Checkpointer
from shardtrain.config import load_config
from shardtrain.run import Run, build
from shardtrain.run_state import restore_state
from shardtrain.sharding.disk_files import PAGE

SECTIONS: dict[str, dict[str, Any]] = {
    "run": {"steps": 20, "cpu_devices": 1},
    "model": {"num_layers": 48, "embed_dim": 512, "num_heads": 8, "layer_loop": "scan"},
    "data": {"sequence_length": 32, "batch_size": 1},
    "train": {"precision": "bfloat16"},
    "optimizer": {"name": "adamw", "learning_rate": 1e-4},
}
ON_DISK = {"offload.optimizer": "disk", "offload.master": "disk"}


def main() -> None:
    """Saves a checkpoint, goes on from it twice, and prints both."""
    flags = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    flags.add_argument("--folder", default="", help="on the disk; by default a temporary one")
    flags.add_argument("--steps", type=int, default=5)
    flags.add_argument("--go_on", default="", help="for the command itself: from where, and how")
    options = flags.parse_args()
    if options.go_on:
        print(json.dumps(go_on(Path(options.folder), options.go_on == "disk", options.steps)))
        return
    with tempfile.TemporaryDirectory(dir=options.folder or None) as folder:
        compare(Path(folder), options.steps)


def compare(folder: Path, steps: int) -> None:
    """All of it, with files in a folder."""
    run = make_run(folder, on_disk=False)
    with Checkpointer(folder / "checkpoints") as checkpoints:
        checkpoints.save(0, run.program.saved.save(run.init()), {})
    found = {}
    for where in ("memory", "disk"):
        words = ["--folder", str(folder), "--go_on", where, "--steps", str(steps)]
        command = [sys.executable, "-m", "benchmarks.disk", *words]
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
        found[where] = json.loads(done.stdout.splitlines()[-1])
        print(where, found[where], flush=True)
    memory, disk = found["memory"], found["disk"]
    assert memory["loss"] == disk["loss"], "the runs are not the same"
    saved = memory["peak"] - disk["peak"]
    print(f"optimizer's state: {memory['optimizer'] / 1e9:.2f} GB")
    print(f"less memory: {saved / 1e9:.2f} GB, {saved / memory['optimizer']:.0%} of it")
    dictated = disk["disk_seconds"]
    print(
        f"a step: {disk['seconds']:.1f} s, {memory['seconds']:.1f} s in memory; the disk alone "
        f"takes {dictated:.1f} s for its reads and writes: "
        f"{disk['seconds'] / (memory['seconds'] + dictated):.2f} of both after one another, "
        f"{disk['seconds'] / max(memory['seconds'], dictated):.2f} of the longer one"
    )


def make_run(folder: Path, *, on_disk: bool) -> Run:
    """The run of the comparison."""
    text = folder / "text.txt"
    if not text.exists():
        text.write_text("all work and no play makes jack a dull boy\n" * 2000)
    more = {"data.path": str(text), "run.dir": str(folder / "run")}
    return build(load_config(SECTIONS, more | (ON_DISK if on_disk else {})))


def go_on(folder: Path, on_disk: bool, steps: int) -> dict[str, Any]:
    """Goes on from the checkpoint; bytes and seconds."""
    most = Most()
    run = make_run(folder, on_disk=on_disk)
    if on_disk:
        run.program.disk.begin()
    with Checkpointer(folder / "checkpoints") as checkpoints:
        state = restore_state(checkpoints, 0, run.program)
    seconds, alone, metrics = [], [], {}
    for cursor in range(steps):
        batch = run.batch_at(cursor)
        begun = time.perf_counter()
        state, metrics = jax.block_until_ready(run.step(state, batch))
        seconds.append(time.perf_counter() - begun)
        if on_disk:
            alone.append(disk_alone(run))
    report = run.report
    return {
        "peak": most.stop(),
        "seconds": statistics.median(seconds[1:]),
        "disk_seconds": statistics.median(alone[1:]) if on_disk else 0.0,
        "optimizer": report.optimizer + report.disk,
        "loss": float(metrics["loss"]),
    }


def disk_alone(run: Run) -> float:
    """Seconds that a step's reads and writes take when nothing else happens.

    A row is read while the one before is written, as in a step, in files of their own.
    """
    disk = run.program.disk
    sizes = [rows.group.nbytes for rows in disk.all for _ in range(rows.group.rows)]
    path = disk.all[0].files.folder / "alone"
    flags = os.O_RDWR | os.O_CREAT | (os.O_DIRECT if disk.all[0].files.is_direct else 0)
    file, starts = os.open(path, flags, 0o600), list(itertools.accumulate(sizes, initial=0))
    buffers = [mmap.mmap(-1, max(sizes)) for _ in range(2)]

    def read(row: int) -> None:
        os.preadv(file, [memoryview(buffers[0])[: sizes[row]]], starts[row])

    def write(row: int) -> None:
        os.pwrite(file, memoryview(buffers[1])[: sizes[row]], starts[row])

    try:
        for row in range(len(sizes)):
            write(row)
        with ThreadPoolExecutor(2) as pool:
            begun = time.perf_counter()
            read(0)
            for row in range(len(sizes)):
                both = [pool.submit(write, row)]
                both += [pool.submit(read, row + 1)] if row + 1 < len(sizes) else []
                for one in both:
                    one.result()
            return time.perf_counter() - begun
    finally:
        os.close(file)
        path.unlink()


class Most:
    """The most memory that this process has had."""

    def __init__(self) -> None:
        """Begins to look."""
        self._most, self._ends = 0, threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._thread.start()

    def _look(self) -> None:
        while not self._ends.wait(0.002):
            pages = int(Path("/proc/self/statm").read_text().split()[1])
            self._most = max(self._most, pages * PAGE)

    def stop(self) -> int:
        """Bytes."""
        self._ends.set()
        self._thread.join()
        return self._most


if __name__ == "__main__":
    main()
