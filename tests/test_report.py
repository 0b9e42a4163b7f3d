"""`report`: where a run's time went, of made-up timelines and of a real run that is killed.

The made-up ones have clocks whose every second is known. What a real run adds is that its lines
come when they come; its times are held against the wall.
"""

import contextlib
import itertools
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from shardtrain import cli
from shardtrain.config import load_config
from shardtrain.report import make_report
from shardtrain.train.goodput import BUCKETS, Goodput, attempts, goodput
from shardtrain.train.metrics import read_events, read_rows
from shardtrain.train.phases import Phases, Timeline, read_timeline

HEAVY = ("jax", "jaxlib", "flax", "optax", "orbax", "grain")
CONFIG = """
[run]
name = "tiny"
dir = "run"
steps = 30
cpu_devices = 2

[model]
num_layers = 1
embed_dim = 16
num_heads = 2

[data]
path = "my.txt"
sequence_length = 16
batch_size = 4

[optimizer]
learning_rate = 1e-2

[checkpoint]
every = 4

[eval]
steps = 1
sample_tokens = 0

[log]
trackers = []
"""


class Clock:
    """Makes a timeline up: phases that last as long as they are said to."""

    def __init__(self, now: float = 1000.0) -> None:
        self.now, self.lines, self._number = now, [], 0

    def attempt(self, resumed: int, start: float, **values: Any) -> "Clock":
        """A process that was started now, and whose first line comes after so many seconds."""
        self._number += 1
        self._seconds, self._step = {"start": start}, 0
        self.now += start
        return self.line(event="start", resumed=resumed, devices=8, processes=1, **values)

    def spend(self, phase: str, seconds: float, step: int | None = None) -> "Clock":
        """Spends time, and writes a line."""
        self._seconds[phase] = self._seconds.get(phase, 0.0) + seconds
        self.now += seconds
        self._step = self._step if step is None else step
        return self.line()

    def line(self, **values: Any) -> "Clock":
        """Writes a line."""
        line = {"time": self.now, "attempt": self._number, "step": self._step, **values}
        self.lines.append({**line, "seconds": dict(self._seconds)})
        return self

    def wait(self, seconds: float) -> "Clock":
        """Time that no process has."""
        self.now += seconds
        return self

    def summed(self) -> Goodput:
        """The buckets, which add up."""
        found = goodput(attempts(self.lines))
        assert sum(found.buckets.values()) == pytest.approx(found.elapsed, rel=1e-6)
        assert tuple(found.buckets) == BUCKETS
        return found


def spent(found: Goodput) -> dict[str, float]:
    """The buckets that are not empty."""
    return {name: pytest.approx(value) for name, value in found.buckets.items() if value}


# -- timelines that are made up


def test_a_run_without_a_fault() -> None:
    clock = Clock().attempt(0, 5).spend("compile", 20).spend("start", 1)
    for step in range(1, 11):
        clock.spend("data", 0.5, step - 1).spend("host", 0.25).spend("step", 4, step)
    clock.spend("eval", 3).spend("save", 2).spend("end", 1).line(event="stop", at=10)
    expected = {"productive": 40, "compile": 20, "start": 6, "data": 5, "host": 2.5, "eval": 3}
    found = clock.summed()
    assert spent(found) == expected | {"save": 2, "end": 1}
    assert found.elapsed == pytest.approx(79.5)
    assert found.share == pytest.approx(40 / 79.5)


def test_steps_after_the_last_checkpoint_were_for_nothing_and_count_once() -> None:
    """10 steps of 4 s, a checkpoint at 6: 4 of them are done again, in `replay`."""
    clock = Clock().attempt(0, 5)
    for step in range(1, 11):
        clock.spend("step", 4, step)
    clock.wait(30).attempt(6, 7).spend("restore", 2, 6)
    for step in range(7, 11):
        clock.spend("replay", 5, step)
    clock.spend("step", 8, 12)
    assert spent(clock.summed()) == {
        "productive": 6 * 4 + 4 * 5 + 8, "recomputed": 4 * 4, "start": 12, "restore": 2, "down": 30,
    }  # fmt: skip


def test_killed_again_in_the_replay() -> None:
    """What the second attempt did again, the third one has to do once more."""
    clock = Clock().attempt(0, 1).spend("step", 40, 10)
    clock.attempt(6, 1).spend("replay", 12, 9)
    clock.attempt(6, 1).spend("replay", 16, 10).spend("step", 4, 11)
    assert spent(clock.summed()) == {"productive": 24 + 20, "recomputed": 16 + 12, "start": 3}


