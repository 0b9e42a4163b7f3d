"""Every pipeline is the same run as one device: schedules over meshes, ZeRO stages and layers."""

import dataclasses
import itertools
import math
import random

import pytest

from shardtrain.sharding.rules import current
from tests.layouts.harness import PIPELINES, Case, difference
from tests.rows import shortened

VIRTUAL = {"gpipe": 1, "1f1b": 1, "interleaved": 2, "zero_bubble": 1}
UNEVEN = {2: "E5,3H", 4: "E1,3,2,2H", 8: "E,2,1,1,1,1,1,1H"}
"""Eight layers in so many parts; the last leaves nothing but the embedding in the first."""
CHOICES: dict[str, tuple[object, ...]] = {
    "microbatches": (4, 8, 16),
    "remat": ("none", "full", "dots"),
    "dropout": (0.0, 0.2),
    "tied": (True, False),
    "uneven": (False, True),
    "sequence_parallel": (False, True),
    "loop": ("scan", "unroll"),
    "documents": (False, True),
}
BATCH = 32
GRID = {
    "schedule": tuple(VIRTUAL),
    "mesh": ("pp2", "pp4", "pp2 tp2", "pp2 dp2 tp2", "pp4 dp2"),
    "zero": (0, 1, 2, 3),
    **{name: CHOICES[name] for name in ("microbatches", "remat", "dropout", "tied", "uneven")},
}
"""What every combination of is tried in the campaign."""


def pipelined(choices: dict[str, object]) -> Case | None:
    """The case of some choices; None where they are not legal together."""
    choices = dict(choices)
    degrees = PIPELINES[str(choices["mesh"])]
    shards = degrees.get("replica", 1) * degrees.get("data", 1)
    if BATCH % (int(str(choices["microbatches"])) * shards):
        return None
    if choices.get("sequence_parallel") and "tensor" not in degrees:
        return None
    virtual = VIRTUAL[str(choices["schedule"])]
    stages = UNEVEN[degrees["pipeline"] * virtual] if choices.pop("uneven") else ""
    return Case(virtual_stages=virtual, stages=stages, num_layers=8, batch=BATCH, **choices)  # type: ignore[arg-type]


def pairs_of(choices: dict[str, object]) -> set[tuple[object, ...]]:
    """Every pair of choices that a case tests together."""
    return set(itertools.combinations(choices.items(), 2))


def covering() -> list[Case]:
    """A case for each schedule x mesh, chosen to test as many pairs of choices as they can."""
    rng = random.Random(0)
    seen: set[tuple[object, ...]] = set()
    cases = []
    for schedule, mesh in itertools.product(VIRTUAL, GRID["mesh"]):
        options = {"schedule": (schedule,), "mesh": (mesh,), "zero": (0, 1, 2, 3), **CHOICES}
        drawn = ({name: rng.choice(v) for name, v in options.items()} for _ in range(300))
        best = max((c for c in drawn if pipelined(c)), key=lambda c: len(pairs_of(c) - seen))
        seen |= pairs_of(best)
        cases.append(pipelined(best))
    return [case for case in cases if case is not None]


COVERING = covering()
EACH = COVERING[::2]
"""Every schedule and every mesh; the others are in the marked run, as is `MORE`."""

SMALL = Case(mesh="pp2 dp2", microbatches=4, num_layers=3, stages="E1,2H")
OTHERS = [
    Case(mesh="pp2 r2 dp2", microbatches=4, num_layers=3, zero=3, remat="full", style="llama"),
    Case(mesh="pp4", microbatches=2, num_layers=4, style="bloom"),
    Case(mesh="pp2", microbatches=2, num_layers=7),
    Case(
        mesh="pp2 c2 tp2",
        microbatches=4,
        num_layers=4,
        sequence_parallel=True,
        dropout=0.2,
        loss_chunks=3,
        schedule="zero_bubble",
    ),
    Case(mesh="pp2 dp2 c2", microbatches=4, zero=3, documents=True, style="llama", remat="full"),
    Case(mesh="pp2 c4", microbatches=2, attention="ulysses", style="bloom", loss_chunks=4),
    dataclasses.replace(SMALL, optimizer="muon", zero=1),
]
"""Fewer microbatches than stages, layers that do not divide, hybrid sharding, split sequences, and
optimizers that mix the entries of a matrix."""
ROUNDED = [dataclasses.replace(SMALL, precision="bfloat16", zero=1)]
MORE = [
    Case(mesh="pp2", microbatches=1, num_layers=3),
    dataclasses.replace(SMALL, optimizer="adafactor", zero=3, style="llama"),
    Case(mesh="pp2 dp2 tp2", precision="bfloat16", microbatches=4, zero=3, style="llama"),
    Case(mesh="pp2", precision="bfloat16", microbatches=4, schedule="zero_bubble"),
]
"""Others vouch for their kinds."""


@pytest.mark.parametrize(
    "case",
    shortened(COVERING + OTHERS + ROUNDED + MORE, (EACH + OTHERS + ROUNDED).__contains__),
    ids=str,
)
def test_pipeline_equals_one_device(case: Case) -> None:
    result = difference(case)
    assert result.equal, result
    assert current() is None


@pytest.mark.smoke312
def test_pipeline_equals_one_device_in_float32() -> None:
    """With a weight part, dropout, padding and reduce-scatters: on the newest jax too."""
    case = Case(mesh="pp2 dp2", microbatches=4, num_layers=3, schedule="zero_bubble")
    case = dataclasses.replace(case, precision="float32", dropout=0.2, zero=2)
    result = difference(case)
    assert result.equal, result


def combinations() -> list[Case]:
    """Every combination of `GRID`."""
    rows = itertools.product(*GRID.values())
    found = (pipelined(dict(zip(GRID, row, strict=True))) for row in rows)
    return [case for case in found if case is not None]


def test_the_grid_has_every_combination() -> None:
    assert len(combinations()) == math.prod(map(len, GRID.values()))
    assert len(set(combinations())) == len(combinations())


@pytest.mark.campaign
def test_many_pipelines(pytestconfig: pytest.Config) -> None:
    """A part of all combinations, drawn anew each time; one in sixty of them."""
    every = combinations()
    for case in random.SystemRandom().sample(every, len(every) // 60):
        result = difference(case)
        assert result.equal, (str(case), result)
