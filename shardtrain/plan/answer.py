"""What `plan` answers: the figures of a config's layout, better ones, and what the compiler found.

Owns: the answer and its form for scripts. Does not own: any figure in it.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from typing import Any

from shardtrain.errors import EXIT_BROKEN, EXIT_DOES_NOT_FIT
from shardtrain.plan.audit import Audit
from shardtrain.plan.compiling import Compiled
from shardtrain.plan.cures import Large, changes, cures, largest
from shardtrain.plan.hardware import Cluster
from shardtrain.plan.memory import MARGIN
from shardtrain.plan.search import WORTH_SAYING, Candidate, Found, candidate, room, slower
from shardtrain.plan.workload import Workload
from shardtrain.sharding.tiers import Tiers


@dataclass(frozen=True)
class Program:
    """The compiled step."""

    compiled: Compiled
    audit: Audit | None
    """None for a TPU, whose programs are not read."""

    @property
    def bytes_per_device(self) -> dict[str, int]:
        """XLA's count, and its peak as `total`."""
        memory = dict(self.compiled.memory)
        return {**memory, "total": memory.pop("peak")}


@dataclass(frozen=True, eq=False)
class Plan:
    """The answer."""

    cluster: Cluster
    workload: Workload
    own: Candidate
    """The config's layout; where it is `refused`, the best that was found instead."""
    found: Found | None = None
    """Others, if they were searched."""
    program: Program | None = None
    price: float | None = None
    """Of one device for an hour, if there is any."""
    notes: tuple[str, ...] = field(default=())
    refused: str = ""
    """Why the config's own layout is not legal on the cluster; empty = it is."""
    tight: bool = False
    """Whether a real run has shown that it does not fit, whatever the figures say."""

    @property
    def size(self) -> str:
        """The model's parameters in words, such as `842 thousand parameters`."""
        count = self.workload.num_parameters
        for unit, word in ((1e9, "billion "), (1e6, "million "), (1e3, "thousand ")):
            if count >= unit:
                return f"{count / unit:.3g} {word}parameters"
        return f"{count} parameters"

    @property
    def room(self) -> float:
        """Bytes on one device that a step may use."""
        return room(self.cluster)

    @property
    def needed(self) -> float:
        """Bytes on one device: XLA's count where the step was compiled, else the model's."""
        if self.program:
            return self.program.bytes_per_device["total"]
        return self.own.memory.total

    @property
    def fits(self) -> bool:
        """Whether the layout fits that is planned."""
        return self.needed <= self.room and not self.tight

    @cached_property
    def largest(self) -> list[Large]:
        """What takes most of a device, if the config does not fit."""
        return [] if self.fits else largest(self.workload, self.own.layout)

    @cached_property
    def cures(self) -> list[Candidate]:
        """The cheapest changes that make it fit, if it does not."""
        return [] if self.fits else cures(self.workload, self.own.layout, self.cluster)

    @cached_property
    def offloaded(self) -> Candidate | None:
        """The config's own layout with its optimizer's state on the host, if that makes it fit."""
        program = self.workload.program
        if self.fits or program.layout.tiers.any:
            return None
        tiers = Tiers(moments="host", master="host" if program.policy.has_master else "device")
        moved = replace(program, layout=replace(program.layout, tiers=tiers))
        found = candidate(replace(self.workload, program=moved), self.own.layout, self.cluster)
        return found if found.memory.total <= self.room else None

    @property
    def exit_code(self) -> int:
        """What the command returns."""
        if self.program and self.program.audit and self.program.audit.broken:
            return EXIT_BROKEN
        return 0 if self.fits else EXIT_DOES_NOT_FIT

    def why(self, candidate: Candidate) -> str:
        """Why a layout is not the best that was found; empty if it is nearly."""
        best = self.found.best[0] if self.found and self.found.best else None
        if best is None or candidate.cost.middle < WORTH_SAYING * best.cost.middle:
            return ""
        return f"the best layout found is faster; this one is {slower(candidate, best)}"

    @property
    def tokens(self) -> int:
        """Tokens of a step."""
        return self.workload.batch_size * self.workload.length

    def price_of_tokens(self, candidate: Candidate, tokens: float = 1e9) -> float | None:
        """What so many tokens cost."""
        if self.price is None:
            return None
        return _price(candidate, self.cluster, self.price, tokens / self.tokens)

    def mfu(self, candidate: Candidate) -> float:
        """Model FLOPs utilisation, in [0, 1]."""
        precision = self.workload.program.policy.words.kind
        flops = self.cluster.chip.flops
        peak = flops.get(precision) or flops["float16"]
        return candidate.cost.model_flops / (
            candidate.cost.middle * peak * self.cluster.num_devices
        )

    def as_json(self) -> dict[str, Any]:
        """Plain values, for scripts."""
        own, found = self.own, self.found
        return {
            "target": str(self.cluster),
            "fits": self.fits,
            "refused": self.refused,
            "parameters": self.workload.num_parameters,
            "layout": asdict(own.layout),
            "bytes_per_device": _rounded(own.memory.by_class()),
            "host_bytes_per_device": round(own.memory.host),
            "disk_bytes_per_device": round(own.memory.disk),
            "memory": {
                "device": self.cluster.chip.memory,
                "margin": MARGIN,
                "room": round(self.room),
            },
            "step_seconds": _ends(own),
            "seconds": {"low": asdict(own.cost.low), "high": asdict(own.cost.high)},
            "bottleneck": own.cost.bottleneck,
            "why_not_best": self.why(own),
            "model_flops": own.cost.model_flops,
            "flops": own.cost.flops,
            "mfu": round(self.mfu(own), 4),
            "tokens_per_second": round(self.tokens / own.cost.middle, 1),
            "price_per_billion_tokens": self.price_of_tokens(own),
            "best": [self.candidate_json(c) for c in (found.best if found else ())],
            "rejected": [asdict(rejected) for rejected in (found.rejected if found else ())],
            "tried": found.tried if found else 0,
            "largest": [asdict(large) for large in self.largest],
            "cures": [
                {"changes": changes(own.layout, c.layout), **self.candidate_json(c)}
                for c in self.cures
            ],
            "offloaded": self.candidate_json(self.offloaded) if self.offloaded else None,
            "notes": list(self.notes),
            **({"compiled": self._compiled(self.program)} if self.program else {}),
        }

    @staticmethod
    def candidate_json(candidate: Candidate) -> dict[str, Any]:
        """A layout and its figures, as plain values."""
        return {
            "layout": asdict(candidate.layout),
            "step_seconds": _ends(candidate),
            "bytes_per_device": _rounded(candidate.memory.by_class()),
            "bottleneck": candidate.cost.bottleneck,
        }

    def _compiled(self, program: Program) -> dict[str, Any]:
        """What the compiler found; classes of state are exact, the others are XLA's."""
        held = self.own.memory.by_class()
        state = {name: round(held[name]) for name in ("parameters", "master", "moments")}
        return {
            "seconds": round(program.compiled.seconds, 2),
            "rematerialized": list(program.compiled.rematerialized or ()),
            **(program.audit.as_json() if program.audit else {}),
            "bytes_per_device": state | program.bytes_per_device,
        }


@dataclass(frozen=True)
class Point:
    """The best layout for one size of a sweep."""

    key: str
    value: int
    cluster: Cluster
    best: Candidate | None
    """None where nothing fits."""
    tokens: int
    """Of a step."""
    legal: bool = True
    """Whether there is any layout, whatever it takes."""

    def price_of_tokens(self, price: float, tokens: float = 1e9) -> float:
        """What so many tokens cost, at a price of one device for an hour."""
        assert self.best is not None
        return _price(self.best, self.cluster, price, tokens / self.tokens)


def _price(candidate: Candidate, cluster: Cluster, price: float, steps: float) -> float:
    """What so many steps cost, at a price of one device for an hour."""
    return steps * candidate.cost.middle / 3600 * price * cluster.num_devices


def _ends(candidate: Candidate) -> list[float]:
    return [candidate.cost.low.total, candidate.cost.high.total]


def _rounded(sizes: Mapping[str, float]) -> dict[str, int]:
    return {name: round(size) for name, size in sizes.items()}
