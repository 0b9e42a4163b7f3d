"""The proof that a table is right, or its first fault.

Owns: what a right table is. Does not own: how tables are made, what they cost.

A right table does each microbatch's forward and backward (and weight gradient, where there is one
at all) once on each virtual stage, uses data only from the tick after it was sent, never overwrites
a slot that is still to be read, and reads from each slot what the work in question needs. Slots are
looked at as they are named in the table: nothing here trusts who made it.
"""

from dataclasses import dataclass

import numpy as np

from shardtrain.errors import ConfigError
from shardtrain.strategies.schedules.table import (
    BUFFERS,
    NOTHING,
    PARTS,
    Key,
    Schedule,
    Work,
    after,
    before,
    is_first,
    is_last,
    sends,
    words,
)

Piece = tuple[str, int, Key]
"""A part, its stage, and its virtual stage and microbatch."""

_NOT_THERE = "which is not there"
_READER = {
    "activation": "forward",
    "residual": "backward",
    "gradient": "backward",
    "pending": "weight",
}
"""The part that reads a buffer."""


@dataclass(frozen=True)
class Fault:
    """What is wrong with a table, where, and what would mend it."""

    what: str
    tick: int
    stage: int
    cure: str = ""


def prove(schedule: Schedule) -> Schedule:
    """Return a table that is right.

    Args:
        schedule: A table from anywhere.

    Returns:
        The same table.

    Raises:
        ConfigError: The table is faulty; the message has the tick and the stage.
    """
    fault = first_fault(schedule)
    if fault is not None:
        where = f"{schedule.name}: tick {fault.tick}, stage {fault.stage}"
        raise ConfigError(fault.what, where=where, cure=fault.cure)
    return schedule


def first_fault(schedule: Schedule) -> Fault | None:
    """Look for a fault: first in what is named, then in what is done, then tick by tick.

    Args:
        schedule: A table from anywhere.

    Returns:
        The first fault, None for a right table.
    """
    work = schedule.work
    return (
        _shape_fault(schedule)
        or _name_fault(work)
        or _count_fault(work)
        or _Walk(schedule).first_fault()
    )


# -- what is named and done


def _shape_fault(schedule: Schedule) -> Fault | None:
    """An array of another size or kind than the others."""
    shape = schedule.work.forward_micro.shape
    if len(shape) != 2 or not all(shape):
        return Fault("the table is empty, or not [ticks, stages]", 0, 0)
    for name, column in schedule.columns().items():
        if column.shape != shape or not np.issubdtype(column.dtype, np.integer):
            found = f"{column.dtype.name}{list(column.shape)}"
            return Fault(f"{name} is {found} and not integers {list(shape)}", 0, 0)
    return None


def _first(mask: "np.ndarray[tuple[int, ...], np.dtype[np.bool_]]") -> tuple[int, int] | None:
    """The first cell of a mask [ticks, stages], tick by tick."""
    found = np.argwhere(mask)
    return (int(found[0, 0]), int(found[0, 1])) if len(found) else None


def _name_fault(work: Work) -> Fault | None:
    """A virtual stage or microbatch that does not exist."""
    faults = []
    for part in PARTS:
        virtual, micro = work.part(part)
        checks = (
            ("microbatch", micro, work.num_microbatches),
            ("virtual stage", virtual, work.num_virtual),
        )
        for what, column, size in checks:
            cell = _first((column < NOTHING) | (column >= size))
            if cell is not None:
                unknown = f"{part} of an unknown {what}, {column[cell]}"
                faults.append(Fault(unknown, *cell, cure=f"there are 0 to {size - 1}"))
        cell = _first((virtual == NOTHING) != (micro == NOTHING))
        if cell is not None:
            both = f"microbatch {micro[cell]} on virtual stage {virtual[cell]}"
            faults.append(Fault(f"{part} of {both}: one is missing", *cell))
    return min(faults, key=lambda fault: (fault.tick, fault.stage), default=None)


