"""Configs: loading, what is said about wrong ones, and which layouts are legal."""

import pickle
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as draw
from pydantic import ValidationError

import shardtrain as st
from shardtrain.config import (
    MODELS,
    known_vocab,
    resolve_mesh,
    section_classes,
    to_template,
    with_defaults,
)
from shardtrain.config_effects import ineffective_settings
from shardtrain.config_files import shipped_configs
from shardtrain.data.config import DataConfig
from shardtrain.models.config import TransformerConfig
from shardtrain.plan.layout import divisors, layout_faults, listed, multiples
from shardtrain.sharding.config import MeshConfig, ShardingConfig
from shardtrain.train.rundir import changes

SMALL: dict[str, dict[str, Any]] = {
    "run": {"steps": 10},
    "model": {"num_layers": 4, "embed_dim": 64, "num_heads": 8},
    "data": {"sequence_length": 32, "batch_size": 16},
    "optimizer": {"learning_rate": 1e-3},
}
TEXT = st.to_toml(st.load_config(SMALL))


def refusal(source: Any, overrides: Mapping[str, Any] | None = None) -> str:
    with pytest.raises(st.ConfigError) as caught:
        st.load_config(source, overrides)
    return str(caught.value)


def written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "mine.toml"
    path.write_text(text, encoding="utf-8")
    return path


# -- loading

BEGUN_WITH = {"finetune_lora": str(Path(__file__).parent / "interop" / "models" / "llama")}
"""Weights for shipped configs that have no model of their own."""


@pytest.mark.parametrize("name", shipped_configs())
@pytest.mark.smoke312
def test_shipped_configs_load_and_survive_writing(name: str, tmp_path: Path) -> None:
    begun = {"run.init": BEGUN_WITH[name]} if name in BEGUN_WITH else {}
    config = st.load_config(name, begun)
    assert config.run.name == name
    assert config.run.dir == f"runs/{name}"
    assert st.load_config(written(tmp_path, st.to_toml(config))) == config
    again = st.load_config(written(tmp_path, to_template(config)))
    assert again.run.name == "mine"
    assert again.model_copy(update={"run": config.run}) == config
    assert ineffective_settings(config) == []


def test_the_shipped_configs_are_these() -> None:
    names = {"bench_medium", "bench_small", "bloom_style", "llama_style", "quickstart"}
    assert names <= set(shipped_configs())


def test_quickstart_is_data_4_tensor_2() -> None:
    config = st.load_config()
    degrees = resolve_mesh(config, config.run.cpu_devices)
    assert degrees == {"pipeline": 1, "replica": 1, "data": 4, "context": 1, "tensor": 2}


@pytest.mark.parametrize(
    ("name", "sizes"),
    [("bench_small", (6, 384, 6, 256, 256, 32)), ("bench_medium", (12, 768, 12, 50304, 512, 4))],
)
def test_bench_configs_are_the_models_of_the_comparison(name: str, sizes: tuple[int, ...]) -> None:
    c = st.load_config(name)
    m, o = c.model, c.optimizer
    data = (m.vocab_size, c.data.sequence_length, c.data.batch_size)
    assert (m.num_layers, m.embed_dim, m.num_heads, *data) == sizes
    assert (m.activation, m.bias, m.norm_bias, m.tied) == ("gelu_tanh", False, False, True)
    assert (o.learning_rate, o.beta1, o.beta2, o.weight_decay) == (3e-4, 0.9, 0.95, 0.1)
    assert (o.epsilon, o.clip_norm, o.schedule, o.warmup_steps) == (1e-8, 1.0, "constant", 0)
    assert not c.data.separate_documents


@pytest.mark.parametrize("name", ["quickstart", "quickstart.toml", "configs/quickstart.toml"])
def test_shipped_configs_are_found_from_any_folder(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert st.load_config(name) == st.load_config()


def test_a_local_file_goes_before_a_shipped_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "quickstart.toml").write_text(TEXT)
    assert st.load_config("quickstart.toml").run.steps == 10


