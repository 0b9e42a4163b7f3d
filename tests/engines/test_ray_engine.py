"""`launch --engine ray`: what is legal with fewer nodes, and a run whose node is killed."""

import importlib.util
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from small_runs import begin, launch, rows, said, wait_for_step, write_run

from shardtrain import cli, load_config
from shardtrain.launch_ray import devices_of_worker, fitting, flags_for, largest_legal

STEPS = 300


@pytest.mark.parametrize(
    ("flags", "room", "wanted", "least", "expected"),
    [
        ({}, 4, 4, 1, 4),
        ({}, 3, 4, 1, 2),  # 16 sequences are not divisible by 3
        ({}, 9, 4, 1, 4),
        ({"mesh.data": 4}, 2, 4, 1, 2),  # data = -1 there
        ({"mesh.data": 4}, 1, 4, 2, 0),
        ({"mesh.tensor": 4}, 1, 4, 1, 0),  # 2 devices cannot hold tensor 4
        ({"mesh.tensor": 4}, 3, 4, 1, 2),
    ],
)
def test_the_processes_that_are_legal(
    flags: dict[str, int], room: int, wanted: int, least: int, expected: int
) -> None:
    config = load_config("quickstart", {"run.cpu_devices": 8} | flags)
    devices = devices_of_worker(config, wanted, 0)
    assert devices == 2
    assert largest_legal(config, room, devices, wanted=wanted, least=least) == expected


def test_flags_of_a_smaller_run() -> None:
    config = load_config("quickstart", {"run.cpu_devices": 8, "mesh.data": 4})
    smaller = fitting(config, 2, 2, wanted=4)
    flags = ["--run.cpu_devices", "8", "--run.steps", "3", "--mesh.data=4", "--log.trackers"]
    expected = ["--run.steps", "3", "--log.trackers", "--run.cpu_devices=4", "--mesh.data=-1"]
    assert flags_for(flags, smaller) == expected
    assert fitting(config, 4, 2, wanted=4) is config


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), "how many processes"),
        (("-n", "3"), "run.cpu_devices=8: cannot be shared out equally to 3 processes"),
        (("-n", "2", "--min_processes", "3"), "--min_processes: more than the 2 processes"),
        (("-n", "2", "--nodes", "3"), "--nodes: the engine ray has no use for it"),
        (("-n", "2", "--mesh.data", "2"), "the product is 4, but there are 8 devices"),
    ],
)
def test_refusals(words: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["launch", "--engine", "ray", *words]) == 2
    with pytest.raises(ValueError, match=message):
        raise ValueError(capsys.readouterr().err)


def test_ray_is_not_installed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    assert cli.main(["launch", "--engine", "ray", "-n", "2"]) == 2
    error = capsys.readouterr().err
    assert "--engine ray: ray is not installed here\n  to do: pip install" in error


# -- a cluster


@pytest.fixture(scope="module")
def python(request: pytest.FixtureRequest) -> str:
    """An interpreter that has ray: this one, or one of an environment that is made for it."""
    if importlib.util.find_spec("ray") is not None:
        return sys.executable
    folder = Path(request.config.rootpath) / ".pytest_cache" / f"ray-{sys.version_info[1]}"
    found = folder / "bin" / "python"
    if not (folder / "ready").exists():
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(folder)], check=True)
        (packages,) = folder.glob("lib/python*/site-packages")
        (packages / "shardtrain_test.pth").write_text(str(Path(pytest.__file__).parent.parent))
        words = [str(found), "-m", "pip", "install", "--quiet", "ray[default]>=2.40"]
        done = subprocess.run(words, capture_output=True, text=True, check=False)
        if done.returncode:
            pytest.skip(f"ray cannot be installed: {done.stderr.strip().splitlines()[-1]}")
        (folder / "ready").touch()
    return str(found)


class Nodes:
    def __init__(self, python: str, count: int) -> None:
        self._process = subprocess.Popen(
            [python, str(Path(__file__).parent / "ray_cluster.py"), str(count)],
            env=os.environ | {"JAX_PLATFORMS": "cpu"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        self.address = self._read("address")

    def _read(self, word: str) -> str:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(word):
                return line.split()[-1]
        raise AssertionError(f"the cluster ended without {word}")

    def kill_one(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write("kill\n")
        self._process.stdin.flush()
        self._read("killed")

    def stop(self) -> None:
        self._process.communicate(timeout=60)


@pytest.fixture
def nodes(python: str) -> Iterator[Nodes]:
    cluster = Nodes(python, 2)
    yield cluster
    cluster.stop()


@pytest.mark.engines
def test_a_run_goes_on_with_the_nodes_that_are_left(
    tmp_path: Path, python: str, nodes: Nodes
) -> None:
    straight = write_run(tmp_path / "straight", STEPS)
    launch(straight, "-n", "2")
    folder = write_run(tmp_path / "shrunk", STEPS)
    flags = ("--engine", "ray", "-n", "2", "--address", nodes.address)
    launcher = begin(folder, *flags, python=python)
    try:
        wait_for_step(folder, 45)
        nodes.kill_one()
        assert launcher.wait(240) == 0, said(folder)
    finally:
        launcher.kill()
    assert "goes on with 1 of 2 processes, 2 devices" in said(folder)
    assert rows(folder, "step", "sample_digest") == rows(straight, "step", "sample_digest")
    losses = [loss for (loss,) in rows(straight, "loss")]
    assert [loss for (loss,) in rows(folder, "loss")] == pytest.approx(losses, rel=1e-4)


@pytest.mark.engines
def test_no_legal_layout_is_left(tmp_path: Path, python: str, nodes: Nodes) -> None:
    folder = write_run(tmp_path / "whole", STEPS)
    flags = ("--engine", "ray", "-n", "2", "--address", nodes.address, "--mesh.tensor", "4")
    launcher = begin(folder, *flags, python=python)
    try:
        wait_for_step(folder, 3)
        nodes.kill_one()
        assert launcher.wait(120) == 76, said(folder)
    finally:
        launcher.kill()
    assert "no legal layout is left: there is room for 1 processes of 2 devices" in said(folder)


@pytest.mark.engines
def test_a_cluster_without_room(tmp_path: Path, python: str, nodes: Nodes) -> None:
    folder = write_run(tmp_path / "large", STEPS)
    flags = ("--engine", "ray", "-n", "4", "--address", nodes.address)
    text = launch(folder, *flags, code=2, python=python)
    assert "-n 4: the cluster has room for 2" in text
