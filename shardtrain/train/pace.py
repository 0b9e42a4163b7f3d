"""How fast the run goes, window by window: drift that is named, targets that are missed.

Owns: what a window is, the judgement on it. Does not own: the clock (`phases`), what follows (the
owner of the loop). A window is `log.every` updates; the first of an attempt does not count.

A step takes all processes the same time, for they wait for each other: the slow one is the one that
spends its own time, on data or between steps, while the others spend theirs waiting.
"""

import json
import statistics
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from shardtrain.sharding.processes import Processes
from shardtrain.train.config import TargetsConfig
from shardtrain.train.phases import Phases

_SLOW: Final = 0.1
"""Part of a step that a process's own time may be above the others'."""
_FALL: Final = 1.3
"""How much longer than before a step may take."""
_PAST: Final = 3
"""Windows before something is drift."""

Tell = Callable[[str, int, Mapping[str, Any]], None]


@dataclass(frozen=True)
class Window:
    """Mean seconds of an update in one window of one process."""

    number: int
    step: float
    data: float
    host: float


@dataclass
class Pace:
    """An observer that looks back at each window; one in every process."""

    every: int
    """Updates in a window."""
    peers: Processes
    phases: Phases
    tell: Tell
    """Given "drift" and what it is; called in process 0 only."""
    _number: int = 0
    _rows: list[float] = field(default_factory=list)
    _before: Mapping[str, float] = field(default_factory=dict)
    _past: deque[Window] = field(default_factory=lambda: deque(maxlen=50))
    _named: set[str] = field(default_factory=set)

    def row(self, step: int, values: Mapping[str, Any]) -> None:
        """Counts an update, and judges where a window ends."""
        self._rows.append(float(values["step_time"]))
        if step % self.every:
            return
        window = self._close()
        if window.number == 0:
            return
        self.peers.set(f"pace/{self.peers.index}", json.dumps(window.__dict__))
        if self.peers.index == 0:
            for words in (*self._slow_processes(), *self._against_the_past(window)):
                self.tell("drift", step, {"reason": words})
        self._past.append(window)

    def event(self, name: str, step: int, values: Mapping[str, Any]) -> None:
        """Nothing to count."""

    def flush(self) -> None:
        """Nothing waits here."""

    def _close(self) -> Window:
        seconds, count = self.phases.seconds(), len(self._rows)
        spent = {
            k: (seconds.get(k, 0.0) - self._before.get(k, 0.0)) / count for k in ("data", "host")
        }
        window = Window(self._number, statistics.fmean(self._rows), **spent)
        self._number, self._rows, self._before = self._number + 1, [], seconds
        return window

    def _slow_processes(self) -> list[str]:
        """Processes that others wait for, by the windows that they have told last."""
        found = {int(i): Window(**json.loads(t)) for i, t in self.peers.under("pace").items()}
        if len(found) < 2:
            return []
        words = []
        for index, window in sorted(found.items()):
            for phase, what in (("data", "waits for data"), ("host", "is busy between steps")):
                others = [getattr(w, phase) for i, w in found.items() if i != index]
                usual, own = statistics.median(others), getattr(window, phase)
                if own - usual > _SLOW * window.step:
                    words.append(
                        f"process {index} is slow: it {what} for {own:.3g} s of a step of "
                        f"{window.step:.3g} s, the others {usual:.2g} s"
                    )
        return self._new("slow", words)

    def _against_the_past(self, window: Window) -> list[str]:
        if len(self._past) < _PAST:
            return []
        words = []
        usual = statistics.median(w.step for w in self._past)
        if window.step > _FALL * usual:
            grown = {
                phase: getattr(window, phase)
                - statistics.median(getattr(w, phase) for w in self._past)
                for phase in ("data", "host")
            }
            phase = max(grown, key=lambda name: grown[name])
            share = grown[phase] / (window.step - usual)
            names = {"data": "waiting for data", "host": "time between steps"}
            cause = names[phase] if share > 0.5 else "the steps themselves"
            words.append(
                f"throughput has fallen by {1 - usual / window.step:.0%}: a step takes "
                f"{window.step:.3g} s, before {usual:.3g} s; it is {cause}"
            )
        return self._new("fallen", words)

    def _new(self, kind: str, words: list[str]) -> list[str]:
        """What is said: the first time, and again when it was well in between."""
        if not words:
            self._named.discard(kind)
        fresh = words if kind not in self._named else []
        if words:
            self._named.add(kind)
        return fresh


@dataclass
class Targets:
    """An observer that looks at the user's targets after each window; in process 0."""

    config: TargetsConfig
    every: int
    cost: Callable[[], float | None]
    """What the run has cost so far; None where no price is known."""
    missed: Callable[[int, str], None]
    """Called with the step and the words."""
    _windows: int = 0
    _rows: list[Mapping[str, Any]] = field(default_factory=list)
    _named: set[str] = field(default_factory=set)

    def row(self, step: int, values: Mapping[str, Any]) -> None:
        """Counts an update, and looks at the targets where a window ends."""
        self._rows.append(values)
        if self.config.loss and step == self.config.loss_step:
            loss = statistics.fmean(row["loss"] for row in self._rows[-self.every :])
            self._judge(step, "loss", loss > self.config.loss, f"the mean loss is {loss:.4g}")
        if step % self.every:
            return
        rows, self._rows, self._windows = self._rows[-self.every :], [], self._windows + 1
        if self._windows == 1:  # it has what only the beginning has
            self._rows = rows
            return
        for name in ("tokens_per_second", "mfu"):
            target, found = getattr(self.config, name), [row.get(name) or 0.0 for row in rows]
            if target and all(found):  # a chip whose speed is unknown has no mfu
                value = statistics.harmonic_mean(found)
                self._judge(step, name, value < target, f"{name} is {value:.4g}")
        cost = self.cost() if self.config.cost else None
        if cost is not None:
            self._judge(step, "cost", cost > self.config.cost, f"the run has cost {cost:.2f}")

    def event(self, name: str, step: int, values: Mapping[str, Any]) -> None:
        """Nothing to count."""

    def flush(self) -> None:
        """Nothing waits here."""

    def _judge(self, step: int, name: str, missed: bool, words: str) -> None:
        if not missed:
            self._named.discard(name)
        elif name not in self._named:
            self._named.add(name)
            self.missed(step, f"{words}, targets.{name}={getattr(self.config, name):g}")
