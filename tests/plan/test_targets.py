"""Targets: how they are written, and what is said where the compiler for them is missing."""

import math
import os
from pathlib import Path

import pytest

from shardtrain.errors import ConfigError, UserError
from shardtrain.plan import targets, targets_tpu
from shardtrain.plan.compiling import Job, compile_for
from shardtrain.plan.targets import Target, describe, descriptions, parse_target
from shardtrain.plan.targets_tpu import slice_shape


def test_a_target() -> None:
    target = parse_target("h100:64x8")
    assert target == Target("h100", hosts=64, per_host=8)
    assert (target.num_devices, target.topology, str(target)) == (512, "64x1x8", "h100:64x8")


@pytest.mark.parametrize("text", ["h100", "h100:8", "h100:0x8", "h100:1x", "H100:1x8", "1x8"])
def test_not_a_target(text: str) -> None:
    with pytest.raises(ConfigError, match="h100:64x8"):
        parse_target(text)


def test_an_unknown_chip() -> None:
    with pytest.raises(ConfigError, match=r"h200.*b200"):
        parse_target("h900:1x8")


@pytest.mark.parametrize(
    ("text", "topology"),
    [
        ("gb200:1x4", "1x1x4"),
        ("gb200:18x4", "1x18x4"),  # a rack
        ("gb200:36x4", "2x18x4"),
        ("gb300:20x4", "2x10x4"),  # domains are equal
        ("h200:18x4", "18x1x4"),
    ],
)
def test_racks_are_domains(text: str, topology: str) -> None:
    assert parse_target(text).topology == topology


@pytest.mark.parametrize(
    ("text", "shape"),
    [
        ("tpu-v5e:1x1", (1, 1)),
        ("tpu-v5e:1x8", (2, 4)),
        ("tpu-v5e:32x8", (16, 16)),
        ("tpu-v6e:2x4", (2, 4)),
        ("tpu-v4:1x4", (2, 2, 1)),
        ("tpu-v5p:2x4", (2, 2, 2)),
        ("tpu-v5p:128x4", (8, 8, 8)),
    ],
)
def test_slices_are_near_cubes(text: str, shape: tuple[int, ...]) -> None:
    target = parse_target(text)
    assert slice_shape(target.chip, target.hosts, target.per_host) == shape
    assert math.prod(shape) == target.num_devices


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("tpu-v5e:2x1", "tpu-v5e:1x1 or tpu-v5e:HOSTSx4"),
        ("tpu-v5p:1x8", "tpu-v5p:HOSTSx4"),
        ("tpu-v6e:33x8", "at most 256 chips"),
    ],
)
def test_no_such_slice(text: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        parse_target(text)


def test_libtpu_is_named_where_it_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(targets_tpu, "missing_tpu_parts", lambda: ["its compiler (libtpu)"])
    with pytest.raises(UserError, match=r"libtpu[\s\S]*plan-tpu"):
        compile_for(Target("tpu-v5e", 1, 8), {"step": Job(os.getpid)})


DESCRIPTIONS = b"""\x00\x01 noise
# a licence
gpu_device_info {
  core_count: 132
}
platform_name: "CUDA"
device_description_str: "NVIDIA H100 80GB HBM3"
# the next one follows without a zero
gpu_device_info {
  core_count: 108
}
device_description_str: "NVIDIA A100-SXM4-80GB"
\x00 gpu_device_info {
 not one"""


def test_descriptions_are_found_in_the_library(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = tmp_path / "xla_cuda_plugin.so"
    library.write_bytes(DESCRIPTIONS)
    found = descriptions(library)
    assert set(found) == {"NVIDIA H100 80GB HBM3", "NVIDIA A100-SXM4-80GB"}
    text = found["NVIDIA H100 80GB HBM3"]
    assert text.startswith("gpu_device_info {\n  core_count: 132\n")
    assert text.endswith('device_description_str: "NVIDIA H100 80GB HBM3"\n')
    monkeypatch.setattr(targets, "require_compiler", lambda: library)
    assert describe(Target("a100-80", 1, 8)) == found["NVIDIA A100-SXM4-80GB"]
    with pytest.raises(UserError, match=r"B200[\s\S]*a100-80, h100[\s\S]*--upgrade"):
        describe(Target("b200", 1, 8))


def test_what_is_missing_is_named_with_the_cure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(targets, "_plugin", lambda: None)
    monkeypatch.setattr(targets, "_version", lambda name: "0.10.2" if name == "jax" else "")
    job = Job(os.getpid)
    with pytest.raises(UserError) as refused:
        compile_for(Target("h100", 1, 8), {"step": job})
    message = str(refused.value)
    for words in ("jax 0.12", "jax-cuda13-plugin", "nvidia-cuda-nvcc", "shardtrain[plan]", "3.12"):
        assert words in message
