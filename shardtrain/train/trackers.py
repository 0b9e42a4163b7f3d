"""Where metrics go besides `metrics.jsonl`: TensorBoard, Weights & Biases, MLflow.

Owns: one step axis for all of them, what each does with steps that a resumed run repeats, the
refusal of one that is not installed. Does not own: the values, and when they are logged.

The only axis is the number of updates done. What is logged for one step (training, validation)
goes out together, once, and steps only grow. A run that dies after its last checkpoint repeats some
steps when it goes on: TensorBoard overwrites them; a tracker that refuses steps which do not grow
never sees them twice.
"""

import importlib.util
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, Self

from shardtrain.errors import ConfigError

_FLUSH_SECONDS = 2


class Tracker(Protocol):
    """One place where metrics are shown."""

    overwrites: bool
    """Whether a step that was logged before a restart may be logged again."""

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Take the values of a step; steps only grow."""

    def text(self, step: int, name: str, text: str) -> None:
        """Take a text, such as a generated sample."""

    def flush(self) -> None:
        """Put what was logged where a crash of this process cannot lose it, if that is cheap."""

    def close(self) -> None:
        """Send what is left."""


class Trackers:
    """All trackers of a run, on one step axis; an observer of the loop."""

    def __init__(self, trackers: Sequence[Tracker], *, replayed_to: int = 0) -> None:
        """Put trackers on one axis.

        Args:
            trackers: Where the metrics go; may be empty.
            replayed_to: The last step that was logged before this run went on from a checkpoint.
        """
        self._trackers = tuple(trackers)
        self._replayed_to = replayed_to
        self._step = -1
        self._values: dict[str, float] = {}

    def row(self, step: int, values: Mapping[str, object]) -> None:
        """Log values of a step; those of one step go out together when the next one begins.

        Args:
            step: Updates done; never smaller than in the call before.
            values: By name; only numbers are taken, and neither `step` nor None.
        """
        assert step >= self._step, f"step {step} after step {self._step}"
        if step > self._step:
            self._send()
            self._step = step
        self._values |= {
            name: float(value)
            for name, value in values.items()
            if isinstance(value, int | float) and not isinstance(value, bool) and name != "step"
        }

    def event(self, name: str, step: int, values: Mapping[str, object]) -> None:
        """Log an evaluation or a sample of text; trackers show no other events.

        Args:
            name: Of the event.
            step: Updates done.
            values: What belongs to it.
        """
        if name == "eval":
            self.row(step, values)
        elif name == "sample":
            self.text(step, name, str(values["text"]))

    def text(self, step: int, name: str, text: str) -> None:
        """Log a text.

        Args:
            step: Updates done.
            name: What it is.
            text: The text.
        """
        for tracker in self._of(step):
            tracker.text(step, name, text)

    def flush(self) -> None:
        """Send the values of the step under way; nothing more may be logged for it."""
        self._send()
        for tracker in self._trackers:
            tracker.flush()

    def close(self) -> None:
        """Send what is left and close all trackers."""
        self._send()
        for tracker in self._trackers:
            tracker.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _send(self) -> None:
        if self._values:
            for tracker in self._of(self._step):
                tracker.log(self._step, self._values)
            self._values = {}

    def _of(self, step: int) -> list[Tracker]:
        return [t for t in self._trackers if t.overwrites or step > self._replayed_to]


def make_trackers(
    names: Sequence[str],
    directory: Path,
    *,
    run_name: str,
    config: Mapping[str, Any],
    resumed_at: int = 0,
    replayed_to: int = 0,
) -> Trackers:
    """Open the trackers that a config names.

    Args:
        names: From `log.trackers`: tensorboard, wandb, mlflow.
        directory: The run directory.
        run_name: How the run is called where it is shown.
        config: The whole config, for trackers that show it.
        resumed_at: The restored step; 0 for a new run.
        replayed_to: The last step that was logged before (`Truncation.last_step`).

    Returns:
        The trackers, on one axis.

    Raises:
        ConfigError: A name is unknown, or its package is not installed.
    """
    check_trackers(names)
    opened: list[Tracker] = []
    for name in names:
        if name == "tensorboard":
            opened.append(TensorBoard(directory / "tensorboard", resumed_at=resumed_at))
        elif name == "wandb":
            opened.append(WeightsAndBiases(directory, run_name=run_name, config=config))
        else:
            opened.append(MLflow(directory, run_name=run_name, config=config))
    return Trackers(opened, replayed_to=replayed_to)


def check_trackers(names: Sequence[str]) -> None:
    """Refuse trackers that are unknown or not installed; imports none of them.

    Args:
        names: From `log.trackers`.

    Raises:
        ConfigError: One cannot be used.
    """
    for name in names:
        if name not in _PACKAGES:
            raise ConfigError(
                "no such tracker",
                where="log.trackers",
                value=name,
                allowed=", ".join(_PACKAGES),
            )
        if importlib.util.find_spec(_PACKAGES[name]) is None:
            raise ConfigError(
                f"the package {_PACKAGES[name]} is not installed",
                where="log.trackers",
                value=name,
                cure='pip install "shardtrain[trackers]", or take it out of log.trackers',
            )


class TensorBoard:
    """Event files in the run directory, read by `tensorboard --logdir`."""

    overwrites = True

    def __init__(self, directory: Path, *, resumed_at: int = 0) -> None:
        """Open a new event file.

        Args:
            directory: The folder of the event files.
            resumed_at: The restored step; what was logged after it is hidden.
        """
        # Not SummaryWriter, whose `flush` leaves in memory what its thread has not got to yet.
        from tensorboardX import proto, summary
        from tensorboardX.event_file_writer import EventsWriter

        goes_on = any(directory.glob("events.*"))
        directory.mkdir(parents=True, exist_ok=True)
        # Two files of one second would have one name.
        self._writer = EventsWriter(str(directory / "events"), f".{uuid.uuid4().hex[:8]}")
        self._summary, self._proto = summary, proto.event_pb2
        self._flushed = time.monotonic()
        if goes_on:
            start = self._proto.SessionLog(status=self._proto.SessionLog.START)
            self._write(resumed_at + 1, session_log=start)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Add one point to each curve."""
        for name, value in values.items():
            self._write(step, summary=self._summary.scalar(name, value))
        if time.monotonic() - self._flushed > _FLUSH_SECONDS:
            self.flush()

    def text(self, step: int, name: str, text: str) -> None:
        """Add a text, shown as it is."""
        indented = "\n".join(f"    {line}" for line in text.splitlines())
        self._write(step, summary=self._summary.text(name, indented))

    def flush(self) -> None:
        """Write what is waiting."""
        self._writer.flush()
        self._flushed = time.monotonic()

    def close(self) -> None:
        """Write what is left."""
        self._writer.close()

    def _write(self, step: int, **what: Any) -> None:
        self._writer.write_event(self._proto.Event(wall_time=time.time(), step=step, **what))