def test_a_run_folder_is_a_config(tmp_path: Path) -> None:
    config = st.load_config(SMALL, {"run.dir": str(tmp_path)})
    (tmp_path / "resolved.toml").write_text(st.to_toml(config))
    assert st.load_config(tmp_path) == config
    moved = tmp_path.rename(tmp_path.with_name("moved"))  # a run goes on where it lies
    assert st.load_config(moved).run.dir == str(moved)
    assert st.load_config(moved, {"run.dir": "other"}).run.dir == "other"
    assert "no resolved.toml" in refusal(Path(__file__).parent)


def test_a_missing_config_names_the_nearest() -> None:
    assert "did you mean quickstart?" in refusal("quickstrat.toml")


def test_names_and_folders_are_filled_in(tmp_path: Path) -> None:
    text = TEXT.replace('name = "run"', "").replace('dir = "runs/run"', "")
    assert st.load_config(written(tmp_path, text)).run.dir == "runs/mine"
    assert st.load_config(SMALL, {"run.name": "a"}).run.dir == "runs/a"
    assert st.load_config(SMALL, {"run.name": "a", "run.dir": "b"}).run.dir == "b"


def test_overrides_replace_values_and_leave_the_source_alone() -> None:
    config = st.load_config(
        SMALL, {"mesh.tensor": 2, "log.trackers": (), "sharding.rules.mlp": None}
    )
    assert (config.mesh.tensor, config.log.trackers) == (2, [])
    assert config.sharding.rules == {"mlp": ""}
    assert "mesh" not in SMALL
    assert st.load_config(SMALL).mesh.tensor == 1


def test_a_config_cannot_be_changed() -> None:
    config = st.load_config(SMALL)
    with pytest.raises(ValidationError, match="frozen"):
        config.mesh.tensor = 2


def test_every_key_says_what_it_is_and_there_are_few() -> None:
    for model in MODELS:
        sections = section_classes({"model": {"type": model}})
        fields = {
            f"{s}.{k}": f for s, part in sections.items() for k, f in part.model_fields.items()
        }
        assert [key for key, field in fields.items() if len(field.description or "") < 5] == []
        assert len(fields) < 140, model


def test_strings_survive_writing(tmp_path: Path) -> None:
    odd = 'a "quoted" \\ path\twith \x7f and \u00e9 \U0001f600\n'
    config = st.load_config(
        SMALL, {"data.path": odd, "sharding.rules": {"mlp": ["data"], "a b": ""}}
    )
    assert st.load_config(written(tmp_path, st.to_toml(config))) == config


# -- single keys and values


@pytest.mark.parametrize(
    ("line", "fragments"),
    [
        ("learning_rat = 1", ("optimizer.learning_rat: unknown key", "optimizer.learning_rate?")),
        ("tensor = 2", ("optimizer.tensor: unknown key", "tensor belongs to [mesh]: mesh.tensor")),
        ("steps = 2", ("steps belongs to [run] or [eval]", "run.steps or eval.steps")),
        ('clip_norm = "1.0"', ("optimizer.clip_norm: must be a number, not a string", '"1.0"')),
        ("clip_norm = true", ("must be a number, not true or false",)),
        ("warmup_steps = 2.0", ("must be a whole number, not a number", "2.0")),
        ("weight_decay = -0.1", ("must be at least 0",)),
        ("weight_decay = nan", ("optimizer.weight_decay: must be a finite number",)),
        ('name = "AdamW"', ("unknown value", "adamw, adam, sgd", 'did you mean "adamw"?')),
    ],
)
def test_a_wrong_line_is_named_with_its_place(
    line: str, fragments: tuple[str, ...], tmp_path: Path
) -> None:
    key = line.partition(" =")[0]
    kept = re.sub(rf"(?ms)(\[optimizer\].*?)^{key} = .*?\n", r"\1", TEXT)
    path = written(tmp_path, kept.replace("[optimizer]\n", f"[optimizer]\n{line}\n"))
    number = path.read_text().splitlines().index(line) + 1
    message = refusal(path)
    assert f"{path}:{number}: optimizer.{key}: " in message
    for fragment in fragments:
        assert fragment in message


