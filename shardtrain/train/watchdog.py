"""No process waits for ever: who is stuck, lost or has failed ends the run for all, and is named.

Owns: how long a phase may take, signs of life, the end of a process that others have caused. Does
not own: what the phases are (`phases`), who restarts a run (the launchers).

Every process writes a sign of life (its phase, its step) into the store; process 0 reads all of
them, and every process reads one key, `end`, under which the first that fails says why. jax itself
notices a process that has died, after long, and never one that is alive and stuck
(https://github.com/jax-ml/jax/issues/38503). Threads do it all, since the main thread is where a
process gets stuck; they end it by `os._exit`, for nothing else works there.
"""

import faulthandler
import json
import statistics
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from shardtrain.errors import EXIT_HUNG, EXIT_PEER_LOST
from shardtrain.sharding.processes import Processes, leave
from shardtrain.train.config import WatchdogConfig
from shardtrain.train.phases import Now, Phases

PERIOD: Final = 0.5
"""Seconds between two signs of life."""
LOST_AFTER: Final = 15.0
"""Seconds without one after which a process is lost."""
_LISTEN: Final = 6 * PERIOD
"""Seconds that a late process is listened to, to tell one that is stuck from one that is gone."""
_END = "end"
_STEP_FLOOR, _FIRST_STEP = 60.0, 1800.0
_TIMES_SLOWER, _TIMES_WARN = 20.0, 8.0
_UNHURRIED = {"host": "step", "replay": "step", "data": "step", "idle": "step", "end": "save"}
"""Phases that have another one's limit."""
_SOON, _LATER = 10.0, 60.0
"""Seconds before a word is said: of what every step does, and of what is slow by its nature."""
_FIRST = {"eval": 0, "save": 1}
"""What comes before all else once so many steps are done, in this order."""


@dataclass(frozen=True)
class End:
    """Why a run ends for all its processes."""

    code: int
    """What a process exits with that is not at fault."""
    culprit: int
    """The process at fault; -1 where it is nobody's alone."""
    words: str


@dataclass(frozen=True)
class Sign:
    """A sign of life."""

    number: int
    phase: str
    step: int
    seconds: float
    """How long it has been in the phase."""


class Limits:
    """How long each phase may take: as configured, or learned from the steps of this run."""

    def __init__(self, config: WatchdogConfig) -> None:
        self._config = config
        self._steps: deque[float] = deque(maxlen=101)

    def saw(self, seconds: float) -> None:
        """Learns how long a step took."""
        self._steps.append(seconds)

    def of(self, phase: str) -> float:
        """The seconds that a phase may take."""
        phase = _UNHURRIED.get(phase, phase)
        configured: int = getattr(self._config, phase)
        if configured:
            return float(configured)
        if phase != "step":
            return 3600.0
        if not self._steps:
            return _FIRST_STEP
        return max(_STEP_FLOOR, _TIMES_SLOWER * statistics.median(self._steps))

    def warn_of(self, phase: str) -> float:
        """The seconds after which a word is said."""
        slow = _TIMES_WARN * statistics.median(self._steps) if self._steps else _FIRST_STEP / 2
        least = _SOON if _UNHURRIED.get(phase, phase) == "step" else _LATER
        return min(self.of(phase) / 2, max(least, slow))


