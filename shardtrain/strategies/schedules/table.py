"""The table of a pipeline schedule: what each stage does in each tick, and where its data lies.

Owns: the arrays, how times become a table, and which buffer slot holds what. Does not own: when
anything runs (`kinds`, `csv_file`), whether a table is right (`proof`), or what it costs
(`simulate`).

A tick is, on each stage, an optional forward, then an optional backward, then an optional weight
gradient. What is sent in a tick can be used from the next one on. Virtual stage v of stage s is
part v * num_stages + s of the model, so that data always goes to a neighbour on the ring of stages.
"""

import heapq
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from functools import cached_property

import numpy as np
import numpy.typing as npt

from shardtrain.errors import ConfigError

Array = npt.NDArray[np.int32]
Ticks = npt.NDArray[np.intp]
Key = tuple[int, int]
"""A virtual stage and a microbatch: what a slot holds, and what a piece of work is."""

PARTS = ("forward", "backward", "weight")
BUFFERS = ("activation", "residual", "gradient", "pending")
NOTHING = -1


@dataclass(frozen=True, eq=False)
class Times:
    """The tick of each piece of work: arrays [stages, virtual stages, microbatches]."""

    forward: Ticks
    backward: Ticks
    """The whole backward, or without `weight`'s part of it."""
    weight: Ticks | None = None
    """The gradient of the weights, where it runs apart from that of the input."""


@dataclass(frozen=True, eq=False)
class Work:
    """What runs when: arrays [ticks, stages] of virtual stages and of microbatches; -1 = nothing.

    Without any weight part, the backward makes the gradient of the weights too.
    """

    num_virtual: int
    """Virtual stages on each stage."""
    num_microbatches: int
    forward_virtual: Array
    forward_micro: Array
    backward_virtual: Array
    backward_micro: Array
    weight_virtual: Array
    weight_micro: Array

    @property
    def num_ticks(self) -> int:
        """Ticks of the table."""
        return len(self.forward_micro)

    @property
    def num_stages(self) -> int:
        """Stages, the degree of the mesh axis `pipeline`."""
        return int(self.forward_micro.shape[1])

    @cached_property
    def split(self) -> bool:
        """Whether the gradient of the weights is a part of its own."""
        return bool((self.weight_micro != NOTHING).any())

    def part(self, name: str) -> tuple[Array, Array]:
        """Return the virtual stages and the microbatches of one of `PARTS`."""
        return {
            "forward": (self.forward_virtual, self.forward_micro),
            "backward": (self.backward_virtual, self.backward_micro),
            "weight": (self.weight_virtual, self.weight_micro),
        }[name]

    def at(self, name: str, tick: int, stage: int) -> Key | None:
        """Return what a part does in a cell of the table, None for nothing."""
        return self._cells[name][tick][stage]

    @cached_property
    def _cells(self) -> dict[str, list[list[Key | None]]]:
        """The table as lists: looking into arrays cell by cell is slow."""
        cells: dict[str, list[list[Key | None]]] = {}
        for name in PARTS:
            virtual, micro = self.part(name)
            cells[name] = [
                [None if key == (NOTHING, NOTHING) else key for key in zip(*row, strict=True)]
                for row in zip(virtual.tolist(), micro.tolist(), strict=True)
            ]
        return cells


@dataclass(frozen=True, eq=False)
class Slots:
    """Where data lies: arrays [ticks, stages] of slots of each stage's four buffers; -1 = none.

    Buffers: activations that arrived, residuals that a forward keeps for its backward, gradients
    that arrived (or that the forward of the last virtual stage made of the loss), and what a
    backward leaves pending for a weight part. A name is who uses the slot, then the buffer.
    """

    forward_activation: Array
    """Read and freed; none on the first virtual stage, which reads the batch."""
    forward_residual: Array
    """Written."""
    forward_gradient: Array
    """Written by the last virtual stage: the loss by its output."""
    backward_residual: Array
    """Read, and freed unless a weight part follows."""
    backward_gradient: Array
    """Read and freed."""
    backward_pending: Array
    """Written where a weight part follows."""
    weight_residual: Array
    """Read and freed."""
    weight_pending: Array
    """Read and freed."""
    receive_activation: Array
    """Written at the end of the tick, with what the stage before sent in it."""
    receive_gradient: Array
    """Written at the end of the tick, with what the stage after sent in it."""

    def size(self, buffer: str) -> int:
        """Return the slots of one of `BUFFERS` that the busiest stage needs."""
        columns = [c.name for c in fields(self) if c.name.endswith(f"_{buffer}")]
        return 1 + max(int(getattr(self, name).max(initial=NOTHING)) for name in columns)


