"""What cannot be trained is refused on the command line: a message, exit code 2, nothing else.

Flags that are wrong, a mesh that does not fit the devices and configs that are not there are in
`tests/test_cli.py`.
"""

import hashlib
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
from jobs import CONFIG

from shardtrain import cli
from shardtrain.data.tokens import HEADER_BYTES
from shardtrain.train.rundir import RunDirectory

Capture = pytest.CaptureFixture[str]


@pytest.fixture
def here(project: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project as the current folder."""
    monkeypatch.chdir(project)
    return project


def refusal(capsys: Capture, *flags: str) -> str:
    """What `train` says when it refuses; it has written nothing."""
    before = sorted(Path().rglob("*"))
    assert cli.main(["train", "tiny.toml", *flags]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "Traceback" not in captured.err
    assert sorted(Path().rglob("*")) == before
    return captured.err


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (
            "learning_rate = 1e-2",
            "learning_rat = 1e-2",
            "tiny.toml:23: optimizer.learning_rat: unknown key\n.*\n.*you mean optimizer.learning_",
        ),
        (
            "steps = 40",
            'steps = "40"',
            "tiny.toml:5: run.steps: must be a whole number, not a string",
        ),
        ("embed_dim = 16", "embed_dim = 16\nembed_dim = 32", "embed_dim is given twice"),
        (
            "num_heads = 4",
            "num_heads = 5",
            "model.num_heads=5: model.embed_dim=16 is not divisible",
        ),
        ("batch_size = 8", "batch_size = 12", "data.batch_size=12: not divisible by mesh.data"),
    ],
    ids=["unknown key", "wrong type", "duplicate key", "heads", "batch"],
)
def test_the_file(here: Path, capsys: Capture, old: str, new: str, message: str) -> None:
    assert CONFIG.count(old) >= 1
    (here / "tiny.toml").write_text(CONFIG.replace(old, new, 1))
    assert re.search(message, refusal(capsys))


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--mesh.pipeline 4", "model.num_layers=2: too few for 4 parts: one would be empty"),
        ("--model.vocab_size 257 --mesh.tensor 2", "the vocabulary's 257 rows are not divisible"),
        ("--model.vocab_size 100", "has 256 tokens; use 256 or more"),
        ("--data.path absent.txt", "data.path: there is no such file or folder"),
        ("--data.path empty.txt", "data.path: there is no text in it"),
        ("--data.path empty", "data.path: there are no text files in it"),
        ("--data.path my.txt --data.sequence_length 60000", "too few tokens for one batch"),
        ("--run.dir my.txt/run", "run.dir: the run directory cannot be written"),
        ("--run.dir /proc/run", "run.dir: the run directory cannot be written"),
    ],
    ids=[
        *("layers", "vocabulary", "small vocabulary", "no data", "empty data", "no text files"),
        *("little data", "run.dir below a file", "run.dir in a pseudo file system"),
    ],
)
def test_flags(here: Path, capsys: Capture, flags: str, message: str) -> None:
    (here / "empty.txt").touch()
    (here / "empty").mkdir()
    assert message in refusal(capsys, *flags.split())


def test_a_vocabulary_that_only_the_data_tells(here: Path, capsys: Capture) -> None:
    """The same cure as where the config says the size, and where the number comes from."""
    np.save(here / "ids.npy", np.arange(9000) % 301)
    flags = ("--data.path", "ids.npy", "--mesh.tensor", "2")
    assert cli.main(["train", "tiny.toml", *flags]) == 2
    assert capsys.readouterr().err.splitlines()[-1] == (  # after what has been prepared
        "mesh.tensor=2: the vocabulary's 301 rows are not divisible by 2; set "
        "model.vocab_multiple = 2 (pads to 302), or use 1, 7, 43 or 301. The data has no "
        "tokenizer, so its 301 tokens are the largest of them and one; data.tokenizer or "
        "model.vocab_size says how many there are"
    )
    words = ["plan", "tiny.toml", *flags, "--target", "h100:1x2", "--no-search"]
    assert cli.main(words) == 2
    assert "set model.vocab_multiple = 2 (pads to 302)" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        ("dtype", "the token file has another dtype"),
        ("checksum", "damaged: bad checksum"),
        ("other", "not a token file of shardtrain"),
        ("", "the vocabulary is smaller than the tokens"),
    ],
)
def test_token_files(here: Path, capsys: Capture, damage: str, message: str) -> None:
    assert cli.main(["prepare", "my.txt", "--out", "tokens"]) == 0
    path = here / "tokens" / "train.tokens"
    data = bytearray(path.read_bytes())
    if damage == "dtype":
        header = data[: HEADER_BYTES - 16].replace(b'"uint8"', b'"int64"')
        data[:HEADER_BYTES] = header + hashlib.sha256(header).digest()[:16]
    elif damage == "checksum":
        data[-1] ^= 1
    elif damage == "other":
        data[:] = b"tokens of somebody else"
    path.write_bytes(data)
    capsys.readouterr()
    said = refusal(capsys, "--data.path", "tokens", "--model.vocab_size", "96")
    assert message in said
    assert ("model.vocab_size" if not damage else "train.tokens") in said


def test_a_disk_that_is_too_small(
    here: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = shutil.disk_usage(here)._replace(free=100_000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: free)
    said = refusal(capsys)
    assert "the disk is too small for the checkpoints of this run" in said
    assert "97.66 KiB free" in said


def test_a_changed_run(here: Path, straight: Path, capsys: Capture) -> None:
    shutil.copytree(straight / "run", "run")
    said = refusal(capsys, "--model.embed_dim", "32", "--run.steps", "50", "--run.stop_at", "45")
    assert "run: the run in this directory was begun with another config" in said
    assert "model.embed_dim: 16 -> 32\n    run.steps: 40 -> 50\n" in said
    assert "add --run.allow_changes true" in said
    assert "stop_at: " not in said
    said = refusal(capsys, "--model.embed_dim", "32", "--run.allow_changes", "True")
    assert "the checkpoint does not fit this run" in said
    assert "params/" in said
    with (here / "my.txt").open("a") as text:
        text.write("that is the question")
    assert "the tokens: " in refusal(capsys)


def test_a_run_whose_checkpoints_are_gone(here: Path, straight: Path, capsys: Capture) -> None:
    shutil.copytree(straight / "run", "run")
    Path("run/checkpoints").rename("elsewhere")
    metrics = Path("run/metrics.jsonl").read_bytes()
    said = refusal(capsys)
    assert "the checkpoints of this run are gone" in said
    assert "none, and timeline.jsonl tells of step 40" in said
    assert len(said.splitlines()) <= 5
    assert Path("run/metrics.jsonl").read_bytes() == metrics
    Path("elsewhere").rename("run/checkpoints")
    assert cli.main(["train", "tiny.toml"]) == 0  # nothing is left to do


def test_a_run_that_another_process_holds(here: Path, capsys: Capture) -> None:
    with RunDirectory("run"):
        assert "another process is running in this directory" in refusal(capsys)
