"""Saved on any mesh by any number of processes, restored on any other: the same run.

That all arrays are restored bit for bit is asserted by the restore itself, against digests that
depend on no mesh.
"""

import itertools
import shutil
from pathlib import Path

import numpy as np
import pytest
from crowds import Crowd
from jobs import rows, write_project

SAVED, END = 6, 11
SIZES = ("--model.num_layers", "4", "--checkpoint.every", str(SAVED), "--run.stop_at", str(END))
LAYOUTS = {
    "one device": (1, "--run.cpu_devices 1"),
    "data 2": (1, "--run.cpu_devices 2 --sharding.zero 0"),
    "ZeRO 1, 2 processes": (2, "--run.cpu_devices 4 --sharding.zero 1"),
    "ZeRO 2, 2 processes": (2, "--run.cpu_devices 8 --sharding.zero 2"),
    "ZeRO 3, 4 processes": (4, "--run.cpu_devices 8 --sharding.zero 3"),
    "tensor 2": (1, "--run.cpu_devices 4 --mesh.tensor 2 --sharding.zero 3"),
    "pipeline 2, 2 processes": (
        2, "--run.cpu_devices 4 --mesh.pipeline 2 --sharding.zero 1 --train.microbatches 2",
    ),
    "pipeline 4": (1, "--run.cpu_devices 4 --mesh.pipeline 4 --train.microbatches 4"),
}  # fmt: skip
PAIRS = (
    ("ZeRO 2, 2 processes", "tensor 2"),
    pytest.param("tensor 2", "pipeline 2, 2 processes", marks=pytest.mark.campaign),
    ("pipeline 4", "ZeRO 2, 2 processes"),
)


def train(folder: Path, layout: str) -> None:
    count, flags = LAYOUTS[layout]
    job = Crowd(folder, count, *SIZES, *flags.split())
    codes = job.finish()
    assert codes == [0] * count, "\n".join(map(job.said, range(count)))


def go_on(saved: Path, folder: Path, layout: str) -> None:
    """Goes on from the save on another layout, and compares with who had gone on on the first."""
    write_project(folder)
    shutil.copytree(saved / "run", folder / "run", ignore=shutil.ignore_patterns(str(END)))
    train(folder, layout)
    ours, theirs = rows(folder), rows(saved)
    assert [r["sample_digest"] for r in ours] == [r["sample_digest"] for r in theirs]
    assert ours[:SAVED] == theirs[:SAVED]
    np.testing.assert_allclose(
        [row["loss"] for row in ours[SAVED:]], [row["loss"] for row in theirs[SAVED:]], rtol=1e-5
    )


@pytest.mark.parametrize(("first", "second"), PAIRS)
def test_from_one_layout_to_another(tmp_path: Path, first: str, second: str) -> None:
    saved = write_project(tmp_path / "saved")
    train(saved, first)
    go_on(saved, tmp_path / "other", second)


@pytest.mark.campaign
def test_from_each_layout_to_each_other(tmp_path: Path) -> None:
    saved = {layout: write_project(tmp_path / str(i)) for i, layout in enumerate(LAYOUTS)}
    for layout, folder in saved.items():
        train(folder, layout)
    pairs = list(itertools.permutations(LAYOUTS, 2))
    assert len(pairs) == 56
    for number, (first, second) in enumerate(pairs):
        go_on(saved[first], tmp_path / f"pair-{number}", second)
        shutil.rmtree(tmp_path / f"pair-{number}")
