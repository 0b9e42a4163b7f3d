"""Drift is named within two windows and not without a cause; targets that are missed are told."""

import time
from collections.abc import Mapping
from typing import Any

import pytest
from several import several

from shardtrain.sharding.processes import Processes
from shardtrain.train.config import TargetsConfig
from shardtrain.train.pace import Pace, Targets
from shardtrain.train.phases import Phases

EVERY = 5


class Clock(Phases):
    """Seconds as they are said to be."""

    def __init__(self) -> None:
        super().__init__()
        self.spent = {"data": 0.0, "host": 0.0, "step": 0.0}

    def seconds(self) -> dict[str, float]:
        return dict(self.spent)


class One:
    """A process that takes so long in each phase of each update."""

    def __init__(self, peer: Processes) -> None:
        self.clock = Clock()
        self.told: list[tuple[int, str]] = []
        self.pace = Pace(EVERY, peer, self.clock, self._tell)

    def _tell(self, name: str, step: int, values: Mapping[str, Any]) -> None:
        assert name == "drift"
        self.told.append((step, values["reason"]))

    def update(self, step: int, *, data: float = 0.01, host: float = 0.01, total: float = 1.0):
        self.clock.spent["data"] += data
        self.clock.spent["host"] += host
        self.pace.row(step, {"step_time": total})


def test_a_clean_run_has_no_drift() -> None:
    one, other = map(One, several(2))
    for step in range(1, 101):
        for process in (other, one):
            process.update(step, total=1.0 + 0.1 * (step % 3))
    assert one.told == other.told == []


@pytest.mark.parametrize(("phase", "words"), [("host", "is busy"), ("data", "waits for data")])
def test_a_slow_process_is_named_with_its_phase_within_two_windows(phase: str, words: str) -> None:
    peers = list(map(One, several(3)))
    for step in range(1, 41):
        slow = step > 22
        for index in (2, 1, 0):
            late = {phase: 0.31} if slow and index == 1 else {}
            peers[index].update(step, total=1.3 if slow else 1.0, **late)
    assert peers[1].told == peers[2].told == []
    (step, said), *rest = [t for t in peers[0].told if "process 1 is slow" in t[1]]
    assert 22 < step <= 22 + 2 * EVERY
    assert words in said
    assert rest == [], "it is said once"


def test_falling_throughput_says_what_it_is() -> None:
    (one,) = map(One, several(1))
    for step in range(1, 51):
        one.update(step, data=0.6 if step > 30 else 0.01, total=1.6 if step > 30 else 1.0)
    ((step, said),) = one.told
    assert 30 < step <= 30 + 2 * EVERY
    assert "throughput has fallen by 3" in said
    assert "it is waiting for data" in said


def told(config: TargetsConfig, rows: list[dict[str, Any]], cost: float | None = None) -> list:
    found: list[tuple[int, str]] = []
    targets = Targets(config, EVERY, lambda: cost, lambda step, words: found.append((step, words)))
    for step, row in enumerate(rows, 1):
        targets.row(step, {"loss": 2.0, "tokens_per_second": 100.0, "mfu": None} | row)
    return found


def test_throughput_below_its_target() -> None:
    config = TargetsConfig(tokens_per_second=90, mfu=0.5)
    slow = {"tokens_per_second": 50.0}
    assert told(config, [{}] * 20) == []
    assert told(config, [slow] * 5 + [{}] * 15) == [], "the first window has the beginning in it"
    ((step, words),) = told(config, [{}] * 10 + [slow] * 10)
    assert step == 15
    assert words == "tokens_per_second is 50, targets.tokens_per_second=90"
    assert [s for s, _ in told(config, [{"mfu": 0.4}] * 10)] == [10]


def test_loss_at_its_step_and_cost() -> None:
    assert told(TargetsConfig(loss=2.5, loss_step=12), [{}] * 20) == []
    ((step, words),) = told(TargetsConfig(loss=1.5, loss_step=12), [{}] * 20)
    assert (step, words) == (12, "the mean loss is 2, targets.loss=1.5")
    assert told(TargetsConfig(cost=10), [{}] * 20, cost=9.0) == []
    assert [s for s, _ in told(TargetsConfig(cost=10), [{}] * 20, cost=11.0)] == [10]
    assert told(TargetsConfig(cost=10), [{}] * 20, cost=None) == []


def test_the_clock_adds_up() -> None:
    phases = Phases()
    for phase in ("compile", "step", "data", "step"):
        phases.enter(phase, 3)
        time.sleep(0.02)
        with phases.within("eval", 3):
            time.sleep(0.01)
    seconds = phases.seconds()
    assert sum(seconds.values()) == pytest.approx(time.monotonic() - phases.begun, abs=2e-3)
    assert seconds["eval"] == pytest.approx(0.04, rel=0.5)
    assert phases.now.phase == "step"
