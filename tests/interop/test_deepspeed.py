"""`import-config`: what a DeepSpeed config says is ours, or listed with the reason."""

import json
import tomllib
from pathlib import Path
from typing import Any

import pytest

from shardtrain import cli
from shardtrain.config import load_config
from shardtrain.interop.deepspeed import map_config
from shardtrain.interop.deepspeed_reasons import UNKNOWN

EXAMPLE: dict[str, Any] = {
    "train_batch_size": 64,
    "gradient_accumulation_steps": 4,
    "steps_per_print": 50,
    "gradient_clipping": 0.5,
    "optimizer": {
        "type": "AdamW",
        "params": {"lr": 3e-4, "betas": [0.9, 0.98], "eps": 1e-6, "weight_decay": 0.01},
    },
    "scheduler": {
        "type": "WarmupCosineLR",
        "params": {"total_num_steps": 1000, "warmup_num_steps": 100, "cos_min_ratio": 0.2},
    },
    "bf16": {"enabled": True},
    "zero_optimization": {
        "stage": 3,
        "overlap_comm": True,
        "stage3_prefetch_bucket_size": 5e7,
        "offload_optimizer": {"device": "cpu", "pin_memory": True},
        "offload_param": {"device": "cpu", "buffer_count": 5},
    },
    "tensorboard": {"enabled": True, "output_path": "logs"},
    "activation_checkpointing": {"partition_activations": True},
    "wall_clock_breakdown": False,
    "made_up": 1,
}


def write(folder: Path, values: Any) -> str:
    path = folder / "ds_config.json"
    path.write_text(values if isinstance(values, str) else json.dumps(values))
    return str(path)


def test_what_comes_of_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["import-config", write(tmp_path, EXAMPLE)]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    found = tomllib.loads(out)
    assert found == {
        "run": {"steps": 1000},
        "data": {"batch_size": 64},
        "sharding": {"zero": 3},
        "train": {"microbatches": 4, "precision": "bfloat16", "overlap": True},
        "optimizer": {
            "clip_norm": 0.5,
            "name": "adamw",
            "learning_rate": 3e-4,
            "beta1": 0.9,
            "beta2": 0.98,
            "epsilon": 1e-6,
            "weight_decay": 0.01,
            "schedule": "cosine",
            "warmup_steps": 100,
            "final_ratio": 0.2,
        },
        "offload": {
            "optimizer": "host",
            "master": "host",
            "fraction": 1.0,
            "parameters": "host",
        },
        "log": {"every": 50, "trackers": ["tensorboard"]},
    }
    model = {"num_layers": 1, "embed_dim": 16, "num_heads": 2}
    data = found["data"] | {"sequence_length": 16}
    config = load_config({**found, "model": model, "data": data, "mesh": {"data": 2}})
    assert config.optimizer.beta2 == 0.98
    for line in (
        "# zero_optimization.offload_optimizer.pin_memory: copies are planned by XLA",
        "# zero_optimization.offload_param.buffer_count: each layer comes for its own use",
        "# zero_optimization.stage3_prefetch_bucket_size: XLA plans",
        "# tensorboard.output_path: a tracker's files lie in the run's folder",
        "# activation_checkpointing: recomputation is a key here",
        "# wall_clock_breakdown: metrics.jsonl",
        "# scheduler.params.warmup_type: the rise is linear here, not log",
        f"# made_up: {UNKNOWN}",
    ):
        assert line in out


def test_every_key_is_mapped_or_listed() -> None:
    """Nothing is left out in silence, however deep it stands."""
    left = dict(map_config(EXAMPLE).left)
    used = {"train_batch_size", "gradient_accumulation_steps", "steps_per_print", "stage"}
    used |= {
        "gradient_clipping",
        "type",
        "overlap_comm",
        "lr",
        "betas",
        "eps",
        "weight_decay",
        "enabled",
    }
    used |= {"device", "total_num_steps", "warmup_num_steps", "cos_min_ratio"}

    def walk(values: dict[str, Any], path: str) -> None:
        for key, value in values.items():
            name = f"{path}{key}"
            if name in left or key in used:
                continue
            assert isinstance(value, dict), name
            walk(value, f"{name}.")

    walk(EXAMPLE, "")


