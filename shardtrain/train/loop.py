"""The loop: batches through the step, and what is written down, evaluated and saved on the way.

It knows neither the model nor the config. It runs one step ahead of what it reports: a step is dispatched
before the numbers of the one before are fetched, so that the devices never wait for it.
"""

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import jax

from shardtrain.train.state import TrainState

DeviceBatch = Mapping[str, jax.Array]
Values = dict[str, Any]


class Observer(Protocol):
    """Whoever wants to know: the metrics file, trackers, the screen."""

    def row(self, step: int, values: Mapping[str, Any]) -> None:
        """The numbers of a step."""

    def event(self, name: str, step: int, values: Mapping[str, Any]) -> None:
        """Something that happened: compile, save, restore, eval, stop."""


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

    step: Callable[[TrainState, DeviceBatch], tuple[TrainState, dict[str, jax.Array]]]
    batches: Iterable[tuple[int, DeviceBatch, float]]
    """(cursor, batch, seconds waited for it)."""
    describe: Callable[[int], Values]
    """What a row says about the batch at a cursor."""
    rates: Callable[[float], Values]
    """What a row says about a step that took so many seconds."""
    evaluate: Callable[[TrainState], Values]
    save: Callable[[int, TrainState], None]
    cadence: Cadence
    observers: tuple[Observer, ...]
    stop: Callable[[], bool] = lambda: False
    """Asked after each update: whether to save and end here."""
    _pending: tuple[int, Values, dict[str, jax.Array]] | None = None
    _finished: float = field(default=0.0)

    def run(self, state: TrainState) -> TrainState:
        """Runs until the last update or until `stop`; saves at the end.

        Args:
            state: where to begin; its step says how many updates are done.

        Returns:
            The state after the last update.
        """
        done = int(state.step)
        self._finished = time.perf_counter()
        saved = done
        for cursor, batch, waited in self.batches:
            state, metrics = self.step(state, batch)
            done += 1
            self._report()
            self._pending = (done, {**self.describe(cursor), "data_wait": waited}, metrics)
            stopping = self.stop()
            if self.cadence.eval_due(done) and not stopping:
                self._report(self.evaluate(state))
                self._finished = time.perf_counter()
            if self.cadence.save_due(done) or stopping:
                self._report()
                self.save(done, state)
                saved = done
                self._finished = time.perf_counter()
            if stopping:
                break
        self._report()
        assert saved == done, "the last update is always saved"
        return state

    def _report(self, more: Values | None = None) -> None:
        """Waits for the step whose row is pending and hands the row to everybody.

        Args:
            more: values of an evaluation after that step.
        """
        if self._pending is None:
            return
        step, values, metrics = self._pending
        self._pending = None
        fetched = jax.device_get(metrics)
        now = time.perf_counter()
        taken, self._finished = now - self._finished, now
        row = {name: float(value) for name, value in fetched.items()} | (more or {}) | values
        row |= {"step_time": taken, **self.rates(taken)}
        for observer in self.observers:
            observer.row(step, row)
            if more:
                observer.event("eval", step, more)
