"""What a compiled program copies between a device and its host, and reads from a disk or writes.

Owns: finding them, by the memory space that XLA prints with a layout and by the calls of
`sharding.disk`. Does not own: their times.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass

from shardtrain.plan.hlo import Instruction, Module, Visit
from shardtrain.sharding.disk import READ, WRITE

HOST = "S(5)"
"""The memory space of the host, in a layout."""

_LAID_OUT = re.compile(r"[a-z]+\d*[a-z0-9]*\[[\d,]*\](?:\{[^}]*\})?")
_COPIES = ("copy", "dynamic-slice", "dynamic-update-slice")


@dataclass(frozen=True)
class HostCopy:
    """One instruction that moves an array to the host or from it."""

    name: str
    to_host: bool
    nbytes: int
    """Once."""
    times: int
    """How often a step runs it."""
    is_async: bool
    op_name: str


@dataclass(frozen=True)
class Travels:
    """Bytes between one device and its host, or a disk, in a step, as they should be."""

    loaded: float
    stored: float
    again: float
    """What may be loaded besides and not used: layers, once more."""


def host_copies(module: Module) -> tuple[HostCopy, ...]:
    """Lists the copies to and from the host in the order in which they are started."""
    return tuple(
        copy
        for visit in module.visits()
        for instruction in visit.computation.instructions
        for copy in _copy(module, visit, instruction)
    )


def disk_bytes(module: Module) -> tuple[int, int]:
    """Bytes that one device reads from a disk and writes there."""
    read = written = 0
    for visit in module.visits():
        for call in visit.computation.instructions:
            if call.opcode != "custom-call":
                continue
            if f"/{READ}" in call.op_name:
                read += visit.times * sum(array.nbytes for array in call.arrays)
            elif f"/{WRITE}" in call.op_name:
                given = [visit.computation.by_name.get(name) for name in call.operands]
                written += visit.times * sum(a.nbytes for x in given if x for a in x.arrays)
    return read, written


def _copy(module: Module, visit: Visit, instruction: Instruction) -> Iterator[HostCopy]:
    inner = _inner(module, instruction)
    opcode = inner.opcode.removesuffix("-start")
    if opcode not in _COPIES:
        return
    shapes = _LAID_OUT.findall(inner.shape)
    to_host = HOST in shapes[0]
    operands = [visit.computation.by_name.get(name) for name in instruction.operands]
    if inner.opcode == "copy-start":  # (destination, source, context)
        from_host = HOST in shapes[1]
    else:
        from_host = bool(operands and operands[0] and HOST in operands[0].shape)
    moved = inner.arrays[:1]
    if opcode == "dynamic-update-slice":
        # The array is on the host already; what is put into it comes from the device.
        from_host, update = False, operands[1] if len(operands) > 1 else None
        moved = update.arrays[:1] if update else moved
    if to_host != from_host:
        yield HostCopy(
            name=instruction.name,
            to_host=to_host,
            nbytes=sum(array.nbytes for array in moved),
            times=visit.times,
            is_async=instruction.is_start,
            op_name=instruction.op_name,
        )


def _inner(module: Module, instruction: Instruction) -> Instruction:
    """What an asynchronous computation or a fusion runs last."""
    if instruction.opcode in ("async-start", "fusion", "fusion-start"):
        for name in instruction.callees("calls", "called_computations"):
            return module.computations[name].root
    return instruction
