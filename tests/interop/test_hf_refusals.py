"""Folders that cannot be imported: exit 2, with the file and the tensor, and nothing is left."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from shardtrain import cli
from shardtrain.config import load_config
from tests.interop.imported import MODELS, run_import

Change = Callable[[Path], None]
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"


def config(**changes: Any) -> Change:
    def change(folder: Path) -> None:
        path = folder / "config.json"
        values = json.loads(path.read_text()) | changes
        path.write_text(json.dumps({k: v for k, v in values.items() if v is not ...}))

    return change


def rope(**values: Any) -> Change:
    return config(rope_parameters={"rope_theta": 10000.0, **values})


def tensors(change: Callable[[dict[str, np.ndarray]], Any]) -> Change:
    def apply(folder: Path) -> None:
        found = load_file(folder / WEIGHTS)
        change(found)
        save_file({n: np.ascontiguousarray(t) for n, t in found.items()}, folder / WEIGHTS)

    return apply


def index(file: str) -> Change:
    def change(folder: Path) -> None:
        path = folder / INDEX
        values = json.loads(path.read_text())
        values["weight_map"]["model.norm.weight"] = file
        path.write_text(json.dumps(values))

    return change


def cut(name: str, size: int) -> Change:
    return lambda folder: (folder / name).write_bytes((folder / name).read_bytes()[:size])


def remove(name: str) -> Change:
    return lambda folder: (folder / name).unlink()


def pickled(folder: Path) -> None:
    (folder / WEIGHTS).rename(folder / "pytorch_model.bin")


def second_shard(folder: Path) -> None:
    first, second = sorted(folder.glob("model-*.safetensors"))[:2]
    save_file(load_file(first) | load_file(second), second)


UP = "transformer.h.1.mlp.c_fc.weight"
LAYER = "model.layers.1.self_attn.k_proj.weight"
CASES: dict[str, tuple[str, Change, list[str]]] = {
    "missing tensor": (
        "gpt2",
        tensors(lambda t: t.pop(UP)),
        [f"{WEIGHTS}: {UP} is missing, [32, 128]"],
    ),
    "extra tensor": (
        "gpt2",
        tensors(lambda t: t.update({"score.weight": t[UP]})),
        [f"{WEIGHTS}: score.weight is no tensor of this gpt2"],
    ),
    "transposed": (
        "gpt2",
        tensors(lambda t: t.update({UP: t[UP].T})),
        [f"{WEIGHTS}: {UP} has another shape", "value: [128, 32]", "allowed: [32, 128]"],
    ),
    "type": (
        "gpt2",
        tensors(lambda t: t.update({UP: t[UP].astype(np.float64)})),
        [f"{WEIGHTS}: {UP} is of a type", "value: F64", "allowed: F32, BF16, F16"],
    ),
    "a head that is not tied": (
        "gpt2",
        tensors(lambda t: t.update({"lm_head.weight": t["transformer.wte.weight"] + 1})),
        ["lm_head.weight is not transformer.wte.weight, though config.json ties them"],
    ),
    "no head": (
        "gpt2",
        config(tie_word_embeddings=False),
        [f"{WEIGHTS}: lm_head.weight is missing, [261, 32]"],
    ),
    "all missing": (
        "gpt2",
        tensors(lambda t: [t.pop(name) for name in list(t)[2:]]),
        ["is missing", "and 18 more tensors"],
    ),
    "other kv heads": (
        "llama",
        config(num_key_value_heads=1),
        [f"{LAYER} has another shape", "value: [16, 32]", "allowed: [8, 32]"],
    ),
    "cut off": ("gpt2", cut(WEIGHTS, 90_000), [f"{WEIGHTS}: this file is damaged or cut off"]),
    "cut in the header": ("gpt2", cut(WEIGHTS, 100), [f"{WEIGHTS}: this file is damaged"]),
    "empty": ("gpt2", cut(WEIGHTS, 0), [f"{WEIGHTS}: this file is damaged or cut off"]),
    "one of several cut off": (
        "llama",
        cut("model-00002-of-00003.safetensors", 20_000),
        ["model-00002-of-00003.safetensors: this file is damaged or cut off"],
    ),
    "one of several missing": (
        "llama",
        remove("model-00003-of-00003.safetensors"),
        ["model-00003-of-00003.safetensors: this file is missing"],
    ),
    "a tensor twice": ("llama", second_shard, ["is in two files", "model-00001"]),
    "index leaves": (
        "llama",
        index("../secret.safetensors"),
        [INDEX, "model.norm.weight would be read from outside of this folder", "../secret"],
    ),
    "index is absolute": (
        "llama",
        index("/etc/model.safetensors"),
        [INDEX, "model.norm.weight would be read from outside of this folder"],
    ),
    "index names a pickle": (
        "llama",
        index("pytorch_model.bin"),
        [INDEX, "model.norm.weight would be read from outside", "no safetensors file"],
    ),
    "index is wrong": (
        "llama",
        index("model-00001-of-00003.safetensors"),
        ["model-00001-of-00003.safetensors: model.norm.weight is not in this file, though"],
    ),
    "index is no index": (
        "llama",
        lambda folder: (folder / INDEX).write_text("[]"),
        [f"{INDEX}: is no index of safetensors files"],
    ),
    "pickle": ("gpt2", pickled, ["pytorch_model.bin: weights in a pickle", "save_pretrained"]),
    "no weights": ("gpt2", remove(WEIGHTS), ["there are no weights in this folder"]),
    "no config": ("gpt2", remove("config.json"), ["this folder has no config.json"]),
    "no folder": ("gpt2", shutil.rmtree, ["there is no such folder"]),
    "no JSON": (
        "gpt2",
        lambda folder: (folder / "config.json").write_text("{"),
        ["config.json: cannot be read"],
    ),
    "model type": (
        "gpt2",
        config(model_type="mamba"),
        ['config.json: model_type: there is no such model here\n  value: "mamba"', "gpt2, llama"],
    ),
    "no model type": ("gpt2", config(model_type=...), ["model_type: there is no such model here"]),
    "size missing": ("gpt2", config(n_embd=...), ["config.json: n_embd: is missing"]),
    "size wrong": ("gpt2", config(n_embd="32"), ["n_embd: this model cannot", 'value: "32"']),
    "scaled attention": (
        "gpt2",
        config(scale_attn_by_inverse_layer_idx=True),
        ["scale_attn_by_inverse_layer_idx: this model cannot be expressed here\n  value: true"],
    ),
    "activation": (
        "gpt2",
        config(activation_function="quick_gelu"),
        ['activation_function: this model cannot be expressed here\n  value: "quick_gelu"'],
    ),
    "code of its own": ("gpt2", config(auto_map={"A": "b.C"}), ["auto_map: this model cannot"]),
    "quantized": (
        "llama",
        config(quantization_config={"quant_method": "gptq"}),
        ["quantization_config: this model cannot be expressed here"],
    ),
    "unknown key": (
        "gpt2",
        config(logit_softcap=30.0),
        ["logit_softcap: is not known, so it may change what the model computes\n  value: 30.0"],
    ),
    "sliding window": (
        "llama",
        config(sliding_window=4096),
        ["sliding_window: this model cannot be expressed here\n  value: 4096\n  allowed: null"],
    ),
    "one of two biases": (
        "llama",
        config(attention_bias=True),
        ["mlp_bias: this model cannot be expressed here\n  value: false\n  allowed: true"],
    ),
    "rope type": (
        "llama",
        rope(rope_type="yarn", factor=4.0),
        ['rope_parameters: rope_type: this model cannot be expressed here\n  value: "yarn"'],
    ),
    "rope of older versions": (
        "llama",
        config(rope_parameters=..., rope_scaling={"type": "dynamic", "factor": 2.0}),
        ['rope_scaling: rope_type: this model cannot be expressed here\n  value: "dynamic"'],
    ),
    "rope incomplete": (
        "llama",
        rope(rope_type="llama3", factor=4.0),
        ["rope_parameters: original_max_position_embeddings: is missing"],
    ),
    "rope key": (
        "llama",
        rope(rope_type="linear", factor=4.0, attention_factor=0.5),
        ["rope_parameters: attention_factor: is not known"],
    ),
    "post norm": (
        "bloom",
        config(apply_residual_connection_post_layernorm=True),
        ["apply_residual_connection_post_layernorm: this model cannot be expressed here"],
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_refused(case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    name, change, words = CASES[case]
    folder = tmp_path / "hf"
    shutil.copytree(MODELS / name, folder)
    change(folder)
    assert run_import(folder, tmp_path / "run") == 2
    out, err = capsys.readouterr()
    assert out == ""
    for word in words:
        assert word in err
    assert str(folder) in err
    assert len(err.splitlines()) <= 30
    assert "Traceback" not in err
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("case", ["missing", "shape"])
def test_a_run_is_not_begun_with_them(
    case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`run.init`: by the headers alone, before the step is compiled and the folder is made."""
    folder, run, data = tmp_path / "hf", tmp_path / "run", tmp_path / "tokens.npy"
    shutil.copytree(MODELS / "gpt2", folder)

    def change(found: dict[str, np.ndarray]) -> None:
        found[UP] = found[UP][:-1]
        if case == "missing":
            del found[UP]

    tensors(change)(folder)
    np.save(data, np.arange(2000, dtype=np.uint16) % 90)
    places = ("--run.init", str(folder), "--run.dir", str(run), "--data.path", str(data))
    sizes = ("--data.sequence_length", "16", "--data.batch_size", "8", "--run.steps", "1")
    assert cli.main(["train", "finetune_lora", *places, *sizes]) == 2
    said = capsys.readouterr().err
    assert f"{UP} {'is missing' if case == 'missing' else 'has another shape'}" in said
    assert str(folder / WEIGHTS) in said
    assert "compil" not in said
    assert not run.exists()


