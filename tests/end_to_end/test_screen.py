"""What stands on a terminal, without a run."""

import io
import os
import sys

import pytest
from rich.console import Console

from shardtrain.train.screen import Screen, make_console


def test_the_screen_of_a_terminal() -> None:
    """A bar, lines that are not cut, an estimate after the first update, NaN is no fault."""
    text = io.StringIO()
    console = Console(file=text, force_terminal=True, width=60, color_system=None)
    values = {"loss": float("nan"), "grad_norm": float("inf"), "learning_rate": 1e-3}
    speed = {"tokens_per_second": 1e6, "mfu": None, "step_time": 2.0}
    with Screen(first=4, last=10, every=100, console=console) as screen:
        screen.table("a run", [("folder", "runs/[bold]x[/bold]:smile:")])
        screen.row(5, values | speed)
        screen.row(6, values | speed)
        screen.row(10, values | speed | {"val_loss": 1.5, "mfu": 0.25})
    said = text.getvalue()
    assert "runs/[bold]x[/bold]" in said
    assert "loss nan  grad inf  lr 1.00e-03  1,000,000 tokens/s  eta 0:10" in said
    assert "step  6/10" not in said
    assert "val_loss 1.5000" in said
    assert "mfu 25.0%" in said


def test_a_file_gets_lines_that_are_neither_cut_nor_filled(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    long = " ".join(["many words"] * 30)
    with Screen(first=0, last=1, every=1) as screen:
        screen.table("a run", [("state", long), ("folder", "runs/[bold]x[/bold]"), ("none", "")])
    assert capsys.readouterr().err == (
        f"a run\n state   {long}\n folder  runs/[bold]x[/bold]\n none\n"
    )
    make_console(stderr=False).print(long)
    assert capsys.readouterr().out == f"{long}\n"


def test_a_reader_that_goes_does_not_end_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """As `shardtrain train ... 2>&1 | head` does; a plain write afterwards is no error either."""
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "w") as stderr:
        monkeypatch.setattr(sys, "stderr", stderr)
        with Screen(first=0, last=2, every=1) as screen:
            screen.table("a run", [("folder", "runs/x")])
            screen.table("a run", [("folder", "runs/x")])
        print("done", file=stderr, flush=True)
