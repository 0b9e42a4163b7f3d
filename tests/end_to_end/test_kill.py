"""Killed at any moment and started again, a run is the run that was never killed."""

import os
import random
import time
from pathlib import Path

import numpy as np
import pytest
from crowds import Crowd
from jobs import LAST, Job, assert_curves, entries, events, last_step, rows, run, write_project

from shardtrain import cli
from shardtrain.checkpoint import folder as checkpoint_folder
from shardtrain.checkpoint.checkpointer import Checkpointer
from shardtrain.checkpoint.folder import TEMPORARY


def final_state(folder: Path) -> dict[str, np.ndarray]:
    """The leaves of the last checkpoint, by path."""

    def flat(tree: dict, prefix: str = "") -> dict[str, np.ndarray]:
        found = {}
        for key, value in tree.items():
            inner = isinstance(value, dict)
            found |= flat(value, f"{prefix}{key}/") if inner else {prefix + key: value}
        return found

    with Checkpointer(folder / "run" / "checkpoints", keep=2) as checkpoints:
        assert checkpoints.latest() == LAST
        assert checkpoints.leftovers() == []
        return flat(checkpoints.restore_host(LAST))


def assert_same_run(folder: Path, straight: Path) -> None:
    """Losses, gradients' norms, sample ids, validation losses and the last state, bit for bit."""
    assert rows(folder) == rows(straight)
    state, expected = final_state(folder), final_state(straight)
    assert state.keys() == expected.keys()
    for name, leaf in expected.items():
        np.testing.assert_array_equal(state[name], leaf, err_msg=name)


def kill_at(folder: Path, moment: str, chance: random.Random, life: float) -> str:
    """Starts the run and kills it; says where that was, or "" when the run was done before."""
    done = last_step(folder)
    job = Job(folder)
    if moment == "anywhere":
        time.sleep(chance.uniform(0, life))
    elif moment == "compile":
        job.wait_for("compiling the step")
        time.sleep(chance.uniform(0, 0.5))
    elif moment == "save":
        job.wait_for_step(chance.randint(min(done, LAST - 5), LAST - 5))
        job.wait_for_save()
        time.sleep(chance.uniform(0, 0.1))
    else:
        job.wait_for_step(chance.randint(min(done + 2, LAST - 3), LAST - 3))
        time.sleep(chance.uniform(0, 0.02))
    if not job.kill():
        return ""
    saving = [path.name for path in (folder / "run" / "checkpoints").glob(f"*{TEMPORARY}")]
    return f"{moment}: step {last_step(folder)}{', saving ' + saving[0] if saving else ''}"


def test_ten_kills(project: Path, straight: Path) -> None:
    chance = random.Random(3)
    for moment in ("compile", "anywhere", "save", "step", "anywhere", "save", "step", "compile"):
        kill_at(project, moment, chance, 2.0)
    for moment in ("save", "step"):
        assert kill_at(project, moment, chance, 0.0)
    said = run(project)
    assert "goes on from step" in said
    assert_same_run(project, straight)
    assert_curves(project)
    restored = events(project, "restore")
    assert restored, "it went on from a checkpoint"
    assert all(event["replayed_to"] >= event["step"] for event in restored)


def test_a_save_that_fails_ends_the_run_and_costs_nothing_else(  # O-32
    project: Path,
    straight: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(project)
    commit = checkpoint_folder.commit

    def full(temporary: Path, final: Path, record: object) -> None:
        if final.name == "10":
            raise OSError(28, "No space left on device")
        commit(temporary, final, record)

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint_folder, "commit", full)
        assert cli.main(["train", "tiny.toml"]) == 2
    said = capsys.readouterr().err
    assert "step 10 was not saved" in said
    assert "the run goes on from step 5" in said
    assert 10 <= len(rows(project)) <= 15
    assert cli.main(["train", "tiny.toml"]) == 0
    assert_same_run(project, straight)


def kill_several(folder: Path, count: int, chance: random.Random, life: float) -> str:
    """The same with several processes, of which one or all are killed."""
    moment = chance.choice(("anywhere", "anywhere", "save", "step"))
    job = Crowd(folder, count)
    if moment == "anywhere":
        time.sleep(chance.uniform(0, life))
    else:
        done = last_step(folder)
        wanted = chance.randint(min(done + 2, LAST - 3), LAST - 3)
        while job.alive() and last_step(folder) < wanted:
            time.sleep(0.002)
        checkpoints = folder / "run" / "checkpoints"
        while moment == "save" and job.alive() and not any(checkpoints.glob(f"*{TEMPORARY}")):
            time.sleep(0.001)
        time.sleep(chance.uniform(0, 0.1))
    killed = job.alive()
    if chance.random() < 0.1 and job.said():
        # The others find out by themselves. Before they have met, at which process 0 begins to
        # speak, nobody but a launcher could know; they wait `START_SECONDS` then.
        job.processes[chance.randrange(count)].kill()
        job.finish(60)
    job.kill()
    return f"{moment}: step {last_step(folder)}, {count} processes" if killed else ""


@pytest.mark.campaign
@pytest.mark.parametrize("count", [1, 2])
def test_two_hundred_kills(project: Path, straight: Path, count: int) -> None:
    """A hundred kills with one process, and a hundred with two; KILLS says how many else."""
    total, chance, seed = int(os.environ.get("KILLS", "100")), random.Random(), time.time_ns()
    chance.seed(seed)
    begun = time.monotonic()
    if count > 1:  # several processes add up in another order than one
        straight = write_project(project / "straight")
        assert Crowd(straight, count).finish() == [0] * count
    moments = ("anywhere", "anywhere", "compile", "save", "save", "step")
    kills: list[str] = []
    runs = 0
    while len(kills) < total:
        runs += 1
        folder = write_project(project / str(runs))
        while len(kills) < total:
            if count == 1:
                where = kill_at(folder, chance.choice(moments), chance, 6.0)
            else:
                where = kill_several(folder, count, chance, 9.0)
            if not where:
                break
            kills.append(where)
        if count == 1:
            run(folder)
        else:
            assert set(Crowd(folder, count).finish()) == {0}
        assert_same_run(folder, straight)
    print(f"\n{len(kills)} kills in {runs} runs, {time.monotonic() - begun:.0f} s, seed {seed}")
    print("\n".join(kills))


def test_before_the_first_checkpoint_a_run_starts_anew(project: Path, straight: Path) -> None:
    flags = ("--checkpoint.every", "0")
    job = Job(project, *flags)
    job.wait_for_step(7)
    assert job.kill()
    assert [row["step"] for row in rows(project)][:7] == [1, 2, 3, 4, 5, 6, 7]
    said = run(project, *flags)
    assert "a new run" in said
    assert_same_run(project, straight)
    assert [entry["step"] for entry in entries(project) if "event" not in entry] == list(
        range(1, LAST + 1)
    )
