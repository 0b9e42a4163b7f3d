"""What is exported: the same tensors bit for bit, files that transformers loads, or a refusal."""

import errno
import json
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from shardtrain import cli
from shardtrain.interop import hf_files
from shardtrain.interop.hf_files import INDEX, WeightFiles, write_files
from tests.interop.imported import MODELS, NAMES, logits_of, run_import, tensors_in

FUNCTION = {
    "bloom": ("hidden_size", "n_layer", "n_head", "layer_norm_epsilon"),
    "gpt2": ("n_embd", "n_layer", "n_head", "n_positions", "activation_function", "resid_pdrop"),
    "llama": ("hidden_size", "num_key_value_heads", "head_dim", "rms_norm_eps", "hidden_act"),
}


def round_trip(source: Path, folder: Path, *words: str) -> Path:
    assert run_import(source, folder / "run") == 0
    assert cli.main(["export", str(folder / "run"), "--out", str(folder / "hf"), *words]) == 0
    return folder / "hf"


@pytest.mark.parametrize("name", NAMES)
def test_there_and_back(name: str, tmp_path: Path) -> None:
    """Every tensor has its name, type, shape and bits; tied heads and padding leave no trace."""
    out = round_trip(MODELS / name, tmp_path)
    assert tensors_in(out) == tensors_in(MODELS / name)
    assert not list(tmp_path.glob("*.tmp"))
    before, after = (json.loads((p / "config.json").read_text()) for p in (MODELS / name, out))
    assert after["model_type"] == before["model_type"]
    assert after["architectures"] == before["architectures"]
    for key in (*FUNCTION[before["model_type"]], "vocab_size", "tie_word_embeddings"):
        assert after[key] == before[key], key
    assert (after["eos_token_id"], after["torch_dtype"]) == (0, "float32")
    assert (out / "generation_config.json").read_bytes() == (
        MODELS / name / "generation_config.json"
    ).read_bytes()


def test_what_was_exported_is_imported_again(tmp_path: Path) -> None:
    out = round_trip(MODELS / "llama3", tmp_path)
    assert run_import(out, tmp_path / "again") == 0
    found = logits_of(tmp_path / "again", np.load(MODELS / "llama3" / "ids.npy"))
    np.testing.assert_allclose(found, np.load(MODELS / "llama3" / "logits.npy"), atol=1e-5, rtol=0)


def test_types_come_back_as_they_were(tmp_path: Path) -> None:
    """Files in 16 bits, one tensor in 32, names without prefix, a tied head written out."""
    source = tmp_path / "source"
    source.mkdir()
    (source / "config.json").write_text((MODELS / "gpt2" / "config.json").read_text())
    tensors = load_file(MODELS / "gpt2" / "model.safetensors")
    kept = "transformer.ln_f.weight"
    half = {n: t if n == kept else t.astype(ml_dtypes.bfloat16) for n, t in tensors.items()}
    plain = {name.removeprefix("transformer."): tensor for name, tensor in half.items()}
    plain["lm_head.weight"] = plain["wte.weight"]
    plain["h.0.attn.bias"] = np.ones((1, 1, 4, 4), np.float32)  # a mask, as old files have it
    save_file(plain, source / "model.safetensors")
    save_file(half, tmp_path / "expected.safetensors")
    out = round_trip(source, tmp_path)
    expected = tensors_in(tmp_path)
    assert tensors_in(out) == expected
    assert json.loads((out / "config.json").read_text())["torch_dtype"] == "bfloat16"


def test_another_type_on_demand(tmp_path: Path) -> None:
    out = round_trip(MODELS / "bloom", tmp_path, "--dtype", "float16")
    assert {tensor[:6] for tensor in tensors_in(out).values()} == {b"('F16'"}


