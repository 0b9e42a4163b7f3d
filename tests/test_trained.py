"""What is done with a trained run: a sample at its end, `generate` and `eval` on any mesh."""

import io
import json
import random
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from shardtrain import cli
from shardtrain.commands_trained import restore_newest
from shardtrain.config import load_config
from shardtrain.errors import CheckpointError
from shardtrain.train.metrics import read_events
from shardtrain.train.screen import printable
from shardtrain.training import train_command

OTHER_MESHES = [
    (),
    ("--mesh.data", "1", "--mesh.tensor", "8"),
    ("--mesh.data", "8", "--mesh.tensor", "1", "--sharding.zero", "3"),
]


def sections(folder: Path) -> dict[str, Any]:
    return {
        "run": {"name": "tiny", "dir": str(folder / "run"), "steps": 2, "cpu_devices": 8},
        "model": {"num_layers": 1, "embed_dim": 16, "num_heads": 8},
        "data": {"path": str(folder / "my.txt"), "sequence_length": 16, "batch_size": 8},
        "mesh": {"data": 4, "tensor": 2},
        "optimizer": {"learning_rate": 0.01},
        "eval": {"steps": 2, "sample_tokens": 30},
    }


def write_text(folder: Path) -> None:
    words = random.Random(0)
    lines = [" ".join(words.choices(("to", "be", "or", "not", "that"), k=12)) for _ in range(200)]
    (folder / "my.txt").write_text("\n".join(lines))


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The folder of a run, and what was said while it was trained."""
    folder = tmp_path_factory.mktemp("trained")
    write_text(folder)
    said = io.StringIO()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "stderr", said)
        assert train_command(load_config(sections(folder))) == 0
    return folder / "run", said.getvalue()


def answer(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    code = cli.main(words)
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_a_run_ends_with_a_sample(trained):
    folder, said = trained
    (sample,) = [e for e in read_events(folder / "metrics.jsonl") if e["event"] == "sample"]
    assert sample["step"] == 2
    assert sample["text"]
    assert "what the model writes now:\n" + printable(sample["text"]) in said
    assert said.index("what the model writes now:") < said.index("done:")
    shown = b"".join(path.read_bytes() for path in (folder / "tensorboard").iterdir())
    assert b"sample" in shown


def test_no_sample_when_it_is_turned_off(tmp_path, capsys):
    write_text(tmp_path)
    assert train_command(load_config(sections(tmp_path), {"eval.sample_tokens": 0})) == 0
    assert "what the model writes now:" not in capsys.readouterr().err


@pytest.mark.parametrize("mesh", OTHER_MESHES, ids=["own", "tensor", "data,zero=3"])
def test_eval_is_that_of_the_run_on_any_mesh(trained, mesh, capsys):
    folder, _ = trained
    code, out, _ = answer(capsys, "eval", str(folder), "--json", *mesh)
    result = json.loads(out)
    (last,) = [e for e in read_events(folder / "metrics.jsonl") if e["event"] == "eval"]
    assert (code, result["step"]) == (0, 2)
    assert abs(result["val_loss"] - last["val_loss"]) <= 1e-5 * last["val_loss"]


def test_a_loss_that_is_no_number_is_said_and_fails(trained, monkeypatch, capsys):
    def poisoned(config, program):
        state = restore_newest(config, program)
        return state.replace(params=jax.tree.map(lambda leaf: leaf * jnp.nan, state.params))

    monkeypatch.setattr("shardtrain.commands_trained.restore_newest", poisoned)
    code, out, err = answer(capsys, "eval", str(trained[0]), "--json")
    assert (code, json.loads(out)) == (1, {"step": 2, "val_loss": None})
    assert "the loss is no number: the weights of step 2" in err
    assert len(err.strip().splitlines()) == 1


def test_generate_is_the_same_on_any_mesh(trained, capsys):
    folder, _ = trained
    words = ("generate", str(folder), "--prompt", "to be", "--tokens", "40", "--json")
    results = []
    for mesh in OTHER_MESHES:
        code, out, err = answer(capsys, *words, "--temperature", "0", *mesh)
        assert code == 0
        assert "note: the model has 16 positions, the text 45" in err
        results.append(json.loads(out))
    assert results[0]["step"] == 2
    assert results[0]["prompt"] == "to be"
    assert results[0]["text"]
    assert results[0] == results[1] == results[2]


def test_generate_needs_no_data(trained, capsys):
    folder, _ = trained
    text = folder.parent / "my.txt"
    text.rename(folder.parent / "gone.txt")
    try:
        code, out, _ = answer(capsys, "generate", str(folder), "--prompt", "or", "--tokens", "5")
    finally:
        (folder.parent / "gone.txt").rename(text)
    assert code == 0
    assert out.startswith("or")


def test_a_prompt_of_any_bytes_is_printed(trained, capsys):
    folder, _ = trained
    code, out, _ = answer(
        capsys, "generate", str(folder), "--prompt", "\udcff\x1b[2J", "--tokens", "30"
    )
    assert code == 0
    assert "\x1b" not in out


@pytest.mark.parametrize("command", ["generate", "eval"])
def test_a_run_without_checkpoint_says_so(tmp_path, capsys, command):
    write_text(tmp_path)
    config = sections(tmp_path)
    (tmp_path / "run").mkdir()
    from shardtrain.config import to_toml

    (tmp_path / "run" / "resolved.toml").write_text(to_toml(load_config(config)))
    code, out, err = answer(capsys, command, str(tmp_path / "run"))
    assert (code, out) == (2, "")
    assert "this run has no complete checkpoint" in err
    assert "shardtrain train" in err


def test_a_negative_number_is_refused(trained, capsys):
    folder, _ = trained
    code, _, err = answer(capsys, "generate", str(folder), "--tokens", "-3")
    assert code == 2
    assert "tokens: must be 0 or more" in err


def test_another_model_is_refused(trained):
    folder, _ = trained
    from shardtrain.commands_trained import eval_command

    with pytest.raises(CheckpointError, match="does not fit this run"):
        eval_command(load_config(folder, {"model.embed_dim": 32}), json=True)


def test_nothing_to_evaluate_on_is_said(trained, capsys):
    folder, _ = trained
    code, _, err = answer(capsys, "eval", str(folder), "--eval.steps", "0")
    assert code == 2
    assert "there is nothing to evaluate on" in err
