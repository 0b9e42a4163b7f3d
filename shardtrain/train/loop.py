"""The loop: batches through the step, and what is written down, evaluated and saved on the way.

Owns: the order of these in an update. Does not own: the model, the config, when a run is resumed.
It runs one step ahead of what it reports: a step is dispatched before the numbers of the one before
are fetched, so that the devices never wait for it.
"""

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import jax

from shardtrain.train.state import TrainState

DeviceBatch = Mapping[str, jax.Array]
Values = dict[str, Any]
CompiledStep = Callable[[TrainState, DeviceBatch], tuple[TrainState, dict[str, jax.Array]]]


class Observer(Protocol):
    """Whoever wants to know: the metrics file, trackers, the screen."""

    def row(self, step: int, values: Mapping[str, Any]) -> None:
        """The numbers of a step."""

    def event(self, name: str, step: int, values: Mapping[str, Any]) -> None:
        """Something that happened: compile, save, restore, eval, sample, stop."""

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


@dataclass
class Loop:
    """What a loop needs; `run` runs it."""

    step: CompiledStep
    batches: Iterable[tuple[int, DeviceBatch, float]]
    """(cursor, batch, seconds waited for it)."""
    describe: Callable[[int], Values]
    """What a row says about the batch at a cursor."""
    rates: Callable[[float], Values]
    """What a row says about a step that took so many seconds."""
    evaluate: Callable[[TrainState], Values]
    save: Callable[[int, TrainState], None]
    cadence: Cadence
    observer: Observer
    poll: Callable[[], None] = lambda: None
    """Called in each update, while the devices work."""
    stop: Callable[[], bool] = lambda: False
    """Asked between updates: whether to save and end here."""
    _pending: tuple[int, Values, dict[str, jax.Array]] | None = None
    _resumed: float = field(default=0.0)

    def run(self, state: TrainState) -> TrainState:
        """Runs until the last update or until `stop`; what was done is saved.

        Args:
            state: where to begin; its step says how many updates are done.

        Returns:
            The state after the last update.
        """
        done, last = int(state.step), self.cadence.last
        self._resumed = time.perf_counter()
        if self.stop():
            return state
        for cursor, batch, waited in self.batches:
            state, metrics = self.step(state, batch)
            self._report()
            done += 1
            self._pending = (done, {**self.describe(cursor), "data_wait": waited}, metrics)
            self.poll()
            if self.cadence.eval_due(done) and (done == last or not self.stop()):
                self._report(partial(self.evaluate, state))
            stopping = done < last and self.stop()
            if self.cadence.save_due(done) or stopping:
                self._report()
                self.save(done, state)
                self._resumed = time.perf_counter()
            if stopping:
                break
        self._report()
        return state

    def _report(self, evaluate: Callable[[], Values] = dict) -> None:
        """Waits for the step whose row is pending and hands the row to the observer.

        Args:
            evaluate: gives what the row says about the state after that step.
        """
        if self._pending is None:
            return
        step, values, metrics = self._pending
        self._pending = None
        fetched = {name: float(value) for name, value in jax.device_get(metrics).items()}
        now = time.perf_counter()
        seconds, self._resumed = now - self._resumed, now
        more = evaluate()
        times = {"step_time": seconds, **self.rates(seconds)}
        self.observer.row(step, fetched | more | values | times)
        if more:
            self.observer.event("eval", step, more)
            self._resumed = time.perf_counter()
