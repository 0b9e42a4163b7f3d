"""Faults on purpose: what a run does when something breaks can be seen before it breaks.

Owns: when a fault happens, and the fault. Does not own: the words that ask for one (`chaos_words`)
and what follows.

A fault happens once in a run, also where the run begins again: that it has is written down before.
"""

import errno
import json
import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final

import jax
import jax.numpy as jnp

from shardtrain.train.chaos_words import Fault
from shardtrain.train.rundir import replace_text

_FOREVER: Final = 10**9


class ChaosError(RuntimeError):
    """What `raise` raises."""


class Chaos:
    """The faults of one process."""

    def __init__(
        self,
        faults: Sequence[Fault],
        process: int,
        *,
        log: Path,
        corrupt: Callable[[], None],
        say: Callable[[str], None],
    ) -> None:
        """Prepares faults.

        Args:
            faults: from `parse_chaos`.
            process: the number of this one.
            log: a file in which this process writes down what has happened.
            corrupt: damages the newest checkpoint.
            say: told what happens.
        """
        self._faults = [fault for fault in faults if fault.process in (process, None)]
        self._process, self._log, self._corrupt, self._say = process, log, corrupt, say
        self._done: list[str] = json.loads(log.read_text()) if log.exists() else []
        self._slow = 0.0
        self._full = False

    def before(self, update: int, step_time: float) -> None:
        """Called before the batch of an update is handed to the devices.

        Args:
            update: its number.
            step_time: seconds of the step before.
        """
        for fault in self._due("slow", update, _FOREVER):
            self._slow = fault.amount
        if self._slow:
            time.sleep(self._slow * step_time)
        for kind in ("sigterm", "diskfull", "corrupt", "hang", "raise", "kill"):
            for fault in self._due(kind, update):
                self._happen(kind, fault)

    def _happen(self, kind: str, fault: Fault) -> None:
        if kind == "sigterm":
            os.kill(os.getpid(), signal.SIGTERM)
        elif kind == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif kind == "raise":
            raise ChaosError(f"chaos: {fault}")
        elif kind == "hang":
            time.sleep(_FOREVER)
        elif kind == "corrupt":
            self._corrupt()
        elif kind == "diskfull":
            self._full = True

    def batch(self, number: int, batch: Mapping[str, jax.Array]) -> Mapping[str, jax.Array]:
        """A batch, where a fault is in it with nothing that is a number.

        Args:
            number: of the batch, from 1: that of the update that it would be in a clean run.
            batch: as it was read.
        """
        for _ in self._due("nan", number):
            name = next((n for n, a in batch.items() if jnp.issubdtype(a.dtype, jnp.floating)), "")
            if not name:
                raise ChaosError("chaos: nan has no effect, no array of the batch has fractions")
            poisoned = jax.jit(jnp.full_like, static_argnums=1, out_shardings=batch[name].sharding)
            batch = {**batch, name: poisoned(batch[name], float("nan"))}
        return batch

    def disk(self) -> None:
        """Called when a save writes; raises OSError where the disk is meant to be full."""
        if self._full:
            self._full = False
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def _due(self, kind: str, update: int, until: int = 0) -> list[Fault]:
        """The faults of a kind that happen now; one is not asked for twice."""
        found = [
            fault
            for fault in self._faults
            if fault.kind == kind
            and fault.step <= update <= max(fault.step, until)
            and str(fault) not in self._done
        ]
        for fault in found:
            self._done.append(str(fault))
            replace_text(self._log, json.dumps(self._done))
            self._say(f"chaos: {fault} happens now")
        return found


def flip_a_byte(folder: Path) -> Path:
    """Damages the largest file under a folder as a bad disk would.

    Args:
        folder: of a checkpoint.

    Returns:
        The file.
    """
    path = max((p for p in folder.rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)
    place = path.stat().st_size // 2
    with path.open("r+b") as file:
        file.seek(place)
        byte = file.read(1)
        file.seek(place)
        file.write(bytes([byte[0] ^ 0x10]))
    return path
