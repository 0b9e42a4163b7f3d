"""The run directory: lock, refusals, the comparison of configs."""

import fcntl
import json
import os
import subprocess
import sys
import textwrap

import pytest

from shardtrain.errors import CheckpointError, ConfigError
from shardtrain.train.phases import Phases, Timeline
from shardtrain.train.rundir import LOCK, Change, RunDirectory, changes, check_changes
from shardtrain.training_record import check_nothing_is_gone


def test_makes_the_directory_and_lets_go_of_it(tmp_path):
    path = tmp_path / "runs" / "first"
    with RunDirectory(path) as run:
        assert run.path == path
        assert json.loads((path / LOCK).read_text())["pid"] == os.getpid()
        assert run.saved_config() is None
    assert list((tmp_path / "runs").iterdir()) == []  # nothing came of it
    path.mkdir()
    RunDirectory(path).close()
    assert list(path.iterdir()) == []


def test_two_runs_cannot_write_one_directory(tmp_path):
    with RunDirectory(tmp_path) as run, pytest.raises(ConfigError) as caught:
        RunDirectory(run.path)
    text = str(caught.value)
    assert "run.dir: another process is running in this directory" in text
    assert f"process {os.getpid()} on " in text
    assert "to do: wait for it" in text


def test_the_lock_of_a_killed_process_is_taken_over(tmp_path):
    script = """
        import sys, time
        from shardtrain.train.rundir import RunDirectory
        run = RunDirectory(sys.argv[1])
        print("held", flush=True)
        time.sleep(60)
    """
    child = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(script), str(tmp_path)], stdout=subprocess.PIPE
    )
    assert child.stdout is not None
    with child.stdout:
        assert child.stdout.readline() == b"held\n"
        with pytest.raises(ConfigError, match=f"process {child.pid} on "):
            RunDirectory(tmp_path)
        child.kill()
        child.wait()
    assert json.loads((tmp_path / LOCK).read_text())["pid"] == child.pid
    with RunDirectory(tmp_path):
        assert json.loads((tmp_path / LOCK).read_text())["pid"] == os.getpid()


def test_without_kernel_locks_the_pid_decides(tmp_path, monkeypatch):
    def no_locks(handle, operation):
        raise OSError(37, "No locks available")

    monkeypatch.setattr(fcntl, "flock", no_locks)
    with RunDirectory(tmp_path), pytest.raises(ConfigError, match="another process"):
        RunDirectory(tmp_path)
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    host = os.uname().nodename
    (tmp_path / LOCK).write_text(json.dumps({"pid": dead.pid, "host": host}))
    RunDirectory(tmp_path).close()
    (tmp_path / LOCK).write_text(json.dumps({"pid": dead.pid, "host": "elsewhere"}))
    with pytest.raises(ConfigError, match="on elsewhere"):
        RunDirectory(tmp_path)


def test_a_directory_that_cannot_be_written_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError) as caught:
        RunDirectory(tmp_path / "file" / "run")
    assert str(caught.value).startswith("run.dir: the run directory cannot be written\n")
    assert "Not a directory" in str(caught.value)
    assert "to do: take another run.dir, on a disk that you may write" in str(caught.value)


def test_a_file_is_no_directory(tmp_path):
    path = tmp_path / "file"
    path.write_text("mine")
    with pytest.raises(ConfigError, match="is a file, and a run has a directory") as caught:
        RunDirectory(path)
    assert caught.value.value == str(path)
    assert path.read_text() == "mine"


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_directory_of_somebody_else_is_refused(tmp_path):
    tmp_path.chmod(0o555)
    with pytest.raises(ConfigError, match="Permission denied"):
        RunDirectory(tmp_path)


def test_resolved_config_comes_back(tmp_path):
    with RunDirectory(tmp_path) as run:
        run.write_resolved("[model]\nnum_layers = 2\n")
        run.write_resolved("[model]\nnum_layers = 4\n")
        assert run.saved_config() == {"model": {"num_layers": 4}}
        run.resolved.write_text("[model")
        with pytest.raises(ConfigError, match=r"resolved\.toml: the saved config cannot be read"):
            run.saved_config()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["resolved.toml"]


