"""The collectives of a compiled program: what moves, over which mesh axes, how often, beside what.

Owns: replica groups in the notations of XLA, payload and ring bytes, overlap as scheduled: that
products stand between start and done in the schedule, not that a clock was read.
Does not own: reading the text (`hlo`), links and times.
"""

import math
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from shardtrain.plan.hlo import ArrayShape, Computation, HloError, Instruction, Module, Visit

KINDS = (
    "all-reduce",
    "all-gather",
    "reduce-scatter",
    "all-to-all",
    "ragged-all-to-all",
    "collective-permute",
    "collective-broadcast",
)

Groups = NDArray[np.int64]
"""Device numbers, [groups, members]."""

_INT_LISTS = re.compile(r"\{([\d, ]*)\}")
_IOTA = re.compile(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
_MESH = re.compile(r"replica_groups=mesh\[([^\]]*)\]([^{]*)\{([^}]*)\}")
_ORDER = re.compile(r"\[([\d,]+)\](?:T\(([\d,]+)\))?")
_NESTED = re.compile(r"(?:replica_groups|source_target_pairs)=\{(\{.*?\})\}")


@dataclass(frozen=True)
class Collective:
    """One collective instruction of the program."""

    name: str
    kind: str
    """One of `KINDS`."""
    axes: tuple[str, ...]
    """The mesh axes that vary inside a group."""
    group_size: int
    """Members of a group; less than the product of `axes` when they are only partly spanned."""
    arrays: tuple[ArrayShape, ...]
    """What is moved, whole: gathered results, operands before they are scattered or reduced."""
    times: int
    """How often a step runs it."""
    loops: tuple[str, ...]
    """The loops around it, outermost first."""
    is_conditional: bool
    is_async: bool
    hidden_flops: int
    """FLOPs of products between its start and its done, once."""
    op_name: str
    """The operation of the user's program that it stems from."""
    computation: str
    """The computation that it stands in."""
    groups: Groups = field(repr=False, compare=False)
    """Who takes part with whom."""

    @property
    def dtypes(self) -> tuple[str, ...]:
        """The dtypes that it moves, sorted."""
        return tuple(sorted({array.dtype for array in self.arrays}))

    @property
    def payload(self) -> int:
        """Bytes of the whole arrays, once."""
        return sum(array.nbytes for array in self.arrays)

    @property
    def wire(self) -> float:
        """Bytes that a device sends, once, by a ring (Patarasuk and Yuan 2009)."""
        if self.group_size == 1:
            return 0.0
        share = (self.group_size - 1) / self.group_size
        factor = {"all-reduce": 2 * share, "collective-permute": 1.0, "collective-broadcast": 1.0}
        return factor.get(self.kind, share) * self.payload

    def crosses(self, domain: int) -> bool:
        """Whether a group spans several domains of so many neighbouring devices."""
        domains = self.groups // domain
        return bool((domains != domains[:, :1]).any())

    @property
    def is_overlapped(self) -> bool:
        """Whether products are scheduled between its start and its done."""
        return self.is_async and self.hidden_flops > 0


@dataclass(frozen=True)
class Total:
    """Collectives of one kind over the same axes; bytes are those of a whole step."""

    kind: str
    axes: tuple[str, ...]
    instructions: int
    times: int
    payload: int
    wire: float
    wire_overlapped: float


def collectives(module: Module, mesh: Mapping[str, int]) -> tuple[Collective, ...]:
    """Lists the collectives of a program in the order in which they are started.

    Args:
        module: from `parse_hlo`.
        mesh: degree of each axis, slowest first; devices are numbered in row-major order.

    Returns:
        One entry for each place where a collective instruction runs.
    """
    found = []
    for visit in module.visits():
        for index, instruction in enumerate(visit.computation.instructions):
            what = moved(module, visit.computation, instruction)
            if what is not None:
                found.append(_read(module, visit, index, what, mesh))
    return tuple(found)


def totals(found: Iterable[Collective]) -> tuple[Total, ...]:
    """Adds up collectives by kind and axes, those that move most first."""
    groups: dict[tuple[str, tuple[str, ...]], list[Collective]] = defaultdict(list)
    for collective in found:
        groups[collective.kind, collective.axes].append(collective)
    rows = (
        Total(
            kind=kind,
            axes=axes,
            instructions=len(some),
            times=sum(c.times for c in some),
            payload=sum(c.payload * c.times for c in some),
            wire=sum(c.wire * c.times for c in some),
            wire_overlapped=sum(c.wire * c.times for c in some if c.is_overlapped),
        )
        for (kind, axes), some in groups.items()
    )
    return tuple(sorted(rows, key=lambda row: -row.wire))


Moved = tuple[Computation, Instruction, str]
"""The computation of a collective, the instruction itself, its kind."""


def moved(module: Module, computation: Computation, instruction: Instruction) -> Moved | None:
    """The collective that an instruction is, begins, or wraps in a fusion or async computation."""
    kind = instruction.opcode.removesuffix("-start")
    if kind in KINDS:
        return computation, instruction, kind
    if instruction.opcode not in ("fusion", "fusion-start", "async-start"):
        return None
    for name in instruction.callees("calls", "called_computations"):
        inner = module.computations[name]
        for other in inner.instructions:
            what = moved(module, inner, other)
            if what is not None:
                return _scattered(inner, what)
    return None


def _scattered(computation: Computation, what: Moved) -> Moved:
    """An all-reduce of which a fusion keeps a slice is a reduce-scatter (so TPUs print it)."""
    if what[2] == "all-reduce" and computation.root.opcode == "dynamic-slice":
        return (*what[:2], "reduce-scatter")
    return what


def _read(
    module: Module, visit: Visit, index: int, what: Moved, mesh: Mapping[str, int]
) -> Collective:
    computation, instruction, kind = what
    outer = visit.computation.instructions[index]
    groups = replica_groups(instruction.attributes, math.prod(mesh.values()))
    arrays = computation.operand_arrays(instruction)
    if kind == "all-gather":
        dim = re.search(r"\bdimensions=\{(\d+)\}", instruction.attributes)
        assert dim is not None, instruction
        arrays = tuple(_gathered(array, int(dim[1]), groups.shape[1]) for array in arrays)
    waits = outer.is_start and '"is_sync":true' not in outer.attributes
    return Collective(
        name=outer.name,
        kind=kind,
        axes=varying_axes(groups, mesh),
        group_size=groups.shape[1],
        arrays=arrays,
        times=visit.times,
        loops=visit.loops,
        is_conditional=visit.is_conditional,
        is_async=waits,
        hidden_flops=_hidden_flops(module, visit.computation, index) if waits else 0,
        op_name=instruction.op_name or outer.op_name,
        computation=visit.computation.name,
        groups=groups,
    )


def _gathered(array: ArrayShape, dim: int, times: int) -> ArrayShape:
    dims = list(array.dims)
    dims[dim] *= times
    return replace(array, dims=tuple(dims))


def _hidden_flops(module: Module, computation: Computation, index: int) -> int:
    """FLOPs of products that stand between a start and its done.

    A loop may hand what it has started to its next turn; then all that follows the start counts.
    """
    handed_on = {computation.instructions[index].name}
    flops = 0
    for instruction in computation.instructions[index + 1 :]:
        if handed_on.intersection(instruction.operands):
            if instruction.opcode.endswith("-done"):
                break
            if instruction.opcode in ("async-update", "get-tuple-element", "bitcast"):
                handed_on.add(instruction.name)
        flops += module.instruction_flops(computation, instruction)
    return flops


# -- groups of devices


def replica_groups(attributes: str, num_devices: int) -> Groups:
    """The groups of a collective.

    Args:
        attributes: of the instruction.
        num_devices: all devices; an empty list of groups is one group of them all.

    Returns:
        Device numbers [groups, members].

    Raises:
        HloError: an unknown notation.

    Example:
        >>> replica_groups("replica_groups=[2,2]<=[2,2]T(1,0)", 4).tolist()
        [[0, 2], [1, 3]]
    """
    found = _IOTA.search(attributes)
    if found:
        shape = _ints(found[1])
        return _iota(_ints(found[2]), found[3]).reshape(shape).reshape(-1, shape[-1])
    found = _MESH.search(attributes)
    if found:
        return _mesh_groups(found[1], found[2], found[3])
    found = _NESTED.search(attributes)
    if found:
        groups = [_ints(group) for group in _INT_LISTS.findall(found[1])]
        if len({len(group) for group in groups}) != 1:
            raise HloError(f"groups of different sizes: {found[0][:80]}")
        return np.array(groups, np.int64)
    if "replica_groups={}" in attributes:
        return np.arange(num_devices)[None]
    raise HloError(f"no replica groups in {attributes[:120]!r}")


def varying_axes(groups: Groups, mesh: Mapping[str, int]) -> tuple[str, ...]:
    """The mesh axes along which members of a group differ.

    Example:
        >>> varying_axes(np.array([[0, 2], [1, 3]]), {"data": 2, "tensor": 2})
        ('data',)
    """
    places = np.unravel_index(groups, tuple(mesh.values()))
    return tuple(
        axis
        for axis, place in zip(mesh, places, strict=True)
        if bool((place != place[:, :1]).any())
    )


def _mesh_groups(sizes: str, order: str, axes: str) -> Groups:
    """`mesh['a'=2,'b'=4] {'b':(2)2}`: an axis, or of an axis the part after `(2)` and of size 2."""
    degrees = {name: int(size) for name, size in re.findall(r"'([^']*)'=(\d+)", sizes)}
    place = _ORDER.search(order)
    if order.strip() and place is None:
        raise HloError(f"unknown order of devices: {order!r}")
    dims = [math.prod(degrees.values())] if place is None else _ints(place[1])
    devices = _iota(dims, None if place is None else place[2])
    spans = {
        name: (int(before or 1), int(size or degrees[name]))
        for name, before, size in re.findall(r"'([^']*)'(?::\((\d+)\)(\d+))?", axes)
    }
    split: list[int] = []
    inside: dict[str, int] = {}
    for name, degree in degrees.items():
        before, size = spans.get(name, (1, 1))
        if name in spans:
            inside[name] = len(split) + 1
        split += [before, size, degree // (before * size)]
    members = [inside[name] for name in spans]
    others = [dim for dim in range(len(split)) if dim not in members]
    size = math.prod(split[dim] for dim in members)
    return devices.reshape(split).transpose(others + members).reshape(-1, size)


def _iota(dims: list[int], order: str | None) -> Groups:
    devices = np.arange(math.prod(dims)).reshape(dims)
    return devices.transpose(_ints(order)) if order else devices


def _ints(text: str) -> list[int]:
    return [int(n) for n in text.replace(" ", "").split(",") if n]


def over(found: Iterable[Collective], kind: str, *axes: str) -> Iterator[Collective]:
    """Those of one kind over exactly these axes."""
    return (c for c in found if c.kind == kind and c.axes == axes)
