"""The loop: batches through the step, and what is written down, evaluated and saved on the way.

Owns: the order of these in an update. Does not own: the model, the config, when a run is resumed.
It runs one step ahead of what it reports: a step is dispatched before the numbers of the one before
are fetched, so that the devices never wait for it.
"""

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import jax
import numpy as np
from numpy.typing import NDArray

from shardtrain.train.agreement import Request
from shardtrain.train.guard import Update, Verdict
from shardtrain.train.phases import Phases
from shardtrain.train.state import TrainState

DeviceBatch = Mapping[str, jax.Array]
Values = dict[str, Any]
CompiledStep = Callable[[TrainState, DeviceBatch], tuple[TrainState, dict[str, jax.Array]]]


class Observer(Protocol):
    """Whoever wants to know: the metrics file, trackers, the screen."""

    def row(self, step: int, values: Mapping[str, Any]) -> None:
        """The numbers of a step."""

    def event(self, name: str, step: int, values: Mapping[str, Any]) -> None:
        """Something that happened: compile, save, restore, eval, overflow, skip, ..."""

    def flush(self) -> None:
        """Puts what was told on the disk: a checkpoint is about to rely on it."""


@dataclass(frozen=True)
class Observers:
    """Several observers as one."""

    members: tuple[Observer, ...]

    def row(self, step: int, values: Mapping[str, Any]) -> None:
        """The numbers of a step."""
        for member in self.members:
            member.row(step, values)

    def event(self, name: str, step: int, values: Mapping[str, Any]) -> None:
        """Something that happened."""
        for member in self.members:
            member.event(name, step, values)

    def flush(self) -> None:
        """Puts what was told on the disk."""
        for member in self.members:
            member.flush()


@dataclass(frozen=True)
class Cadence:
    """When things happen, in updates; 0 means only at the end."""

    last: int
    """The update after which the loop ends."""
    save_every: int
    eval_every: int

    def save_due(self, step: int) -> bool:
        """Whether to save after this update."""
        return step == self.last or (self.save_every > 0 and step % self.save_every == 0)

    def eval_due(self, step: int) -> bool:
        """Whether to evaluate after this update."""
        return step == self.last or (self.eval_every > 0 and step % self.eval_every == 0)


@dataclass(frozen=True)
class Ending:
    """How a loop ended."""

    state: TrainState
    verdict: Verdict | None = None
    """What made it end, where it was a number."""
    request: Request | None = None
    """What made it end, where somebody asked for it."""


@dataclass(frozen=True)
class _Pending:
    """A batch that is with the devices and of which nothing is known yet."""

    cursor: int
    told: Values
    """What is known of it beforehand."""
    metrics: dict[str, jax.Array]


def _same_batch(_update: int, _cursor: int, batch: DeviceBatch) -> DeviceBatch:
    return batch