def test_a_number_in_quotes_is_refused_with_the_cure(tmp_path: Path) -> None:
    text = TEXT.replace("learning_rate = 0.001", 'learning_rate = "3e-4"')
    message = refusal(written(tmp_path, text))
    assert "optimizer.learning_rate: must be a number, not a string" in message
    assert "write it without quotes: learning_rate = 3e-4" in message


@pytest.mark.parametrize(
    ("key", "value", "fragment"),
    [
        ("sharding.zero", 4, "sharding.zero: must be at most 3"),
        ("sharding.zero", True, "must be a whole number, not true or false"),
        ("sharding.sequence_parallel", 1, "must be true or false, not a whole number"),
        ("sharding.sequence_parallel", "True", "without quotes: sequence_parallel = true"),
        ("sharding.rules", {"heads": 3}, "sharding.rules.heads: must be a string"),
        ("mesh.data", 0, "must be -1 (all devices that are left) or at least 1"),
        ("mesh.data", -2, "must be at least -1"),
        ("mesh.tensor", 0, "must be at least 1"),
        ("model.type", "transfomer", 'did you mean "transformer"?'),
        ("model.dropout", 1.0, "must be less than 1"),
        ("model.num_layers", 0, "must be at least 1"),
        ("task.type", "translation", "allowed: language_model"),
        ("data.tokenizer", "bites", 'did you mean "bytes"?'),
        ("train.remat", "everything", "names among qkv, attention"),
        ("train.remat", "full,mlp", "names among qkv, attention"),
        (
            "train.precision",
            "fp16",
            "allowed: float32, bfloat16, float16, fp8, fp8_delayed",
        ),
        ("log.trackers", ["tensorboard", "wandbb"], "log.trackers: unknown value"),
        ("mesh.tensors", 2, "did you mean mesh.tensor?"),
        ("mehs.tensor", 2, "did you mean [mesh]?"),
        ("seed", 2, "an override needs section and key"),
    ],
)
def test_a_wrong_value_is_refused(key: str, value: Any, fragment: str) -> None:
    assert fragment in refusal(SMALL, {key: value})


def test_remat_takes_names() -> None:
    assert st.load_config(SMALL, {"train.remat": "attention, mlp"}).train.remat == "attention,mlp"


def test_remat_takes_places() -> None:
    words = "mlp:host, attention, input:host"
    assert st.load_config(SMALL, {"train.remat": words}).train.remat == words.replace(" ", "")


@pytest.mark.parametrize("words", ["input", "mlp:disk", "mlp,mlp:host", "full:host", "mlp:"])
def test_other_places_are_refused(words: str) -> None:
    assert "names among qkv" in refusal(SMALL, {"train.remat": words})


def test_what_a_pipeline_keeps_stays_on_the_device() -> None:
    message = refusal(SMALL, {"train.remat": "mlp:host", "mesh.pipeline": 2})
    assert "stages keep in their own slots, on the device" in message


def test_kept_activations_and_fetched_parameters_are_refused() -> None:
    message = refusal(SMALL, {"train.remat": "input:host", "offload.parameters": "host"})
    assert "a backward of its own" in message


def test_a_key_outside_its_section_is_named(tmp_path: Path) -> None:
    message = refusal(written(tmp_path, f"seed = 3\n{TEXT}"))
    assert "mine.toml:1: seed: unknown key" in message
    assert "seed belongs to [run]: run.seed" in message


