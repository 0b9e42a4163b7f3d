"""`metrics.jsonl` and the trackers: what a resumed run keeps, one step axis (O-43)."""

import json
import math
import struct
import sys
import types

import jax.numpy as jnp
import numpy as np
import pytest
from tensorboardX.proto.event_pb2 import Event

from shardtrain.errors import ConfigError, UserError
from shardtrain.train.metrics import KEYS, MetricsFile, Truncation, read_events, read_rows
from shardtrain.train.trackers import Trackers, check_trackers, make_trackers


def test_rows_have_their_keys_in_order_and_nan_as_null(tmp_path):
    path = tmp_path / "metrics.jsonl"
    with MetricsFile(path) as metrics:
        metrics.row(
            1,
            {
                "data_wait": 0.5,
                "extra": [1, math.inf],
                "loss": jnp.float32(2.5),
                "grad_norm": np.float32("inf"),
                "mfu": None,
                "tokens": np.int64(2**40),
                "sample_digest": "0123456789abcdef",
                "val_loss": math.nan,
            },
        )
        # every line is in the file at once
        text = path.read_text()
        metrics.event("save", 1, {"blocked_seconds": 0.01})
    assert text == (
        '{"step": 1, "sample_digest": "0123456789abcdef", "loss": 2.5, "val_loss": null, '
        '"grad_norm": null, "tokens": 1099511627776, "mfu": null, "data_wait": 0.5, '
        '"extra": [1, null]}\n'
    )
    assert list(read_rows(path)[0]) == [key for key in KEYS if key in read_rows(path)[0]] + [
        "extra"
    ]
    assert read_events(path) == [{"event": "save", "step": 1, "blocked_seconds": 0.01}]


def test_a_value_that_json_cannot_hold_is_our_fault(tmp_path):
    with MetricsFile(tmp_path / "m") as metrics, pytest.raises(TypeError, match="object"):
        metrics.row(1, {"loss": object()})
    assert (tmp_path / "m").read_text() == ""


def test_a_torn_last_line_is_cut_off(tmp_path):
    path = tmp_path / "metrics.jsonl"
    whole = b'{"step": 1}\n{"step": 2}\n'
    for torn in (b"", b'{"step": 3, "lo', b'{"step": 3}', b"\0" * 9000):
        path.write_bytes(whole + torn)
        assert [row["step"] for row in read_rows(path)] == [1, 2]
        with MetricsFile(path) as metrics:
            metrics.row(3, {})
        assert path.read_bytes() == whole + b'{"step": 3}\n'
    path.write_bytes(b'{"st')
    MetricsFile(path).close()
    assert path.read_bytes() == b""