@dataclass
class Loop:
    """What a loop needs; `run` runs it."""

    step: CompiledStep
    batches: Iterator[tuple[int, DeviceBatch, float]]
    """(cursor, batch, seconds waited for it), without an end."""
    describe: Callable[[int], Values]
    """What a row says about the batch at a cursor."""
    rates: Callable[[float], Values]
    """What a row says about a step that took so many seconds."""
    evaluate: Callable[[TrainState], Values]
    save: Callable[[int, TrainState, Values], None]
    """(updates done, state, what its evaluation gave)."""
    cadence: Cadence
    observer: Observer
    judge: Callable[[Update, NDArray[np.bool_]], Verdict | None] = lambda _update, _finite: None
    """Given each batch's numbers, and which leaves of the gradient are numbers."""
    may_step: Callable[[], Request | None] = lambda: None
    """Asked before each step: what is to be done before it."""
    hurry: Callable[[], bool] = lambda: False
    """Whether to leave out an evaluation, since the process is about to end."""
    phases: Phases = field(default_factory=Phases)
    replayed_to: int = 0
    """The last update that was done before this attempt."""
    prepare: Callable[[int, int, DeviceBatch], DeviceBatch] = _same_batch
    """(number of the update, cursor, batch) -> the batch; called just before it is handed out."""
    inspect: Callable[[int, TrainState], None] = lambda _update, _state: None
    """(updates handed out, the state after them), after each; may raise."""
    poll: Callable[[], None] = lambda: None
    """Called in each update, while the devices work."""
    retries: bool = False
    """Whether a step may want its batch again; then it is waited for before the next is begun."""
    _pending: _Pending | None = None
    _done: int = 0
    _verdict: Verdict | None = None
    _resumed: float = 0.0

    def run(self, state: TrainState) -> Ending:
        """Runs until the last update, a request to stop, or a verdict that ends it.

        What was done is saved, but after a verdict.

        Args:
            state: where to begin; its step says how many updates are done.

        Returns:
            The state at the end, and what ended it.
        """
        self._done, last = int(state.step), self.cadence.last
        saved = self._done
        self._resumed = time.perf_counter()
        while self._done < last and self._verdict is None:
            self.phases.enter("idle", self._done)
            request = self.may_step()
            if request is not None:
                self._settle()
                if self._verdict is None and self._done > saved:
                    saved = self._save(state)
                if self._verdict is not None or request.kind == "stop":
                    return Ending(state, self._verdict, request)
                continue
            state = self._hand_out(state)
            if self._verdict is not None:
                break
            self.poll()
            update = self._done + 1
            self.inspect(update, state)
            saves = self.cadence.save_due(update)
            evaluates = self.cadence.eval_due(update) and (update == last or not self.hurry())
            if not (saves or evaluates):
                continue
            values = self._settle(partial(self.evaluate, state) if evaluates else None)
            if self._verdict is None and saves and self._done == update:
                saved = self._save(state, values)
        return Ending(state, self._verdict)

    def _hand_out(self, state: TrainState) -> TrainState:
        """Gives the devices another batch, and settles the one before while they work on it."""
        self.phases.enter("data")
        cursor, batch, waited = next(self.batches)
        self.phases.enter("host")
        update = self._done + 1 + (self._pending is not None)
        batch = self.prepare(update, cursor, batch)
        self.phases.enter("replay" if update <= self.replayed_to else "step")
        state, metrics = self.step(state, batch)
        self._settle()
        while self.retries and self._verdict is None and bool(metrics["retry"]):
            scale = float(metrics["loss_scale"])
            self.observer.event("overflow", self._done, {"cursor": cursor, "loss_scale": scale})
            state, metrics = self.step(state, batch)
        told = {**self.describe(cursor), "data_wait": waited}  # while the devices work
        self._pending = _Pending(cursor, told, metrics)
        return state

    def _save(self, state: TrainState, values: Values | None = None) -> int:
        with self.phases.within("save", self._done):
            self.save(self._done, state, values or {})
        self._resumed = time.perf_counter()
        return self._done

    def _settle(self, evaluate: Callable[[], Values] | None = None) -> Values:
        """Waits for the batch that is with the devices, and judges and tells its numbers.

        Args:
            evaluate: gives what the row says about the state after that update.

        Returns:
            What it gave.
        """
        if self._pending is None:
            return {}
        pending, self._pending = self._pending, None
        metrics = dict(jax.device_get(pending.metrics))
        moved, finite = bool(metrics.pop("moved")), metrics.pop("finite")
        metrics.pop("retry")
        fetched = {name: float(value) for name, value in metrics.items()}
        now = time.perf_counter()
        seconds, self._resumed = now - self._resumed, now
        update = Update(
            self._done + 1,
            pending.cursor,
            fetched["loss"],
            fetched["grad_norm"],
            moved,
            fetched.get("loss_scale"),
        )
        verdict = self.judge(update, finite)
        if verdict is not None and verdict.action in ("stop", "rollback"):
            self._verdict = verdict
            return {}
        values: Values = {}
        if moved:
            self._done += 1
            if evaluate is not None:
                with self.phases.within("eval", self._done):
                    values = evaluate()
            times = {"step_time": seconds, **self.rates(seconds)}
            self.observer.row(self._done, fetched | values | pending.told | times)
        if verdict is not None:
            name = "skip" if verdict.action == "skip" else "spike"
            self.observer.event(name, self._done, verdict.values() | pending.told)
        if values:
            self.observer.event("eval", self._done, values)
            self._resumed = time.perf_counter()
        return values