def test_a_section_that_is_a_value_is_refused() -> None:
    assert "mesh: must be a section, not a whole number" in refusal(SMALL | {"mesh": 3})


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("tensor = 1", "tensor = 1\ntensor = 2", "mesh.tensor is given twice"),
        ("[log]", "[mesh]\ndata = 2\n[log]", "mesh is given twice"),
        ("[log]", '[log]\n"every" = 2', "log.every is given twice"),
    ],
)
def test_a_repeated_key_is_refused_with_both_lines(
    old: str, new: str, message: str, tmp_path: Path
) -> None:
    path = written(tmp_path, TEXT.replace(old, new))
    found = re.match(
        rf"{re.escape(str(path))}:(\d+): {message}, first on line (\d+)", refusal(path)
    )
    assert found
    key = message.removesuffix(" is given twice").rpartition(".")[2]
    lines = path.read_text().splitlines()
    assert all(key in lines[int(number) - 1] for number in found.groups())
    assert int(found[1]) > int(found[2])


def test_what_is_not_toml_is_refused_with_its_place(tmp_path: Path) -> None:
    assert re.search(
        r"mine\.toml:3:\d+: not TOML", refusal(written(tmp_path, "\n[run]\nsteps = =\n"))
    )
    path = tmp_path / "binary.toml"
    path.write_bytes(b"\xff\xfe")
    assert "cannot be read" in refusal(path)


def test_all_missing_keys_are_named_at_once() -> None:
    message = refusal({"run": {"steps": 1}})
    needed = ["model.num_layers", "data.batch_size", "optimizer.learning_rate"]
    assert all(f"{key}: is missing" in message for key in needed)
    assert "run.steps" not in message


# -- checks that span sections


