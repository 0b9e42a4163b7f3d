"""The text of a compiled program: computations, how often each runs, the FLOPs of its products.

Owns: reading scheduled HLO as XLA prints it; instructions stand in the order of their start.
Does not own: what a collective moves (`collectives`), or how the text is made (`compiling`).
"""

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property

BITS: Mapping[str, int] = {
    **{"pred": 8, "s4": 4, "u4": 4, "s8": 8, "u8": 8, "s16": 16, "u16": 16, "s32": 32, "u32": 32},
    **{"s64": 64, "u64": 64, "f16": 16, "bf16": 16, "f32": 32, "f64": 64, "c64": 64, "c128": 128},
    **{"f8e4m3fn": 8, "f8e5m2": 8, "f8e4m3": 8, "f8e4m3b11fnuz": 8, "f8e8m0fnu": 8, "f4e2m1fn": 4},
}
"""Bits of an entry of each dtype; what is not here (tokens, opaque values) takes no memory."""

_ARRAY = re.compile(r"\b([a-z]+\d*[a-z0-9]*)\[([\d,]*)\]")
_HEAD = re.compile(r"(ENTRY )?%?([\w.\-]+)")
_LINE = re.compile(r"\s+(ROOT )?%?([\w.\-]+) = (.*)")
_OPCODE = re.compile(r"([\w\-]+)\(")
_CALLED = re.compile(
    r"\b(calls|to_apply|body|condition|true_computation|false_computation|branch_computations|"
    r"called_computations)=(\{[^}]*\}|%?[\w.\-]+)"
)
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
_DONATED = re.compile(r"\}: \((\d+), \{[\d, ]*\}, (?:may|must)-alias\)")
_CONTRACTED = re.compile(r'lhs_contracting_dim(?:s=\{([\d,]*)\}|ensions":\[([\d",]*)\])')


class HloError(ValueError):
    """The text is not the HLO that this parser knows."""


