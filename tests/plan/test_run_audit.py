"""`train.audit` without GPUs: refused, and what devices say of a cluster."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from shardtrain.cli import main
from shardtrain.run_audit import domain_of


def test_it_is_refused_where_nothing_can_be_checked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["train", "quickstart", "--run.dir", str(tmp_path / "run"), "--run.steps", "1"]
    for _ in range(2):  # the first may prepare the text, and say so
        capsys.readouterr()
        assert main([*words, "--train.audit", "True"]) == 2
    told = capsys.readouterr().err
    assert told.startswith("train.audit=True: programs for cpu devices cannot be checked")
    assert "plan CONFIG --target h100:1x8 --audit" in told
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


H100, BRIDGED, DESKTOP, RACK = (
    "NVIDIA H100 80GB HBM3",
    "NVIDIA H100 PCIe",
    "NVIDIA GeForce RTX 4090",
    "NVIDIA GB200",
)


@pytest.mark.parametrize(
    ("kind", "processes", "each", "domain"),
    [
        (H100, 1, 8, 8),
        (H100, 2, 8, 8),
        (H100, 4, 4, 4),
        (H100, 16, 1, 8),  # one process a device, on hosts of 8
        (H100, 4, 1, 4),
        (H100, 1, 1, 1),
        (BRIDGED, 1, 8, 2),
        (DESKTOP, 1, 2, 1),
        (RACK, 18, 4, 72),
        (RACK, 36, 4, 72),
        ("a chip of no table", 2, 6, 6),
    ],
)
def test_neighbours_on_the_fast_link(kind: str, processes: int, each: int, domain: int) -> None:
    devices: list[Any] = [
        SimpleNamespace(device_kind=kind, process_index=process)
        for process in range(processes)
        for _ in range(each)
    ]
    assert domain_of(devices) == domain