def test_a_run_is_not_overwritten(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_import(MODELS / "bloom", tmp_path / "run") == 0
    before = (tmp_path / "run" / "resolved.toml").read_bytes()
    assert run_import(MODELS / "gpt2", tmp_path / "run") == 2
    assert "this folder is a run already" in capsys.readouterr().err
    assert (tmp_path / "run" / "resolved.toml").read_bytes() == before


def test_an_import_whose_weights_are_gone_is_not_drawn(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, data = tmp_path / "run", tmp_path / "tokens.npy"
    assert run_import(MODELS / "llama", run) == 0
    shutil.rmtree(run / "checkpoints")
    np.save(data, np.arange(2000, dtype=np.uint16) % 90)
    sizes = ("--data.sequence_length", "16", "--data.batch_size", "8", "--run.steps", "1")
    assert cli.main(["train", str(run), "--data.path", str(data), *sizes]) == 2
    said = capsys.readouterr().err
    assert "the checkpoints of this run are gone" in said
    assert "none, and its weights were imported" in said


def test_a_mesh_that_does_not_divide(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_import(MODELS / "llama", tmp_path / "run", "--mesh.tensor", "4") == 2
    assert "mesh.tensor=4: model.num_kv_heads=2" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "key", "value", "theirs"),
    [
        ("llama", "rope_theta", "5.0", "10000.0"),
        ("llama", "norm_epsilon", "0.1", "1e-06"),
        ("llama", "num_layers", "3", "2"),
        ("llama", "num_heads", "3", "4"),  # which would not divide the width either
    ],
)
def test_the_weights_settle_the_model(
    name: str, key: str, value: str, theirs: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_import(MODELS / name, tmp_path / "run", f"--model.{key}", value) == 2
    assert capsys.readouterr().err.splitlines() == [
        f"model.{key}: the weights of {MODELS / name} are of another model",
        f"  value: {value}",
        f"  allowed: {theirs}",
        f"  to do: leave model.{key} out: config.json there has it",
    ]
    assert not (tmp_path / "run").exists()


def test_padding_and_what_changes_no_meaning_are_free(tmp_path: Path) -> None:
    flags = ("--model.vocab_multiple", "32", "--model.dropout", "0.3", "--model.num_layers", "2")
    assert run_import(MODELS / "llama", tmp_path / "run", *flags) == 0
    model = load_config(tmp_path / "run").model
    assert (model.vocab_multiple, model.dropout) == (32, 0.3)


def test_a_run_folder_that_cannot_be(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "file"
    file.write_text("mine")
    assert run_import(MODELS / "llama", file) == 2
    assert capsys.readouterr().err.startswith("--out: is a file, and a run has a directory\n")
    assert run_import(MODELS / "llama", file / "run") == 2
    err = capsys.readouterr().err
    assert err.startswith("--out: the run directory cannot be written\n")
    assert "to do: take another --out, on a disk that you may write" in err
    assert file.read_text() == "mine"


def test_one_folder_is_given_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_import(MODELS / "llama", tmp_path / "run", "--run.dir", "elsewhere") == 2
    assert "--run.dir: the folder of an import is --out" in capsys.readouterr().err


def test_without_a_folder(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["import", "--out", "run"]) == 2
    assert "HF_DIR is missing" in capsys.readouterr().err
