"""What a run leaves behind, and what it makes of a text, a folder and a loss that is no number."""

import json
from pathlib import Path

import pytest
from jobs import LAST, assert_curves, entries, events, rows

from shardtrain import cli, load_config

KEYS = ["step", "sample_digest", "loss", "grad_norm", "learning_rate", "tokens"]
SPEED = ["tokens_per_second", "mfu", "step_time", "data_wait", "nll"]


def test_what_a_run_leaves_behind(straight: Path) -> None:
    folder = straight / "run"
    assert sorted(path.name for path in folder.iterdir()) == [
        "checkpoints",
        "metrics.jsonl",
        "resolved.toml",
        "tensorboard",
        "timeline.jsonl",
    ]
    assert sorted(path.name for path in (folder / "checkpoints").iterdir()) == ["35", "40"]
    again = load_config(folder)
    assert again == load_config(straight / "tiny.toml", {"run.dir": str(folder)})
    lines = [entry for entry in entries(straight) if "event" not in entry]
    assert [list(line) for line in lines[:9]] == [KEYS + SPEED] * 9
    assert list(lines[9]) == ["step", "sample_digest", "loss", "val_loss", *KEYS[3:], *SPEED]
    assert [line["tokens"] for line in lines] == [128 * step for step in range(1, LAST + 1)]
    assert len({line["sample_digest"] for line in lines}) == LAST
    assert [line["step"] for line in lines if "val_loss" in line] == [10, 20, 30, 40]
    assert [event["step"] for event in events(straight, "save")] == list(range(5, LAST + 1, 5))
    (compiled,), (stop,) = events(straight, "compile"), events(straight, "stop")
    assert (compiled["step"], stop["step"], stop["reason"]) == (0, LAST, "done")


def test_curves_are_the_metrics_file(straight: Path) -> None:
    assert_curves(straight)


@pytest.mark.parametrize("path", ["my.txt", "texts"])
def test_a_text_or_a_folder_just_works(
    path: str,
    project: Path,
    straight: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(project)
    monkeypatch.setenv("SHARDTRAIN_CACHE", str(project / "cache"))
    (project / "texts").mkdir()
    text = (project / "my.txt").read_text()
    (project / "texts" / "a.txt").write_text(text[:20000])
    (project / "texts" / "b.md").write_text(text[20000:])
    words = ["train", "tiny.toml", "--data.path", path, "--run.steps", "2"]
    assert cli.main(words) == 0
    first = capsys.readouterr().err
    assert f"preparing {path}: " in first
    assert f"once, into {project / 'cache'}" in first
    assert f"data     {path}, " in first
    assert cli.main([*words, "--run.dir", "other"]) == 0
    assert "preparing" not in capsys.readouterr().err
    assert len(rows(project)) == 2


def test_a_loss_that_is_no_number_ends_the_run(
    project: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(project)
    flags = "--optimizer.name sgd --optimizer.learning_rate 1e30 --optimizer.clip_norm 0"
    words = ["train", "tiny.toml", *flags.split(), "--run.steps", "12", "--model.dropout", "0"]
    assert cli.main(words) == 3
    (stop,) = events(project, "stop")
    done = stop["step"]
    assert [row["step"] for row in rows(project)] == list(range(1, done + 1))
    assert stop["loss"] is None
    said = capsys.readouterr().err
    assert f"stopped: the loss of update {done + 1} is nan; of 16 of 16 gradients, first " in said
    (evidence,) = (project / "run" / "bad_numbers").iterdir()
    assert str(evidence) in said
    told = json.loads(evidence.read_text())
    assert len(told["samples"]) == 8
    assert told["parameters_not_finite"] == [], "they are as the update before left them"