def test_a_line_in_the_middle_of_updates_is_cut_in_proportion() -> None:
    clock = Clock().attempt(0, 1).spend("step", 10, 4).spend("step", 20, 8).spend("step", 3, 8)
    clock.attempt(6, 1)
    assert spent(clock.summed()) == {"productive": 10 + 10, "recomputed": 10 + 3, "start": 2}


def test_without_a_checkpoint_all_was_for_nothing() -> None:
    clock = Clock().attempt(0, 1).spend("compile", 9).spend("step", 20, 5).wait(2).attempt(0, 1)
    expected = {"recomputed": 20, "compile": 9, "start": 2, "down": 2}
    assert spent(clock.summed()) == expected


def test_an_attempt_that_stopped_and_saved_loses_nothing() -> None:
    clock = Clock().attempt(0, 1).spend("step", 20, 5).spend("save", 1).line(event="stop", at=5)
    clock.wait(10).attempt(5, 1).spend("step", 20, 10)
    assert spent(clock.summed()) == {"productive": 40, "start": 2, "save": 1, "down": 10}


def test_a_rollback_takes_back_what_came_after_its_checkpoint() -> None:
    clock = Clock().attempt(0, 1).spend("step", 40, 10).spend("restore", 3, 4)
    clock.line(event="rollback", at=4, cursor=12).spend("replay", 24, 10).spend("step", 8, 12)
    assert spent(clock.summed()) == {
        "productive": 16 + 24 + 8, "recomputed": 24, "restore": 3, "start": 1,
    }  # fmt: skip


def test_a_process_that_was_started_before_the_last_one_had_ended() -> None:
    """Its start and the end of the other are one time, which is counted once."""
    clock = Clock().attempt(0, 1).spend("step", 20, 5).wait(-2).attempt(5, 6)
    assert spent(clock.summed()) == {"productive": 20, "start": 5}


def test_a_machine_that_slept_was_down() -> None:
    clock = Clock().attempt(0, 1).spend("step", 20, 5).wait(600).spend("step", 4, 6)
    assert spent(clock.summed()) == {"productive": 24, "start": 1, "down": 600}


def test_many_kills_at_any_moment() -> None:
    """Whatever is cut off where, nothing is lost of the sum, and each update counts once."""
    phases = itertools.cycle(("data", "host", "step", "eval", "save"))
    clock, step = Clock(), 0
    for number in range(40):
        resumed = step - step % 5
        clock.wait(number % 3).attempt(resumed, 2 + number % 4).spend("compile", 1, resumed)
        step = resumed
        for phase in itertools.islice(phases, 11 + number % 7):
            step += phase == "step"
            clock.spend(phase, 0.5 + number % 2, step)
    found = clock.summed()
    worked = sum(a.seconds.get("step", 0.0) for a in attempts(clock.lines))
    assert found.buckets["productive"] + found.buckets["recomputed"] == pytest.approx(worked)
    assert 0.5 * step <= found.buckets["productive"] <= 1.5 * step
    assert found.buckets["recomputed"] > 0


# -- the timeline