class WeightsAndBiases:
    """A run on Weights & Biases, continued under the same id when the run goes on."""

    overwrites = False

    def __init__(self, directory: Path, *, run_name: str, config: Mapping[str, Any]) -> None:
        """Open or continue the run.

        Args:
            directory: The run directory; it keeps the id.
            run_name: Shown name.
            config: The whole config.
        """
        import wandb

        self._html = wandb.Html
        run_id = _kept_id(directory / "wandb.id", lambda: uuid.uuid4().hex)
        self._run = wandb.init(
            project="shardtrain",
            name=run_name,
            id=run_id,
            resume="allow",
            dir=str(directory),
            config=dict(config),
        )
        # Its own step counter refuses steps that do not grow; ours is a metric like any other.
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Send one row."""
        self._run.log({"step": step, **values})

    def text(self, step: int, name: str, text: str) -> None:
        """Send a text as preformatted HTML."""
        escaped = text.replace("&", "&amp;").replace("<", "&lt;")
        self._run.log({"step": step, name: self._html(f"<pre>{escaped}</pre>")})

    def flush(self) -> None:
        """Its own process has it already."""

    def close(self) -> None:
        """Finish the run."""
        self._run.finish()


class MLflow:
    """A run on an MLflow server (`MLFLOW_TRACKING_URI`), continued when the run goes on."""

    overwrites = False

    def __init__(self, directory: Path, *, run_name: str, config: Mapping[str, Any]) -> None:
        """Open or continue the run.

        Args:
            directory: The run directory; it keeps the id.
            run_name: Shown name.
            config: The whole config, stored as a file of the run.
        """
        import mlflow

        self._client = mlflow.MlflowClient()
        experiment = mlflow.set_experiment("shardtrain").experiment_id
        self._run_id = _kept_id(
            directory / "mlflow.id",
            lambda: str(self._client.create_run(experiment, run_name=run_name).info.run_id),
        )
        self._client.log_dict(self._run_id, dict(config), "config.json")

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Send one point for each metric."""
        for name, value in values.items():
            self._client.log_metric(self._run_id, name, value, step=step)

    def text(self, step: int, name: str, text: str) -> None:
        """Store the text as a file of the run."""
        self._client.log_text(self._run_id, text, f"{name}-{step}.txt")

    def flush(self) -> None:
        """The server has it already."""

    def close(self) -> None:
        """Mark the run as finished."""
        self._client.set_terminated(self._run_id)


_PACKAGES = {"tensorboard": "tensorboardX", "wandb": "wandb", "mlflow": "mlflow"}


def _kept_id(path: Path, make: Callable[[], str]) -> str:
    if path.is_file():
        return path.read_text(encoding="utf-8").strip()
    made = make()
    path.write_text(made + "\n", encoding="utf-8")
    return made