@dataclass(frozen=True, eq=False)
class Schedule:
    """A table: what runs when, and where its data lies."""

    name: str
    work: Work
    slots: Slots

    def columns(self) -> dict[str, Array]:
        """Return every array [ticks, stages] by name, as an executor scans over them."""
        of_work = [c.name for c in fields(self.work) if not c.name.startswith("num_")]
        return {name: getattr(self.work, name) for name in of_work} | {
            c.name: getattr(self.slots, c.name) for c in fields(self.slots)
        }


def without_backward(work: Work) -> Work:
    """Return the forwards alone, without ticks in which no stage has one."""
    busy = (work.forward_micro != NOTHING).any(axis=1)
    columns = {}
    for part in PARTS:
        for name, column in zip((f"{part}_virtual", f"{part}_micro"), work.part(part), strict=True):
            kept = column[busy]
            columns[name] = kept if part == "forward" else np.full_like(kept, NOTHING)
    return replace(work, **columns)


def with_columns(schedule: Schedule, columns: Mapping[str, Array]) -> Schedule:
    """Return the schedule with some of its arrays replaced."""
    every = schedule.columns() | dict(columns)
    work, slots = schedule.work, schedule.slots
    return Schedule(
        schedule.name,
        Work(
            work.num_virtual,
            work.num_microbatches,
            **{c.name: every[c.name] for c in fields(work) if c.name in every},
        ),
        Slots(**{c.name: every[c.name] for c in fields(slots)}),
    )


# -- who sends to whom


def after(stage: int, virtual: int, num_stages: int) -> tuple[int, int]:
    """Return the stage and virtual stage that an output goes to."""
    return (stage + 1, virtual) if stage + 1 < num_stages else (0, virtual + 1)


def before(stage: int, virtual: int, num_stages: int) -> tuple[int, int]:
    """Return the stage and virtual stage that the gradient of an input goes to."""
    return (stage - 1, virtual) if stage else (num_stages - 1, virtual - 1)


def is_first(stage: int, virtual: int) -> bool:
    """Whether a virtual stage holds the beginning of the model."""
    return stage == 0 and virtual == 0


def is_last(stage: int, virtual: int, work: Work) -> bool:
    """Whether a virtual stage holds the end of the model."""
    return stage == work.num_stages - 1 and virtual == work.num_virtual - 1


def words(part: str, key: Key, num_virtual: int) -> str:
    """Return a piece of work in words, such as `forward of microbatch 3`."""
    where = f" on virtual stage {key[0]}" if num_virtual > 1 else ""
    return f"{part} of microbatch {key[1]}{where}"


# -- from times to a table


def tabulate(name: str, times: Times) -> Schedule:
    """Make the table in which each piece of work runs in its tick.

    Args:
        name: What to call it.
        times: The tick of each piece of work.

    Returns:
        The table, not yet proven (`proof.prove`).

    Raises:
        ConfigError: A tick is negative, or a stage would do the same part twice in one tick.
    """
    parts = {"forward": times.forward, "backward": times.backward, "weight": times.weight}
    given = {part: ticks for part, ticks in parts.items() if ticks is not None}
    stages, num_virtual, microbatches = times.forward.shape
    num_ticks = 1 + max(int(ticks.max()) for ticks in given.values())
    columns = {
        f"{part}_{what}": np.full((num_ticks, stages), NOTHING, np.int32)
        for part in PARTS
        for what in ("virtual", "micro")
    }
    for part, ticks in given.items():
        for stage, virtual, micro in np.ndindex(ticks.shape):
            tick = int(ticks[stage, virtual, micro])
            where = f"{name}: tick {tick}, stage {stage}"
            who = words(part, (virtual, micro), num_virtual)
            if tick < 0:
                raise ConfigError(f"{who} is before the first tick", where=where)
            if columns[f"{part}_micro"][tick, stage] != NOTHING:
                raise ConfigError(
                    f"{who} in the same tick as that of microbatch "
                    f"{columns[f'{part}_micro'][tick, stage]}",
                    where=where,
                    cure=f"a tick has one {part} on a stage; move one of them",
                )
            columns[f"{part}_virtual"][tick, stage] = virtual
            columns[f"{part}_micro"][tick, stage] = micro
    return with_slots(name, Work(num_virtual, microbatches, **columns))