def _count_fault(work: Work) -> Fault | None:
    """A piece of work that is done twice, or never."""
    parts = PARTS if work.split else PARTS[:2]
    seen: dict[Piece, int] = {}
    for tick, stage in np.ndindex(work.forward_micro.shape):
        for part in parts:
            key = work.at(part, tick, stage)
            if key is None:
                continue
            if (part, stage, key) in seen:
                first = seen[part, stage, key]
                return Fault(
                    f"{words(part, key, work.num_virtual)} again; it was done in tick {first}",
                    tick,
                    stage,
                )
            seen[part, stage, key] = tick
    for micro, virtual, stage in np.ndindex(
        work.num_microbatches, work.num_virtual, work.num_stages
    ):
        for part in parts:
            if (part, stage, (virtual, micro)) not in seen:
                what = f"the table ends without {words(part, (virtual, micro), work.num_virtual)}"
                return Fault(what, work.num_ticks - 1, stage)
    return None


# -- what is ready, and where it lies


class _Walk:
    """Goes through a table as an executor does, with names instead of data."""

    def __init__(self, schedule: Schedule) -> None:
        self._work = schedule.work
        self._slots = {name: column.tolist() for name, column in schedule.columns().items()}
        stages = range(self._work.num_stages)
        self._held: list[dict[str, dict[int, Key]]] = [{b: {} for b in BUFFERS} for _ in stages]
        self._where: list[dict[str, dict[Key, int]]] = [{b: {} for b in BUFFERS} for _ in stages]

    def first_fault(self) -> Fault | None:
        """Return the first fault of a table that names and counts rightly."""
        for tick in range(self._work.num_ticks):
            arriving: list[tuple[str, int, Key]] = []
            for stage in range(self._work.num_stages):
                wrong = self._own(tick, stage)
                if wrong is not None:
                    return self._explained(*wrong, tick, stage)
                arriving += sends(self._work, tick, stage)
            for stage in range(self._work.num_stages):
                mine = [(buffer, key) for buffer, to, key in arriving if to == stage]
                what = self._arrivals(mine, tick, stage)
                if what is not None:
                    return Fault(what, tick, stage)
        return None

    def _own(self, tick: int, stage: int) -> tuple[str, str] | None:
        """What is wrong with the work of a stage in a tick, after the part that it is wrong in."""
        work, split = self._work, self._work.split
        first = last = False
        for part in PARTS:
            key = work.at(part, tick, stage)
            if key is not None:
                first, last = is_first(stage, key[0]), is_last(stage, key[0], work)
            # buffer, whether it is written, whether this work uses it, whether reading frees it
            uses = {
                "forward": (
                    ("activation", False, not first, True),
                    ("residual", True, True, False),
                    ("gradient", True, last, False),
                ),
                "backward": (
                    ("residual", False, True, not split),
                    ("gradient", False, True, True),
                    ("pending", True, split, False),
                ),
                "weight": (("residual", False, True, True), ("pending", False, True, True)),
            }[part]
            for buffer, written, used, freed in uses:
                slot = self._slots[f"{part}_{buffer}"][tick][stage]
                needed = key if used else None
                who = f"{part}_{buffer}" if key is None else words(part, key, work.num_virtual)
                what = (
                    self._write(stage, buffer, slot, needed)
                    if written
                    else self._read(stage, buffer, slot, needed, freed=freed)
                )
                if what is not None:
                    return part, f"{who} {what}"
        return None

    def _arrivals(self, arriving: list[tuple[str, Key]], tick: int, stage: int) -> str | None:
        """What is wrong with where a stage puts what arrives at the end of a tick."""
        for buffer in ("activation", "gradient"):
            keys: list[Key | None] = [key for name, key in arriving if name == buffer]
            slot = self._slots[f"receive_{buffer}"][tick][stage]
            what = self._write(stage, buffer, slot, keys[0] if keys else None)
            if what is not None:
                return f"the {buffer} that arrives {what}"
        return None

    def _write(self, stage: int, buffer: str, slot: int, key: Key | None) -> str | None:
        """Put something into a slot; None = there is nothing to put."""
        if key is None:
            return None if slot == NOTHING else f"names {buffer} slot {slot} for nothing"
        if slot < 0:
            return f"has no {buffer} slot"
        held = self._held[stage][buffer]
        if slot in held:
            return (
                f"overwrites {buffer} slot {slot}, which still holds what "
                f"{words(_READER[buffer], held[slot], self._work.num_virtual)} needs"
            )
        held[slot] = key
        self._where[stage][buffer][key] = slot
        return None

    def _read(
        self, stage: int, buffer: str, slot: int, key: Key | None, *, freed: bool
    ) -> str | None:
        """Take something from a slot; None = there is nothing to take."""
        if key is None:
            return None if slot == NOTHING else f"names {buffer} slot {slot} for nothing"
        right = self._where[stage][buffer].get(key)
        if right is None:
            return f"needs its {buffer}, {_NOT_THERE}"
        if slot != right:
            return f"reads {buffer} slot {slot}; its own is in slot {right}"
        if freed:
            del self._held[stage][buffer][slot]
            del self._where[stage][buffer][key]
        return None

    def _explained(self, part: str, what: str, tick: int, stage: int) -> Fault:
        """A fault; one of order with what would mend it, or that stages wait for each other."""
        if not what.endswith(_NOT_THERE):
            return Fault(what, tick, stage)
        stuck = _deadlock(self._work)
        if stuck is not None:
            return stuck
        ready = _ready(self._work, part, tick, stage)
        return Fault(
            f"{what} before tick {ready}",
            tick,
            stage,
            cure=f"run it in tick {ready} or later; what is sent in a tick can be used from the "
            "next one on",
        )


