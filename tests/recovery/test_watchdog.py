"""Who is late, lost or has failed is named, and ends the run for all; in threads, with short times.

The same with real processes is in `test_chaos.py`.
"""

import contextlib
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from several import several

from shardtrain.errors import EXIT_HUNG, EXIT_PEER_LOST
from shardtrain.train import watchdog as module
from shardtrain.train.config import WatchdogConfig
from shardtrain.train.phases import Phases
from shardtrain.train.watchdog import Limits, Watchdog


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PERIOD", 0.02)
    monkeypatch.setattr(module, "LOST_AFTER", 0.5)
    monkeypatch.setattr(module, "_LISTEN", 0.2)


class Process:
    """One process: what it does, and what it left with."""

    def __init__(self, peer: module.Processes, limits: Limits, stacks: Path) -> None:
        self.phases = Phases()
        self.code: int | None = None
        self.left = threading.Event()
        self.dog = Watchdog(peer, self.phases, limits, stacks=stacks, leave=self._leave)

    def _leave(self, code: int) -> None:
        self.code = code
        self.left.set()


@contextlib.contextmanager
def processes(count: int, limits: Limits, stacks: Path) -> Iterator[list[Process]]:
    with contextlib.ExitStack() as stack:
        found = [Process(peer, limits, stacks) for peer in several(count)]
        for process in found:
            stack.enter_context(process.dog)
        yield found


def short(seconds: float) -> Limits:
    limits = Limits(WatchdogConfig())
    limits.of = lambda phase: seconds  # type: ignore[method-assign]
    return limits


def test_the_one_that_is_behind_is_named(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    with processes(3, short(0.6), tmp_path) as found:
        for process in found:
            process.phases.enter("step", 5)
        time.sleep(0.1)
        for process in (found[0], found[2]):
            process.phases.enter("step", 6)
        assert all(process.left.wait(5) for process in found)
    assert [process.code for process in found] == [EXIT_HUNG] * 3
    said = capsys.readouterr().err
    assert "process 1 (step, step 5) is late" in said
    assert said.count("is late") <= 2, "process 0 and the one at fault"
    for index in range(3):
        assert "_watch" in (tmp_path / f"process-{index}.txt").read_text()


def test_all_at_one_step_the_one_not_with_the_devices_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    with processes(2, short(0.4), tmp_path) as found:
        found[0].phases.enter("step", 5)
        found[1].phases.enter("data", 5)
        assert all(process.left.wait(5) for process in found)
    assert "process 1 (data, step 5) is late" in capsys.readouterr().err


def test_one_that_gives_no_sign_is_lost(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    with processes(3, short(60), tmp_path) as found:
        time.sleep(0.2)
        found[2].dog._stop.set()  # as SIGSTOP or SIGKILL would
        assert found[0].left.wait(5)
        assert found[1].left.wait(5)
    assert [p.code for p in found] == [EXIT_PEER_LOST, EXIT_PEER_LOST, None]
    assert "process 2 was lost: no sign of life for 0 s" in capsys.readouterr().err


def test_one_that_is_late_since_it_is_gone_is_lost(
    tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step's limit may be shorter than the silence after which a process counts as lost."""
    monkeypatch.setattr(module, "LOST_AFTER", 60)
    with processes(2, short(0.6), tmp_path) as found:
        found[1].phases.enter("step", 5)
        time.sleep(0.1)
        found[1].dog._stop.set()
        found[0].phases.enter("step", 6)
        assert found[0].left.wait(5)
    assert found[0].code == EXIT_PEER_LOST
    said = capsys.readouterr().err
    assert "process 1 was lost: no sign of life for 0 s; hung: after 1 s" in said


def test_one_that_is_through_is_not_lost(tmp_path: Path) -> None:
    with processes(2, short(60), tmp_path) as found:
        time.sleep(0.1)
        found[1].dog.__exit__()
        assert not found[0].left.wait(1.0)


def test_who_fails_tells_the_others(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    with processes(3, short(60), tmp_path) as found:
        assert found[1].dog.tell(76, "process 1 failed: no luck")
        assert not found[2].dog.tell(76, "process 2 failed: as a consequence")
        end = found[2].dog.reason(2)
        assert end is not None
        assert (end.culprit, end.words) == (1, "process 1 failed: no luck")
        assert found[0].left.wait(5)
        assert not found[1].left.is_set(), "it ends by its own error"
    assert found[0].code == 76
    assert capsys.readouterr().err.count("process 1 failed: no luck") == 1


def test_slow_is_not_stuck(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    limits = short(5)
    limits.warn_of = lambda phase: 0.2  # type: ignore[method-assign]
    with processes(1, limits, tmp_path) as (process,):
        process.phases.enter("data", 4)
        time.sleep(0.5)
        process.phases.enter("step", 4)
        assert not process.left.is_set()
        process.phases.enter("end", 6)
        time.sleep(0.5)
    lines = capsys.readouterr().err.splitlines()
    doing = [line.partition(" for 0 s; up to 5 s are waited for") for line in lines]
    assert [(before, after) for before, _, after in doing] == [
        ("process 0 has been waiting for data (step 4)", ""),
        ("process 0 has been at the end of the run (step 6)", ""),
    ]


def test_what_is_slow_by_its_nature_is_not_told_of_at_once() -> None:
    limits = Limits(WatchdogConfig())
    for _ in range(5):
        limits.saw(0.1)
    assert [limits.warn_of(phase) for phase in ("step", "data", "idle")] == [10, 10, 10]
    assert [limits.warn_of(phase) for phase in ("save", "end", "eval")] == [60, 60, 60]
    assert Limits(WatchdogConfig(save=30)).warn_of("end") == 15


def test_one_that_still_saves_is_behind_the_others(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    with processes(3, short(0.4), tmp_path) as found:
        for process, phase in zip(found, ("idle", "save", "data"), strict=True):
            process.phases.enter(phase, 5)
        assert all(process.left.wait(5) for process in found)
    assert "process 1 (save, step 5) is late" in capsys.readouterr().err


def test_limits_are_learned_or_given() -> None:
    limits = Limits(WatchdogConfig(eval=7))
    assert limits.of("step") == 1800
    for _ in range(5):
        limits.saw(10.0)
    assert limits.of("step") == limits.of("host") == limits.of("data") == 200
    assert limits.of("eval") == 7
    assert limits.of("compile") == 3600
    for _ in range(200):
        limits.saw(0.1)
    assert limits.of("step") == 60
    assert Limits(WatchdogConfig(step=3)).of("replay") == 3
