"""Several processes: the same run as one, on any number of them; one's trouble ends all, named.

O-45 (one is stuck or gone), O-46 (one is told to stop) and the kinds of `run.chaos`.
"""

import json
import signal
import time
from pathlib import Path

import numpy as np
import pytest
from crowds import Crowd, crowd
from jobs import LAST, entries, events, rows, run

from shardtrain.checkpoint.checkpointer import Checkpointer

HUNG = ("--watchdog.step", "8")


def near(found: Path, wanted: Path, first: int = 0) -> None:
    """The same samples, and losses within 1e-5."""
    ours, theirs = rows(found), rows(wanted)
    assert [r["sample_digest"] for r in ours] == [r["sample_digest"] for r in theirs]
    losses = [[row["loss"] for row in some[first:]] for some in (ours, theirs)]
    np.testing.assert_allclose(losses[0], losses[1], rtol=1e-5)


def test_two_processes_are_told_to_stop_and_one_goes_on(project: Path, straight: Path) -> None:
    """Stopped after the same step though only process 1 is told; saved by two, restored by one."""
    both = crowd(project, 2, "--run.chaos", "sigterm@9:1", "--checkpoint.every", "0", codes={75})
    assert "interrupted, saved at step" in both.said(0)
    assert "shardtrain train" not in both.said(1), "process 0 speaks for all"
    (stop,) = events(project, "stop")
    assert 8 <= stop["step"] <= 11
    assert Checkpointer(project / "run" / "checkpoints").newest_good() == stop["step"]
    run(project)
    assert len(rows(project)) == LAST
    near(project, straight)


def test_one_that_raises_is_the_only_one_that_complains(project: Path) -> None:
    both = Crowd(project, 2, "--run.chaos", "raise@9:1")
    begun = time.monotonic()
    assert both.finish() == [76, 70]
    assert time.monotonic() - begun < 120
    assert both.said(0).count("process 1 failed: ChaosError: chaos: raise@9:1") == 1
    assert "Traceback" not in both.said(0)
    assert both.said(1).count("Traceback") == 1


def test_one_that_hangs_is_named_with_its_phase_and_its_stacks(project: Path) -> None:
    both = crowd(project, 2, "--run.chaos", "hang@12:1", *HUNG, codes={124})
    assert "process 1 (host, step 1" in both.said(0)
    stacks = (project / "run" / "stacks" / "process-1.txt").read_text()
    assert "chaos.py" in stacks


def test_one_that_dies_takes_the_others_along(project: Path) -> None:
    both = Crowd(project, 2, "--run.chaos", "kill@7:1")
    both.processes[1].wait(180)
    died = time.monotonic()
    assert both.finish() == [76, -signal.SIGKILL]
    assert time.monotonic() - died < 30
    assert "process 1 was lost: no sign of life" in both.said(0)


@pytest.mark.campaign
@pytest.mark.parametrize("count", [1, 2, 4])
@pytest.mark.parametrize(
    ("fault", "codes"),
    [
        ("kill@7:{last}", {-9, 76, -6}),
        ("raise@9:{last}", {70, 76}),
        ("hang@12:{last}", {124}),
        ("slow@15:{last}:0.3", {0}),
        ("corrupt@20", {0}),
        ("nan@25", {3}),
        ("diskfull@30", {2}),
        ("sigterm@33:{last}", {75}),
    ],
)
def test_every_fault_ends_as_it_should(
    project: Path, straight: Path, count: int, fault: str, codes: set[int]
) -> None:
    flags = ("--run.chaos", fault.format(last=count - 1), *HUNG)
    found = Crowd(project, count, *flags)
    ended = set(found.finish())
    assert ended <= codes, "\n".join(map(found.said, range(count)))
    assert ended & (codes - {76})
    crowd(project, count)  # the fault happens once
    near(project, straight)
    assert len(rows(project)) == LAST


@pytest.mark.campaign
def test_one_that_is_stopped_is_lost(project: Path) -> None:
    both = Crowd(project, 2)
    while not (project / "run").exists() or len(rows_so_far(project)) < 5:
        time.sleep(0.05)
    both.send(1, signal.SIGSTOP)
    stopped = time.monotonic()
    assert both.processes[0].wait(60) == 76
    assert time.monotonic() - stopped < 30
    assert "process 1 was lost" in both.said(0)
    both.kill()


@pytest.mark.campaign
def test_a_loader_that_stalls_and_recovers_only_warns(project: Path, straight: Path) -> None:
    program = """
import sys, time
from shardtrain import cli
from shardtrain.data.language import LanguageData
from shardtrain.sharding.processes import processes
rows = LanguageData.rows
def stall(self, cursor, start, stop):
    if cursor == 20 and processes().index == 1:
        time.sleep(30)
    return rows(self, cursor, start, stop)
LanguageData.rows = stall
sys.exit(cli.main(["train", "tiny.toml", *sys.argv[1:]]))
"""
    both = Crowd(project, 2, program=("-c", program))
    assert both.finish() == [0, 0]
    assert "process 1 has been waiting for data" in both.said(1)
    near(project, straight)


@pytest.mark.campaign
def test_one_that_leaves_early_is_lost(project: Path) -> None:
    program = """
import os, sys
from shardtrain import cli
from shardtrain.data.language import LanguageData
from shardtrain.sharding.processes import processes
digest = LanguageData.digest
def leave(self, cursor):
    if cursor == 9 and processes().index == 1:
        os._exit(0)
    return digest(self, cursor)
LanguageData.digest = leave
sys.exit(cli.main(["train", "tiny.toml", *sys.argv[1:]]))
"""
    both = Crowd(project, 2, program=("-c", program))
    assert both.finish() == [76, 0]
    assert "process 1 was lost" in both.said(0)


def rows_so_far(folder: Path) -> list[object]:
    path = folder / "run" / "metrics.jsonl"
    return path.read_text().splitlines() if path.exists() else []


def test_the_timeline_tells_of_both_processes_and_every_second(straight: Path) -> None:
    text = (straight / "run" / "timeline.jsonl").read_text()
    lines = [json.loads(line) for line in text.splitlines()]
    assert lines[0]["event"] == "start"
    assert lines[0]["processes"] == 1
    assert lines[0]["devices"] == 8
    for line in lines:
        age = line["time"] - lines[0]["time"] + sum(lines[0]["seconds"].values())
        assert sum(line["seconds"].values()) == pytest.approx(age, abs=0.05)
    assert lines[-1]["seconds"]["step"] > 0
    assert [e["event"] for e in entries(straight) if "event" in e][-1] == "stop"
