"""The audit: what a compiled program does, and which promises of its layout it keeps.

Owns: the figures of a program in one place, and their plain form for JSON and tables. Does not own:
the promises (`promises`), what a layout leads one to expect (`expected`), how a table looks.

Overlap is what the schedule says: products stand between a collective's start and its done. No
clock was read.
"""

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from shardtrain.plan.collectives import Collective, totals
from shardtrain.plan.compiling import Compiled
from shardtrain.plan.evidence import Evidence, Outcome
from shardtrain.plan.expected import Expected
from shardtrain.plan.host_copies import HostCopy, host_copies
from shardtrain.plan.promises import PROMISES


@dataclass(frozen=True)
class Traffic:
    """Collectives of one kind over the same axes and links; bytes are a device's in a step."""

    kind: str
    axes: tuple[str, ...]
    crosses: bool
    """Whether groups span several domains of the fast link."""
    dtypes: tuple[str, ...]
    instructions: int
    times: int
    payload: int
    """Of the whole arrays."""
    wire: float
    """What a device sends, by a ring."""
    overlapped: float
    """Share of `wire` that has products between start and done, in [0, 1]."""


@dataclass(frozen=True)
class Promise:
    """One promise and what its check said."""

    name: str
    outcome: Outcome


@dataclass(frozen=True)
class Audit:
    """A program's figures; bytes and FLOPs are those of one device and one step."""

    promises: tuple[Promise, ...]
    traffic: tuple[Traffic, ...]
    """Those that send most first."""
    collectives: tuple[Collective, ...]
    """One by one, in the order of their start."""
    host_copies: tuple[HostCopy, ...]
    flops: int
    """Of products in the program."""
    expected_flops: float
    """Of forward and backward with everything saved, as the layout has it."""
    model_flops: float
    """By the convention of utilisation."""
    state_bytes: int
    donated_bytes: int
    notes: tuple[str, ...]
    """What makes figures above worth less than they look."""

    @property
    def broken(self) -> tuple[Promise, ...]:
        """Promises that do not hold."""
        return tuple(p for p in self.promises if p.outcome.state == "broken")

    @property
    def recomputed(self) -> float:
        """Share of the products that are done again; below 0 where some do not show."""
        return self.flops / self.expected_flops - 1 if self.expected_flops else 0.0

    def as_json(self) -> dict[str, Any]:
        """The audit as plain values, collectives added up as in `traffic`."""
        copied = {
            direction: sum(c.nbytes * c.times for c in self.host_copies if c.to_host is to_host)
            for direction, to_host in (("to_host", True), ("from_host", False))
        }
        return {
            "promises": [{"name": p.name, **asdict(p.outcome)} for p in self.promises],
            "collectives": [asdict(row) for row in self.traffic],
            "host_copies": {"instructions": len(self.host_copies), **copied},
            "flops": self.flops,
            "expected_flops": self.expected_flops,
            "model_flops": self.model_flops,
            "state_bytes": self.state_bytes,
            "donated_bytes": self.donated_bytes,
            "notes": list(self.notes),
        }


def audit(compiled: Compiled, expected: Expected) -> Audit:
    """Reads a compiled program and checks each promise of its layout against it.

    Args:
        compiled: from `compile_for`, a run's own step.
        expected: from `expect`, of the same config on a mesh of the same degrees.

    Returns:
        The figures and the outcome of every promise.

    Raises:
        HloError: the text is not the HLO that the parser knows.
    """
    evidence = Evidence(compiled, expected)
    return Audit(
        promises=tuple(Promise(name, check(evidence)) for name, check in PROMISES.items()),
        traffic=tuple(_traffic(evidence.moved, expected.domain)),
        collectives=evidence.moved,
        host_copies=host_copies(evidence.module),
        flops=evidence.module.flops,
        expected_flops=evidence.theory.model,
        model_flops=expected.model_flops,
        state_bytes=expected.state_bytes,
        donated_bytes=compiled.memory["aliased"],
        notes=tuple(_notes(evidence)),
    )


def _traffic(moved: tuple[Collective, ...], domain: int) -> list[Traffic]:
    rows = []
    for crosses in (True, False):
        some = [c for c in moved if c.crosses(domain) is crosses]
        for total in totals(some):
            same = [c for c in some if (c.kind, c.axes) == (total.kind, total.axes)]
            rows.append(
                Traffic(
                    kind=total.kind,
                    axes=total.axes,
                    crosses=crosses,
                    dtypes=tuple(sorted({dtype for c in same for dtype in c.dtypes})),
                    instructions=total.instructions,
                    times=total.times,
                    payload=total.payload,
                    wire=total.wire,
                    overlapped=total.wire_overlapped / total.wire if total.wire else 0.0,
                )
            )
    return sorted(rows, key=lambda row: -row.wire)


def _notes(evidence: Evidence) -> Iterable[str]:
    memory, chip = evidence.compiled.memory, evidence.expected.memory
    needed = memory["arguments"] + memory["temporaries"]
    if chip is not None and needed > chip:
        yield (
            f"arguments and temporaries are {needed:,} bytes and the chip has {chip:,.0f}: then "
            "XLA gives up overlap, so that the shares above say nothing of a program that fits"
        )
    for name, trips in evidence.module.loops.items():
        if trips is None:
            yield f"how often the loop {name} runs is not known: what is in it counts once"
    if evidence.in_kernels:
        yield "attention is a library's kernel, whose products are in no figure here"
    if evidence.expected.is_pipeline:
        yield (
            "each tick of the pipeline counts as if every stage did all its work in it: FLOPs and "
            "bytes inside its branches are at most as given"
        )