def test_a_full_disk_is_the_users_affair(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.symlink_to("/dev/full")
    with MetricsFile(path) as metrics, pytest.raises(UserError) as caught:
        metrics.row(1, {"loss": 1.0})
    assert str(caught.value).splitlines() == [
        f"{path}: the metrics cannot be written",
        "  value: No space left on device",
        "  to do: free some space, then run again: the run goes on from its newest checkpoint",
    ]


def test_truncate_goes_back_to_a_step(tmp_path):
    path = tmp_path / "metrics.jsonl"
    with MetricsFile(path) as metrics:
        metrics.event("compile", 0)
        for step in range(1, 8):
            metrics.row(step, {"loss": 1.0 / step})
            if step == 6:
                metrics.event("save", 5)  # completed late
        metrics.event("stop", 7)
    with path.open("ab") as file:
        file.write(b"damaged\n[]\n")
    with MetricsFile(path) as metrics:
        assert metrics.truncate(5) == Truncation(dropped=5, last_step=7)
        metrics.event("restore", 5, {"replayed_to": 7})
        metrics.row(6, {})
    assert [row["step"] for row in read_rows(path)] == [1, 2, 3, 4, 5, 6]
    assert [(e["event"], e["step"]) for e in read_events(path)] == [
        ("compile", 0),
        ("save", 5),
        ("restore", 5),
    ]
    # a second crash before step 7 is reached does not forget that step 7 was seen
    with MetricsFile(path) as metrics:
        assert metrics.truncate(5) == Truncation(dropped=1, last_step=7)
    with MetricsFile(path) as metrics:
        assert metrics.truncate(0).last_step == 7
    assert [json.loads(line)["event"] for line in path.read_text().splitlines()] == ["compile"]


class Strict:
    """A tracker that refuses steps which do not grow, and lives longer than the run."""

    overwrites = False

    def __init__(self):
        self.steps = []
        self.rows = {}

    def log(self, step, values):
        assert step > (self.steps[-1] if self.steps else 0), f"rejected {step}"
        self.steps.append(step)
        self.rows[step] = dict(values)

    def text(self, step, name, text):
        self.rows[f"{name} {step}"] = text

    def flush(self):
        pass

    def close(self):
        pass


class Overwriting(Strict):
    overwrites = True

    def log(self, step, values):
        self.steps.append(step)
        self.rows[step] = dict(values)


def run_and_crash(path, trackers, resumed_at, stop):
    """Train, evaluate every third step on the same axis, die without closing anything."""
    metrics = MetricsFile(path)
    seen = metrics.truncate(resumed_at).last_step
    metrics.event("restore", resumed_at, {"replayed_to": seen})
    axis = Trackers(trackers, replayed_to=seen)
    for step in range(resumed_at + 1, stop + 1):
        metrics.row(step, {"loss": float(step)})
        axis.row(step, {"loss": float(step), "sample_digest": "ab", "mfu": None, "step": step})
        if step % 3 == 0:
            axis.row(step, {"val_loss": float(-step)})
    metrics.close()
    axis.flush()


def test_one_step_axis_through_two_crashes(tmp_path):
    strict, overwriting = Strict(), Overwriting()
    for resumed_at, stop in ((0, 8), (5, 7), (5, 12)):
        run_and_crash(tmp_path / "m", [strict, overwriting], resumed_at, stop)
    assert strict.steps == list(range(1, 13))
    assert strict.rows[6] == {"loss": 6.0, "val_loss": -6.0}
    assert strict.rows[7] == {"loss": 7.0}
    assert sorted(set(overwriting.steps)) == list(range(1, 13))
    assert overwriting.steps.count(6) == 3
    assert [row["step"] for row in read_rows(tmp_path / "m")] == list(range(1, 13))


def read_tensorboard(directory):
    """Events of all files, as TensorBoard shows them: a start event hides what it purges."""
    points = {}
    for path in sorted(directory.glob("events.*"), key=lambda p: p.stat().st_mtime_ns):
        data = path.read_bytes()
        while data:
            (length,) = struct.unpack("<Q", data[:8])
            event = Event.FromString(data[12 : 12 + length])
            data = data[16 + length :]
            if event.HasField("session_log"):
                points = {key: v for key, v in points.items() if key[1] < event.step}
            for value in event.summary.value:
                points[value.tag, event.step] = value.simple_value or value.tensor.string_val
    return points


def test_tensorboard_overwrites_what_a_resumed_run_repeats(tmp_path):
    for resumed_at, stop, sign in ((0, 8, 1.0), (5, 7, -1.0)):
        trackers = make_trackers(
            ["tensorboard"], tmp_path, run_name="r", config={}, resumed_at=resumed_at
        )
        for step in range(resumed_at + 1, stop + 1):
            trackers.row(step, {"loss": sign * step})
        trackers.text(stop, "sample", "def f():\n  <b>")
        trackers.close()
    points = read_tensorboard(tmp_path / "tensorboard")
    losses = {step: value for (tag, step), value in points.items() if tag == "loss"}
    assert losses == {1: 1, 2: 2, 3: 3, 4: 4, 5: 5, 6: -6, 7: -7}
    (text,) = [value for (tag, step), value in points.items() if "sample" in tag]
    assert list(text) == [b"    def f():\n      <b>"]
    assert len(list((tmp_path / "tensorboard").iterdir())) == 2


def test_no_trackers_is_fine(tmp_path):
    trackers = make_trackers([], tmp_path, run_name="r", config={})
    trackers.row(1, {"loss": 1.0})
    trackers.close()
    assert list(tmp_path.iterdir()) == []


def test_unknown_and_missing_trackers_are_refused(tmp_path, monkeypatch):
    with pytest.raises(ConfigError) as caught:
        check_trackers(["tensorboard", "tensorbord"])
    assert "log.trackers: no such tracker" in str(caught.value)
    assert "allowed: tensorboard, wandb, mlflow" in str(caught.value)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError) as caught:
        make_trackers(["wandb"], tmp_path, run_name="r", config={})
    assert "the package wandb is not installed" in str(caught.value)
    assert 'pip install "shardtrain[trackers]"' in str(caught.value)