def test_a_trained_run_is_exported_with_its_masters(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In bfloat16 what is exported are the float32 masters, not their rounded copies."""
    (tmp_path / "my.txt").write_text("\n".join(f"line {i} of a text" for i in range(200)))
    config = tmp_path / "my.toml"
    config.write_text(f"""
[run]
steps = 1
dir = "{tmp_path / "run"}"
[model]
num_layers = 1
embed_dim = 16
num_heads = 2
vocab_multiple = 32
[data]
path = "{tmp_path / "my.txt"}"
sequence_length = 16
batch_size = 8
[train]
precision = "bfloat16"
[optimizer]
learning_rate = 1e-3
[eval]
steps = 0
sample_tokens = 0
[log]
trackers = []
""")
    assert cli.main(["train", str(config)]) == 0
    capsys.readouterr()
    words = ["export", str(tmp_path / "run"), "--out", str(tmp_path / "hf"), "--json"]
    assert cli.main(words) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["step"], told["family"]) == (1, "gpt2")
    assert told["files"] == ["model.safetensors", "config.json"]
    found = load_file(tmp_path / "hf" / "model.safetensors")
    table = found["transformer.wte.weight"]
    assert (table.shape, table.dtype) == ((256, 16), np.float32)
    assert (table != table.astype(ml_dtypes.bfloat16).astype(np.float32)).any()
    values = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert (values["n_positions"], values["vocab_size"]) == (16, 256)
    assert told["parameters"] == sum(tensor.size for tensor in found.values())
    # a folder with something in it stays as it is
    assert cli.main(words) == 2
    assert "--out: is there already" in capsys.readouterr().err


def test_a_model_of_no_family_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_import(MODELS / "llama", tmp_path / "run") == 0
    words = ["export", str(tmp_path / "run"), "--out", str(tmp_path / "hf")]
    assert cli.main([*words, "--model.embed_norm", "True"]) == 2
    err = capsys.readouterr().err
    assert "model.embed_norm=True: llama has no counterpart\n  allowed: False" in err
    assert not (tmp_path / "hf").exists()


def test_a_folder_that_cannot_be_made(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_import(MODELS / "llama", tmp_path / "run") == 0
    (tmp_path / "file").write_text("mine")
    capsys.readouterr()
    for out, words in ((tmp_path / "file" / "hf", "Not a directory"), ("/proc/hf", "No such file")):
        assert cli.main(["export", str(tmp_path / "run"), "--out", str(out)]) == 2
        lines = capsys.readouterr().err.splitlines()
        assert lines[0].startswith(f"--out: cannot be made: {words}")
        assert lines[1:] == [
            f"  value: {out}",
            "  to do: take a folder on a disk that you may write",
        ]


def test_a_run_without_checkpoint_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["export", "quickstart", "--run.dir", str(tmp_path), "--out", str(tmp_path / "hf")]
    assert cli.main([*words, "--model.position", "learned"]) == 2
    assert "no complete checkpoint" in capsys.readouterr().err


def test_a_disk_that_takes_no_more_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    assert run_import(MODELS / "llama", tmp_path / "run") == 0
    monkeypatch.setattr(hf_files, "save_file", full)
    assert cli.main(["export", str(tmp_path / "run"), "--out", str(tmp_path / "hf")]) == 2
    assert "cannot be written: [Errno 28] No space left" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_large_exports_are_cut(tmp_path: Path) -> None:
    """Several files and an index, in the order in which tensors come."""
    tensors = {f"t{i}": np.full((i + 1, 4), i, np.float32) for i in range(6)}
    shapes = {name: (tensor.shape, "F32") for name, tensor in tensors.items()}
    paths = write_files(tmp_path, shapes, iter(tensors.items()), file_bytes=100)
    assert [path.name for path in paths] == [
        *(f"model-{i:05}-of-00004.safetensors" for i in range(1, 5)),
        INDEX,
    ]
    index = json.loads(paths[-1].read_text())
    assert index["metadata"]["total_size"] == 16 * 21
    files = WeightFiles(tmp_path)
    for name, tensor in tensors.items():
        np.testing.assert_array_equal(files.read(name), tensor)
