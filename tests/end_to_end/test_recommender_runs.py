"""Recommenders, as processes: they learn what can be learned, resume, and are the same on two."""

import json
import random
import re
from pathlib import Path

import numpy as np
import pytest
from crowds import crowd
from jobs import Job, events, rows

from shardtrain import cli
from shardtrain.data.interaction_generator import generate
from shardtrain.data.interactions import split
from shardtrain.tasks.ranking import auc

CONFIG = """
[run]
name = "tiny"
dir = "run"
steps = 240
cpu_devices = 8

[model]
type = "dlrm"
table_sizes = [60, 40, 12]
num_dense = 2
embed_dim = 16
dense_rows = 16
table_rate = 30.0
bottom = [16]
top = [32]

[data]
generated = 150000
batch_size = 512

[sharding]
zero = 1

[optimizer]
learning_rate = 0.01
weight_decay = 0.0
warmup_steps = 10

[checkpoint]
every = 80

[eval]
every = 120
steps = 100

[log]
trackers = []
"""
KEYS = ("step", "sample_digest", "loss", "grad_norm", "learning_rate", "examples")
EXACT = (*KEYS, "val_loss", "val_auc")
FILES = ("--data.path", "shards", "--data.format", "csv", "--data.batch_size", "48")
COLUMNS = ("--data.ids", "user", "item", "hour", "--data.dense", "age", "pay")
FEW = ("--run.steps", "6", "--eval.every", "0", "--checkpoint.every", "6")