def test_a_phase_that_lasts_is_told_while_it_lasts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that is killed after an hour of compiling has told of almost all of it."""
    monkeypatch.setattr(Timeline, "EVERY", 0.02)
    phases = Phases()
    timeline = Timeline(tmp_path / "t", phases, devices=1, resumed=0)
    phases.enter("compile")
    time.sleep(0.3)
    lines = read_timeline(tmp_path / "t")
    assert lines[-1]["seconds"]["compile"] > 0.15
    timeline.close()
    count = len(read_timeline(tmp_path / "t"))
    time.sleep(0.1)
    assert len(read_timeline(tmp_path / "t")) == count


def test_lines_are_further_apart_in_a_long_attempt(tmp_path: Path) -> None:
    phases = Phases(begun=time.monotonic() - 100_000)
    timeline = Timeline(tmp_path / "t", phases, devices=1, resumed=0)
    timeline._last -= 60
    timeline.tick(phases.now)
    assert len(read_timeline(tmp_path / "t")) == 1
    timeline._last -= 60
    timeline.tick(phases.now)
    assert len(read_timeline(tmp_path / "t")) == 2
    timeline.close()


def test_a_number_that_is_none_is_strict_json(tmp_path: Path) -> None:
    timeline = Timeline(tmp_path / "t", Phases(), devices=1, resumed=0)
    timeline.write("skip", at=1, loss=float("nan"))
    timeline.close()
    text = (tmp_path / "t").read_text()
    assert "NaN" not in text
    assert json.loads(text.splitlines()[-1])["loss"] is None


# -- a report of a folder that is made up


def write_run(folder: Path, clock: Clock, rows: int = 0, more: str = "") -> Path:
    """A run folder from a timeline."""
    folder.mkdir(exist_ok=True)
    text = CONFIG.replace('dir = "run"', f"dir = {json.dumps(str(folder))}") + more
    (folder / "resolved.toml").write_text(text)
    (folder / "timeline.jsonl").write_text("".join(json.dumps(n) + "\n" for n in clock.lines))
    numbers = [{"step": n, "loss": 5 - n / 10, "tokens_per_second": 100.0 * n, "mfu": None}
               for n in range(1, rows + 1)]  # fmt: skip
    (folder / "metrics.jsonl").write_text("".join(json.dumps(n) + "\n" for n in numbers))
    return folder


def test_ends_costs_and_what_happened(tmp_path: Path) -> None:
    clock = Clock().attempt(0, 4).line(event="compile", at=0, cached=False)
    clock.spend("step", 2, 1).line(event="first_step", at=1).spend("step", 8, 5)
    clock.line(event="skip", at=5, cursor=5, reason="the loss is nan")
    clock.line(event="save", at=4, bytes=1000, blocked=0.5, took=1.5)
    clock.wait(1).attempt(4, 3).line(event="compile", at=4, cached=True)
    clock.line(event="skip", at=5, cursor=5, reason="the loss is nan")  # seen once more
    clock.line(event="drift", at=5, reason="slow").line(event="target", at=5, reason="mfu")
    clock.line(event="stop", at=5, reason="a spike", update=6).line(event="failed", code=3)
    clock.attempt(4, 3).line(event="failed", reason="the disk is full", code=2)
    clock.attempt(4, 3).spend("step", 5, 6).line(event="stop", at=6, reason="SIGTERM", code=75)
    run = write_run(tmp_path / "r", clock, rows=5, more="\n[targets]\ndevice_hour = 3.0\n")
    (run / "checkpoints" / "4").mkdir(parents=True)
    (run / "checkpoints" / "4" / "checkpoint.json").touch()
    found = make_report(load_config(run))
    ends = [(one.ended, one.code, one.first_step, one.cached) for one in found.attempts]
    assert ends == [
        ("killed", None, pytest.approx(6.0), False),
        ("a spike", 3, None, True),
        ("the disk is full", 2, None, None),
        ("SIGTERM", 75, None, None),
    ]
    counts = {"skip": 1, "overflow": 0, "spike": 0, "rollback": 0, "damaged": 0}
    counts |= {"drift": 1, "target": 1}
    assert found.happened == counts
    assert (found.done, found.steps, found.loss, found.val_loss) == (5, 30, 4.5, None)
    assert (found.tokens_per_second, found.mfu) == (300.0, None)
    assert (found.saves.count, found.saves.bytes, found.saves.newest) == (1, 1000, 4)
    assert found.saves.took == 1.5
    hours = 8 * (14 + 3 + 3 + 8) / 3600  # not the second between two attempts
    assert found.device_hours == pytest.approx(hours)
    assert found.cost == pytest.approx(3 * hours)


def test_what_saves_have_taken_is_told_apart(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Until they are complete, which is behind the steps, and what they held the loop up."""
    clock = Clock().attempt(0, 4).spend("step", 4, 2).spend("save", 2, 2)
    for took in (7.0, 9.0):
        clock.line(event="save", at=2, bytes=2**20, blocked=1.0, took=took)
    run = write_run(tmp_path / "r", clock)
    assert cli.main(["report", str(run)]) == 0
    told = capsys.readouterr().out
    assert "saves    2, 2.0 MiB in all" in told
    assert "complete 8.0 s after it begins (median)" in told
    assert "blocked  the loop for 2.0 s, 20.00%" in told
    assert re.search(r"^save +2\.0 s +20\.0%", told, re.MULTILINE)


def test_whether_it_runs(tmp_path: Path) -> None:
    run = write_run(tmp_path / "r", Clock().attempt(0, 4).spend("step", 2, 1))
    assert make_report(load_config(run)).attempts[-1].ended == "killed"
    lock = {"pid": os.getpid(), "host": os.uname().nodename}
    (run / "run.lock").write_text(json.dumps(lock))
    found = make_report(load_config(run))
    assert found.attempts[-1].ended == "under way"
    assert str(os.getpid()) in found.under_way
    assert found.heard > 0