def test_the_message_of_the_design() -> None:
    first = refusal(SMALL, {"mesh.tensor": 3}).splitlines()[0]
    assert first == "mesh.tensor=3: model.num_heads=8 is not divisible by 3; use 1, 2, 4 or 8"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            {"model.num_heads": 6, "model.embed_dim": 96, "mesh.tensor": 4},
            "mesh.tensor=4: model.num_heads=6 is not divisible by 4; use 1, 2, 3 or 6",
        ),
        (
            {"model.num_kv_heads": 2, "mesh.tensor": 4},
            "mesh.tensor=4: model.num_kv_heads=2 is not divisible by 4; use 1 or 2",
        ),
        (
            {"model.mlp_dim": 90, "mesh.tensor": 4},
            "mesh.tensor=4: model.mlp_dim=90 is not divisible by 4; use",
        ),
        (
            {"model.vocab_size": 257, "mesh.tensor": 4},
            "mesh.tensor=4: the vocabulary's 257 rows are not divisible by 4; "
            "set model.vocab_multiple = 4 (pads to 260), or use 1",
        ),
        (
            {"model.vocab_size": 257, "model.vocab_multiple": 6, "mesh.tensor": 4},
            "the vocabulary's 258 rows are not divisible by 4; set model.vocab_multiple = 12 "
            "(pads to 264)",
        ),
        (
            {"model.num_layers": 3, "mesh.pipeline": 4},
            "model.num_layers=3: too few for 4 parts: one would be empty",
        ),
        (
            {"mesh.pipeline": 2, "pipeline.schedule": "1f1"},
            "pipeline.schedule=1f1: there is no such schedule",
        ),
        (
            {"mesh.pipeline": 2, "pipeline.virtual_stages": 2},
            "pipeline.virtual_stages=2: 1f1b has one virtual stage",
        ),
        (
            {"mesh.pipeline": 2, "pipeline.layout": "E9,9H"},
            'pipeline.layout="E9,9H": has 18 layers, but the model has',
        ),
        (
            {"mesh.pipeline": 2, "pipeline.layout": "E1,1,1H"},
            'pipeline.layout="E1,1,1H": has 3 parts, but there are 2 stages',
        ),
        (
            {"mesh.pipeline": 2, "pipeline.table": "no/such.csv"},
            "no/such.csv: there is no such file",
        ),
        (
            {"mesh.pipeline": 2, "sharding.rules": {"layers": "data"}},
            "sharding.rules.layers: a pipeline shares layers among stages",
        ),
        (
            {"mesh.pipeline": 2, "sharding.rules": {"embed": "pipeline"}},
            "sharding.rules.embed: a pipeline shares layers among stages",
        ),
        (
            {"mesh.pipeline": 2, "mesh.replica": 2, "sharding.rules": {"mlp": "replica"}},
            "sharding.rules.mlp: a pipeline shares layers among stages and samples",
        ),
        (
            {"mesh.pipeline": 2, "sharding.rules": {"batch": "data"}},
            "sharding.rules.batch: a pipeline shares layers among stages and samples",
        ),
        (
            {"mesh.pipeline": 2, "sharding.rules": {"residual_length": "data"}},
            "sharding.rules.residual_length: a pipeline shares layers",
        ),
        (
            {"data.batch_size": 10, "mesh.data": 4},
            "data.batch_size=10: not divisible by mesh.data=4; use 8 or 12",
        ),
        (
            {"data.batch_size": 12, "mesh.data": 2, "mesh.replica": 2, "train.microbatches": 2},
            "data.batch_size=12: not divisible by "
            "train.microbatches=2 x mesh.replica=2 x mesh.data=2 = 8; use 8 or 16",
        ),
        (
            {"data.batch_size": 10, "train.microbatches": 4},
            "data.batch_size=10: not divisible by train.microbatches=4; use 8 or 12",
        ),
        (
            {"data.sequence_length": 100, "mesh.context": 8},
            "mesh.context=8: data.sequence_length=100 is not divisible by 8; use 96 or 104",
        ),
        (
            {"data.sequence_length": 101, "mesh.tensor": 2, "sharding.sequence_parallel": True},
            "mesh.tensor=2: data.sequence_length=101 is not divisible by 2; use 100 or 102",
        ),
        (
            {"model.max_length": 16},
            "model.max_length=16: data.sequence_length=32 is longer than the position table; use "
            "32 or more, or 0 for just that; or data.sequence_length=16 or less",
        ),
        (
            {"model.num_heads": 5},
            "model.num_heads=5: model.embed_dim=64 is not divisible by 5; use 2, 4, 8 or 16",
        ),
        (
            {"model.num_kv_heads": 3},
            "model.num_kv_heads=3: model.num_heads=8 is not divisible by 3; use 1, 2, 4 or 8",
        ),
        (
            {"model.position": "rope", "model.head_dim": 7},
            'model.position="rope": rotations pair the entries of a head, and its width is 7; '
            "use 6 or 8",
        ),
        ({"run.stop_at": 11}, "run.stop_at=11: run.steps=10 is fewer; use 10 or less"),
        ({"model.vocab_size": 100}, 'model.vocab_size=100: data.tokenizer="bytes" has 256 tokens'),
        (
            {"model.attention": "cudnn"},
            'model.attention="cudnn": train.precision="float32" has no such kernel',
        ),
        (
            {"mesh.context": 2, "model.attention": "xla"},
            'mesh.context=2: model.attention="xla" needs whole sequences; use "auto", "ring" or '
            '"ulysses", or mesh.context=1',
        ),
        (
            {"mesh.context": 2, "data.sequence_length": 30},
            "mesh.context=2: data.sequence_length=30 is not divisible by 4, and each device of a "
            "ring has two chunks of it; use 28 or 32",
        ),
        (
            {"mesh.context": 4, "mesh.tensor": 4, "model.attention": "ulysses"},
            "mesh.context=4: model.num_kv_heads=8 / mesh.tensor=4 is not divisible by 4, and "
            'model.attention="ulysses" shares them out; use 1 or 2, or model.attention="ring"',
        ),
        (
            {"mesh.context": 2, "sharding.rules": {"length": "tensor"}},
            "sharding.rules.length: attention shares positions over `context` itself",
        ),
        (
            {"mesh.context": 2, "task.loss_chunks": 17},
            "task.loss_chunks=17: a device has 16 positions of a sequence; use 16 or less",
        ),
        (
            {"mesh.context": 3, "mesh.pipeline": 2, "data.sequence_length": 48},
            "mesh.context=3: in a pipeline devices of a ring send in pairs; use an even degree",
        ),
    ],
)
def test_settings_that_do_not_fit_are_refused(overrides: dict[str, Any], message: str) -> None:
    assert message in refusal(SMALL, overrides)


