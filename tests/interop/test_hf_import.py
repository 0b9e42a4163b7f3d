"""Imported models compute what transformers computes, on any mesh, and go on from there."""

import json
from pathlib import Path

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from shardtrain import cli
from shardtrain.checkpoint.checkpointer import Checkpointer
from shardtrain.config import load_config
from shardtrain.train.metrics import read_entries
from tests.interop.imported import MODELS, NAMES, logits_of, run_import

FOUR = {
    "mesh.data": 2,
    "mesh.tensor": 2,
    "mesh.replica": 2,
    "sharding.zero": 3,
    "sharding.sequence_parallel": True,
}


def flags(values: dict[str, object]) -> list[str]:
    return [word for key, value in values.items() for word in (f"--{key}", str(value))]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every model, imported onto a mesh: two thirds of it matter only to where leaves rest."""
    folder = tmp_path_factory.mktemp("imported")
    for name in NAMES:
        mesh = FOUR if name != "llama3" else {"mesh.data": 8, "sharding.zero": 3}
        assert run_import(MODELS / name, folder / name, *flags(mesh)) == 0
    return folder


@pytest.mark.parametrize("name", NAMES)
def test_logits_on_a_mesh(runs: Path, name: str) -> None:
    """Tensor 2 x data 2 x replica 2, ZeRO 3; llama3 has one key head and is split by data only."""
    found = logits_of(runs / name, np.load(MODELS / name / "ids.npy"))
    np.testing.assert_allclose(found, np.load(MODELS / name / "logits.npy"), atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", NAMES)
def test_logits_on_another_layout(runs: Path, name: str) -> None:
    """Read back on eight plain data shards; imported on another mesh."""
    plain = {"mesh.data": 8, "mesh.tensor": 1, "mesh.replica": 1, "sharding.zero": 0}
    overrides = {**plain, "sharding.sequence_parallel": False}
    found = logits_of(runs / name, np.load(MODELS / name / "ids.npy"), overrides)
    np.testing.assert_allclose(found, np.load(MODELS / name / "logits.npy"), atol=1e-5, rtol=0)


def test_a_model_is_drawn_such_that_the_reference_is_a_test() -> None:
    """Logits of a few units, and far from each other: no weight is lost in rounding."""
    for name in NAMES:
        logits = np.load(MODELS / name / "logits.npy")
        assert logits.std() > 0.3
        assert np.abs(logits).max() < 10


def test_the_config_beside_it(runs: Path) -> None:
    config = load_config(runs / "llama3")
    assert config.run.dir == str(runs / "llama3")
    model = config.model
    assert (model.num_kv_heads, model.head_dim, model.tied) == (1, 8, True)
    assert (model.rope_scaling, model.rope_factor, model.rope_trained_length) == ("llama3", 4, 16)
    assert (model.norm, model.norm_epsilon) == ("rmsnorm", 1e-6)
    assert model.padded_vocab(0) == 384
    gpt2 = load_config(runs / "gpt2").model
    assert (gpt2.max_length, gpt2.activation) == (40, "gelu_tanh")
    assert (gpt2.dropout, gpt2.attention_dropout) == (0.1, 0.1)


def test_padding_of_the_vocabulary_is_zero(runs: Path) -> None:
    """O-18 and tied heads: the rows that no checkpoint has are zero in the table."""
    with Checkpointer(runs / "gpt2" / "checkpoints") as checkpoints:
        params = checkpoints.restore_host(0)["params"]
    assert params["embedding"].shape == (384, 32)
    assert not params["embedding"][261:].any()
    assert "head" not in params
    assert params["embedding"].dtype == np.float32


def byte_tokenizer(folder: Path) -> Path:
    """A tokenizer.json whose tokens are bytes, for models that came without one."""
    tokenizers = pytest.importorskip("tokenizers")
    letters = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    made = tokenizers.Tokenizer(
        tokenizers.models.BPE({letter: i for i, letter in enumerate(letters)}, [])
    )
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    made.save(str(folder / "tokenizer.json"))
    return folder / "tokenizer.json"


def test_eval_generate_and_train_take_it(
    runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Precision, optimizer, data, steps and mesh are still open at step 0."""
    text = tmp_path / "my.txt"
    text.write_text("\n".join(f"a line of text, number {i}" for i in range(200)))
    data = ["--data.path", str(text), "--data.sequence_length", "16", "--data.batch_size", "8"]
    words = ["--data.tokenizer", str(byte_tokenizer(tmp_path))]
    data += words
    run = str(runs / "llama")
    assert cli.main(["eval", run, "--json", *data]) == 0
    before = json.loads(capsys.readouterr().out)
    assert before["step"] == 0
    assert cli.main(["generate", run, *words, "--tokens", "4", "--temperature", "0", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["step"] == 0
    changed = {
        "run.steps": 4,
        "optimizer.name": "lion",
        "optimizer.learning_rate": 1e-2,
        "train.precision": "bfloat16",
        "sharding.zero": 1,
        "eval.every": 4,
        "eval.sample_tokens": 0,
        "log.trackers": "tensorboard",
    }
    assert cli.main(["train", run, *data, *flags(changed)]) == 0
    rows = [row for row in read_entries(runs / "llama" / "metrics.jsonl") if "event" not in row]
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    assert abs(rows[0]["loss"] - before["loss"]) < 0.3
    assert rows[-1]["loss"] < rows[0]["loss"]
    capsys.readouterr()
    # from the first save on it is a run like any other
    assert cli.main(["train", run, *data, *flags({**changed, "optimizer.name": "adamw"})]) == 2
    assert "optimizer.name" in capsys.readouterr().err


def test_the_model_is_not_open(
    runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    np.save(tmp_path / "ids.npy", np.arange(40000) % 261)
    data = ("--data.path", str(tmp_path / "ids.npy"))
    assert cli.main(["train", str(runs / "bloom"), *data, "--model.norm_epsilon", "1e-3"]) == 2
    assert "model.norm_epsilon: 1e-05 -> 0.001" in capsys.readouterr().err


@pytest.mark.parametrize(
    "keys",
    [{"train.precision": "float16"}, {"offload.optimizer": "host", "sharding.zero": 1}],
    ids=["float16", "offload"],
)
def test_the_rest_of_the_state_is_made(runs: Path, keys: dict[str, object]) -> None:
    """A state of weights from elsewhere has all that an initial one has, in the same places."""
    from shardtrain.run_program import make_program
    from shardtrain.run_state import restore_state

    config = load_config(runs / "gpt2", keys)
    program = make_program(config, vocab_size=config.model.vocab_size)
    with Checkpointer(runs / "gpt2" / "checkpoints") as checkpoints:
        state = restore_state(checkpoints, 0, program)
    found = jax.tree.map(lambda x: (x.shape, x.dtype, x.sharding), state)
    wanted = jax.tree.map(lambda x: (x.shape, x.dtype, x.sharding), program.abstract_state)
    assert found == wanted


def test_stages_get_their_layers(runs: Path) -> None:
    """Weights in model order rest in a stack that a pipeline shares out."""
    from shardtrain.commands_trained import restore_newest
    from shardtrain.run_program import make_program

    mesh = {"mesh.pipeline": 2, "mesh.data": 2, "mesh.tensor": 2, "mesh.replica": 1}
    layers = {"pipeline.layout": "E1,1H", "train.microbatches": 2, "data.batch_size": 8}
    config = load_config(runs / "gpt2", {**mesh, **layers})
    program = make_program(config, vocab_size=config.model.vocab_size)
    state = restore_newest(config, program)
    found = jax.device_get(program.in_model_order(state.params))
    with Checkpointer(runs / "gpt2" / "checkpoints") as checkpoints:
        saved = checkpoints.restore_host(0)["params"]
    jax.tree.map(np.testing.assert_array_equal, found, saved)


def test_half_precision_files_lose_nothing(tmp_path: Path) -> None:
    """Weights in 16 bits are held in 32 exactly, whatever precision the run has."""
    source = tmp_path / "half"
    source.mkdir()
    (source / "config.json").write_text((MODELS / "gpt2" / "config.json").read_text())
    tensors = load_file(MODELS / "gpt2" / "model.safetensors")
    half = {name: tensor.astype(np.float16) for name, tensor in tensors.items()}
    save_file(half, source / "model.safetensors")
    assert run_import(source, tmp_path / "run", "--train.precision", "bfloat16") == 0
    with Checkpointer(tmp_path / "run" / "checkpoints") as checkpoints:
        params = checkpoints.restore_host(0)["params"]
    found = params["layers"]["mlp"]["down"][1]
    wanted = half["transformer.h.1.mlp.c_proj.weight"].astype(np.float32).T
    np.testing.assert_array_equal(found, wanted)


def test_a_moved_run_finds_its_tokenizer(tmp_path: Path) -> None:
    """The folder goes where it likes, with the tokenizer that lies in it."""
    source = tmp_path / "hf"
    source.mkdir()
    for path in (MODELS / "gpt2").iterdir():
        (source / path.name).write_bytes(path.read_bytes())
    (source / "tokenizer.json").write_text("{}")
    assert run_import(source, tmp_path / "run") == 0
    assert load_config(tmp_path / "run").data.tokenizer == str(tmp_path / "run" / "tokenizer.json")
    (tmp_path / "run").rename(tmp_path / "moved")
    moved = load_config(tmp_path / "moved")
    assert moved.data.tokenizer == str(tmp_path / "moved" / "tokenizer.json")
    assert (tmp_path / "moved" / "tokenizer.json").read_text() == "{}"
