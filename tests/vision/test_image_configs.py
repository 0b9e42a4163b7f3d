"""Configs of runs with images: what is refused at the start, and what a command says."""

import json
from typing import Any

import pytest

from shardtrain import cli
from shardtrain.config import ImageRunConfig, LanguageRunConfig, load_config, to_toml, with_defaults
from shardtrain.config_effects import ineffective_settings
from shardtrain.errors import ConfigError
from shardtrain.optim.schedules import make_schedule
from shardtrain.train.rundir import changes


def test_a_model_brings_its_task_and_data() -> None:
    config = load_config("resnet18_digits")
    assert isinstance(config, ImageRunConfig)
    assert (config.task.type, config.data.type) == ("image_classification", "images")
    assert isinstance(load_config("quickstart"), LanguageRunConfig)


@pytest.mark.parametrize(
    ("overrides", "where", "message"),
    [
        ({"mesh.pipeline": 2}, "mesh.pipeline=2", "its blocks differ"),
        ({"mesh.context": 2}, "mesh.context=2", "no sequence"),
        ({"mesh.tensor": 2}, "mesh.tensor=2", "channels are not split"),
        ({"sharding.sequence_parallel": True}, "sharding.sequence_parallel", "no sequences"),
        ({"train.remat": "full"}, "train.remat", "no stack of layers"),
        ({"train.audit": True}, "train.audit", "language models alone"),
        ({"train.microbatches": 2}, "train.microbatches=2", "choose other statistics by name"),
        ({"data.mean": [0.1, 0.2]}, "data.mean", "data.channels=1 wants 1"),
        ({"data.deviation": [0.0]}, "data.deviation", "above 0"),
        ({"data.batch_size": 12, "mesh.data": 8}, "data.batch_size=12", "use 8 or 16"),
        ({"data.type": "text"}, "data.type", "goes with another one"),
        ({"data.tokenizer": "bytes"}, "data.tokenizer", "unknown key"),
        ({"model.depth": 20}, "model.depth", "unknown value"),
        (
            {"offload.master": "host", "train.precision": "bfloat16"},
            "optimizer.ema_decay=0.99",
            'offload.master="host"',
        ),
    ],
)
def test_refusals(overrides: dict[str, Any], where: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        load_config("resnet18_digits", overrides)
    assert where in str(caught.value)


def test_microbatches_are_chosen_by_name() -> None:
    keys = {"train.microbatches": 2, "model.norm_statistics": "microbatch"}
    assert load_config("resnet18_digits", keys).train.microbatches == 2


def test_what_has_no_effect_is_said() -> None:
    lines = ineffective_settings(
        load_config("resnet18_digits", {"eval.sample_tokens": 5, "targets.tokens_per_second": 1.0})
    )
    assert [line.split("=")[0] for line in lines] == [
        "eval.sample_tokens",
        "targets.tokens_per_second",
    ]


def test_a_config_that_was_saved_before_there_were_kinds_is_the_same() -> None:
    config = load_config("quickstart")
    sections = config.model_dump()
    del sections["data"]["type"], sections["optimizer"]["nesterov"]
    del sections["optimizer"]["reference_batch"], sections["optimizer"]["ema_decay"]
    assert changes(with_defaults(sections), config.model_dump()) == []


def test_the_learning_rate_scales_with_the_batch() -> None:
    """Goyal et al. 2017: 0.1 for 256 images is 3.2 for 8192, after a linear warm-up."""
    config = load_config("resnet50_imagenet_8gpu").optimizer
    schedule = make_schedule(config, 450360, 8192)
    assert float(schedule(25020)) == pytest.approx(3.2)
    assert float(schedule(12510)) == pytest.approx(1.6)
    assert float(make_schedule(config, 450360, 256)(25020)) == pytest.approx(0.1)
    assert float(schedule(450360)) == pytest.approx(0.0, abs=1e-6)


def test_the_config_for_eight_devices_has_32_images_on_each() -> None:
    config = load_config("resnet50_imagenet_8gpu")
    assert config.data.batch_size // config.mesh.data == 32
    assert "[task]" in to_toml(config)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("export", "resnet18_digits", "--out", "there"), "an export is there for models of text"),
        (("generate", "resnet18_digits"), "generation is there for language models"),
        (("plan", "resnet18_digits", "--audit"), "planned for language models alone"),
        (("plan", "resnet18_digits", "--explain", "zero=1"), "planned for language models alone"),
        (("verify", "resnet18_digits", "--model.norm_statistics", "per_replica"), "another run"),
    ],
)
def test_commands_that_refuse(
    words: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(list(words)) == 2
    assert message in capsys.readouterr().err


def test_a_plan_states_bytes_and_whether_they_fit(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", "resnet50_imagenet_8gpu", "--sharding.zero", "1", "--json"]
    assert cli.main([*words, "--target", "h100:1x8"]) == 0
    told = json.loads(capsys.readouterr().out)
    count = 25_557_032
    assert (told["count"], told["fits"]) == (count, True)
    held = told["bytes_per_device"]
    assert held["parameters"] == 2 * count
    # Masters and momentum, 4 bytes each, on 8 devices; the classes' bias is on all.
    assert held["optimizer"] == pytest.approx(count, rel=0.01)
    assert cli.main([*words, "--target", "h100:1x8", "--model.width", "4096"]) == 4
    assert not json.loads(capsys.readouterr().out)["fits"]
