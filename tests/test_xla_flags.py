"""The flags that hide collectives: known to this jax, and a user's own value stands."""

import os
import subprocess
import sys

import pytest

from shardtrain.sharding import devices
from shardtrain.sharding.xla_flags import ALWAYS, OVERLAP, missing_flags


@pytest.mark.smoke312
def test_this_jax_knows_them() -> None:
    """An unknown flag ends the process when jax starts."""
    flags = " ".join(missing_flags(overlap=True, given=""))
    words = [sys.executable, "-c", "import jax; print(jax.devices())"]
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}
    done = subprocess.run(words, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_a_users_own_value_stands() -> None:
    name = next(iter(OVERLAP))
    missing = missing_flags(overlap=True, given=f"--other=1 {name}=false")
    assert len(missing) == len(ALWAYS) + len(OVERLAP) - 1
    assert not any(word.startswith(f"{name}=") for word in missing)


@pytest.mark.parametrize("overlap", [False, True])
def test_a_run_on_a_gpu_sets_them(monkeypatch: pytest.MonkeyPatch, overlap: bool) -> None:
    monkeypatch.setattr(devices, "accelerators", lambda: {"NVIDIA": 8})
    monkeypatch.setattr(devices, "accelerator_expected", lambda: True)
    monkeypatch.delitem(sys.modules, "jax", raising=False)
    monkeypatch.setenv("XLA_FLAGS", "--other=1")
    devices.prepare_devices(0, overlap=overlap)
    wanted = {**ALWAYS, **(OVERLAP if overlap else {})}
    words = os.environ["XLA_FLAGS"].split()
    assert words == ["--other=1", *(f"{name}={value}" for name, value in wanted.items())]


def test_a_run_on_a_cpu_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "accelerators", dict)
    monkeypatch.setenv("XLA_FLAGS", "--other=1")
    devices.prepare_devices(0)
    assert os.environ["XLA_FLAGS"] == "--other=1"
