"""Ctrl-C and SIGTERM: what is done is saved, what is said is true, going on is exact."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from jobs import LAST, UPDATES, Job, events, rows

from shardtrain import cli
from shardtrain.checkpoint.checkpointer import Checkpointer
from shardtrain.data.language import LanguageData
from shardtrain.run import Run
from shardtrain.train.interrupt import Interrupt

GO_ON = "the same command goes on from there, or this one:\n  shardtrain train "


def stopped_at(folder: Path, reason: str) -> int:
    """The step of the stop event."""
    (stop,) = events(folder, "stop")
    assert stop["reason"] == reason
    return int(stop["step"])


def test_ctrl_c_at_a_terminal(project: Path, straight: Path) -> None:
    job = Job(project, "--checkpoint.every", "0", terminal=True)
    job.wait_for_step(7)
    job.type(b"\x03")
    said = job.finish(130).replace("\r\n", "\n")
    done = stopped_at(project, "SIGINT")
    assert 7 <= done < LAST
    assert "SIGINT: the run saves and ends" in said
    assert "training" in said, "a bar"
    assert f"interrupted, saved at step {done}; {GO_ON}{project / 'run'}\n" in said
    assert rows(project, *UPDATES) == rows(straight, *UPDATES)[:done]
    words = ["train", str(project / "run"), "--data.path", str(project / "my.txt")]
    assert cli.main(words) == 0
    assert rows(project, *UPDATES) == rows(straight, *UPDATES)


def test_sigterm_saves_and_asks_to_be_started_again(project: Path, straight: Path) -> None:
    job = Job(project, "--checkpoint.every", "0")
    job.wait_for_step(7)
    job.send(signal.SIGTERM)
    said = job.finish(75)
    done = stopped_at(project, "SIGTERM")
    assert f"interrupted, saved at step {done}" in said
    assert sorted(path.name for path in (project / "run" / "checkpoints").iterdir()) == [str(done)]
    assert rows(project, *UPDATES) == rows(straight, *UPDATES)[:done]


def test_noticed_while_compiling(project: Path) -> None:
    job = Job(project)
    job.wait_for("compiling the step")
    job.send(signal.SIGINT)
    job.wait_for("SIGINT: the run saves and ends")
    said = job.finish(130)
    assert said.index("SIGINT: ") < said.index("compiled the step in")
    assert f"interrupted, nothing was done yet; {GO_ON}" in said
    assert stopped_at(project, "SIGINT") == 0
    assert rows(project) == []


def test_a_second_interrupt_quits_at_once(project: Path) -> None:
    job = Job(project, cache=False)
    job.wait_for("compiling the step")
    job.send(signal.SIGTERM)
    job.wait_for("SIGTERM: the run saves and ends")
    job.send(signal.SIGTERM)  # machines repeat themselves
    job.send(signal.SIGINT)
    said = job.finish(130)
    assert "stopped at once" in said
    assert "compiled the step" not in said


def test_terminated_before_training_begins(project: Path) -> None:
    code = """
import os, signal, sys
from shardtrain import cli
import shardtrain.training
def slow(config):
    os.kill(os.getpid(), signal.SIGTERM)
    raise AssertionError("not reached")
shardtrain.training.build = slow
sys.exit(cli.main(["train", "tiny.toml"]))
"""
    words = [sys.executable, "-c", code]
    result = subprocess.run(words, cwd=project, capture_output=True, text=True, check=False)
    assert result.returncode == 75, result.stderr
    assert "SIGTERM: ended; no training was under way" in result.stderr
    assert not (project / "run").exists()


# -- in this process


def signal_at(monkeypatch: pytest.MonkeyPatch, update: int, number: signal.Signals) -> None:
    """Sends a signal to this process in an update, before it is asked whether to stop."""
    digest = LanguageData.digest

    def signalled(self: LanguageData, cursor: int) -> str:
        if cursor + 1 == update:
            os.kill(os.getpid(), number)
            time.sleep(0.2)
        return digest(self, cursor)

    monkeypatch.setattr(LanguageData, "digest", signalled)


def test_an_evaluation_that_an_interrupt_left_out_is_made_up_for(
    project: Path, straight: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(project)
    with monkeypatch.context() as patch:
        signal_at(patch, 20, signal.SIGINT)
        assert cli.main(["train", "tiny.toml"]) == 130
    assert len(rows(project)) == 20
    assert [event["step"] for event in events(project, "eval")] == [10]
    assert cli.main(["train", "tiny.toml"]) == 0
    losses = [(event["step"], event["val_loss"]) for event in events(project, "eval")]
    assert losses == [(event["step"], event["val_loss"]) for event in events(straight, "eval")]
    assert rows(project, *UPDATES) == rows(straight, *UPDATES)


def test_sigterm_in_every_phase(  # O-46
    project: Path, straight: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In an evaluation, a restore, a save, twice each time: each stop leaves a checkpoint."""
    monkeypatch.chdir(project)

    def terminate(owner: type, name: str) -> None:
        function = getattr(owner, name)

        def terminated(*arguments: Any, **keywords: Any) -> Any:
            for _ in range(2):
                os.kill(os.getpid(), signal.SIGTERM)
                time.sleep(0.1)
            return function(*arguments, **keywords)

        patch.setattr(owner, name, terminated)

    for owner, name, done in (
        (Run, "evaluate", 10),
        (Checkpointer, "restore", 10),
        (Checkpointer, "save", 15),
    ):
        with monkeypatch.context() as patch:
            terminate(owner, name)
            assert cli.main(["train", "tiny.toml"]) == 75
        assert Checkpointer(project / "run" / "checkpoints", keep=2).latest() == done
        assert rows(project) == rows(straight)[:done]
    assert cli.main(["train", "tiny.toml"]) == 0
    assert rows(project) == rows(straight)


def test_an_interrupt_in_the_last_update_changes_nothing(
    project: Path, straight: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(project)
    signal_at(monkeypatch, LAST, signal.SIGTERM)
    assert cli.main(["train", "tiny.toml"]) == 0
    assert rows(project) == rows(straight)
    assert stopped_at(project, "done") == LAST


def test_handlers_are_given_back() -> None:
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    with Interrupt() as interrupt:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.1)
    assert interrupt.signal is signal.SIGTERM
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before
    assert signal.set_wakeup_fd(-1) == -1


def test_elsewhere_than_in_the_main_thread_signals_are_left_alone() -> None:
    found: list[Any] = []

    def enter() -> None:
        with Interrupt() as interrupt:
            found.append((interrupt.signal, signal.getsignal(signal.SIGINT)))

    thread = threading.Thread(target=enter)
    before = signal.getsignal(signal.SIGINT)
    thread.start()
    thread.join()
    assert found == [(None, before)]
