"""`launch --engine mpi`: the command line, and runs under Open MPI."""

import shlex
import signal
import sys
from pathlib import Path

import pytest
from debian import install
from small_runs import begin, launch, rows, said, wait_for_step, write_run

from shardtrain import cli

STEPS = 120


def shown(capsys: pytest.CaptureFixture[str], *words: str) -> list[str]:
    assert cli.main(["launch", "--engine", "mpi", "quickstart", "--show", *words]) == 0
    return shlex.split(capsys.readouterr().out)


def test_the_command_line_on_this_machine(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    monkeypatch.setenv("MY_SECRET", "x")
    words = shown(capsys, "-n", "2", "--run.steps", "5")
    assert words[:4] == ["mpirun", "--quiet", "-n", "2"]
    assert "--oversubscribe" in words
    end = [sys.executable, "-m", "shardtrain", "train", "quickstart", "--run.steps", "5"]
    assert words[-len(end) :] == end
    assert any(word.startswith("SHARDTRAIN_COORDINATOR=127.0.0.1:") for word in words)
    assert "NCCL_DEBUG" in words
    assert "MY_SECRET" not in words


def test_the_command_line_for_hosts(capsys: pytest.CaptureFixture[str]) -> None:
    words = shown(capsys, "-n", "8", "--hosts", "a:4,b:4")
    assert words[:6] == ["mpirun", "--quiet", "-n", "8", "--host", "a:4,b:4"]
    assert "--oversubscribe" not in words
    assert any(word.startswith("SHARDTRAIN_COORDINATOR=a:") for word in words)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), "how many processes"),
        (("-n", "8", "--hosts", "a:4,b"), "--hosts: these hosts have 5 slots, fewer than the 8"),
        (("-n", "2", "--hosts", "a:x"), "--hosts: hosts are written wrongly"),
        (("-n", "2", "--restarts", "1"), "--restarts: the engine mpi has no use for it"),
        (("-n", "3"), "run.cpu_devices=8: .* equally to 3 processes"),
    ],
)
def test_refusals(words: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["launch", "--engine", "mpi", *words]) == 2
    with pytest.raises(ValueError, match=message):
        raise ValueError(capsys.readouterr().err)


def test_no_mpirun(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("PATH", "")
    assert cli.main(["launch", "--engine", "mpi", "-n", "2"]) == 2
    assert "there is no mpirun here" in capsys.readouterr().err


# -- runs


@pytest.fixture
def _mpirun() -> None:
    install("openmpi-bin", "openssh-client", needs=("mpirun", "ssh"))


@pytest.mark.engines
@pytest.mark.usefixtures("_mpirun")
def test_two_processes_train_and_resume(tmp_path: Path) -> None:
    straight = write_run(tmp_path / "straight", STEPS)
    launch(straight, "-n", "2")
    folder = write_run(tmp_path / "resumed", STEPS)
    flags = ("--engine", "mpi", "-n", "2")
    launcher = begin(folder, *flags)
    wait_for_step(folder, 8)
    launcher.send_signal(signal.SIGTERM)
    assert launcher.wait(60) == 75, said(folder)
    launch(folder, *flags)
    values = ("step", "loss", "sample_digest", "grad_norm")
    assert rows(folder, *values) == rows(straight, *values)


@pytest.mark.engines
@pytest.mark.usefixtures("_mpirun")
def test_a_wrong_config(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "wrong", 4)
    launch(folder, "--engine", "mpi", "-n", "2", "--data.path", "nowhere.txt", code=2)
