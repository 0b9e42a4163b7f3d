"""All processes save or stop after the same step, whoever was asked and however far each is."""

import random
import threading
import time

import pytest
from several import several

from shardtrain.sharding.processes import Alone
from shardtrain.train.agreement import Agreement, Request

STOP = Request("stop", 75, "SIGTERM")
STEPS = 400


class Devices:
    """A collective: a step ends when every process has begun it; nobody is more than one ahead."""

    def __init__(self, count: int) -> None:
        self._barrier = threading.Barrier(count)

    def step(self) -> None:
        self._barrier.wait(20)


def loop(
    agreement: Agreement, devices: Devices, pace: random.Random, found: list[tuple[int, str]]
) -> None:
    done = 0
    with agreement:
        while done < STEPS:
            request = agreement.may_step()
            if request is not None:
                found.append((done, request.kind))
                if request.kind == "stop":
                    return
                continue
            time.sleep(pace.random() * 0.002)
            devices.step()
            done += 1
    found.append((done, "end"))


def run(count: int, asks: list[tuple[int, float, Request]], seed: int = 0) -> list[list[object]]:
    """Runs loops in threads; some are asked for something after some seconds."""
    devices = Devices(count)
    agreements = [Agreement(peer, period=0.005) for peer in several(count)]
    found: list[list[tuple[int, str]]] = [[] for _ in range(count)]
    threads = [
        threading.Thread(
            target=loop, args=(agreements[i], devices, random.Random(seed + i), found[i])
        )
        for i in range(count)
    ]
    for thread in threads:
        thread.start()
    for who, seconds, request in asks:
        time.sleep(seconds)
        agreements[who].ask(request)
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive(), "a process waits for ever"
    return found  # type: ignore[return-value]


@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.parametrize("who", [0, 1])
def test_all_stop_after_the_same_step(count: int, who: int) -> None:
    found = run(count, [(who, 0.1, STOP)])
    assert all(f == found[0] for f in found)
    ((step, kind),) = found[0]
    assert kind == "stop"
    assert 0 < step < STEPS


def test_saves_and_then_a_stop() -> None:  # O-36: who asks by the clock is one process
    save = Request("save")
    found = run(3, [(0, 0.05, save), (0, 0.1, save), (2, 0.1, STOP)])
    assert all(f == found[0] for f in found)
    assert [kind for _, kind in found[0]] == ["save", "save", "stop"]


def test_two_are_asked_at_once() -> None:
    found = run(3, [(0, 0.05, STOP), (1, 0.0, STOP)])
    assert all(f == found[0] for f in found)
    assert [kind for _, kind in found[0]] == ["stop"]


def test_a_stop_is_not_lost_behind_a_save() -> None:
    found = run(3, [(0, 0.05, Request("save")), (1, 0.0, STOP)])
    assert all(f == found[0] for f in found)
    assert found[0][-1][1] == "stop"  # type: ignore[index]


def test_asked_when_others_are_through_already() -> None:
    """A process that is asked before its last step, when the others have ended, is not stuck."""
    peers = several(2)
    first, second = (Agreement(peer, period=0.005) for peer in peers)
    with first:
        for _ in range(3):
            assert first.may_step() is None
    with second:
        assert second.may_step() is None
        second.ask(STOP)
        time.sleep(0.1)
        assert [second.may_step() for _ in range(2)] == [None, None]
        assert second.may_step() == STOP


def test_alone_it_needs_no_thread() -> None:
    agreement = Agreement(Alone())
    with agreement:
        assert agreement.may_step() is None
        agreement.ask(Request("save"))
        agreement.ask(STOP)
        assert agreement.may_step() == STOP
        assert agreement.may_step() is None