@pytest.mark.parametrize(
    ("values", "devices", "sections", "left"),
    [
        # theirs is off unless it is set; ours is 1
        ({}, 0, {"optimizer": {"clip_norm": 0.0}}, []),
        (
            {"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2},
            8,
            {"data": {"batch_size": 64}, "train": {"microbatches": 2}},
            [],
        ),
        (
            {"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2},
            0,
            {"train": {"microbatches": 2}},
            ["train_micro_batch_size_per_gpu"],
        ),
        (
            {"train_batch_size": 64, "train_micro_batch_size_per_gpu": 4},
            8,
            {"data": {"batch_size": 64}, "train": {"microbatches": 2}},
            [],
        ),
        ({"train_batch_size": "auto"}, 0, {}, ["train_batch_size"]),
        (
            {"fp16": {"enabled": True, "loss_scale": 0, "initial_scale_power": 12}},
            0,
            {"train": {"precision": "float16", "loss_scale": 4096.0, "loss_scale_window": 1000}},
            ["fp16.hysteresis"],
        ),
        (
            {"fp16": {"enabled": True, "loss_scale": 128, "hysteresis": 1}},
            0,
            {"train": {"precision": "float16", "loss_scale": 128.0, "loss_scale_window": 0}},
            ["fp16.loss_scale"],
        ),
        ({"fp16": {"enabled": False, "loss_scale": 0}}, 0, {}, ["fp16.loss_scale"]),
        (
            {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "tape"}}},
            0,
            {"sharding": {"zero": 2}},
            ["zero_optimization.offload_optimizer.device"],
        ),
        (
            {
                "zero_optimization": {
                    "stage": 3,
                    "offload_optimizer": {
                        "device": "nvme",
                        "nvme_path": "/nvme",
                        "buffer_count": 4,
                    },
                    "offload_param": {"device": "nvme", "nvme_path": "/nvme"},
                }
            },
            0,
            {
                "offload": {
                    "optimizer": "disk",
                    "master": "disk",
                    "parameters": "disk",
                    "fraction": 1.0,
                    "disk_path": "/nvme",
                }
            },
            ["zero_optimization.offload_optimizer.buffer_count"],
        ),
        (
            {"optimizer": {"type": "Adam", "params": {"lr": 0.1, "adam_w_mode": False}}},
            0,
            # their defaults, which are not ours
            {
                "optimizer": {
                    "name": "adam",
                    "learning_rate": 0.1,
                    "beta2": 0.999,
                    "weight_decay": 0,
                }
            },
            [],
        ),
        (
            {"optimizer": {"type": "OneBitLamb", "params": {"lr": 0.1}}},
            0,
            {},
            ["optimizer.type", "optimizer.params.lr"],
        ),
        (
            {"scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 0.5}}},
            0,
            {"optimizer": {"schedule": "constant", "warmup_steps": 1000, "learning_rate": 0.5}},
            ["scheduler.params.warmup_type"],
        ),
        (
            {
                "optimizer": {"type": "Adam", "params": {"lr": 3e-4}},
                "scheduler": {"type": "WarmupLR"},
            },
            0,
            {
                "optimizer": {
                    "name": "adamw",
                    "learning_rate": 0.001,
                    "beta2": 0.999,
                    "weight_decay": 0,
                    "schedule": "constant",
                    "warmup_steps": 1000,
                }
            },
            ["optimizer.params.lr", "scheduler.params.warmup_type"],
        ),
        (
            {"scheduler": {"type": "OneCycle", "params": {"cycle_min_lr": 0.1}}},
            0,
            {},
            ["scheduler.type", "scheduler.params.cycle_min_lr"],
        ),
        (
            {"zero_optimization": {"stage": 3, "mics_shard_size": 8}},
            32,
            {"mesh": {"replica": 4}},
            [],
        ),
        ({"tensor_parallel": {"autotp_size": 4}}, 0, {"mesh": {"tensor": 4}}, []),
    ],
)
def test_single_keys(
    values: dict[str, Any], devices: int, sections: dict[str, Any], left: list[str]
) -> None:
    found = map_config(values, devices=devices)
    for section, keys in sections.items():
        for key, value in keys.items():
            assert found.sections[section][key] == value
    assert [key for key, _ in found.left] == left


def test_a_file_is_written_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["import-config", write(tmp_path, EXAMPLE), "--out", str(tmp_path / "my.toml")]
    assert cli.main(words) == 0
    out, err = capsys.readouterr()
    assert out == ""
    assert "keys have no counterpart" in err
    assert tomllib.loads((tmp_path / "my.toml").read_text())["sharding"] == {"zero": 3}
    assert cli.main(words) == 2


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ("{", "ds_config.json: cannot be read"),
        ("[1]", "ds_config.json: is no JSON object"),
        ({"train_batch_size": "many"}, "train_batch_size: is of the wrong kind\n  value: 'many'"),
        ({"zero_optimization": {"stage": 4}}, "sharding.zero"),
        ({"zero_optimization": 3}, "zero_optimization: is of the wrong kind"),
        ({"optimizer": {"type": "Adam", "params": {"lr": -1}}}, "optimizer.learning_rate"),
        ({"optimizer": {"type": "Adam", "params": {"betas": [0.9]}}}, "optimizer.params.betas"),
    ],
)
def test_what_is_wrong_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], values: Any, words: str
) -> None:
    assert cli.main(["import-config", write(tmp_path, values)]) == 2
    assert words in capsys.readouterr().err


def test_files_that_are_not_there_are_told_without_error_numbers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["import-config", str(tmp_path / "nofile.json")]) == 2
    said = capsys.readouterr().err
    assert "nofile.json: there is no such file\n  to do: " in said
    out = str(tmp_path / "nowhere" / "z.toml")
    assert cli.main(["import-config", write(tmp_path, {}), "--out", out]) == 2
    said = capsys.readouterr().err
    assert "--out: cannot be written: No such file or directory\n  value: " in said
    assert "Errno" not in said


@pytest.mark.parametrize(
    ("path", "near"),
    [("zero_optimization.stagee", "stage"), ("bf16.enabeld", "enabled"), ("train_batch_siz", "")],
)
def test_a_mistyped_key_gets_no_reason_of_another(path: str, near: str) -> None:
    """Not that of its table: it is said to be unknown, with the key that it is like."""
    *tables, name = path.split(".")
    values: dict[str, Any] = {name: 2}
    for table in reversed(tables):
        values = {table: values}
    ((key, reason),) = [row for row in map_config(values).left if row[0] == path]
    assert key == path
    assert reason.endswith(f'did you mean "{near or "train_batch_size"}"?')


def test_a_file_that_is_there_is_not_written_over(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, out = tmp_path / "ds.json", tmp_path / "my.toml"
    source.write_text('{"train_batch_size": 32}')
    assert cli.main(["import-config", str(source), "--out", str(out)]) == 0
    assert cli.main(["import-config", str(source), "--out", str(out)]) == 2
    said = capsys.readouterr().err
    assert "--out: is there already" in said
    assert "Errno" not in said