BREAKING = {
    "model.num_layers": (2, 4),
    "model.type": ("transformer", "resnet"),
    "task.z_loss": (0.0, 1e-4),
    "data.batch_size": (8, 16),
    "run.seed": (0, 1),
    "run.steps": (100, 200),
    "optimizer.learning_rate": (1e-3, 2e-3),
    "train.precision": ("float32", "bfloat16"),
    "unheard.of": (1, 2),
}
FREE = {
    "mesh.tensor": (1, 2),
    "pipeline.schedule": ("1f1b", "gpipe"),
    "sharding.zero": (0, 3),
    "sharding.rules": ({"mlp": "tensor"}, {"mlp": ["tensor", "data"]}),
    "train.microbatches": (1, 4),
    "train.remat": ("none", "full"),
    "checkpoint.every": (5, 10),
    "log.trackers": (["tensorboard"], []),
    "eval.every": (0, 10),
    "run.stop_at": (0, 50),
    "run.name": ("a", "b"),
    "run.dir": ("a", "b"),
    "run.cpu_devices": (8, 4),
    "run.allow_changes": (False, True),
    "data.path": ("a", "b"),
    "data.tokenizer": ("bytes", "b"),
    "data.cache": ("a", "b"),
    "data.prefetch": (2, 4),
    "model.attention": ("auto", "xla"),
    "model.layer_loop": ("auto", "scan"),
}


@pytest.mark.parametrize(
    ("key", "kind"), [(key, "breaks") for key in BREAKING] + [(key, "free") for key in FREE]
)
def test_every_key_breaks_the_run_or_is_free(key, kind):
    section, name = key.split(".")
    old, new = (BREAKING | FREE)[key]
    found = changes({section: {name: old, "same": 1}}, {section: {name: new, "same": 1}})
    assert [change.kind for change in found] == [kind]
    assert found[0].key.startswith(key)


def test_equal_configs_have_no_changes():
    assert changes({"a": {"b": None, "c": (1, 2)}}, {"a": {"c": [1, 2]}}) == []


def test_a_key_that_only_one_config_has_is_a_change():
    assert changes({"model": {}}, {"model": {"bias": True}}) == [
        Change("model.bias", None, True, "breaks")
    ]


def test_breaking_changes_are_refused_with_the_list(tmp_path):
    old = {"model": {"num_layers": 2}, "run": {"steps": 100}, "mesh": {"tensor": 1}}
    new = {"model": {"num_layers": 4}, "run": {"steps": 200}, "mesh": {"tensor": 2}}
    found = changes(old, new)
    with pytest.raises(ConfigError) as caught:
        check_changes(found, allow=False, where="runs/first")
    assert str(caught.value).splitlines() == [
        "runs/first: the run in this directory was begun with another config",
        "  value: ",
        "    model.num_layers: 2 -> 4",
        "    run.steps: 100 -> 200",
        "  allowed: changes of mesh, sharding, train, offload, pipeline, checkpoint, log, eval, "
        "guard, watchdog and targets",
        "  to do: take another run.dir, undo the changes, or add --run.allow_changes true",
    ]
    check_changes(found, allow=True, where="runs/first")
    check_changes([c for c in found if c.kind == "free"], allow=False, where="runs/first")


def test_only_a_run_that_never_saved_begins_anew_by_itself(tmp_path):
    with RunDirectory(tmp_path) as run:
        check_nothing_is_gone(run, imported=False)  # nothing was done at all
        timeline = Timeline(run.timeline, Phases())
        timeline.write("first_step", at=1)
        timeline.write("failed", reason="killed before a save was complete", code=1)
        check_nothing_is_gone(run, imported=False)
        with pytest.raises(CheckpointError, match="weights were imported"):
            check_nothing_is_gone(run, imported=True)
        timeline.write("save", at=300)
        timeline.close()
        with pytest.raises(CheckpointError, match="tells of step 300"):
            check_nothing_is_gone(run, imported=False)