@dataclass(frozen=True)
class ArrayShape:
    """One array."""

    dtype: str
    dims: tuple[int, ...]

    @property
    def size(self) -> int:
        """Number of entries."""
        return math.prod(self.dims)

    @property
    def nbytes(self) -> int:
        """Bytes, without padding."""
        return -(-self.size * BITS[self.dtype] // 8)


def array_shapes(text: str) -> tuple[ArrayShape, ...]:
    """The arrays of a shape as printed, those of a tuple one after another.

    Example:
        >>> array_shapes("(bf16[2,3]{1,0}, f32[])")[0].nbytes
        12
    """
    return tuple(
        ArrayShape(dtype, tuple(int(n) for n in dims.split(",") if n))
        for dtype, dims in _ARRAY.findall(text)
        if dtype in BITS
    )


@dataclass(frozen=True)
class Instruction:
    """One line of a computation."""

    name: str
    opcode: str
    shape: str
    """As printed."""
    operands: tuple[str, ...]
    """Names, in order."""
    attributes: str
    """All that follows the operands."""
    is_root: bool
    number: int | None = None
    """Of a parameter: which one it is."""

    @property
    def arrays(self) -> tuple[ArrayShape, ...]:
        """The arrays of the result."""
        return array_shapes(self.shape)

    @cached_property
    def called(self) -> tuple[tuple[str, str], ...]:
        """(role, computation) of everything that it refers to."""
        return tuple(
            (role, name.strip().lstrip("%"))
            for role, names in _CALLED.findall(self.attributes)
            for name in names.strip("{}").split(",")
            if name.strip()
        )

    def callees(self, *roles: str) -> tuple[str, ...]:
        """Computations that it refers to in these roles."""
        return tuple(name for role, name in self.called if role in roles)

    @property
    def branches(self) -> tuple[str, ...]:
        """Branches of a conditional, of two ways or more."""
        return self.callees("true_computation", "false_computation", "branch_computations")

    @property
    def trip_count(self) -> int | None:
        """How often a loop's body runs, where XLA knows."""
        found = _TRIPS.search(self.attributes)
        return int(found[1]) if found else None

    @property
    def op_name(self) -> str:
        """The operation in the user's program that it stems from; an argument's name there."""
        found = re.search(r'op_name="([^"]*)"', self.attributes)
        return found[1].replace("\\'", "'") if found else ""

    @property
    def is_start(self) -> bool:
        """Whether it only begins something that another instruction waits for."""
        return self.opcode.endswith("-start")


@dataclass(frozen=True)
class Computation:
    """A list of instructions in the order in which they are started."""

    name: str
    instructions: tuple[Instruction, ...]

    @cached_property
    def by_name(self) -> Mapping[str, Instruction]:
        """Its instructions by name."""
        return {instruction.name: instruction for instruction in self.instructions}

    @property
    def root(self) -> Instruction:
        """What it returns."""
        return next(i for i in self.instructions if i.is_root)

    def operand_arrays(self, instruction: Instruction) -> tuple[ArrayShape, ...]:
        """The arrays that one of its instructions reads."""
        return tuple(
            array
            for name in instruction.operands
            if name in self.by_name
            for array in self.by_name[name].arrays
        )


@dataclass(frozen=True)
class Visit:
    """A computation where the program runs it."""

    computation: Computation
    times: int
    """How often a step runs it."""
    loops: tuple[str, ...]
    """The loops around it, outermost first."""
    is_conditional: bool
    """Whether a conditional may leave it out."""


@dataclass(frozen=True)
class Module:
    """A compiled program."""

    computations: Mapping[str, Computation]
    entry: str
    donated: frozenset[int] = frozenset()
    """Numbers of the entry's parameters whose memory results take over."""
    _flops: dict[str, int] = field(default_factory=dict, repr=False, compare=False)

    def visits(self) -> Iterator[Visit]:
        """Every computation that the program runs step by step, from the entry on.

        Loops multiply; every branch of a conditional is visited. Fusions and wrapped asynchronous
        computations are instructions of their caller and are not visited.
        """
        yield from self._visit(Visit(self.computations[self.entry], 1, (), False))

    def _visit(self, visit: Visit) -> Iterator[Visit]:
        yield visit
        for instruction in visit.computation.instructions:
            times, loops, conditional = visit.times, visit.loops, visit.is_conditional
            callees: tuple[str, ...] = ()
            if instruction.opcode == "while":
                callees = instruction.callees("body")
                times *= 1 if instruction.trip_count is None else instruction.trip_count
                loops = (*loops, instruction.name)
            elif instruction.opcode == "call":
                callees = instruction.callees("to_apply", "called_computations")
            elif instruction.opcode == "conditional":
                callees, conditional = instruction.branches, True
            for name in callees:
                yield from self._visit(Visit(self.computations[name], times, loops, conditional))

    @property
    def loops(self) -> Mapping[str, int | None]:
        """Trip count of each loop; None where it is not known, which then counts once."""
        return {
            instruction.name: instruction.trip_count
            for visit in self.visits()
            for instruction in visit.computation.instructions
            if instruction.opcode == "while"
        }

    @property
    def flops(self) -> int:
        """FLOPs of all products of one run: twice the multiplications, loops counted."""
        return self._computation_flops(self.entry)

    def instruction_flops(self, computation: Computation, instruction: Instruction) -> int:
        """FLOPs of the products of an instruction and of what it calls.

        Of a conditional's branches the costliest counts.
        """
        if instruction.opcode == "dot" or "__cublas" in instruction.attributes:
            return _product_flops(computation, instruction)
        if instruction.opcode == "while":
            trips = 1 if instruction.trip_count is None else instruction.trip_count
            return trips * sum(map(self._computation_flops, instruction.callees("body")))
        if instruction.opcode == "conditional":
            return max(map(self._computation_flops, instruction.branches), default=0)
        roles = ["calls", "called_computations"]
        if instruction.opcode == "call":
            roles.append("to_apply")
        return sum(map(self._computation_flops, instruction.callees(*roles)))

    def _computation_flops(self, name: str) -> int:
        if name not in self._flops:
            computation = self.computations[name]
            self._flops[name] = sum(
                self.instruction_flops(computation, instruction)
                for instruction in computation.instructions
            )
        return self._flops[name]


def _product_flops(computation: Computation, instruction: Instruction) -> int:
    """A product sums over the contracted dims of its left operand."""
    left = computation.operand_arrays(instruction)
    found = _CONTRACTED.search(instruction.attributes)
    if not left or not found:
        raise HloError(f"{instruction.name}: a product without operand or contracted dims")
    dims = [int(n) for n in (found[1] or found[2] or "").replace('"', "").split(",") if n]
    return 2 * instruction.arrays[0].size * math.prod(left[0].dims[dim] for dim in dims)


def parse_hlo(text: str) -> Module:
    """Reads a compiled program.

    Args:
        text: as from `compiled.as_text()`.

    Returns:
        The module.

    Raises:
        HloError: the text has no entry computation, or is not scheduled.
    """
    header = text[: text.find("\n")]
    if "is_scheduled=true" not in header:
        raise HloError("not a scheduled module; take the text of a compiled program")
    computations: dict[str, Computation] = {}
    lines: list[Instruction] = []
    name, entry = "", ""
    for line in text.splitlines():
        if not line[:1].isspace():
            if line.endswith("{") and "->" in line:
                head = _HEAD.match(line)
                assert head is not None
                name, lines = head[2], []
                entry = name if head[1] else entry
            elif line.startswith("}") and name:
                computations[name] = Computation(name, tuple(lines))
                name = ""
            continue
        found = _LINE.match(line)
        if found:
            lines.append(_instruction(bool(found[1]), found[2], found[3]))
    if entry not in computations:
        raise HloError("no entry computation")
    return Module(computations, entry, frozenset(map(int, _DONATED.findall(header))))


def _instruction(is_root: bool, name: str, text: str) -> Instruction:
    end = _closing(text, 0) if text.startswith("(") else text.find(" ")
    shape, rest = text[:end], text[end:].lstrip()
    head = _OPCODE.match(rest)
    if head is None:
        raise HloError(f"{name}: no operation in {text[:80]!r}")
    end = _closing(rest, head.end() - 1)
    inside = re.sub(r"/\*.*?\*/", "", rest[head.end() : end - 1])
    operands: list[str] = []
    number = int(inside) if head[1] == "parameter" else None
    if head[1] not in ("constant", "parameter"):
        operands = re.findall(r"%([\w.\-]+)", inside)
        if not operands:
            operands = [word.split()[-1] for word in inside.split(",") if word.strip()]
    return Instruction(name, head[1], shape, tuple(operands), rest[end:], is_root, number)


def _closing(text: str, start: int) -> int:
    """The place after the bracket that closes the one at `start`."""
    depth = 0
    for index in range(start, len(text)):
        if text[index] == "(":
            depth += 1
        elif text[index] == ")":
            depth -= 1
            if depth == 0:
                return index + 1
    raise HloError(f"unbalanced brackets in {text[:80]!r}")
