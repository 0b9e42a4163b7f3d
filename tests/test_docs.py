"""The documentation: what it quotes is so, what it shows runs, and what it names exists."""

import difflib
import re
import runpy
import shlex
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from shardtrain.cli import COMMANDS, main
from shardtrain.config import SECTIONS, TYPES, load_config
from shardtrain.errors import UserError

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"
PAGES = [README, ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted(ROOT.glob("docs/*.md"))]
SMALL = {
    "run.cpu_devices": 0,  # the devices of this process, which are 8
    "run.steps": 3,
    "model.num_layers": 1,
    "model.embed_dim": 16,
    "data.sequence_length": 16,
    "eval.every": 0,
    "eval.steps": 1,
    "eval.sample_tokens": 4,
    "checkpoint.every": 0,
    "log.trackers": [],
}


def keys_of(section: str) -> set[str]:
    """The keys of a section, whatever its type is."""
    parts = [SECTIONS[section], *TYPES.get(section, {}).values()]
    return {key for part in parts for key in part.model_fields}


def name(path: Path) -> str:
    return path.name


def blocks(path: Path, language: str) -> list[str]:
    """The fenced blocks of one language; "" are commands."""
    text = path.read_text("utf-8")
    return [m[2] for m in re.finditer(r"(?ms)^```(\w*)\n(.*?)^```$", text) if m[1] == language]


def prose(path: Path) -> str:
    """A page without its blocks."""
    return re.sub(r"(?ms)^```.*?^```$", "", path.read_text("utf-8"))


# -- what is generated or quoted


def test_the_page_of_keys_is_current() -> None:
    made = runpy.run_path(str(ROOT / "docs" / "make_config.py"))["page"]()
    assert (ROOT / "docs" / "config.md").read_text("utf-8") == made, "run docs/make_config.py"


def test_the_overview_is_quoted(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    assert capsys.readouterr().out in blocks(README, "text")


def test_the_first_config(tmp_path: Path) -> None:
    (block,) = blocks(README, "toml")
    (tmp_path / "my.toml").write_text(block)
    config = load_config(tmp_path / "my.toml")
    assert config.run.dir == "runs/my"
    with pytest.raises(UserError) as refused:
        load_config(tmp_path / "my.toml", {"mesh.tensor": 3})
    (quoted,) = (text for text in blocks(README, "text") if text.startswith("mesh.tensor=3"))
    assert quoted.strip() in str(refused.value)


def test_the_examples_are_quoted() -> None:
    one, many = (
        (ROOT / "examples" / file).read_text("utf-8")
        for file in ("one_device.py", "many_devices.py")
    )
    assert one in blocks(README, "python")
    changed = [
        line for line in difflib.ndiff(one.splitlines(), many.splitlines()) if line[0] in "+-"
    ]
    (quoted,) = blocks(README, "diff")
    assert quoted.splitlines() == [line[0] + line[2:] for line in changed]


# -- what is shown runs


def test_the_api(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code, *_ = blocks(README, "python")
    values = '{"mesh.tensor": 2, "run.steps": 50}'
    assert code.count(values) == 1
    assert len(code.splitlines()) <= 10
    small: dict[str, Any] = {"mesh.tensor": 2, **SMALL}
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, Any] = {"__name__": "readme"}
    exec(
        code.replace("prepare_devices(8)", "prepare_devices(0)").replace(values, repr(small)),
        namespace,
    )
    assert int(namespace["state"].step) == 3
    assert (tmp_path / "runs" / "quickstart" / "metrics.jsonl").exists()


def commands() -> list[str]:
    lines = [
        line for page in PAGES if page.exists() for b in blocks(page, "") for line in b.splitlines()
    ]
    spans = [
        m[1]
        for page in PAGES
        if page.exists()
        for m in re.finditer(r"`(shardtrain [^`]+)`", prose(page))
    ]
    return sorted(
        {
            line
            for line in (*lines, *spans)
            if line.startswith("shardtrain ") and "COMMAND" not in line
        }
    )


@pytest.mark.parametrize("line", commands())
def test_commands_exist(line: str) -> None:
    """The command is there, and so is each of its flags."""
    _, command, *words = shlex.split(line, comments=True)
    own = {field.name for field in fields(COMMANDS[command].options)}
    for word in words:
        if not word.startswith("--"):
            continue
        section, _, key = word[2:].partition(".")
        assert key in keys_of(section) if key else section in own, word


@pytest.mark.parametrize("line", [c for c in commands() if "config llama_style" in c])
def test_placement_of_a_mesh_that_is_not_here(
    line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*shlex.split(line)[1:], "--run.cpu_devices", "0", "--json"]) == 0
    assert '"data": 64' in capsys.readouterr().out


# -- what is named exists


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_links(page: Path) -> None:
    links = re.findall(r"\]\(([^)#]+)[^)]*\)", prose(page))
    local = [link for link in links if "://" not in link]
    assert [link for link in local if not (page.parent / link).exists()] == []


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_keys(page: Path) -> None:
    """Every `section.key` is one; of a table of other trainers' keys, the column of ours."""
    text = prose(page)
    if page.name == "moving.md":
        text = "\n".join(line.rsplit(" | ", 1)[-1] for line in text.splitlines())
    for code in re.findall(r"`([^`]+)`", text):
        for section, key in re.findall(
            rf"(?<![\w./-])({'|'.join(SECTIONS)})\.([a-z]\w*)(?!\w*[(.])", code
        ):
            known = {*keys_of(section), *PYTHON.get(section, ())}
            assert key in known, f"{section}.{key}"


PYTHON = {
    "run": ("mesh", "placement", "report", "py"),
    "config": ("py",),
    "checkpoint": ("json",),
    "data": ("loader",),
}
"""Attributes of a `Run`, and files, which are no keys."""


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_files(page: Path) -> None:
    """Every `path/file.py` lies in the package or in the repository."""
    for code in re.findall(r"`([\w/.]+/[\w.]+\.(?:py|toml|md|ipynb))`", prose(page)):
        assert (ROOT / code).exists() or (ROOT / "shardtrain" / code).exists(), code
