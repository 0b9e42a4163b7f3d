"""`launch --engine slurm`: the script, and a job on a real cluster of one node."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from slurm_machine import Slurm, job_state, make_slurm
from slurm_machine import said as slurm_said
from small_runs import launch, rows, said, wait_for_step, write_run

from shardtrain import cli

STEPS = 120


def script(folder: Path, *words: str) -> str:
    out = folder / "job.sh"
    assert cli.main(["launch", "--engine", "slurm", "quickstart", "--out", str(out), *words]) == 0
    done = subprocess.run(["bash", "-n", str(out)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    return out.read_text()


def header(text: str) -> dict[str, str]:
    lines = [line for line in text.splitlines() if line.startswith("#SBATCH ")]
    body = text[text.index("codes=") :]
    assert "#SBATCH" not in body  # Slurm reads none after the first command
    return dict(line.removeprefix("#SBATCH --").partition("=")[::2] for line in lines)


def test_the_script(tmp_path: Path) -> None:
    flags = ["--nodes", "4", "--tasks", "2", "--gpus", "8", "--time", "1:00:00", "--account", "us"]
    flags += ["--partition", "big", "--lines", "#SBATCH --constraint=h100", "module load cuda"]
    text = script(tmp_path, *flags, "--restarts", "3", "--data.batch_size", "32")
    assert header(text) == {
        "job-name": "quickstart",
        "nodes": "4",
        "ntasks-per-node": "2",
        "gpus-per-node": "8",
        "time": "1:00:00",
        "partition": "big",
        "account": "us",
        "chdir": os.getcwd(),
        "output": "%x-%j.out",
        "open-mode": "append",
        "signal": "USR1@120",
        "requeue": "",
        "constraint": "h100",
    }
    assert "srun --kill-on-bad-exit=1 --gpus-per-task=4 \\\n" in text
    assert f"{sys.executable} -m shardtrain train quickstart --data.batch_size 32\n" in text
    assert text.index("\nmodule load cuda\n") < text.index("srun --kill")
    assert '"$(wc -l < "$failures")" -le 3 ]' in text


def test_a_script_of_defaults_says_nothing_of_what_was_not_given(tmp_path: Path) -> None:
    found = header(script(tmp_path))
    assert (found["nodes"], found["ntasks-per-node"]) == ("1", "1")
    assert found.keys() & {"gpus-per-node", "time", "partition", "account"} == set()


def test_it_is_printed_without_out(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["launch", "--engine", "slurm"]) == 0
    assert capsys.readouterr().out.startswith("#!/bin/bash\n#SBATCH --job-name=quickstart\n")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--gpus", "3", "--tasks", "2"), "--gpus: .* shared out equally to 2 processes"),
        (("--gpus", "3"), "not divisible by mesh.data=3|3 devices"),
        (("--tasks", "3"), "run.cpu_devices=8: .* equally to 3 processes"),
        (("--time", "1 day"), "--time: must be one word"),
        (("--lines", "a\nb"), "--lines: each must be one line"),
        (("-n", "2"), "--processes: the engine slurm has no use for it"),
        (("--out", "/no/where/job.sh"), "--out: cannot be written"),
    ],
)
def test_refusals(words: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["launch", "--engine", "slurm", *words]) == 2
    out, error = capsys.readouterr()
    assert out == ""
    with pytest.raises(ValueError, match=message):
        raise ValueError(error)


def test_submitting_without_slurm(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", "")
    assert cli.main(["launch", "--engine", "slurm", "--submit"]) == 2
    assert "there is no sbatch here" in capsys.readouterr().err


# -- a cluster


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    machine = make_slurm(tmp_path_factory.mktemp("slurm"))
    yield machine
    machine.stop()


def submit(folder: Path, *flags: str) -> str:
    text = launch(folder, "--engine", "slurm", "--tasks", "2", "--submit", *flags)
    return text.split()[-1]


def wait_for_end(folder: Path, job: str) -> int:
    """Waits until a job is done; returns how often it was put back."""
    limit = time.monotonic() + 240
    while (state := job_state(job))[0] != "COMPLETED":
        assert time.monotonic() < limit, said(folder)
        assert state[0] in ("PENDING", "RUNNING", "COMPLETING"), f"{state}\n{said(folder)}"
        time.sleep(0.2)
    return state[1]


@pytest.mark.engines
@pytest.mark.usefixtures("slurm")
def test_a_preempted_job_goes_on(tmp_path: Path) -> None:
    straight = write_run(tmp_path / "straight", STEPS)
    launch(straight, "-n", "2")
    folder = write_run(tmp_path / "preempted", STEPS)
    job = submit(folder)
    wait_for_step(folder, 8)
    slurm_said("scancel", "--signal=USR1", job)
    assert wait_for_end(folder, job) == 1
    assert "the run ended with 75; the job goes back into the queue" in said(folder)
    values = ("step", "loss", "sample_digest", "grad_norm")
    assert rows(folder, *values) == rows(straight, *values)


@pytest.mark.engines
@pytest.mark.usefixtures("slurm")
def test_a_wrong_config_does_not_go_back(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "wrong", 4)
    job = submit(folder, "--data.path", "nowhere.txt")
    limit = time.monotonic() + 120
    while job_state(job)[0] != "FAILED":
        assert time.monotonic() < limit, said(folder)
        time.sleep(0.2)
    assert job_state(job)[1] == 0
    assert "the run ended with 2\n" in said(folder)
