"""What is said about a machine: accelerators that are not used, the allocator, folders, extras."""

import json
import logging
import tomllib
from pathlib import Path

import pytest

from shardtrain import doctor
from shardtrain.cli import main
from shardtrain.sharding import devices
from shardtrain.train import machine

ROOT = Path(__file__).parent.parent


@pytest.fixture
def gpu_here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A machine with two NVIDIA GPUs whose jax is asked for nothing in particular."""
    for number in range(2):
        (tmp_path / f"nvidia{number}").touch()
    monkeypatch.setattr(devices, "_NODES", {"NVIDIA": (f"{tmp_path}/nvidia[0-9]*",)})
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(machine, "allocator", lambda: "jemalloc")


# -- accelerators


def test_a_gpu_and_a_jax_for_cpus(gpu_here: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "PLUGINS", {"NVIDIA": ("no_such_plugin",)})
    assert devices.accelerators() == {"NVIDIA": 2}
    (text,) = machine.warnings()
    assert "an NVIDIA GPU" in text
    assert "pip install 'shardtrain[cuda]'" in text


def test_a_gpu_and_a_plugin_that_does_not_work(
    gpu_here: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "PLUGINS", {"NVIDIA": ("json",)})
    (text,) = machine.warnings()
    assert "driver" in text


@pytest.mark.parametrize(
    ("name", "value"), [("JAX_PLATFORMS", "cpu"), ("CUDA_VISIBLE_DEVICES", "")]
)
def test_a_gpu_that_is_hidden(
    gpu_here: None, monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    monkeypatch.setenv(name, value)
    (text,) = machine.warnings()
    assert name in text


def test_no_gpu_is_no_news(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "_NODES", {})
    monkeypatch.setattr(machine, "allocator", lambda: "jemalloc")
    assert machine.warnings() == []


def test_a_plugin_without_a_gpu_makes_no_noise(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(devices, "_NODES", {})
    logger = logging.getLogger("jax._src.xla_bridge")
    monkeypatch.setattr(logger, "filters", list(logger.filters))
    devices.prepare_devices(0)
    logger.error("Jax plugin configuration error: Exception when calling initialize()")
    logger.error("something else")
    assert [record.getMessage() for record in caplog.records] == ["something else"]


# -- the allocator


def test_the_allocator_of_this_process_is_one_of_those() -> None:
    assert machine.allocator() in (*machine.ALLOCATORS, "system")


@pytest.mark.parametrize("library", [None, "libjemalloc.so.9"])
def test_how_to_have_another_allocator(
    monkeypatch: pytest.MonkeyPatch, library: str | None
) -> None:
    monkeypatch.setattr(devices, "_NODES", {})
    monkeypatch.setattr(machine, "allocator", lambda: "system")
    monkeypatch.setattr(machine, "jemalloc_library", lambda: library)
    monkeypatch.setattr(machine.platform, "system", lambda: "Linux")
    (text,) = machine.warnings()
    assert f"LD_PRELOAD={library or 'libjemalloc.so.2'} MALLOC_CONF=" in text
    assert ("apt install" in text) == (library is None)
    (brief,) = machine.warnings(brief=True)
    assert len(f"note: {brief}") < 100
    assert "shardtrain doctor" in brief


# -- the command


def test_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert set(found) == {
        *("versions", "devices", "machine", "folders", "extras", "plan", "advice"),
    }
    assert found["versions"]["jax"]
    assert found["devices"]["platform"] == "cpu"
    assert sum(found["devices"]["kinds"].values()) == 8
    assert found["machine"]["memory"] > found["machine"]["memory available"] > 0
    assert found["folders"]["cache"]["free"] > 0
    assert "pytest" not in found["extras"]["test"]


def test_text(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor"]) == 0
    text = capsys.readouterr().out
    for words in ("versions", "allocator", "extras", "what to do"):
        assert words in text


def test_advice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "warnings", lambda: ["use the GPU"])
    found = doctor.examine()
    found["folders"] = {
        "cache": {"path": "/full", "free": 5 * 2**20, "writable": True},
        "here": {"path": "/other", "free": 2**40, "writable": False},
        "jax compile cache": "/cache",
    }
    assert doctor.advice(found) == [
        "use the GPU",
        "/full has only 5.0 MiB left",
        "/other cannot be written",
    ]
    found["devices"] = found["devices"] | {"error": "no such platform"}
    found["folders"]["jax compile cache"] = ""
    first, second, *_ = doctor.advice(found)
    assert first == "jax finds no devices: no such platform"
    assert "JAX_COMPILATION_CACHE_DIR" in second


def test_extras_are_those_of_the_package() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert set(doctor.EXTRAS) == set(project["optional-dependencies"])