class Watchdog:
    """The threads of one process; a context manager around everything that others may wait for."""

    def __init__(
        self,
        peers: Processes,
        phases: Phases,
        limits: Limits,
        *,
        stacks: Path,
        leave: Callable[[int], None] = leave,
    ) -> None:
        """Prepares to watch.

        Args:
            peers: the processes.
            phases: what this one does.
            limits: how long that may take.
            stacks: folder for the stacks of a process that is stuck.
            leave: ends the process with a code.
        """
        self._peers, self._phases, self._limits = peers, phases, limits
        self._stacks, self._leave = stacks, leave
        self._stop = threading.Event()
        self._number = 0
        self._heard = time.monotonic()
        self._signs: dict[int, tuple[int, float, Sign]] = {}
        self._warned: Now | None = None
        self._threads = [threading.Thread(target=self._watch, name="watchdog", daemon=True)]
        if peers.count > 1:
            talk = threading.Thread(target=self._talk, name="signs of life", daemon=True)
            self._threads.append(talk)

    def __enter__(self) -> "Watchdog":
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._peers.count > 1 and self._peers.get(_END) is None:
            self._peers.set(f"life/{self._peers.index}", "gone")
        self._stop.set()
        for thread in self._threads:
            thread.join(5)

    # -- the end of a run that several processes share

    def tell(self, code: int, words: str) -> bool:
        """Tells the others that this process ends the run.

        Args:
            code: what the others exit with.
            words: why.

        Returns:
            Whether it is the first to do so; if not, its own error is a consequence.
        """
        end = End(code, self._peers.index, words)
        return self._peers.count == 1 or self._peers.set_first(_END, json.dumps(asdict(end)))

    def reason(self, seconds: float) -> End | None:
        """Waits whether another process has ended the run, for an error that may come of it."""
        deadline = time.monotonic() + seconds
        while self._peers.count > 1 and time.monotonic() < deadline:
            try:
                text = self._peers.get(_END)
            except RuntimeError:
                return End(EXIT_PEER_LOST, 0, "process 0 is gone")
            if text is not None:
                end = End(**json.loads(text))
                return end if end.culprit != self._peers.index else None
            time.sleep(0.1)
        return None

    # -- this process's own time

    def _watch(self) -> None:
        while not self._stop.wait(PERIOD):
            now = self._phases.now
            spent = time.monotonic() - now.since
            if spent > self._limits.of(now.phase):
                self._too_late(now, spent)
            elif spent > self._limits.warn_of(now.phase) and self._warned != now:
                self._warned = now
                _say(
                    f"process {self._peers.index} has been {_doing(now)} for {spent:.0f} s; "
                    f"up to {self._limits.of(now.phase):.0f} s are waited for"
                )
            if self._peers.count > 1 and time.monotonic() - self._heard > LOST_AFTER:
                words = f"process 0 has been silent for {LOST_AFTER:.0f} s"
                self._end(End(EXIT_PEER_LOST, 0, words))

    def _too_late(self, now: Now, spent: float) -> None:
        index, limit = self._peers.index, self._limits.of(now.phase)
        late = self._behind(now.step) or [(index, now.phase, now.step)]
        who = " and ".join(f"process {i} ({phase}, step {step})" for i, phase, step in late)
        words = (
            f"hung: after {spent:.0f} s of at most {limit:.0f} s in phase {now.phase}, "
            f"{who} {'is' if len(late) == 1 else 'are'} late"
        )
        code, silent = EXIT_HUNG, self._silent([i for i, _, _ in late if i != index])
        if silent:
            # A limit shorter than `LOST_AFTER` finds the dead before their silence does.
            names = " and ".join(f"process {i}" for i in silent)
            code = EXIT_PEER_LOST
            words = f"{names} was lost: no sign of life for {_LISTEN:.0f} s; {words}"
        self._end(self._first(End(code, (silent or [late[0][0]])[0], words)))

    def _silent(self, late: Sequence[int]) -> list[int]:
        """Those of the late processes that give no sign of life any more."""
        if not late:
            return []
        before = self._peers.under("life")
        self._stop.wait(_LISTEN)
        now = self._peers.under("life")
        return [i for i in late if before.get(str(i)) == now.get(str(i))]

    def _first(self, end: End) -> End:
        """Tells the others of an end; returns the one that was told first, which stands."""
        self._peers.set_first(_END, json.dumps(asdict(end)))
        return End(**json.loads(self._peers.wait(_END, 10)))

    def _behind(self, step: int) -> list[tuple[int, str, int]]:
        """Processes that are not as far as the others, as far as the store tells."""
        if self._peers.count == 1:
            return []
        signs = {int(i): _parse(text) for i, text in self._peers.under("life").items()}
        known = {i: sign for i, sign in signs.items() if sign is not None}
        places = {i: (sign.step, _FIRST.get(sign.phase, len(_FIRST))) for i, sign in known.items()}
        least = min(places.values(), default=(step, 0))
        behind = [(i, s.phase, s.step) for i, s in sorted(known.items()) if places[i] == least]
        if len(behind) < len(known):
            return behind
        # All at the same step: those that are not with the devices hold the others up.
        apart = [(i, phase, at) for i, phase, at in behind if phase in ("data", "host")]
        return apart if len(apart) < len(known) else []

    def _end(self, end: End) -> None:
        """Ends this process; with its stacks where the run hung."""
        if self._stop.is_set():
            return
        self._stop.set()
        if end.code == EXIT_HUNG:
            self._dump()
        if self._peers.index == 0 or end.culprit in (self._peers.index, 0):
            _say(end.words)
        self._leave(end.code)

    def _dump(self) -> None:
        """Writes what each thread of this process is doing."""
        self._stacks.mkdir(parents=True, exist_ok=True)
        path = self._stacks / f"process-{self._peers.index}.txt"
        with path.open("w", encoding="utf-8") as file:
            now = self._phases.now
            file.write(f"process {self._peers.index}: {_doing(now)}, at step {now.step}\n\n")
            file.flush()
            faulthandler.dump_traceback(file, all_threads=True)
        if self._peers.index == 0:
            _say(f"what every thread was doing is in {self._stacks}")

    # -- the others

    def _talk(self) -> None:
        while not self._stop.is_set():
            try:
                self._give_sign()
                text = self._peers.get(_END)
                end = None if text is None else End(**json.loads(text))
                if end is None and self._peers.index == 0:
                    end = self._look_around()
            except RuntimeError:
                return  # process 0 is gone: the other thread counts the seconds
            self._heard = time.monotonic()
            if end is not None and end.culprit != self._peers.index:
                self._end(end)
                return
            self._stop.wait(PERIOD)

    def _give_sign(self) -> None:
        now = self._phases.now
        self._number += 1
        sign = Sign(self._number, now.phase, now.step, time.monotonic() - now.since)
        self._peers.set(f"life/{self._peers.index}", json.dumps(asdict(sign)))

    def _look_around(self) -> End | None:
        """What process 0 makes of the signs: the end, if somebody is lost."""
        found = self._peers.under("life")
        now = time.monotonic()
        for index in range(1, self._peers.count):
            text = found.get(str(index))
            sign = None if text is None else _parse(text)
            if sign is None:  # not begun, or through
                self._signs.pop(index, None)
                continue
            number, since, _ = self._signs.get(index, (-1, now, sign))
            if sign.number != number:
                self._signs[index] = (sign.number, now, sign)
            elif now - since > LOST_AFTER:
                words = (
                    f"process {index} was lost: no sign of life for {LOST_AFTER:.0f} s; "
                    f"the last was in phase {sign.phase}, step {sign.step}"
                )
                return self._first(End(EXIT_PEER_LOST, index, words))
        return None


def _parse(text: str) -> Sign | None:
    try:
        found = json.loads(text)
    except ValueError:
        return None
    return Sign(**found) if isinstance(found, Mapping) else None


def _doing(now: Now) -> str:
    words = {
        "data": "waiting for data", "step": "in a step", "replay": "in a step",
        "host": "between two steps", "idle": "waiting for the others",
        "eval": "evaluating", "save": "saving", "end": "at the end of the run",
    }  # fmt: skip
    return f"{words.get(now.phase, f'in phase {now.phase}')} (step {now.step})"


def _say(words: str) -> None:
    print(words, file=sys.stderr, flush=True)
