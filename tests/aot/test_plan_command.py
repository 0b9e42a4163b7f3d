"""`shardtrain plan --compile` and `--audit` through the command: exit codes, words, what is kept.

Needs the extra `plan`. Each command compiles in a child of its own.
"""

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from shardtrain.cli import main
from shardtrain.config import load_config, to_toml
from tests.aot.marks import needs_compiler
from tests.aot.sections import model_sections

pytestmark = needs_compiler("plan command")

BASE = model_sections(2, 128, 512, 64, 32)
BASE["model"]["num_heads"] = 16


@pytest.fixture
def words(tmp_path: Path) -> list[str]:
    """A small config for two hosts of H100s."""
    path = tmp_path / "small.toml"
    path.write_text(to_toml(load_config(BASE)), encoding="utf-8")
    return ["plan", str(path), "--target", "h100:2x8", "--no-search"]


def test_a_broken_promise_ends_with_5(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """A tensor group over two hosts is a promise that the config itself breaks."""
    assert main([*words, "--audit", "--mesh.tensor", "16"]) == 5
    text = capsys.readouterr().out
    (told,) = (line for line in text.splitlines() if " broken " in line)
    assert told.startswith(" tensor groups are in one domain")
    assert "all-reduce" in text.split(told)[1]
    assert "2, 1 expected domains" in text


def aborts(devices: list[Any], *_: Any) -> Any:
    os.abort()


def killed(devices: list[Any], *_: Any) -> Any:
    print("x" * 5000, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize(
    ("lower", "message"),
    [
        (aborts, "compiling for h100:2x8: the compiler aborted (SIGABRT)"),
        (killed, "compiling for h100:2x8: the compiler was ended from outside (SIGKILL)"),
    ],
)
def test_a_compiler_that_dies_is_told_on_one_screen(
    words: list[str],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    lower: Callable[..., Any],
    message: str,
) -> None:
    monkeypatch.setattr("shardtrain.commands_plan.lower_step", lower)
    assert main([*words, "--compile"]) == 2
    told = capsys.readouterr()
    assert told.err.startswith(message)
    assert len(told.err.splitlines()) < 24
    assert max(map(len, told.err.splitlines())) < 200
    assert told.out == ""


@pytest.mark.campaign
def test_what_is_kept_is_the_same_twice(
    words: list[str], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """And shows what another layout changes."""
    layouts = {"first": "1", "second": "1", "third": "3"}
    kept = {}
    for name, zero in layouts.items():
        command = [*words, "--compile", "--json", "--keep", str(tmp_path / name)]
        assert main([*command, "--sharding.zero", zero]) == 0
        kept[name] = {
            path.name: path.read_text(encoding="utf-8") for path in (tmp_path / name).iterdir()
        }
    printed = json.loads(capsys.readouterr().out.splitlines()[0])
    assert set(kept["first"]) == {"step.hlo", "collectives.txt", "memory.txt", "plan.json"}
    assert kept["first"] == kept["second"]
    assert all(kept["third"][name] != text for name, text in kept["first"].items())
    plan = json.loads(kept["first"]["plan.json"])
    assert plan["compiled"]["bytes_per_device"] == printed["compiled"]["bytes_per_device"]
    peak = printed["compiled"]["bytes_per_device"]["total"]
    assert f"compiled\ttotal\t{peak}\n" in kept["first"]["memory.txt"]
    head, *lines = (line.split("\t") for line in kept["first"]["collectives.txt"].splitlines())
    rows = [dict(zip(head, line, strict=True)) for line in lines]
    sent = sum(int(row["instructions"]) * int(row["sent"]) * int(row["times"]) for row in rows)
    told = sum(row["wire"] for row in printed["compiled"]["collectives"])
    assert sent == pytest.approx(told, rel=1e-3)
