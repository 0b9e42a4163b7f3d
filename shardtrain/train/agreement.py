"""All processes of a run save, or stop, after the same step, though only one was asked to.

Owns: how they agree. Does not own: why somebody asks (`interrupt`, targets, a clock) and what is
done then (the loop).

Who wants something writes it into the store. A thread of every process sees it there, freezes how
many steps its process has handed to the devices, and writes that number down. No process hands out
another step before all numbers are there; the largest is the step after which it happens: some had
begun that step, so the others must follow, and none is beyond it. The loop is not held up unless
somebody asks: a step costs a look at a variable.
"""

import json
import threading
import time
from dataclasses import asdict, dataclass
from typing import Literal

from shardtrain.sharding.processes import Processes

Kind = Literal["save", "stop"]
_PERIOD = 0.25
_PATIENCE = 600.0
"""How long a process waits for the numbers of the others; a stuck one is the watchdog's affair."""


@dataclass(frozen=True)
class Request:
    """Something that happens to all processes after the same step."""

    kind: Kind
    code: int = 0
    """Exit code of a stop."""
    reason: str = ""
    """Why, in a word or a sentence."""


class Agreement:
    """One process's part in it; a context manager around the loop."""

    def __init__(self, peers: Processes, *, period: float = _PERIOD) -> None:
        self._peers, self._period = peers, period
        self._lock = threading.Condition()
        self._handed_out = 0
        self._round = 0
        self._pending: Request | None = None
        self._due: int | None = None
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="agreement", daemon=True)

    def __enter__(self) -> "Agreement":
        if self._peers.count > 1:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        if self._thread.is_alive():
            self._thread.join()
            for number in (self._round, self._round + 1):  # who asks now is not kept waiting
                self._peers.set_first(f"at/{number}/{self._peers.index}", str(self._handed_out))

    def ask(self, request: Request) -> None:
        """Asks all processes, this one included; any thread may call it.

        A round has one request: what is asked while another one is under way is asked again in the
        next round, but for a save, which that one makes needless.
        """
        if self._peers.count == 1:
            with self._lock:
                if self._pending is None or request.kind == "stop":
                    self._pending, self._due = request, self._handed_out
            return
        with self._lock:
            number = self._round
        written = self._peers.set_first(f"asked/{number}", json.dumps(asdict(request)))
        if not written and request.kind == "stop":
            found = Request(**json.loads(self._peers.wait(f"asked/{number}", 10)))
            if found.kind != "stop":
                self._peers.set_first(f"asked/{number + 1}", json.dumps(asdict(request)))

    def may_step(self) -> Request | None:
        """Asked before each step; None hands one out.

        Returns:
            What is to be done before, once: save, or save and stop.
        """
        with self._lock:
            if self._pending is None:
                self._handed_out += 1
                return None
            if not self._lock.wait_for(lambda: self._due is not None, _PATIENCE):
                raise TimeoutError("the other processes did not say how far they are")
            assert self._due is not None
            if self._handed_out < self._due:
                self._handed_out += 1
                return None
            request, self._pending, self._due = self._pending, None, None
            self._round += 1
            return request

    def _watch(self) -> None:
        while not self._end.wait(self._period):
            with self._lock:
                number = self._round
                seen = self._pending is not None
            text = None if seen else self._peers.get(f"asked/{number}")
            if text is None:
                continue
            with self._lock:
                self._pending = Request(**json.loads(text))
                mine = self._handed_out
            self._peers.set(f"at/{number}/{self._peers.index}", str(mine))
            due = self._agree(number)
            with self._lock:
                self._due = due
                self._lock.notify_all()

    def _agree(self, number: int) -> int | None:
        """The step that all can stop at; process 0 adds up and the others read its result.

        Each may add up by itself, for a process that is through with its steps answers, and goes.
        """
        while not self._end.is_set():
            if self._peers.index:
                try:
                    return int(self._peers.wait(f"agreed/{number}", 1.0))
                except TimeoutError:
                    pass
            found = self._peers.under(f"at/{number}")
            if len(found) == self._peers.count:
                due = max(map(int, found.values()))
                self._peers.set(f"agreed/{number}", str(due))
                return due
            time.sleep(self._period / 5)
        return None