@pytest.mark.parametrize("count", [1, 466])
def test_it_fits_on_a_screen(
    count: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    clock = Clock()
    for number in range(count):
        clock.wait(9).attempt(number, 40).spend("compile", 60).spend("restore", 5, number)
        for phase in ("data", "host", "step", "eval", "save", "idle", "end"):
            clock.spend(phase, 7, number + 2)
        clock.line(event="save", at=number, bytes=2**30, blocked=7.0, took=93.0)
    run = write_run(tmp_path / "r", clock)
    assert cli.main(["report", str(run)]) == 0
    told = capsys.readouterr()
    assert told.err == ""
    lines = told.out.splitlines()
    assert len(lines) <= 24
    assert max(map(len, lines)) <= 80
    assert f"{count} attempt" in lines[0]
    assert ("458 attempts before these" in told.out) == (count == 466)
    assert "unknown, " in told.out, "no price"


def test_a_price_may_be_given(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = write_run(tmp_path / "r", Clock().attempt(0, 3600))
    assert cli.main(["report", str(run), "--json", "--targets.device_hour", "2.5"]) == 0
    assert json.loads(capsys.readouterr().out)["cost"] == pytest.approx(8 * 2.5)


@pytest.mark.parametrize("words", [("report", "nowhere"), ("report", "empty"), ("report", "new")])
def test_refusals(
    words: tuple[str, ...],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    write_run(tmp_path / "new", Clock())  # it was killed before its first line
    assert cli.main(words) == 2
    told = capsys.readouterr()
    assert told.out == ""
    assert words[1] in told.err.splitlines()[0]
    assert "Traceback" not in told.err
    assert len(told.err.splitlines()) < 5


def test_without_jax(tmp_path: Path) -> None:
    """A folder that was copied to a laptop; the data is not there."""
    run = write_run(tmp_path / "r", Clock().attempt(0, 4).spend("step", 2, 1), rows=1)
    code = f"""
import sys
from shardtrain.cli import main
code = main(["report", {str(run)!r}, "--json"])
loaded = [name for name in {HEAVY!r} if name in sys.modules]
sys.exit(f"imported {{loaded}}" if loaded else code)
"""
    words = [sys.executable, "-c", code]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout)["buckets"]["productive"] == 2


# -- a real run that is killed twice


@contextlib.contextmanager
def job(folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A run in a process of its own, which does not outlive this."""
    words = [sys.executable, "-m", "shardtrain", "train", "tiny.toml"]
    environment = os.environ | {"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
    with (folder / "said.txt").open("ab") as said:
        process = subprocess.Popen(words, cwd=folder, env=environment, stdout=said, stderr=said)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def reached(folder: Path) -> int:
    """The last step of its metrics."""
    path = folder / "run" / "metrics.jsonl"
    rows = read_rows(path) if path.exists() else []
    return int(rows[-1]["step"]) if rows else 0


def test_a_run_that_is_killed_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "my.txt").write_text("to be or not to be, that is the question\n" * 300)
    (tmp_path / "tiny.toml").write_text(CONFIG)
    monkeypatch.chdir(tmp_path)
    begun = time.time()
    for step in (9, 18):
        with job(tmp_path) as process:
            while process.poll() is None and reached(tmp_path) < step:
                time.sleep(0.005)
            assert cli.main(["report", "run", "--json"]) == 0
            under_way = json.loads(capsys.readouterr().out)
            assert under_way["attempts"][-1]["ended"] == "under way"
            process.send_signal(signal.SIGKILL)
            assert process.wait() == -signal.SIGKILL, (tmp_path / "said.txt").read_text()
        time.sleep(0.5)
    with job(tmp_path) as process:
        assert process.wait() == 0, (tmp_path / "said.txt").read_text()
    wall = time.time() - begun
    assert cli.main(["report", "run", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert sum(found["buckets"].values()) == pytest.approx(found["elapsed"], rel=0.01)
    assert found["elapsed"] == pytest.approx(wall, rel=0.15, abs=1.0)
    assert 1.0 < found["buckets"]["down"] < 5.0, "half a second twice, and what was untold"
    assert [(one["ended"], one["code"]) for one in found["attempts"]] == [
        ("killed", None), ("killed", None), ("done", 0),
    ]  # fmt: skip
    assert found["attempts"][-1]["cached"] is True, "a restart takes the program from the cache"
    for one in found["attempts"]:
        # Told by two clocks, to a tenth of a millisecond.
        assert 0 < one["first_step"] <= one["seconds"] + 1e-3
    assert (found["done"], found["saves"]["newest"]) == (30, 30)
    assert 0 < found["step_time"] < 10
    assert 0 < found["saves"]["took"] < 10
    (stop,) = read_events(tmp_path / "run" / "metrics.jsonl")[-1:]
    assert stop["event"] == "stop"
    assert stop["goodput"] == pytest.approx(found["goodput"], abs=0.01)
    assert 0 < found["goodput"] < 1