# -- who waits for whom


def _needs(part: str, stage: int, key: Key, work: Work) -> list[Piece]:
    """The pieces of work whose results a piece needs."""
    if part == "weight":
        return [("backward", stage, key)]
    if part == "forward":
        if is_first(stage, key[0]):
            return []
        back, virtual = before(stage, key[0], work.num_stages)
        return [("forward", back, (virtual, key[1]))]
    own: list[Piece] = [("forward", stage, key)]
    if is_last(stage, key[0], work):
        return own
    to, virtual = after(stage, key[0], work.num_stages)
    return [*own, ("backward", to, (virtual, key[1]))]


def _ticks(work: Work) -> dict[Piece, int]:
    """The tick of each piece of work."""
    return {
        (part, stage, key): tick
        for tick, stage in np.ndindex(work.forward_micro.shape)
        for part in PARTS
        if (key := work.at(part, tick, stage)) is not None
    }


def _ready(work: Work, part: str, tick: int, stage: int) -> int:
    """The first tick in which a piece can run, by the ticks of what it needs."""
    key = work.at(part, tick, stage)
    if key is None:
        return 0
    ticks = _ticks(work)
    order = PARTS.index(part)
    return max(
        (
            ticks[need] + (need[1] != stage or PARTS.index(need[0]) >= order)
            for need in _needs(part, stage, key, work)
        ),
        default=0,
    )


def _deadlock(work: Work) -> Fault | None:
    """Play the stages, each in its own order and waiting for what it needs; say who gets stuck."""
    queues: list[list[tuple[int, Piece]]] = [[] for _ in range(work.num_stages)]
    for (part, stage, key), tick in _ticks(work).items():
        queues[stage].append((tick, (part, stage, key)))
    done: set[Piece] = set()
    moved = True
    while moved:
        moved = False
        for queue in queues:
            while queue and all(need in done for need in _needs(*queue[0][1], work)):
                done.add(queue.pop(0)[1])
                moved = True
    heads = [queue[0] for queue in queues if queue]
    if not heads:
        return None
    tick, (part, stage, key) = min(heads, key=lambda head: (head[0], head[1][1]))
    waits = [
        f"stage {at} with {words(name, own, work.num_virtual)} waits for "
        f"{words(need[0], need[2], work.num_virtual)} of stage {need[1]}"
        for _, (name, at, own) in heads
        for need in _needs(name, at, own, work)
        if need not in done
    ]
    return Fault(
        f"deadlock, {words(part, key, work.num_virtual)} can never run: " + "; ".join(waits[:4]),
        tick,
        stage,
        cure="change the order of one of these stages",
    )
