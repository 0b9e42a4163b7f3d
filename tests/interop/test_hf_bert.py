"""BERT of transformers: the same scores, the same tensors back, old names, and what is refused."""

import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

from shardtrain import cli
from shardtrain.commands_trained import restore_newest
from shardtrain.config import load_config
from shardtrain.run_program import make_program
from shardtrain.sharding.rules import use_rules
from shardtrain.strategies.stack import make_stack
from tests.interop.imported import BERTS, MODELS, run_import, tensors_in
from tests.interop.make_fixtures import LONG, bert_inputs

FUNCTION = (
    *("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size"),
    *("hidden_act", "layer_norm_eps", "max_position_embeddings", "type_vocab_size", "vocab_size"),
    *("tie_word_embeddings", "hidden_dropout_prob", "architectures", "model_type"),
)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tokenizers = pytest.importorskip("tokenizers")
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    words = {f"w{i}": i for i in range(256)} | {"[CLS]": 256, "[SEP]": 257, "[MASK]": 258}
    words |= {"[PAD]": 259, "[UNK]": 260}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="[UNK]"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    made.save(str(path))
    return path


def imported(source: Path, out: Path, tokenizer: Path) -> int:
    return run_import(source, out, "--data.tokenizer", str(tokenizer))


def scores_of(run: Path, ids: np.ndarray, overrides: dict[str, Any]) -> list[np.ndarray]:
    """The scores of every token, and of the next sentence where there is such a head."""
    config = load_config(run, overrides)
    program = make_program(config, vocab_size=config.model.vocab_size)
    state = restore_newest(config, program)
    inputs = bert_inputs(ids)
    rows = {
        "tokens": ids,
        "parts": inputs["token_type_ids"],
        "segments": inputs["attention_mask"],
        "predicted": np.broadcast_to(np.arange(ids.shape[1]), ids.shape),
    }
    times = program.layout.mesh.size
    batch = {name: np.tile(array, (times, 1)).astype(np.int32) for name, array in rows.items()}

    @jax.jit
    def scores(params: Any, batch: Any) -> list[jax.Array]:
        with use_rules(program.layout.compute, program.layout.mesh):
            model = nnx.merge(program.graph, params)
            x = model.hidden(batch, None, make_stack())
            both = [model.token_scores(x, batch["predicted"])]
            return both + ([model.next_scores(x)] if config.model.next_sentence else [])

    tokens, *rest = map(np.asarray, scores(state.weights, batch))
    return [tokens[: len(ids), :, : config.model.vocab_size], *(r[: len(ids)] for r in rest)]


@pytest.mark.parametrize("name", BERTS)
def test_scores_are_those_of_transformers(name: str, tmp_path: Path, tokenizer: Path) -> None:
    """Two parts, padding, a vocabulary padded to 384 rows over tensor 2."""
    assert imported(MODELS / name, tmp_path / "run", tokenizer) == 0
    ids = np.load(MODELS / name / "ids.npy")
    mesh = {"mesh.data": 4, "mesh.tensor": 2, "sharding.zero": 3, "data.sequence_length": 24}
    found = scores_of(tmp_path / "run", ids, {**mesh, "train.precision": "float32"})
    wanted = [np.load(MODELS / name / "logits.npy")]
    if name == "bert":
        wanted.append(np.load(MODELS / name / "next.npy"))
    assert len(found) == len(wanted)
    there = bert_inputs(ids)["attention_mask"] > 0
    assert not there[0, LONG:].any()
    np.testing.assert_allclose(found[0][there], wanted[0][there], atol=1e-4, rtol=0)
    for own, theirs in zip(found[1:], wanted[1:], strict=True):
        np.testing.assert_allclose(own, theirs, atol=1e-4, rtol=0)


@pytest.mark.parametrize("name", BERTS)
def test_there_and_back(name: str, tmp_path: Path, tokenizer: Path) -> None:
    """Every tensor has its name, type, shape and bits; the tied decoder is not written twice."""
    assert imported(MODELS / name, tmp_path / "run", tokenizer) == 0
    assert cli.main(["export", str(tmp_path / "run"), "--out", str(tmp_path / "hf")]) == 0
    assert tensors_in(tmp_path / "hf") == tensors_in(MODELS / name)
    before, after = (
        json.loads((p / "config.json").read_text()) for p in (MODELS / name, tmp_path / "hf")
    )
    assert {key: after[key] for key in FUNCTION} == {key: before[key] for key in FUNCTION}
    assert (tmp_path / "hf" / "tokenizer.json").read_bytes() == tokenizer.read_bytes()