@pytest.mark.parametrize(
    "overrides",
    [
        {"model.num_heads": 6, "model.head_dim": 16, "mesh.tensor": 3, "model.mlp_dim": 96}
        | {"model.vocab_multiple": 3},
        {"model.vocab_size": 257, "model.vocab_multiple": 4, "mesh.tensor": 4},
        {"model.num_heads": 8, "mesh.tensor": 3, "model.mlp_dim": 96, "model.vocab_multiple": 3}
        | {"sharding.rules": {"heads": "", "kv_heads": ""}},
        {"data.sequence_length": 101, "mesh.tensor": 2},
        {"model.max_length": 16, "model.position": "rope"},
        {"train.precision": "bfloat16", "model.attention": "cudnn"},
        {"run.stop_at": 10},
        {"mesh.data": -1, "data.batch_size": 7},
    ],
)
def test_settings_that_fit_are_taken(overrides: dict[str, Any]) -> None:
    config = st.load_config(SMALL, overrides)
    assert config.run.steps == 10


@pytest.mark.parametrize(
    ("mesh", "devices", "data"),
    [({}, 8, 8), ({"tensor": 2}, 8, 4), ({"data": 2, "replica": 2}, 4, 2), ({"tensor": 1}, 1, 1)],
)
def test_data_takes_what_is_left(mesh: dict[str, int], devices: int, data: int) -> None:
    degrees = resolve_mesh(st.load_config(SMALL | {"mesh": mesh}), devices)
    assert list(degrees) == ["pipeline", "replica", "data", "context", "tensor"]
    assert degrees == dict.fromkeys(degrees, 1) | mesh | {"data": data}


@pytest.mark.parametrize(
    ("mesh", "devices", "message"),
    [
        ({"tensor": 2}, 5, "mesh: 2 does not divide 5 devices"),
        ({"data": 4, "tensor": 2}, 5, "mesh: the product is 8, but there are 5 devices"),
        ({"data": 4}, 8, "mesh: the product is 4, but there are 8 devices"),
        ({"data": 2, "tensor": 2}, 2, "mesh: the product is 4, but there are 2 devices"),
    ],
)
def test_a_mesh_must_use_all_devices(mesh: dict[str, int], devices: int, message: str) -> None:
    config = st.load_config(SMALL | {"mesh": mesh})
    with pytest.raises(st.ShardingError) as caught:
        resolve_mesh(config, devices)
    assert message in str(caught.value)


def test_the_batch_is_checked_when_the_devices_are_known() -> None:
    config = st.load_config(SMALL, {"data.batch_size": 12})
    with pytest.raises(st.ConfigError, match="use 8 or 16"):
        resolve_mesh(config, 8)


def test_prepared_tokens_say_their_own_vocabulary(tmp_path: Path) -> None:
    assert known_vocab(st.load_config(SMALL)) == 256
    (tmp_path / "train.tokens").touch()
    config = st.load_config(SMALL, {"data.path": str(tmp_path), "model.vocab_size": 102})
    assert known_vocab(config) is None


SIZES = draw.integers(1, 24)


