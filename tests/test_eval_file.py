"""The loss over a file: every token but the first once, whatever mesh, and in which units."""

import json
import math
import shutil
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from shardtrain import cli
from shardtrain.config import load_config
from shardtrain.data.prepare import prepare
from shardtrain.training import train_command
from tests.interop.imported import MODELS, logits_of, run_import
from tests.rows import shortened

LENGTH = 16


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("eval_file")
    (folder / "my.txt").write_text("to be or not to be, that is the question. " * 50)
    sections: dict[str, Any] = {
        "run": {"dir": str(folder / "run"), "steps": 3, "cpu_devices": 8},
        "model": {"num_layers": 1, "embed_dim": 16, "num_heads": 4, "vocab_size": 256},
        "data": {"path": str(folder / "my.txt"), "sequence_length": LENGTH, "batch_size": 8},
        "mesh": {"data": 4, "tensor": 2},
        "optimizer": {"learning_rate": 0.05},
        "eval": {"sample_tokens": 0},
    }
    assert train_command(load_config(sections)) == 0
    return folder / "run"


def plain_nats(run: Path, tokens: np.ndarray) -> tuple[float, int]:
    """The same by NumPy, from one device's scores: windows of so many targets, the last shorter."""
    total, count = 0.0, 0
    for start in range(0, len(tokens) - 1, LENGTH):
        window = tokens[start : start + LENGTH + 1].astype(np.int32)
        scores = logits_of(run, window[None, :-1], {"mesh.data": 8, "mesh.tensor": 1})[0]
        scores = scores.astype(np.float64)
        logs = scores - np.log(np.exp(scores).sum(-1, keepdims=True))
        total -= logs[np.arange(len(window) - 1), window[1:]].sum()
        count += len(window) - 1
    return total, count


def evaluate(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    assert cli.main(["eval", *words, "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


@pytest.mark.parametrize(
    "size", shortened([2, LENGTH + 1, LENGTH + 2, 61], (2, LENGTH + 2).__contains__)
)
def test_every_token_but_the_first_is_predicted_once(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], size: int
) -> None:
    text = ("the question is to be or not " * 3)[:size]
    path = tmp_path / "file.txt"
    path.write_text(text)
    total, count = plain_nats(run, np.frombuffer(text.encode(), np.uint8))
    found = evaluate(capsys, str(run), "--data.path", str(path))
    assert count == found["targets"] == size - 1
    assert found["loss"] == pytest.approx(total / count, rel=1e-5)
    assert found["perplexity"] == pytest.approx(math.exp(total / count), rel=1e-4)
    assert found["bits_per_byte"] == pytest.approx(total / math.log(2) / size, rel=1e-5)
    assert (found["step"], found["tokens"], found["bytes"]) == (3, size, size)


def test_text_tokens_and_arrays_give_the_same_on_any_mesh(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = "not to be, that is what to question is. " * 4
    (tmp_path / "file.txt").write_text(text)
    ids = np.frombuffer(text.encode(), np.uint8)
    np.save(tmp_path / "ids.npy", ids)
    prepare([tmp_path / "file.txt"], tmp_path / "made", validation_fraction=0)
    files = ("file.txt", "ids.npy", "made/train.tokens")
    losses = [evaluate(capsys, str(run), "--data.path", str(tmp_path / f))["loss"] for f in files]
    mesh = ("--mesh.data", "2", "--mesh.tensor", "4", "--sharding.zero", "3")
    losses.append(evaluate(capsys, str(run), f"--data.path={tmp_path / 'file.txt'}", *mesh)["loss"])
    assert losses == pytest.approx([losses[0]] * 4, rel=1e-5)


def test_only_what_is_learned_counts_in_examples(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [{"prompt": "to be ", "completion": "or not"}] * 3
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = evaluate(capsys, str(run), "--data.path", str(tmp_path / "pairs.jsonl"))
    assert found["targets"] == 18


def test_what_cannot_be_evaluated_is_said(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def refused(path: Path) -> str:
        assert cli.main(["eval", str(run), "--data.path", str(path)]) == 2
        return capsys.readouterr().err

    assert "no such file" in refused(tmp_path / "nowhere.txt")
    (tmp_path / "short.txt").write_text("x")
    assert "there is nothing to predict" in refused(tmp_path / "short.txt")
    np.save(tmp_path / "far.npy", np.array([1, 300, 2]))
    assert "tokens that the model does not know" in refused(tmp_path / "far.npy")
    (tmp_path / "t.txt").write_text("some text " * 20)
    prepare([tmp_path / "t.txt"], tmp_path / "made")
    assert "more than one file of tokens" in refused(tmp_path / "made")


def test_imported_weights_without_tokenizer_never_read_text_as_bytes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = tmp_path / "source"
    source.mkdir()
    for path in (MODELS / "llama").iterdir():
        if path.name == "config.json" or "safetensors" in path.name:
            (source / path.name).write_bytes(path.read_bytes())
    assert run_import(source, tmp_path / "run") == 0
    (tmp_path / "t.txt").write_text("some text " * 200)
    capsys.readouterr()
    for words in (
        ("generate", str(tmp_path / "run"), "--prompt", "x"),
        ("eval", str(tmp_path / "run"), "--data.path", str(tmp_path / "t.txt")),
        ("train", str(tmp_path / "run"), "--data.path", str(tmp_path / "t.txt")),
    ):
        assert cli.main(list(words)) == 2
        assert "came without their tokenizer.json" in capsys.readouterr().err, words[0]
    np.save(tmp_path / "ids.npy", np.load(MODELS / "llama" / "ids.npy").reshape(-1))
    found = evaluate(capsys, str(tmp_path / "run"), "--data.path", str(tmp_path / "ids.npy"))
    assert found["bits_per_byte"] is None
    assert found["loss"] > 0
    assert jax.device_count() == 8


def test_weights_that_are_no_numbers_are_noted_and_their_loss_fails(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, ids, name = tmp_path / "source", tmp_path / "ids.npy", "transformer.h.1.mlp.c_fc.weight"
    shutil.copytree(MODELS / "gpt2", source)
    weights = load_file(source / "model.safetensors")
    weights[name][3, 5] = np.nan
    save_file(weights, source / "model.safetensors")
    np.save(ids, np.load(MODELS / "gpt2" / "ids.npy").reshape(-1))
    assert cli.main(["import", str(source), "--out", str(tmp_path / "run")]) == 0
    assert (
        capsys.readouterr().err.count(f"note: {name} has entries that are no finite numbers") == 1
    )
    assert cli.main(["eval", str(tmp_path / "run"), "--data.path", str(ids)]) == 1
    out, err = capsys.readouterr()
    assert "loss nan  perplexity nan  bits per byte" in out
    assert "the loss is no number: the weights of step 0" in err
