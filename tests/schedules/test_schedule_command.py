"""The command: what it prints, writes and refuses; that it does not import jax."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from shardtrain import cli


def answer(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    code = cli.main(["schedule", *words])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


@pytest.mark.smoke312
def test_it_does_not_import_jax(tmp_path: Path) -> None:
    code = """
import sys
from shardtrain.cli import main
assert main("schedule --schedule zero_bubble --layers 9 --out out.svg".split()) == 0
sys.exit(str([name for name in ("jax", "flax", "matplotlib") if name in sys.modules] or ""))
"""
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path, check=False
    )
    assert result.stderr.strip() == ""
    assert result.stdout.startswith("zero_bubble: 4 stages, 8 microbatches, 17 ticks\n")
    assert (tmp_path / "out.svg").exists()


def test_figures_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    words = "--stages 8 --microbatches 32 --schedule interleaved --virtual_stages 4 --json"
    code, out, _ = answer(capsys, *words.split(), "--activation_bytes", "4", "--forward", "4")
    found = json.loads(out)
    assert code == 0
    assert found["ratio"] == (32 * 4 + 8 - 1) / (32 * 4)
    assert (found["time"], found["ideal"]) == (135 * 1.5, 128 * 1.5)
    assert [row["live"]["residual"] for row in found["per_stage"]] == list(range(39, 24, -2))
    assert [row["message_bytes"] for row in found["per_stage"]] == [896] + [1024] * 6 + [896]


def test_figures_and_timeline_as_text(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    words = "--stages 2 --microbatches 4 --layers 5 --head 0.5 --residual_bytes 1024"
    code, out, _ = answer(capsys, *words.split())
    lines = out.splitlines()
    assert code == 0
    assert lines[0] == "1f1b: 2 stages, 4 microbatches, 6 ticks"
    assert lines[1] == "lockstep time 42, ideal 36: 1.167 of the ideal; bubble 21.4%"
    assert lines[2] == "layout E3,2H"
    assert lines[-3].startswith("stage 0  F0")
    assert len(lines[-3]) == 100
    assert "9.0 KiB" in out


def test_without_anything_it_shows_something(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = answer(capsys)
    assert (code, err) == (0, "")
    assert "1f1b: 4 stages, 8 microbatches" in out


@pytest.mark.parametrize("suffix", ["svg", "png", "csv"])
def test_a_table_can_be_written_and_used(
    suffix: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if suffix == "png":
        pytest.importorskip("matplotlib")
    table, out = str(tmp_path / "mine.csv"), str(tmp_path / f"out.{suffix}")
    assert answer(capsys, "--schedule", "zero_bubble", "--stages", "3", "--out", table)[0] == 0
    code, text, _ = answer(capsys, "--table", table, "--out", out, "--json")
    assert code == 0
    assert Path(out).stat().st_size > 100
    found = json.loads(text)
    assert (found["stages"], found["microbatches"], found["slots"]["pending"]) == (3, 8, 4)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--schedule 1f2b", "did you mean 1f1b?"),
        ("--stages -1", "stages=-1: must be at least 1"),
        ("--schedule 1f1b --table x.csv", "there is a table too, x.csv"),
        ("--table nowhere.csv", "nowhere.csv: there is no such file"),
        ("--table mine.csv --stages 3", "mine.csv: has 2 stages, but there are 3"),
        ("--table mine.csv --virtual_stages 2", "has 1 virtual stages, but virtual_stages=2"),
        ("--layers 3", "too few for 4 parts"),
        ("--layers -3", "layers=-3: must be at least 0"),
        ("--layers 8 --head nan", "head=nan: must be at least 0"),
        ("--head 1", "head=1: is in layers, and they are not known"),
        ("--layout E4,0,4,4H", "part 1 is empty"),
        ("--layout E4,4,4,4H --layers 15", "has 16 layers, but the model has 15"),
        ("--forward -1", "forward=-1: must be a time"),
        ("--out picture.jpg", "allowed: .svg, .png, .csv"),
        ("--out nowhere/picture.svg", "cannot be written: No such file or directory"),
        ("--stages 4 --stages 8", "is given twice"),
    ],
)
def test_what_cannot_be_is_refused(
    words: str,
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.csv").write_text("stage 0,stage 1\nF0,\n,F0 B0\nB0,\n")
    code, out, err = answer(capsys, *words.split())
    assert (code, out) == (2, "")
    assert message in err
