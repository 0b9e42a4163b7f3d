"""Stopped early, on another mesh, after the end: a run goes on as if nothing had been."""

import shutil
from pathlib import Path

import numpy as np
import pytest
from jobs import LAST, UPDATES, Job, events, rows, run

from shardtrain import cli
from shardtrain.train.phases import read_timeline


def test_stop_at_leaves_the_schedule_alone(
    project: Path,
    straight: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(project)
    for word in ("done: 13 of 40 updates, as run.stop_at says: ", "nothing to do: 13 of 13 "):
        assert cli.main(["train", "tiny.toml", "--run.stop_at", "13"]) == 0
        assert word in capsys.readouterr().err
    assert rows(project, *UPDATES) == rows(straight, *UPDATES)[:13]
    assert [event["reason"] for event in events(project, "stop")] == ["run.stop_at"]
    assert cli.main(["train", "tiny.toml"]) == 0
    assert rows(project, *UPDATES) == rows(straight, *UPDATES)


def test_after_the_last_update_there_is_nothing_to_do(straight: Path, tmp_path: Path) -> None:
    told = read_timeline(straight / "run" / "timeline.jsonl")
    assert {line["step"] for line in told[-2:]} == {LAST}, "also while the last save is waited for"
    folder = shutil.copytree(straight, tmp_path / "copy")
    before = (folder / "run" / "metrics.jsonl").read_bytes()
    said = run(folder)
    assert "nothing to do: 40 of 40 updates are done" in said
    assert "compil" not in said
    assert (folder / "run" / "metrics.jsonl").read_bytes() == before


MESHES = {
    "data 4 x tensor 2": ("--mesh.tensor", "2", "--sharding.zero", "3"),
    "pipeline 2 x data 4": ("--mesh.pipeline", "2", "--train.microbatches", "2"),
    "no mesh": ("--run.cpu_devices", "1"),
}


def test_on_another_mesh(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Same samples; 20 losses after the change of mesh within 1e-5, relative."""
    monkeypatch.chdir(project)
    assert cli.main(["train", "tiny.toml", "--run.stop_at", "20"]) == 0
    folders = {mesh: shutil.copytree(project, project / mesh) for mesh in MESHES}
    jobs = [Job(folders[mesh], *flags) for mesh, flags in MESHES.items()]
    assert cli.main(["train", "tiny.toml"]) == 0
    expected = rows(project)
    for job, mesh in zip(jobs, MESHES, strict=True):
        said = job.finish()
        assert mesh in said
        assert "goes on from step 20" in said
        found = rows(job.folder)
        assert [row["sample_digest"] for row in found] == [row["sample_digest"] for row in expected]
        losses = [np.array([row["loss"] for row in part[20:]]) for part in (found, expected)]
        assert len(losses[0]) == LAST - 20
        np.testing.assert_allclose(*losses, rtol=1e-5)
        assert found[-1]["val_loss"] == pytest.approx(expected[-1]["val_loss"], rel=1e-5)