@given(SIZES, SIZES, SIZES, SIZES, SIZES, SIZES, draw.integers(1, 8), draw.integers(1, 4))
def test_a_layout_is_refused_exactly_when_something_does_not_divide(
    heads: int, group: int, mlp: int, vocab: int, length: int, batch: int, tensor: int, data: int
) -> None:
    model = TransformerConfig(
        num_layers=1,
        embed_dim=8,
        num_heads=heads * group,
        num_kv_heads=heads,
        head_dim=2,
        mlp_dim=mlp,
    )
    part = DataConfig(sequence_length=length, batch_size=batch)
    sharding = ShardingConfig(sequence_parallel=True)
    degrees = {"pipeline": 1, "replica": 1, "data": data, "context": 1, "tensor": tensor}
    faults = layout_faults(model, part, sharding, degrees, 2, vocab)
    split = (heads, mlp, vocab, length)
    assert (not faults) == (all(n % tensor == 0 for n in split) and batch % (2 * data) == 0)
    for fault in faults:
        text = str(fault)
        offered = [int(n) for n in re.findall(r"\d+", text.rpartition("use ")[2])]
        assert offered
        if "batch_size" in text:
            assert all(n % (2 * data) == 0 for n in offered)
        elif "sequence_length" in text:
            assert all(n % tensor == 0 for n in offered)
        else:
            [size] = re.findall(r"(\d+)(?: rows are| is) not divisible", text)
            assert all(int(size) % n == 0 for n in offered)


@given(draw.integers(1, 5000), draw.integers(1, 5000))
def test_nearest_legal_sizes(number: int, near: int) -> None:
    assert all(number % d == 0 for d in divisors(number, near))
    assert divisors(number, near) == sorted(set(divisors(number, near)))
    if number % near == 0:
        assert near in divisors(number, near)
    below_and_above = multiples(near, number)
    assert all(m % near == 0 and m > 0 and abs(m - number) <= near for m in below_and_above)


def test_lists_are_written_as_phrases() -> None:
    assert [listed([1]), listed([1, 2]), listed([1, 2, 4])] == ["1", "1 or 2", "1, 2 or 4"]


def test_sizes_that_follow_from_others() -> None:
    model = TransformerConfig(num_layers=1, embed_dim=48, num_heads=4, vocab_multiple=8)
    assert (model.kv_heads, model.head_size, model.mlp_size) == (4, 12, 192)
    assert model.padded_vocab(101) == 104
    assert model.padded_vocab(104) == 104
    wide = model.model_copy(update={"head_dim": 16, "num_kv_heads": 2, "vocab_size": 9})
    assert (wide.kv_heads, wide.head_size, wide.padded_vocab(101)) == (2, 16, 16)


def test_a_saved_config_gets_newer_keys() -> None:
    """A run that was begun before a key existed goes on as if it had its default."""
    config = st.load_config(SMALL, {"model.norm": "rmsnorm"}).model_dump()
    older = {name: dict(section) for name, section in config.items()}
    del older["model"]["norm_epsilon"], older["targets"]
    assert changes(with_defaults(older), config) == []
    assert changes(with_defaults(older), config | {"model": {}}) != []


# -- settings without effect


@pytest.mark.parametrize(
    ("overrides", "line"),
    [
        ({"optimizer.momentum": 0.5}, "optimizer.momentum=0.5 has no effect: adamw has none"),
        ({"optimizer.name": "sgd", "optimizer.beta1": 0.8}, "optimizer.beta1=0.8 has no effect"),
        ({"optimizer.name": "lion", "optimizer.epsilon": 1e-6}, "optimizer.epsilon=1e-06 has no"),
        ({"optimizer.decay_fraction": 0.5}, 'only schedule="wsd" has one, not "cosine"'),
        (
            {"optimizer.schedule": "constant", "optimizer.final_ratio": 0.0},
            "optimizer.final_ratio=0.0 has no effect",
        ),
        ({"model.rope_theta": 5e5}, 'only model.position="rope" rotates, not "learned"'),
        ({"model.position": "rope", "model.max_length": 64}, "model.max_length=64 has no effect"),
        ({"model.norm": "rmsnorm", "model.norm_bias": True}, "rmsnorm"),
        ({"sharding.zero": 1, "mesh.data": 1}, "sharding.zero=1 has no effect: mesh.data=1"),
        (
            {"train.precision": "bfloat16,reduce=float32", "mesh.data": 1},
            "train.precision: reduce=float32 has no effect: mesh.data=1",
        ),
        (
            {"train.precision": "bfloat16,accumulate=float32"},
            "train.precision: accumulate=float32 has no effect: train.microbatches=1",
        ),
        ({"sharding.sequence_parallel": True}, "mesh.tensor=1 leaves nothing to split"),
        ({"checkpoint.every": 11}, "checkpoint.every=11 has no effect: the run ends after 10"),
        ({"eval.every": 5, "eval.steps": 0}, "eval.steps=0 turns evaluation off"),
        ({"run.stop_at": 4, "eval.every": 5}, "the run ends after 4 steps, and evaluates then"),
        ({"data.validation_fraction": 0.0, "eval.steps": 4}, "keeps nothing to evaluate on"),
        (
            {"run.steps": 0, "optimizer.warmup_steps": 2},
            "warmup_steps=2 has no effect: run.steps=0",
        ),
        ({"optimizer.warmup_steps": 11}, "is more than run.steps=10: the peak"),
    ],
)
def test_a_setting_without_effect_is_said(overrides: dict[str, Any], line: str) -> None:
    lines = ineffective_settings(st.load_config(SMALL, overrides))
    assert len(lines) == 1
    assert line in lines[0]


