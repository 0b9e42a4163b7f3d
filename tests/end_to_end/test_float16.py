"""A run in float16: overflows are told, batches come again, a stopped run goes on bit for bit."""

import re
from pathlib import Path

import pytest
from jobs import UPDATES, events, rows

from shardtrain import cli
from shardtrain.checkpoint.checkpointer import Checkpointer

SHORT = ("--run.steps", "16", "--train.precision", "float16", "--train.loss_scale_window", "6")


def train(*flags: str) -> int:
    return cli.main(["train", "tiny.toml", *SHORT, *flags])


@pytest.fixture
def here(project: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(project)
    return project


def test_overflows_cost_no_batch_and_a_stopped_run_goes_on(here: Path) -> None:
    large = ("--train.loss_scale", str(2.0**24))
    assert train(*large) == 0
    found = rows(here, *UPDATES, "loss_scale")
    overflows = events(here, "overflow")
    assert [o["loss_scale"] for o in overflows][:2] == [2.0**23, 2.0**22]
    assert [row["step"] for row in found] == list(range(1, 17))
    assert any(o["step"] > 0 for o in overflows), "it grew until it was too large"
    state = Checkpointer(here / "run" / "checkpoints", keep=2).restore_host(16)
    assert (int(state["step"]), int(state["cursor"])) == (16, 16), "each batch was used once"
    assert float(state["loss_scale"]["scale"]) == found[-1]["loss_scale"]
    second = ("--run.dir", "again")
    assert train(*large, *second, "--run.stop_at", "7") == 0
    assert train(*large, *second) == 0
    (here / "run").rename(here / "first")
    (here / "again").rename(here / "run")
    assert rows(here, *UPDATES, "loss_scale") == found


def test_an_overflow_at_the_floor_is_a_bad_number(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing is left to shrink: the run stops, and says where and with which scale."""
    stuck = ("--train.loss_scale", str(2.0**32), "--train.loss_scale_floor", str(2.0**30))
    assert train(*stuck) == 3
    assert [o["loss_scale"] for o in events(here, "overflow")] == [2.0**31, 2.0**30]
    said = capsys.readouterr().err
    assert re.search(
        r"the norm of the gradient of update 1 is (inf|nan), with a loss scale of 1.07374e\+09",
        said,
    )
    assert "gradients, first that of" in said