def copied(
    name: str, folder: Path, changes: dict[str, Any], tensors: dict[str, np.ndarray] | None = None
) -> Path:
    """A model with another config.json, or with other tensors."""
    folder.mkdir()
    config = json.loads((MODELS / name / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))
    kept = load_file(MODELS / name / "model.safetensors") if tensors is None else tensors
    save_file(kept, folder / "model.safetensors")
    return folder


def test_older_files_are_read(tmp_path: Path, tokenizer: Path) -> None:
    """As the first published ones are: gamma and beta, tied tensors written out, positions."""
    tensors = load_file(MODELS / "bert" / "model.safetensors")
    ends = {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}
    old = {}
    for name, tensor in tensors.items():
        end = next((end for end in ends if name.endswith(end)), "")
        old[name.removesuffix(end) + ends.get(end, "")] = tensor
    old["cls.predictions.decoder.weight"] = old["bert.embeddings.word_embeddings.weight"].copy()
    old["cls.predictions.decoder.bias"] = old["cls.predictions.bias"].copy()
    old["bert.embeddings.position_ids"] = np.arange(512)[None]
    source = copied("bert", tmp_path / "old", {}, old)
    assert imported(source, tmp_path / "run", tokenizer) == 0
    assert cli.main(["export", str(tmp_path / "run"), "--out", str(tmp_path / "hf")]) == 0
    assert tensors_in(tmp_path / "hf") == tensors_in(MODELS / "bert")


def test_the_head_for_pairs_is_left_out_where_the_config_has_none(
    tmp_path: Path, tokenizer: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As in bert-base-uncased, whose files have more than its `architectures` says."""
    source = copied("bert", tmp_path / "source", {"architectures": ["BertForMaskedLM"]})
    words = ["import", str(source), "--out", str(tmp_path / "run")]
    assert cli.main([*words, "--data.tokenizer", str(tokenizer)]) == 0
    assert "write BertForPreTraining there to keep them" in capsys.readouterr().err
    assert not load_config(tmp_path / "run").model.next_sentence


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"position_embedding_type": "relative_key"}, "position_embedding_type"),
        ({"type_vocab_size": 1}, "type_vocab_size"),
        ({"is_decoder": True}, "is_decoder"),
        ({"tie_word_embeddings": False}, "tie_word_embeddings"),
        ({"architectures": ["BertForQuestionAnswering"]}, "BertForQuestionAnswering"),
    ],
)
def test_what_has_no_counterpart_is_refused(
    changes: dict[str, Any],
    words: str,
    tmp_path: Path,
    tokenizer: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    source = copied("bert", tmp_path / "source", changes)
    assert imported(source, tmp_path / "run", tokenizer) == 2
    assert words in capsys.readouterr().err


def test_a_decoder_of_its_own_is_refused(
    tmp_path: Path, tokenizer: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tensors = load_file(MODELS / "bert" / "model.safetensors")
    tensors["cls.predictions.decoder.weight"] = (
        tensors["bert.embeddings.word_embeddings.weight"] + 1
    )
    source = copied("bert", tmp_path / "source", {}, tensors)
    assert imported(source, tmp_path / "run", tokenizer) == 2
    assert "though config.json ties them" in capsys.readouterr().err


@pytest.mark.campaign
def test_a_model_that_was_imported_is_pre_trained_further(tmp_path: Path, tokenizer: Path) -> None:
    """`run.init` of a folder: the model comes from there, and so do its weights."""
    lines = (" ".join(f"w{(3 * i + k) % 256}" for k in range(20 + i % 9)) for i in range(80))
    text = tmp_path / "text.jsonl"
    text.write_text("\n".join(json.dumps({"text": line}) for line in lines))
    sections = {
        "run": {"steps": 1, "init": str(MODELS / "bert"), "dir": str(tmp_path / "run")},
        "model": {"type": "bert"},
        "data": {
            "path": str(text),
            "tokenizer": str(tokenizer),
            "sequence_length": 32,
            "batch_size": 8,
        },
        "optimizer": {"learning_rate": 1e-9},
    }
    config = load_config(sections)
    assert (config.model.embed_dim, config.model.max_length) == (32, 512)
    import shardtrain as st

    run = st.build(config)
    state = st.train(run)
    kept = load_file(MODELS / "bert" / "model.safetensors")
    name = "bert.encoder.layer.1.intermediate.dense.weight"
    found = np.asarray(state.params["layers"]["mlp"]["up"])[1]
    np.testing.assert_allclose(found.T, kept[name], atol=1e-6)
