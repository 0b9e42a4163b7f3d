"""Where a value of a compiled program comes from, through whatever only moves it.

Owns: the way back from an instruction through slices, copies, casts, gathers, loops and calls to
what made it: an argument of the program, or an instruction that computes. Does not own: what that
is asked for (`promises`).
"""

from collections import defaultdict
from collections.abc import Iterator
from functools import cached_property
from typing import TypeAlias

from shardtrain.plan.collectives import Collective, moved
from shardtrain.plan.hlo import ArrayShape, Computation, Instruction, Module

Path: TypeAlias = tuple[int, ...]
"""Which part of a tuple, of tuples."""
_Value: TypeAlias = tuple[Computation, str, Path]
"""A computation, one of its instructions, and the part of its result."""

_MOVES = frozenset(
    {
        *("all-gather", "bitcast", "bitcast-convert", "convert", "copy", "dynamic-slice"),
        *("reshape", "slice", "transpose"),
    }
)
"""Operations whose result is (part of) their first operand, in another form or place."""
_WRAPPERS = frozenset({"fusion", "async", "call"})
_ROLES = ("calls", "called_computations", "to_apply")


class Origins:
    """The way back from the values of one program."""

    def __init__(self, module: Module) -> None:
        """Notes who calls what.

        Args:
            module: the program.
        """
        self._module = module

    @cached_property
    def _callers(self) -> dict[str, list[tuple[Computation, Instruction]]]:
        callers = defaultdict(list)
        for computation in self._module.computations.values():
            for instruction in computation.instructions:
                for _, callee in instruction.called:
                    callers[callee].append((computation, instruction))
        return callers

    @cached_property
    def arguments(self) -> dict[str, Instruction]:
        """The program's arguments by the name that the user's program has for them."""
        entry = self._module.computations[self._module.entry]
        return {i.op_name: i for i in entry.instructions if i.opcode == "parameter"}

    def trail(
        self, computation: Computation, name: str
    ) -> Iterator[tuple[Computation, Instruction]]:
        """The way back from a value to what made it: an instruction that computes, or an argument.

        Args:
            computation: where the value is.
            name: the instruction whose result it is.

        Yields:
            Each instruction on the way after its computation, the value's own first.
        """
        at: _Value | None = (computation, name, ())
        seen = set()
        while at is not None and at[1] in at[0].by_name:
            where, name, path = at
            if (where.name, name, path) in seen:  # a loop fills an array with parts of itself
                return
            seen.add((where.name, name, path))
            yield where, where.by_name[name]
            at = self._before(*at)

    def source(self, computation: Computation, name: str) -> tuple[Computation, Instruction]:
        """What made a value, after its computation."""
        *_, last = self.trail(computation, name)
        return last

    def argument(self, computation: Computation, name: str) -> str:
        """The user's name of the argument that a value is (a part of), or ""."""
        where, source = self.source(computation, name)
        is_argument = where.name == self._module.entry and source.opcode == "parameter"
        return source.op_name if is_argument else ""

    def gathered(self, collective: Collective) -> list[tuple[ArrayShape, str]]:
        """The arrays that a collective moves, each with the argument that it comes from, or ""."""
        computation, instruction = self._inside(collective)
        names = [self.argument(computation, name) for name in instruction.operands]
        return list(zip(collective.arrays, names, strict=True))

    def passed(self, collective: Collective) -> Iterator[Instruction]:
        """What the arrays that a collective moves have been through on their way there."""
        computation, instruction = self._inside(collective)
        for name in instruction.operands:
            for _, step in self.trail(computation, name):
                yield step

    def pieces(self, collective: Collective) -> Iterator[ArrayShape]:
        """The arrays that a collective moves, those apart that were only put end to end for it."""
        computation, instruction = self._inside(collective)
        for array, name in zip(collective.arrays, instruction.operands, strict=True):
            for where, step in self.trail(computation, name):
                if step.opcode == "concatenate":
                    yield from where.operand_arrays(step)
                    break
                if step.opcode == "while":  # what fills an array by turns is not a piece of it
                    yield array
                    break
            else:
                yield array

    def _inside(self, collective: Collective) -> tuple[Computation, Instruction]:
        """The collective itself, where a fusion or an asynchronous computation wraps it."""
        computation = self._module.computations[collective.computation]
        found = moved(self._module, computation, computation.by_name[collective.name])
        assert found is not None, collective
        return found[:2]

    # -- one step back

    def _before(self, computation: Computation, name: str, path: Path) -> _Value | None:
        """The value that this one is a part or another form of; None if it is made here."""
        instruction = computation.by_name.get(name)
        if instruction is None:
            return None
        opcode = instruction.opcode
        if opcode.endswith(("-done", "-update")):
            return computation, instruction.operands[0], path
        opcode = opcode.removesuffix("-start")
        if opcode in _MOVES:
            # A gather of several arrays at once has a tuple of them.
            return computation, instruction.operands[path[0] if path else 0], ()
        step = {
            "parameter": self._handed,
            "get-tuple-element": self._element,
            "tuple": self._part,
            "opt-barrier": self._part_of_all,
            "while": self._looped,
        }.get(opcode, self._result if opcode in _WRAPPERS else None)
        return step(computation, instruction, path) if step else None

    @staticmethod
    def _element(computation: Computation, instruction: Instruction, path: Path) -> _Value:
        """One part of a tuple."""
        index = int(instruction.attributes.partition("index=")[2].partition(",")[0])
        return computation, instruction.operands[0], (index, *path)

    @staticmethod
    def _part(computation: Computation, instruction: Instruction, path: Path) -> _Value | None:
        """What a tuple is made of."""
        return (computation, instruction.operands[path[0]], path[1:]) if path else None

    @staticmethod
    def _part_of_all(computation: Computation, instruction: Instruction, path: Path) -> _Value:
        """What a barrier holds up: a tuple, or one array."""
        return computation, instruction.operands[0], path

    def _handed(
        self, computation: Computation, parameter: Instruction, path: Path
    ) -> _Value | None:
        """What the only caller hands to a parameter."""
        callers = self._callers.get(computation.name, [])
        if len(callers) != 1 or parameter.number is None:
            return None
        caller, instruction = callers[0]
        opcode = instruction.opcode.removesuffix("-start")
        if opcode == "while":
            return self._looped(caller, instruction, path)
        if opcode == "conditional":
            branch = instruction.branches.index(computation.name)
            return caller, instruction.operands[1 + branch], path
        if opcode in _WRAPPERS:
            return caller, instruction.operands[parameter.number], path
        return None

    def _result(
        self, computation: Computation, instruction: Instruction, path: Path
    ) -> _Value | None:
        """The result of what an instruction wraps."""
        del computation
        for callee in instruction.callees(*_ROLES):
            inner = self._module.computations[callee]
            return inner, inner.root.name, path
        return None

    def _looped(self, computation: Computation, loop: Instruction, path: Path) -> _Value | None:
        """A part of a loop's result: what went in and is handed on, or what fills it by turns."""
        body = self._module.computations[loop.callees("body")[0]]
        if not path or body.root.opcode != "tuple":
            return None
        at: _Value | None = (body, body.root.operands[path[0]], path[1:])
        while at is not None and at[1] in at[0].by_name:
            where, instruction = at[0], at[0].by_name[at[1]]
            if where is body and instruction.opcode == "parameter":
                return (computation, loop.operands[0], path) if at[2] == path else None
            if instruction.opcode == "dynamic-update-slice":
                return where, instruction.operands[1], ()
            at = self._before(*at)
        return None
