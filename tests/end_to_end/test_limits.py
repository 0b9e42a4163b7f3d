"""Time limits, saves by the clock, checks of copies in a run, and what a run never writes down."""

from pathlib import Path

import pytest
from jobs import LAST, events, rows, run

from shardtrain import cli


def test_a_run_out_of_time_saves_and_can_go_on(project: Path, straight: Path) -> None:
    said = run(project, "--run.time_limit", "0:00:01", code=75)
    assert "interrupted" in said
    (stop,) = events(project, "stop")
    assert stop["reason"] == "run.time_limit"
    assert stop["step"] < LAST
    run(project)
    assert rows(project) == rows(straight)


def test_saves_by_the_clock(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(project)
    words = ["train", "tiny.toml", "--checkpoint.every", "0"]
    assert cli.main([*words, "--checkpoint.every_minutes", "0.002"]) == 0
    saves = [save["step"] for save in events(project, "save")]
    assert len(saves) >= 3
    assert saves == sorted(set(saves))
    assert saves[-1] == LAST


def test_copies_stay_equal_where_clipping_acts(  # O-06
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(project)
    flags = "--mesh.tensor 2 --optimizer.clip_norm 0.05 --run.steps 20 --guard.replicas_every 1"
    assert cli.main(["train", "tiny.toml", *flags.split(), "--guard.rerun_every", "5"]) == 0
    assert len(rows(project)) == 20
    assert min(row["grad_norm"] for row in rows(project)) > 0.05


def test_a_target_that_is_missed_ends_the_run(
    project: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(project)
    flags = "--log.every 5 --targets.action stop --targets.tokens_per_second 1e9"
    assert cli.main(["train", "tiny.toml", *flags.split()]) == 3
    (stop,) = events(project, "stop")
    assert stop["reason"].startswith("tokens_per_second is ")
    assert 10 <= stop["step"] <= 12
    assert events(project, "save")[-1]["step"] == stop["step"], "what was done is saved"
    assert f"stopped, saved at step {stop['step']}" in capsys.readouterr().err
    assert (
        cli.main(["train", "tiny.toml", "--targets.loss", "0.1", "--targets.loss_step", "20"]) == 0
    )
    assert "target: the mean loss is " in capsys.readouterr().err


def test_no_secret_of_the_environment_is_written_down(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "hunter2-hunter2")
    said = run(project, "--run.steps", "5")
    assert "hunter2" not in said
    files = [path for path in (project / "run").rglob("*") if path.is_file()]
    assert len(files) > 5
    for path in files:
        assert b"hunter2" not in path.read_bytes(), path
