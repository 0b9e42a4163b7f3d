"""Batches whose numbers are none, and losses that jump: skipped, gone back from, stopped at."""

import json
from pathlib import Path

import pytest
from jobs import entries, events, rows

from shardtrain import cli
from shardtrain.checkpoint.checkpointer import Checkpointer

SHORT = ("--model.dropout", "0", "--optimizer.schedule", "constant")


def train(*flags: str) -> int:
    return cli.main(["train", "tiny.toml", *SHORT, "--run.steps", "24", *flags])


@pytest.fixture
def here(project: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(project)
    return project


def digests(folder: Path) -> list[str]:
    return [row["sample_digest"] for row in rows(folder, "sample_digest")]


def test_a_skipped_batch_moves_the_cursor_and_not_the_step(here: Path) -> None:
    flags = ("--guard.bad_numbers", "skip", "--run.chaos", "nan@5,nan@6,nan@20")
    assert train(*flags, "--run.stop_at", "1") == 0
    first = digests(here)
    assert train(*flags) == 0
    assert [row["step"] for row in rows(here, "step")] == list(range(1, 25))
    skips = events(here, "skip")
    assert [(skip["step"], skip["update"], skip["cursor"]) for skip in skips] == [
        (4, 5, 4), (4, 5, 5), (17, 18, 19),
    ]  # fmt: skip
    assert skips[0]["loss"] is None
    assert "of 16 of 16 gradients, first that of embedding" in skips[0]["reason"]
    order = [*digests(here)]
    left_out = [skip["sample_digest"] for skip in skips]
    assert order[:1] == first
    assert len(set(order) | set(left_out)) == 27, "no batch is seen twice"
    state = Checkpointer(here / "run" / "checkpoints", keep=2).restore_host(24)
    assert (int(state["step"]), int(state["cursor"]), int(state["skipped"])) == (24, 27, 0)
    # What the optimizer counts did not move either, and the schedule is that of the step.
    assert all(int(n) == 24 for n in counts(state["opt_state"]))


def counts(tree: object) -> list[int]:
    if not isinstance(tree, dict):
        return []
    found = [int(value) for key, value in tree.items() if key == "count"]
    return found + [n for value in tree.values() for n in counts(value)]


def test_so_many_in_a_row_stop_the_run(here: Path) -> None:
    flags = ("--guard.bad_numbers", "skip", "--guard.skip_limit", "2")
    assert train(*flags, "--run.chaos", "nan@5,nan@6,nan@7") == 3
    assert [skip["cursor"] for skip in events(here, "skip")] == [4, 5]
    (stop,) = events(here, "stop")
    assert "such batch 3 in a row, guard.skip_limit=2" in stop["reason"]


def test_a_rollback_goes_back_and_past_the_batches(here: Path) -> None:
    flags = ("--guard.bad_numbers", "rollback", "--guard.rollback_steps", "4")
    assert train(*flags, "--guard.rollback_batches", "7", "--run.chaos", "nan@18") == 0
    (back,) = events(here, "rollback")
    assert (back["step"], back["from"], back["cursor"], back["left_out"]) == (10, 18, 18, 8)
    assert [row["step"] for row in rows(here, "step")] == list(range(1, 25))
    assert len(set(digests(here))) == 24
    saves = [save["step"] for save in events(here, "save")]
    assert saves == [5, 10, 15, 20, 24], "saves at the replayed steps happen"
    state = Checkpointer(here / "run" / "checkpoints", keep=2).restore_host(20)
    assert int(state["cursor"]) == 28
    assert any((here / "run" / "bad_numbers").iterdir())


def test_rollbacks_have_an_end_and_one_without_a_checkpoint_begins_anew(here: Path) -> None:
    flags = ("--guard.bad_numbers", "rollback", "--guard.rollback_limit", "2")
    flags = (*flags, "--guard.rollback_batches", "1", "--checkpoint.every", "0")
    assert train(*flags, "--run.chaos", "nan@3,nan@7,nan@11") == 3
    assert [e["step"] for e in entries(here) if e.get("event") == "rollback"] == [0, 0]
    assert len(set(digests(here))) == len(digests(here)) == 3


def test_a_jump_of_the_loss(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A learning rate that is far too high makes the loss jump."""
    jump = ("--optimizer.learning_rate", "1", "--guard.spike_sigmas", "2")
    assert train(*jump, "--guard.spikes", "warn") == 0
    first = events(here, "spike")[0]["update"]
    assert "spike: the loss of update" in capsys.readouterr().err
    assert train(*jump, "--guard.spikes", "stop", "--run.dir", "other") == 3
    told = capsys.readouterr().err
    assert f"stopped: the loss of update {first} is " in told
    assert "standard deviations above the median" in told


def test_stopping_is_the_default_and_going_on_meets_it_again(here: Path) -> None:
    assert train("--run.chaos", "nan@12") == 3
    assert len(rows(here, "step")) == 11
    evidence = json.loads(next((here / "run" / "bad_numbers").iterdir()).read_text())
    assert evidence["update"] == 12
    assert evidence["cursor"] == 11
    assert train("--run.chaos", "nan@12") == 0, "the fault happened once"
    assert len(rows(here, "step")) == 24
