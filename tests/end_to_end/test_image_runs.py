"""A residual network on the digits, as processes: it learns, resumes and is the same on two."""

import json
from pathlib import Path

import numpy as np
import pytest
from crowds import crowd
from jobs import Job, events, rows

from shardtrain import cli

CONFIG = """
[run]
name = "tiny"
dir = "run"
steps = 24
cpu_devices = 8

[model]
type = "resnet"
depth = 10
width = 8
stem = "small"
norm_momentum = 0.7

[data]
image_size = 8
channels = 1
mean = [0.3]
deviation = [0.4]
crop = "none"
flip = false
batch_size = 64
validation_fraction = 0.2

[sharding]
zero = 1

[optimizer]
name = "sgd"
learning_rate = 0.3
nesterov = true
warmup_steps = 3
clip_norm = 0.0
weight_decay = 1e-4
final_ratio = 0.0
ema_decay = 0.7

[checkpoint]
every = 8

[eval]
every = 12
steps = 100

[log]
trackers = []
"""
KEYS = ("step", "sample_digest", "loss", "grad_norm", "learning_rate", "examples")
EXACT = (*KEYS, "top1", "top5", "val_loss", "val_top1", "val_top5")


def write_images(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tiny.toml").write_text(CONFIG)
    return folder


def train(folder: Path) -> None:
    """A run in this process, from its start or newest checkpoint to its end."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        assert cli.main(["train", "tiny.toml"]) == 0


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of an uninterrupted run."""
    folder = write_images(tmp_path_factory.mktemp("images"))
    train(folder)
    return folder


def test_it_learns_and_says_so(
    whole: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = rows(whole, *EXACT)
    last = found[-1]
    assert len(found) == 24
    assert last["loss"] < 0.5 * found[0]["loss"]
    assert last["val_top1"] > 0.5
    assert last["val_top5"] > last["val_top1"]
    assert last["examples"] == 24 * 64
    assert [event["step"] for event in events(whole, "eval")] == [12, 24]
    monkeypatch.chdir(whole)
    assert cli.main(["report", "run"]) == 0
    assert "examples/s" in capsys.readouterr().out
    assert cli.main(["eval", "run", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    names = ("val_loss", "val_top1", "val_top5")
    assert said == {"step": 24, **{name: pytest.approx(last[name], rel=1e-6) for name in names}}
    assert cli.main(["generate", "run"]) == 2
    assert "generation is there for language models alone" in capsys.readouterr().err


@pytest.mark.campaign
def test_killed_and_resumed_it_is_bit_for_bit_the_same(whole: Path, tmp_path: Path) -> None:
    folder = write_images(tmp_path)
    job = Job(folder)
    job.wait_for("saved step 8")
    assert job.kill()
    assert len(rows(folder)) < 24
    train(folder)
    assert events(folder, "restore")[0]["step"] in (8, 16)
    assert rows(folder, *EXACT) == rows(whole, *EXACT)


@pytest.mark.campaign
def test_two_processes_are_the_same_run(whole: Path, tmp_path: Path) -> None:
    folder = write_images(tmp_path)
    crowd(folder, 2, "--run.stop_at", "3", "--eval.steps", "0")
    ours, theirs = rows(folder, *EXACT), rows(whole, *EXACT)[:3]
    assert [row["sample_digest"] for row in ours] == [row["sample_digest"] for row in theirs]
    for name in ("loss", "grad_norm"):
        wanted = [row[name] for row in theirs]
        np.testing.assert_allclose([row[name] for row in ours], wanted, rtol=1e-5)
