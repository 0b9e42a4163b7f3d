"""Targets: how they are written, and what is said where the compiler for them is missing."""

import os
from pathlib import Path

import pytest

from shardtrain.errors import ConfigError, UserError
from shardtrain.plan import targets
from shardtrain.plan.compiling import Job, compile_for
from shardtrain.plan.targets import Target, describe, descriptions, parse_target


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