class _Buffer:
    """Slots of one buffer of one stage, handed out as a compiler hands out registers."""

    def __init__(self) -> None:
        self._free: list[int] = []
        self._slots: dict[Key, int] = {}
        self._size = 0

    def put(self, key: Key) -> int:
        """Take the lowest free slot."""
        if not self._free:
            self._free.append(self._size)
            self._size += 1
        self._slots[key] = heapq.heappop(self._free)
        return self._slots[key]

    def get(self, key: Key) -> int:
        """Look a slot up; what is not there is a fault of the table, which `proof` names."""
        return self._slots.get(key, 0)

    def take(self, key: Key) -> int:
        """Look a slot up and free it."""
        if key not in self._slots:
            return 0
        heapq.heappush(self._free, self._slots[key])
        return self._slots.pop(key)


def with_slots(name: str, work: Work) -> Schedule:
    """Make the table of some work with the fewest slots on each stage.

    Args:
        name: What to call it.
        work: What runs when; it may be faulty.

    Returns:
        The table, not yet proven (`proof.prove`).
    """
    stages = work.num_stages
    empty = np.full((work.num_ticks, stages), NOTHING, np.int32)
    columns = {column.name: empty.copy() for column in fields(Slots)}
    buffers = [{buffer: _Buffer() for buffer in BUFFERS} for _ in range(stages)]
    for tick in range(work.num_ticks):
        arriving: list[tuple[str, int, Key]] = []
        for stage, own in enumerate(buffers):
            for column, slot in _own_slots(work, tick, stage, own).items():
                columns[column][tick, stage] = slot
            arriving += sends(work, tick, stage)
        for buffer, stage, key in arriving:
            columns[f"receive_{buffer}"][tick, stage] = buffers[stage][buffer].put(key)
    return Schedule(name, work, Slots(**columns))


def _own_slots(work: Work, tick: int, stage: int, own: dict[str, _Buffer]) -> dict[str, int]:
    """The slots that a stage's own work in a tick uses."""
    slots: dict[str, int] = {}
    if (key := work.at("forward", tick, stage)) is not None:
        if not is_first(stage, key[0]):
            slots["forward_activation"] = own["activation"].take(key)
        slots["forward_residual"] = own["residual"].put(key)
        if is_last(stage, key[0], work):
            slots["forward_gradient"] = own["gradient"].put(key)
    if (key := work.at("backward", tick, stage)) is not None:
        residual = own["residual"]
        slots["backward_residual"] = residual.get(key) if work.split else residual.take(key)
        slots["backward_gradient"] = own["gradient"].take(key)
        if work.split:
            slots["backward_pending"] = own["pending"].put(key)
    if (key := work.at("weight", tick, stage)) is not None:
        slots["weight_residual"] = own["residual"].take(key)
        slots["weight_pending"] = own["pending"].take(key)
    return slots


def sends(work: Work, tick: int, stage: int) -> list[tuple[str, int, Key]]:
    """Return what a stage sends in a tick: the buffer it goes to, the stage, and what it is.

    Args:
        work: What runs when.
        tick: A tick of it.
        stage: The stage that sends.
    """
    found: list[tuple[str, int, Key]] = []
    key = work.at("forward", tick, stage)
    if key is not None and not is_last(stage, key[0], work):
        to, virtual = after(stage, key[0], work.num_stages)
        found.append(("activation", to, (virtual, key[1])))
    key = work.at("backward", tick, stage)
    if key is not None and not is_first(stage, key[0]):
        to, virtual = before(stage, key[0], work.num_stages)
        found.append(("gradient", to, (virtual, key[1])))
    return found