def write_job(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tiny.toml").write_text(CONFIG)
    return folder


def write_shards(folder: Path, counts: tuple[int, ...]) -> None:
    """Uneven shards; each row says in its dense numbers which it is."""
    words = random.Random(0)
    (folder / "shards").mkdir()
    for shard, count in enumerate(counts):
        lines = ["label,user,item,hour,age,pay"]
        for _ in range(count):
            ids = [words.randrange(size) for size in (60, 40, 12)]
            numbers = [f"{words.gauss(0, 1):.3f}" for _ in range(2)]
            lines.append(",".join(map(str, (words.randrange(2), *ids, *numbers))))
        (folder / "shards" / f"{shard}.csv").write_text("\n".join(lines) + "\n")


def train(folder: Path, *flags: str) -> None:
    """A run in this process, from its start or newest checkpoint to its end."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        assert cli.main(["train", "tiny.toml", *flags]) == 0


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of an uninterrupted run."""
    folder = write_job(tmp_path_factory.mktemp("clicks"))
    train(folder)
    return folder


def test_it_learns_what_can_be_learned_and_says_so(
    whole: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The AUC is within 0.01 of that of the true probabilities, on the same interactions."""
    made = generate(150_000, [60, 40, 12], 2)
    held = split(150_000, 0.1, shuffle=True)[1]
    kept = held.at(np.arange(held.count))
    best = auc(made.odds[kept], made.records["label"][kept])
    found = rows(whole, *EXACT)
    last = found[-1]
    assert len(found) == 240
    assert best - 0.01 < last["val_auc"] < best + 0.003
    assert [event["step"] for event in events(whole, "eval")] == [120, 240]
    monkeypatch.chdir(whole)
    assert cli.main(["report", "run"]) == 0
    said = capsys.readouterr().out
    assert "examples/s" in said
    assert re.search(rf"AUC +{last['val_auc']:.4f}", said)
    assert cli.main(["eval", "run", "--json"]) == 0
    told = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert told["val_auc"] == pytest.approx(last["val_auc"], rel=1e-6)
    for command in (["generate", "run"], ["export", "run", "--out", "out"]):
        assert cli.main(command) == 2
        assert re.search(
            "there for (language models|models of text) alone", capsys.readouterr().err
        )


@pytest.mark.campaign
def test_killed_and_resumed_it_is_bit_for_bit_the_same(whole: Path, tmp_path: Path) -> None:
    folder = write_job(tmp_path)
    job = Job(folder)
    job.wait_for("saved step 80")
    assert job.kill()
    assert len(rows(folder)) < 240
    train(folder)
    assert events(folder, "restore")[0]["step"] in (80, 160)
    assert rows(folder, *EXACT) == rows(whole, *EXACT)


@pytest.mark.parametrize("shards", ["global", pytest.param("local", marks=pytest.mark.campaign)])
def test_two_processes_with_uneven_shards(shards: str, tmp_path: Path) -> None:
    """The same run as one process; or each reads its own shards, and every row counts once."""
    folder = write_job(tmp_path / "two")
    write_shards(folder, (200, 30))
    flags = (*FILES, *COLUMNS, *FEW, "--eval.steps", "50", "--data.shards", shards)
    crowd(folder, 2, *flags)
    two = rows(folder, *EXACT)
    if shards == "local":
        # 180 and 27 rows to learn from, 24 of each a batch: the smaller share ends after two.
        assert len({row["sample_digest"] for row in two}) == 6
        assert np.isfinite([row["loss"] for row in two]).all()
        assert 0 <= two[-1]["val_auc"] <= 1
        return
    alone = write_job(tmp_path / "one")
    write_shards(alone, (200, 30))
    train(alone, *flags)
    one = rows(alone, *EXACT)
    assert [row["sample_digest"] for row in two] == [row["sample_digest"] for row in one]
    for name in ("loss", "grad_norm"):
        np.testing.assert_allclose([r[name] for r in two], [r[name] for r in one], rtol=1e-5)
    assert two[-1]["val_loss"] == pytest.approx(one[-1]["val_loss"], rel=1e-5)
    assert two[-1]["val_auc"] == pytest.approx(one[-1]["val_auc"], abs=1e-12)


@pytest.mark.campaign
def test_a_run_begins_with_weights_that_another_had_frozen(whole: Path, tmp_path: Path) -> None:
    folder = write_job(tmp_path)
    train(folder, "--run.init", str(whole / "run"), "--model.freeze_tables", "True", *FEW)
    again = write_job(tmp_path / "again")
    train(again, "--run.init", str(folder / "run"), *FEW)
    before = rows(whole, *EXACT)[-1]
    assert rows(again, *EXACT)[-1]["val_auc"] > before["val_auc"] - 0.05


def test_fine_tuning_with_frozen_tables_begins_where_the_run_was(
    whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_job(tmp_path)
    flags = ("--run.init", str(whole / "run"), "--model.freeze_tables", "True", *FEW)
    train(folder, *flags, "--optimizer.learning_rate", "1e-4")
    tuned, before = rows(folder, *EXACT)[-1], rows(whole, *EXACT)[-1]
    assert tuned["val_auc"] == pytest.approx(before["val_auc"], abs=2e-3)
    capsys.readouterr()
    wrong = ["train", "tiny.toml", "--run.init", str(folder / "run"), "--model.embed_dim", "8"]
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(write_job(tmp_path / "wrong"))
        assert cli.main(wrong) == 2
    assert "the weights of run.init are of another model" in capsys.readouterr().err


def test_two_towers_find_what_users_of_movielens_like(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The shipped config on a file like u.data: users rate a quarter of the movies high."""
    words = random.Random(0)
    lines = []
    for _ in range(6000):
        user, movie = words.randint(1, 59), words.randint(1, 39)
        lines.append(f"{user}\t{movie}\t{5 if (user + movie) % 4 == 0 else 2}\t{881250949}\n")
    (tmp_path / "ml").mkdir()
    (tmp_path / "ml" / "u.data").write_text("".join(lines))
    monkeypatch.chdir(tmp_path)
    flags = ["--run.dir", "run", "--data.path", "ml", "--run.steps", "120", "--log.trackers"]
    sizes = ["--model.table_sizes", "60", "40", "--model.dense_rows", "30"]
    more = ["--model.table_rate", "20", "--data.batch_size", "256", "--optimizer.warmup_steps", "5"]
    assert cli.main(["train", "two_tower_movielens", *flags, *sizes, *more]) == 0
    last = rows(tmp_path, "val_loss", "val_recall")[-1]
    assert last["val_recall"] > 0.9  # of 10 liked movies; by chance 0.26 of 39
