"""What an attempt writes down: metrics, curves, the timeline; in process 0, for all of them.

Owns: opening, going back to a step, what the other processes must know of it, and what it proves of
checkpoints that are gone. Does not own: the files' forms (`shardtrain.train`), and what is told.
"""

import json
from collections import deque
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass
from typing import Any, Self

from shardtrain.config import RunConfig
from shardtrain.errors import CheckpointError, PeerEndError, UserError
from shardtrain.sharding.processes import Processes
from shardtrain.train.goodput import attempts, goodput
from shardtrain.train.loop import Observer
from shardtrain.train.metrics import MetricsFile, read_entries
from shardtrain.train.phases import Phases, Timeline, read_timeline
from shardtrain.train.rundir import RunDirectory
from shardtrain.train.trackers import Trackers, make_trackers

_PATIENCE = 600.0


@dataclass(frozen=True)
class Past:
    """What was done before, as all processes must know it."""

    seen: int = 0
    """The last update that anybody has seen the numbers of."""
    losses: tuple[float, ...] = ()
    """Those of the last updates before the one that the run goes on from."""
    evaluated: bool = True
    """Whether that one has its evaluation, which an interrupt leaves out."""


def check_nothing_is_gone(directory: RunDirectory, *, imported: bool) -> None:
    """Refuses to begin anew where a checkpoint was: one that has gone, or whose disk is not there.

    A run that was killed before its first save was complete has no line of one, and begins anew.

    Args:
        directory: of a run that has no checkpoint.
        imported: whether its weights came by `shardtrain import`, as its step 0.

    Raises:
        CheckpointError: the timeline tells of one that was saved or read, or there were weights.
    """
    told = [
        line
        for line in read_timeline(directory.timeline)
        if line.get("event") in ("save", "restore")
    ]
    if not told and not imported:
        return
    raise CheckpointError(
        "the checkpoints of this run are gone",
        where=str(directory.checkpoints),
        value=f"none, and {directory.timeline.name} tells of step {told[-1]['at']}"
        if told
        else "none, and its weights were imported",
        cure="put them back, or mount their disk, and run again; to begin anew, take another "
        "run.dir or remove this run's folder",
    )


class Record:
    """An observer that writes everything down; in processes other than 0 it writes nothing."""

    def __init__(
        self, config: RunConfig, directory: RunDirectory, peers: Processes, phases: Phases
    ) -> None:
        self._config, self._directory, self._peers = config, directory, peers
        self._phases = phases
        self._writes = peers.index == 0
        self._stack = ExitStack()
        self._metrics: MetricsFile | None = None
        self._timeline: Timeline | None = None
        self._trackers: Trackers | None = None
        self._earlier = 0.0
        self._first = True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _traceback: object) -> None:
        if self._timeline is not None and error is not None:
            self._tell_failure(self._timeline, error)
        if self._trackers is not None:
            self._trackers.close()
        self._stack.close()

    def open(self, first: int, devices: int) -> Past:
        """Opens the files at the update that the run goes on from.

        Args:
            first: that update; what was written of later ones goes.
            devices: of the run.

        Returns:
            The same in every process.
        """
        if self._writes:
            self._timeline = Timeline(
                self._directory.timeline,
                self._phases,
                processes=self._peers.count,
                devices=devices,
                resumed=first,
            )
            self._stack.callback(self._timeline.close)
            earlier = attempts(self._timeline.earlier)
            self._earlier = sum(sum(attempt.seconds.values()) for attempt in earlier)
            self._phases.told = self._timeline.tick
            self._metrics = self._stack.enter_context(MetricsFile(self._directory.metrics))
            past = self._go_back(first)
            self._peers.set("past", json.dumps(asdict(past)))
            return past
        found = json.loads(self._peers.wait("past", _PATIENCE))
        return Past(**{**found, "losses": tuple(found["losses"])})

    def go_back(self, step: int, seen: int) -> None:
        """Takes back what was written of updates after a step.

        Args:
            step: the last that stays.
            seen: the last update that anybody has seen the numbers of.
        """
        if self._writes:
            self._go_back(step, seen)

    def _go_back(self, step: int, seen: int = 0) -> Past:
        assert self._metrics is not None
        seen = max(seen, self._metrics.truncate(step).last_step)
        config, evaluated = self._config, False
        losses: deque[float | None] = deque(maxlen=config.guard.spike_window)
        for entry in read_entries(self._directory.metrics):
            if "event" not in entry:
                losses.append(entry["loss"])
            elif entry["event"] == "eval" and entry["step"] == step:
                evaluated = True
        if self._trackers is not None:
            self._trackers.close()
        self._trackers = make_trackers(
            config.log.trackers,
            self._directory.path,
            run_name=config.run.name,
            config=config.model_dump(),
            resumed_at=step,
            replayed_to=seen,
        )
        return Past(seen, tuple(loss for loss in losses if loss is not None), evaluated)

    @property
    def _observers(self) -> tuple[Observer, ...]:
        return tuple(o for o in (self._metrics, self._trackers) if o is not None)

    def row(self, step: int, values: Mapping[str, Any]) -> None:
        """Writes the numbers of an update."""
        for observer in self._observers:
            observer.row(step, values)
        if self._first and self._timeline is not None:
            self._timeline.write("first_step", at=step)
        self._first = False

    def event(self, name: str, step: int, values: Mapping[str, Any]) -> None:
        """Writes something that happened."""
        for observer in self._observers:
            observer.event(name, step, values)
        if self._timeline is not None:
            # a line's own `seconds` are those of the phases
            told = {"took" if k == "seconds" else k: v for k, v in values.items() if k != "text"}
            self._timeline.write(name, at=step, **told)

    def flush(self) -> None:
        """Puts what was told on the disk."""
        for observer in self._observers:
            observer.flush()

    def goodput(self) -> dict[str, float]:
        """The productive part of the run's time so far, as an event has it; process 0 knows it."""
        if self._timeline is None:
            return {}
        self._timeline.write("")
        found = goodput(attempts(read_timeline(self._directory.timeline)))
        return {"goodput": round(found.share, 4)}

    @staticmethod
    def _tell_failure(timeline: Timeline, error: BaseException) -> None:
        """Writes down that the attempt ended by an error; the error itself is told elsewhere."""
        words = str(error).partition("\n")[0] or type(error).__name__
        code = error.exit_code if isinstance(error, UserError | PeerEndError) else None
        with suppress(OSError):  # it may be that the disk is full
            timeline.write("failed", reason=words, code=code)

    def seconds(self) -> float:
        """How long all attempts have taken together, without the time between them."""
        return self._earlier + sum(self._phases.seconds().values())
