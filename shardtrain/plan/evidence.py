"""What promises are checked on, and what a check says.

Owns: the words for outcomes, and a program with all that is read off it. Does not own: the
promises (`promises`), and how outcomes are shown (`audit`).
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final, Literal, TypeAlias

from shardtrain.optim.sweep import UPDATE
from shardtrain.plan.collectives import Collective, collectives
from shardtrain.plan.compiling import Compiled
from shardtrain.plan.expected import Expected
from shardtrain.plan.hlo import Instruction, Module, Visit, parse_hlo
from shardtrain.plan.origins import Origins
from shardtrain.plan.recompute import Products

State: TypeAlias = Literal["kept", "broken", "not checked"]

MOST_FAULTS: Final = 8
"""Instructions that are named for one promise; the largest."""


@dataclass(frozen=True)
class Fault:
    """One place where a promise is broken."""

    instruction: str
    """Its name in the program; "" for what is not in it."""
    belongs_to: str
    """The parameter or tensor of the state, or else the operation of the user's program."""
    unit: str
    """What the figures count."""
    expected: float | None
    """What the promise allows; None where it allows so much of all together."""
    found: float
    note: str = ""


@dataclass(frozen=True)
class Outcome:
    """What the check of one promise says."""

    state: State
    words: str
    """The figures, or the reason why it could not be checked."""
    faults: tuple[Fault, ...] = ()


def kept(words: str) -> Outcome:
    """The promise holds."""
    return Outcome("kept", words)


def unchecked(reason: str) -> Outcome:
    """The promise does not apply here, or the program does not tell."""
    return Outcome("not checked", reason)


def broken(words: str, faults: Sequence[Fault]) -> Outcome:
    """The promise does not hold.

    Args:
        words: what is wrong, with its figures.
        faults: where, largest first; only the first are held on to.
    """
    more = len(faults) - MOST_FAULTS
    words += f" (and {more} more places)" if more > 0 else ""
    return Outcome("broken", words, tuple(faults[:MOST_FAULTS]))


@dataclass(frozen=True, eq=False)
class Evidence:
    """A compiled program, what is read off it, and what was expected of it."""

    compiled: Compiled
    expected: Expected

    @cached_property
    def module(self) -> Module:
        """The program."""
        return parse_hlo(self.compiled.text)

    @cached_property
    def moved(self) -> tuple[Collective, ...]:
        """Its collectives."""
        return collectives(self.module, self.expected.degrees)

    @cached_property
    def origins(self) -> Origins:
        """Where its values come from."""
        return Origins(self.module)

    @cached_property
    def over_data(self) -> tuple[Collective, ...]:
        """Collectives whose groups span data shards, or all replicas where there are no shards."""
        axes = self.expected.data_axes
        return tuple(c for c in self.moved if axes and axes[-1] in c.axes)

    @cached_property
    def instructions(self) -> tuple[tuple[Visit, Instruction], ...]:
        """Every instruction that the program runs, where it runs it."""
        return tuple(
            (visit, instruction)
            for visit in self.module.visits()
            for instruction in visit.computation.instructions
        )

    @cached_property
    def in_kernels(self) -> bool:
        """Whether attention is a library's kernel, whose products do not show."""
        return "__cudnn$fmha" in self.compiled.text

    @property
    def theory(self) -> Products:
        """The FLOPs that products should have, those that do not show left out."""
        expected = self.expected
        return expected.products_in_kernels if self.in_kernels else expected.products

    def products(self) -> Iterator[tuple[Visit, Instruction, int]]:
        """Instructions that multiply matrices, with the FLOPs of one run."""
        for visit, instruction in self.instructions:
            if instruction.opcode not in ("while", "conditional", "call"):
                flops = self.module.instruction_flops(visit.computation, instruction)
                if flops:
                    yield visit, instruction, flops

    def kept_in_loops(self) -> Iterator[tuple[Instruction, list[Instruction]]]:
        """Loops, each with the instructions that keep something of every turn for the backward.

        Every turn puts a part into an array; what it puts is neither a gradient nor a parameter.
        """
        for _, loop in self.instructions:
            if loop.opcode != "while":
                continue
            body = self.module.computations[loop.callees("body")[0]]
            if body.root.opcode != "tuple":
                continue
            sources = (self.origins.source(body, name) for name in body.root.operands)
            yield (
                loop,
                [
                    instruction
                    for computation, instruction in sources
                    if instruction.opcode == "dynamic-update-slice"
                    and f"/{UPDATE}/" not in instruction.op_name
                    and "transpose(" not in instruction.op_name
                    and not self.origins.argument(computation, instruction.operands[1])
                ],
            )

    def owners(self, collective: Collective) -> str:
        """The parameters that a collective moves, or may by its size; else its operation."""
        paths: dict[str, None] = {}
        if collective.kind == "all-gather":
            by_argument = self.expected.by_argument
            arguments = (argument for _, argument in self.origins.gathered(collective))
            paths.update((by_argument[a].path, None) for a in arguments if a in by_argument)
        for array in () if paths else self.origins.pieces(collective):
            paths.update(dict.fromkeys(self.expected.owners(array.size)))
        return ", ".join(paths) or collective.op_name


def largest(collectives: Iterable[Collective]) -> list[Collective]:
    """Those that move most in a step first."""
    return sorted(collectives, key=lambda c: -c.wire * c.times)


def step_bytes(collectives: Iterable[Collective]) -> int:
    """Bytes of the whole arrays that a step moves."""
    return sum(c.payload * c.times for c in collectives)


def step_entries(collectives: Iterable[Collective]) -> int:
    """Entries of the whole arrays that a step moves."""
    return sum(sum(a.size for a in c.arrays) * c.times for c in collectives)
