"""Fine-tuning: from a run, a checkpoint or a Hugging Face folder, all weights or LoRA."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shardtrain import cli
from shardtrain.commands_trained import restore_newest
from shardtrain.config import load_config
from shardtrain.data.tokenizer import ByteTokenizer
from shardtrain.errors import CheckpointError, ConfigError
from shardtrain.run import build, make_generator
from shardtrain.run_program import make_program
from shardtrain.sharding.placement import leaves_by_path
from shardtrain.training import train_command
from tests.interop.imported import MODELS, logits_of, run_import

TEXT = "a prompt, its answer, and again the prompt. " * 40
IDS = np.arange(24, dtype=np.int32).reshape(2, 12)


def pairs(folder: Path, count: int = 60) -> Path:
    rows = [{"prompt": f"{n}+1=", "completion": f"{n + 1}"} for n in range(count)]
    path = folder / "pairs.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def tune(folder: Path, name: str, init: Path, **keys: Any) -> dict[str, Any]:
    """Sections without a model: that comes with the weights."""
    sections: dict[str, Any] = {
        "run": {"dir": str(folder / name), "steps": 4, "init": str(init), "cpu_devices": 8},
        "lora": {"rank": 3, "targets": "qkv,out,up,down"},
        "data": {"path": str(pairs(folder)), "sequence_length": 16, "batch_size": 8},
        "mesh": {"data": 4, "tensor": 2},
        "sharding": {"zero": 3},
        "optimizer": {"learning_rate": 0.02},
        "eval": {"sample_tokens": 0, "steps": 2},
        "checkpoint": {"every": 2},
    }
    for key, value in keys.items():
        section, _, name = key.partition("__")
        sections[section][name] = value
    return sections


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fine_tune")


@pytest.fixture(scope="module")
def base(folder: Path) -> Path:
    """A small run to begin with."""
    (folder / "text.txt").write_text(TEXT)
    sections = tune(folder, "base", folder / "nothing")
    sections |= {"lora": {}, "model": {"num_layers": 1, "embed_dim": 16, "num_heads": 2}}
    sections["model"] |= {"norm": "rmsnorm", "position": "rope", "bias": False}
    sections["model"] |= {"activation": "swiglu", "vocab_size": 256}
    sections["run"] |= {"init": "", "steps": 2}
    sections["data"]["path"] = str(folder / "text.txt")
    assert train_command(load_config(sections)) == 0
    return folder / "base"


@pytest.fixture(scope="module")
def tuned(folder: Path, base: Path) -> Path:
    assert train_command(load_config(tune(folder, "tuned", base))) == 0
    return folder / "tuned"


def params_of(run: Path) -> dict[str, np.ndarray]:
    config = load_config(run)
    program = make_program(config, vocab_size=256)
    state = restore_newest(config, program)
    return {path: np.asarray(leaf) for path, leaf in leaves_by_path(state.weights)}


def test_the_base_is_saved_once_and_steps_hold_adapters(tuned: Path, base: Path) -> None:
    steps = tuned / "checkpoints"
    record = json.loads((steps / "4" / "checkpoint.json").read_text())
    assert {name.rpartition("/")[2] for name in record["leaves"] if "params" in name} == {
        "lora_a",
        "lora_b",
    }
    assert [path.name for path in (tuned / "base").iterdir()] == ["0"]
    kept = params_of(tuned)
    for path, value in params_of(base).items():
        frozen = kept.get(path, kept.get(f"{path}/base"))
        np.testing.assert_array_equal(frozen, value, err_msg=path)


def test_it_goes_on_from_its_own_checkpoint_to_the_bit(
    folder: Path, base: Path, tuned: Path
) -> None:
    """Stopped, and gone on with after the weights that it began with are gone."""
    copy = folder / "copy of base"
    shutil.copytree(base, copy)
    sections = tune(folder, "stopped", copy, run__stop_at=2)
    assert train_command(load_config(sections)) == 0
    shutil.rmtree(copy)
    assert train_command(load_config(folder / "stopped", {"run.stop_at": 0})) == 0
    found = params_of(folder / "stopped")
    for path, value in params_of(tuned).items():
        np.testing.assert_array_equal(found[path], value, err_msg=path)


def test_eval_on_another_mesh_and_generate_beside_the_base(
    tuned: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    alone = ("--mesh.data", "8", "--mesh.tensor", "1", "--sharding.zero", "0")
    losses = []
    for mesh in ((), alone):
        assert cli.main(["eval", str(tuned), "--json", *mesh]) == 0
        losses.append(json.loads(capsys.readouterr().out)["val_loss"])
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    config = load_config(tuned)
    program, prompt = make_program(config, vocab_size=256), np.frombuffer(b"3+1=", np.uint8)
    generator = make_generator(config, program, ByteTokenizer())
    state = restore_newest(config, program)
    (drawn,) = generator.draw(state.weights, prompt, tokens=1, temperature=0, seed=0)
    assert drawn == logits_of(tuned, prompt[None])[0, -1].argmax()


def test_an_export_has_the_merged_weights(tuned: Path, folder: Path) -> None:
    """What another program reads computes what base and change compute."""
    out = folder / "hf"
    assert cli.main(["export", str(tuned), "--out", str(out), "--json"]) == 0
    assert run_import(out, folder / "again") == 0
    mine = logits_of(tuned, IDS)
    np.testing.assert_allclose(logits_of(folder / "again", IDS), mine, atol=2e-5, rtol=0)
    kept = params_of(tuned)
    assert max(np.abs(v).max() for p, v in kept.items() if p.endswith("lora_b")) > 1e-3


def test_a_lora_run_can_be_begun_with_and_is_merged(folder: Path, tuned: Path) -> None:
    sections = tune(folder, "further", tuned / "checkpoints" / "4", lora__rank=0, run__steps=0)
    sections["checkpoint"] = {}
    config = load_config(sections)
    state = build(config).init()
    kept, found = params_of(tuned), dict(leaves_by_path(state.params))
    for path, value in found.items():
        if path in kept:
            np.testing.assert_array_equal(value, kept[path], err_msg=path)
        else:
            assert np.abs(np.asarray(value) - kept[f"{path}/base"]).max() > 0, path


def test_from_a_hugging_face_folder(folder: Path) -> None:
    """Straight from the folder: model, weights, and what lies beside them for an export."""
    rows = np.arange(2000, dtype=np.uint16) % 90
    np.save(folder / "tokens.npy", rows)
    sections = tune(folder, "from_hf", MODELS / "llama", run__steps=1)
    sections["data"] |= {"path": str(folder / "tokens.npy"), "tokenizer": "bytes"}
    sections["optimizer"]["learning_rate"] = 1e-9
    sections["eval"]["steps"] = 0
    assert train_command(load_config(sections)) == 0
    ids = np.load(MODELS / "llama" / "ids.npy")
    found = logits_of(folder / "from_hf", ids)
    np.testing.assert_allclose(found, np.load(MODELS / "llama" / "logits.npy"), atol=1e-4, rtol=0)
    assert (folder / "from_hf" / "hf_config.json").is_file()


def test_other_frozen_weights_are_refused(
    folder: Path, tuned: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = folder / "other"
    shutil.copytree(tuned, other)
    record = other / "base" / "0" / "checkpoint.json"
    shutil.rmtree(other / "base")
    config = load_config(other)
    program = make_program(config, vocab_size=256)
    with pytest.raises(CheckpointError, match="are gone"):
        restore_newest(config, program)
    assert not record.exists()
    verify = ["checkpoints", str(other), "verify"]
    assert cli.main(verify) == 1
    assert "base: the frozen weights that steps 2, 4 were trained with are gone" in (
        capsys.readouterr().out
    )
    assert cli.main([*verify, "4", "--json"]) == 1
    assert "step 4 was trained with are gone" in json.loads(capsys.readouterr().out)["base"][0]
    shutil.copytree(folder / "from_hf" / "base", other / "base")
    with pytest.raises(CheckpointError, match="are others"):
        restore_newest(config, program)
    assert cli.main(verify) == 1
    assert "steps 2, 4 were trained with are others" in capsys.readouterr().out


def test_damage_of_frozen_weights_is_found(
    folder: Path, tuned: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = folder / "damaged"
    shutil.copytree(tuned, copy)
    assert cli.main(["checkpoints", str(copy), "verify", "4"]) == 0
    assert "base: every file and array is as it was saved" in capsys.readouterr().out
    largest = max((copy / "base").rglob("*"), key=lambda path: path.stat().st_size)
    content = bytearray(largest.read_bytes())
    content[len(content) // 2] ^= 1
    largest.write_bytes(content)
    assert cli.main(["checkpoints", str(copy), "verify", "4", "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["base"]


def test_weights_of_another_model_are_refused(folder: Path, base: Path) -> None:
    sections = tune(folder, "x", base) | {"model": {"num_layers": 3}}
    with pytest.raises(ConfigError, match=r"model\.num_layers=3|of another model"):
        load_config(sections)
    with pytest.raises(ConfigError, match="there is no such folder"):
        load_config(tune(folder, "x", folder / "nowhere"))
    with pytest.raises(ConfigError, match="there are no weights here"):
        load_config(tune(folder, "x", base / "checkpoints" / "77"))


def test_a_length_that_the_weights_have_no_positions_for(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The model cannot change, so the data is named; the shipped config has 256 tokens."""
    words = ["config", "finetune_lora", "--run.init", str(MODELS / "gpt2"), "--json"]
    assert cli.main(words) == 2
    told = "data.sequence_length=256: the weights have 40 positions; use 40 or less\n"
    assert capsys.readouterr().err == told
    assert cli.main([*words, "--data.sequence_length", "32"]) == 0
    assert json.loads(capsys.readouterr().out)["model"]["max_length"] == 40


def test_flags_alone_are_enough(
    folder: Path, base: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = folder / "lora.toml"
    file.write_text(
        "[run]\nsteps = 1\n[data]\nsequence_length = 16\nbatch_size = 8\n"
        "[optimizer]\nlearning_rate = 1e-3\n[lora]\nrank = 2\n"
    )
    assert cli.main(["config", str(file), "--run.init", str(base), "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["model"]["embed_dim"] == 16
    assert shown["lora"]["rank"] == 2
    assert cli.main(["config", str(file), "--run.init", str(base), "--model.num_layers", "5"]) == 2
    assert "the weights of run.init are of another model" in capsys.readouterr().err