@pytest.mark.parametrize(
    "overrides",
    [
        {"optimizer.name": "muon", "optimizer.momentum": 0.5, "optimizer.beta1": 0.8},
        {"optimizer.schedule": "wsd", "optimizer.decay_fraction": 0.5},
        {"sharding.zero": 1},
        {"checkpoint.every": 10, "eval.every": 10},
        {"optimizer.warmup_steps": 10},
    ],
)
def test_a_setting_with_effect_is_not_said(overrides: dict[str, Any]) -> None:
    assert ineffective_settings(st.load_config(SMALL, overrides)) == []


def test_known_degrees_tell_more() -> None:
    config = st.load_config(SMALL, {"sharding.zero": 2})
    assert ineffective_settings(config, degrees=resolve_mesh(config, 8)) == []
    assert "sharding.zero=2" in ineffective_settings(config, degrees=resolve_mesh(config, 1))[0]


def test_a_resolved_file_says_only_what_was_chosen(tmp_path: Path) -> None:
    config = st.load_config(SMALL, {"optimizer.momentum": 0.5})
    path = written(tmp_path, st.to_toml(config))
    assert "decay_fraction = 0.2  # no effect in this run" in path.read_text()
    assert ineffective_settings(st.load_config(path)) == ineffective_settings(config)


# -- errors and devices


def test_errors_survive_a_process_boundary() -> None:
    error = st.ShardingError("what", where="mesh", value="3", allowed="2", cure="do")
    error.also = (st.DataError("other"),)
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is st.ShardingError
    assert str(again) == "mesh: what\n  value: 3\n  allowed: 2\n  to do: do\nother"


def test_a_mesh_knows_its_axes() -> None:
    from shardtrain.sharding.mesh import MESH_AXES

    assert tuple(MeshConfig.model_fields) == MESH_AXES


@pytest.mark.parametrize(
    ("before", "result"),
    [
        ("", "8"),
        ("import jax", "8"),
        ("import jax; jax.devices()", "jax has already started here, with 1 CPU device"),
        ("import jax; jax.config.update('jax_num_cpu_devices', 8); jax.devices()", "8"),
    ],
    ids=["before jax", "jax imported", "jax started", "jax started with as many"],
)
@pytest.mark.smoke312
def test_virtual_devices(before: str, result: str) -> None:
    code = f"""
import os
os.environ.pop("XLA_FLAGS", None)
os.environ["JAX_PLATFORMS"] = "cpu"
{before}
from shardtrain import ConfigError, prepare_devices
try:
    prepare_devices(8)
    import jax
    print(len(jax.devices()))
except ConfigError as error:
    print(error)
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result in run.stdout
    if result != "8":
        assert "restart the kernel and call shardtrain.prepare_devices(8)" in run.stdout
