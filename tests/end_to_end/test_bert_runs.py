"""A BERT as runs: two phases, the same on two processes and after a kill, and what it refuses."""

import json
import random
from pathlib import Path

import numpy as np
import pytest
from crowds import crowd
from jobs import Job, events, rows

from shardtrain import cli
from shardtrain.checkpoint.checkpointer import Checkpointer
from shardtrain.config import load_config
from shardtrain.run_weights import SavedWeights

CONFIG = """
[run]
name = "tiny"
dir = "run"
steps = 8
cpu_devices = 8

[model]
type = "bert"
num_layers = 2
embed_dim = 16
num_heads = 2
max_length = 64
vocab_multiple = 8

[data]
path = "my.jsonl"
tokenizer = "wordpiece:80"
sequence_length = 32
batch_size = 16
validation_fraction = 0.2

[sharding]
zero = 1

[optimizer]
name = "lamb"
learning_rate = 1e-2

[checkpoint]
every = 4

[eval]
every = 4
steps = 100

[log]
trackers = []
"""
REPORTED = ("val_loss", "val_masked_accuracy", "val_next_loss", "val_next_accuracy")
KEYS = ("step", "sample_digest", "loss", "grad_norm", "learning_rate", "tokens")
EXACT = (*KEYS, "masked_loss", "next_loss", *REPORTED)


def write_text(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    draw = random.Random(0)
    words = ("sleeping", "cats", "and", "dogs", "under", "tables", "with", "a", "mat")
    texts = (" ".join(draw.choices(words, k=draw.randint(30, 90))) for _ in range(120))
    (folder / "my.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in texts))
    (folder / "tiny.toml").write_text(CONFIG)
    return folder


def command(folder: Path, *words: str) -> int:
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        return cli.main(list(words))


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of an uninterrupted run."""
    folder = write_text(tmp_path_factory.mktemp("bert"))
    assert command(folder, "train", "tiny.toml") == 0
    return folder


def test_it_reports_each_term_and_evaluates_again(
    whole: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    last = rows(whole, *EXACT)[-1]
    assert last["tokens"] == 8 * 16 * 32
    assert last["loss"] == pytest.approx(last["masked_loss"] + last["next_loss"], rel=1e-6)
    assert command(whole, "eval", "run", "--json") == 0
    said = json.loads(capsys.readouterr().out)
    assert said == {"step": 8, **{n: pytest.approx(last[n], rel=1e-6) for n in REPORTED}}
    # The same tokens are hidden on any mesh, and each counts once.
    other = ("--mesh.data", "2", "--mesh.tensor", "2", "--mesh.replica", "2")
    assert command(whole, "eval", "run", "--json", *other) == 0
    elsewhere = json.loads(capsys.readouterr().out)
    assert elsewhere == {"step": 8, **{n: pytest.approx(last[n], rel=1e-5) for n in REPORTED}}
    assert command(whole, "report", "run") == 0
    assert command(whole, "generate", "run") == 2
    assert "generation is there for language models alone" in capsys.readouterr().err


def test_a_second_phase_has_the_tokenizer_of_the_first(
    whole: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert load_config(whole / "run").data.tokenizer == "wordpiece:80"
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(whole)
        second = load_config("tiny.toml", {"run.init": "run", "run.dir": "second"})
    assert second.data.tokenizer == "run/tokenizer.json"
    assert second.model == load_config(whole / "run").model
    words = ("train", "tiny.toml", "--run.init", "run", "--data.tokenizer", "wordpiece:99")
    assert command(whole, *words) == 2
    assert "one that is learned anew would not fit" in capsys.readouterr().err


@pytest.mark.campaign
def test_a_second_phase_begins_with_the_first(whole: Path) -> None:
    """Longer samples, the weights of the first run, its tokenizer though the text is another."""
    other = (whole / "my.jsonl").read_text().replace("dogs", "zebras")
    (whole / "other.jsonl").write_text(other)
    words = (
        "--run.init run --run.name second --run.dir second --run.steps 1 --data.path other.jsonl "
        "--data.sequence_length 64 --optimizer.learning_rate 1e-6 --eval.steps 0"
    )
    assert command(whole, "train", "tiny.toml", *words.split()) == 0
    saved = []
    for name, step in (("run", 8), ("second", 1)):
        with Checkpointer(whole / name / "checkpoints") as checkpoints:
            saved.append(SavedWeights(checkpoints, step).read("layers/mlp/up"))
    np.testing.assert_allclose(*saved, atol=1e-6)


def test_it_is_exported_with_its_tokenizer(whole: Path) -> None:
    assert command(whole, "export", "run", "--out", "hf") == 0
    kept = (whole / "run" / "tokenizer.json").read_bytes()
    assert (whole / "hf" / "tokenizer.json").read_bytes() == kept
    size = json.loads((whole / "hf" / "config.json").read_text())["vocab_size"]
    assert size == len(json.loads(kept)["model"]["vocab"]) <= 80


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--mesh.context 2", "attention over a split sequence is causal"),
        ("--data.sequence_length 128", "is longer than the position table"),
        ("--data.tokenizer bytes", "needs a tokenizer with [MASK]"),
        ("--train.audit True", "for language models alone"),
        ("--train.remat budget --train.memory_budget 1GiB", "that of language models"),
        ("--task.type language_model", 'allowed: "masked_lm"'),
        ("--model.num_heads 3", "is not divisible by 3"),
    ],
)
def test_what_cannot_be_is_refused_at_the_start(
    flags: str, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_text(tmp_path)
    assert command(tmp_path, "train", "tiny.toml", *flags.split()) == 2
    assert words in capsys.readouterr().err


@pytest.mark.campaign
def test_killed_and_resumed_it_is_bit_for_bit_the_same(whole: Path, tmp_path: Path) -> None:
    folder = write_text(tmp_path)
    job = Job(folder)
    job.wait_for("saved step 4")
    assert job.kill()
    assert command(folder, "train", "tiny.toml") == 0
    assert rows(folder, *EXACT) == rows(whole, *EXACT)


@pytest.mark.campaign
def test_two_processes_are_the_same_run(whole: Path, tmp_path: Path) -> None:
    folder = write_text(tmp_path)
    crowd(folder, 2, "--run.stop_at", "3")
    ours, theirs = rows(folder, *EXACT), rows(whole, *EXACT)[:3]
    assert [row["sample_digest"] for row in ours] == [row["sample_digest"] for row in theirs]
    for name in ("loss", "masked_loss", "next_loss", "grad_norm"):
        wanted = [row[name] for row in theirs]
        np.testing.assert_allclose([row[name] for row in ours], wanted, rtol=1e-5)
    (evaluated,) = events(folder, "eval")
    assert evaluated["step"] == 3