def test_weights_and_biases_has_our_step_as_its_axis(tmp_path, monkeypatch):
    calls = []
    run = types.SimpleNamespace(
        define_metric=lambda *a, **k: calls.append(("define", a, k)),
        log=lambda row: calls.append(("log", row)),
        finish=lambda: calls.append(("finish",)),
    )
    fake = types.ModuleType("wandb")
    fake.__spec__ = types.SimpleNamespace()
    fake.Html = lambda text: text
    fake.init = lambda **k: calls.append(("init", k)) or run
    monkeypatch.setitem(sys.modules, "wandb", fake)
    ids = []
    for resumed_at, replayed_to in ((0, 0), (1, 2)):
        calls.clear()
        trackers = make_trackers(
            ["wandb"], tmp_path, run_name="r", config={"a": 1}, replayed_to=replayed_to
        )
        for step in range(resumed_at + 1, resumed_at + 3):
            trackers.row(step, {"loss": 1.0})
        trackers.text(3, "sample", "a < b & c")
        trackers.close()
        assert calls[0][1]["resume"] == "allow"
        assert calls[0][1]["config"] == {"a": 1}
        ids.append(calls[0][1]["id"])
        assert ("define", ("*",), {"step_metric": "step"}) in calls
        logged = [call[1] for call in calls if call[0] == "log" and "loss" in call[1]]
        assert [row["step"] for row in logged] == ([1, 2] if not resumed_at else [3])
        assert ("log", {"step": 3, "sample": "<pre>a &lt; b &amp; c</pre>"}) in calls
        assert calls[-1] == ("finish",)
    assert ids[0] == ids[1]


def test_mlflow_goes_on_under_its_run_id(tmp_path, monkeypatch):
    calls = []

    class Client:
        def create_run(self, experiment, run_name):
            calls.append(("create", experiment, run_name))
            return types.SimpleNamespace(info=types.SimpleNamespace(run_id="r1"))

        def log_dict(self, run_id, values, name):
            calls.append(("dict", run_id, values))

        def log_metric(self, run_id, name, value, step):
            calls.append((run_id, name, value, step))

        def log_text(self, run_id, text, name):
            calls.append((run_id, name, text))

        def set_terminated(self, run_id):
            calls.append(("end", run_id))

    fake = types.ModuleType("mlflow")
    fake.__spec__ = types.SimpleNamespace()
    fake.MlflowClient = Client
    fake.set_experiment = lambda name: types.SimpleNamespace(experiment_id=7)
    monkeypatch.setitem(sys.modules, "mlflow", fake)
    for step in (1, 2):
        trackers = make_trackers(["mlflow"], tmp_path, run_name="r", config={"a": 1})
        trackers.row(step, {"loss": 1.0})
        trackers.text(step, "sample", "text")
        trackers.close()
    assert [call for call in calls if call[0] == "create"] == [("create", 7, "r")]
    assert ("r1", "loss", 1.0, 2) in calls
    assert ("r1", "sample-2.txt", "text") in calls
    assert calls[-1] == ("end", "r1")


def test_what_is_flushed_survives_a_kill(tmp_path):
    """Read while the writer is open: nothing waits in a thread or a buffer after `flush`."""
    trackers = make_trackers(["tensorboard"], tmp_path, run_name="r", config={})
    for step in range(1, 201):
        trackers.row(step, {"loss": float(step)})
    trackers.flush()
    points = read_tensorboard(tmp_path / "tensorboard")
    assert [step for tag, step in points if tag == "loss"] == list(range(1, 201))
    trackers.close()
