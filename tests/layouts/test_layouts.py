"""Every layout is the same run: pairs of choices over meshes and ZeRO stages."""

import dataclasses
import itertools
import random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shardtrain.sharding.rules import current
from tests.layouts.harness import MESHES, STYLES, Case, difference
from tests.rows import shortened

LAYOUT_CHOICES: dict[str, tuple[object, ...]] = {
    "sequence_parallel": (False, True),
    "microbatches": (1, 2, 4),
    "remat": ("none", "full", "dots", "attention,mlp"),
    "loop": ("scan", "peel", "unroll"),
    "attention": ("auto", "ring", "ulysses"),
    "loss_chunks": (1, 3),
}
RUN_CHOICES: dict[str, tuple[object, ...]] = {
    "dropout": (0.0, 0.2),
    "style": tuple(STYLES),
    "tied": (True, False),
    "documents": (False, True),
}
"""What one device computes too: each combination is one more program to compare with."""
CHOICES = LAYOUT_CHOICES | RUN_CHOICES
RARE = {"loop": (4, 2, 1)}
"""How often the values of a choice are drawn: an unrolled step takes twice as long to compile."""
BATCH_PER_SHARD = {"1": 16, "8x1": 2, "4x2": 4, "2x4": 8, "2x2x2": 4}
BATCH_PER_SHARD |= {"c4 dp2": 8, "c2 dp2 tp2": 8}


def legal(case: Case) -> bool:
    """Whether the batch divides, and whether sequence parallelism has an axis to act on."""
    if BATCH_PER_SHARD[case.mesh] % case.microbatches:
        return False
    return not case.sequence_parallel or "tensor" in MESHES[case.mesh]


Pair = frozenset[tuple[str, object]]


def pairs_of(case: Case) -> set[Pair]:
    """Every pair of choices that a case tests together."""
    values = [(f.name, getattr(case, f.name)) for f in dataclasses.fields(case)]
    return set(map(frozenset, itertools.combinations(values, 2)))


def covering_runs() -> list[dict[str, object]]:
    """A few combinations of `RUN_CHOICES` that have every pair of them."""
    combinations = [
        dict(zip(RUN_CHOICES, values, strict=True))
        for values in itertools.product(*RUN_CHOICES.values())
    ]
    missing = {pair for run in combinations for pair in itertools.combinations(run.items(), 2)}
    runs = []
    while missing:
        best = max(
            combinations, key=lambda run: len(missing & {*itertools.combinations(run.items(), 2)})
        )
        missing -= {*itertools.combinations(best.items(), 2)}
        runs.append(best)
    return runs


def covering(per_layout: int) -> list[list[Case]]:
    """Turns of a case for each mesh x ZeRO stage, chosen to test as many pairs as they can.

    Args:
        per_layout: how many turns; one device, where the stage is nothing, has one.
    """
    rng = random.Random(0)
    seen: set[Pair] = set()
    turns: list[list[Case]] = [[] for _ in range(per_layout)]
    runs = covering_runs()
    for turn, mesh, zero in itertools.product(range(per_layout), MESHES, range(4)):
        if turn and mesh == "1":
            continue
        drawn = (
            Case(
                mesh=mesh,
                zero=zero,
                **{n: rng.choices(v, RARE.get(n))[0] for n, v in LAYOUT_CHOICES.items()},
                **rng.choice(runs),
            )
            for _ in range(120)
        )
        best = max(filter(legal, drawn), key=lambda case: len(pairs_of(case) - seen))
        seen |= pairs_of(best)
        turns[turn].append(best)
    return turns


FIRST, SECOND = covering(2)
"""The second turn is in the marked run."""
CASES = list(dict.fromkeys(FIRST + SECOND))
BFLOAT16 = [
    Case(mesh="8x1", zero=3, precision="bfloat16", microbatches=2, style="llama", dropout=0.2),
    Case(mesh="2x2x2", zero=2, precision="bfloat16", style="bloom", sequence_parallel=True),
    Case(mesh="2x4", zero=1, precision="bfloat16", microbatches=4, tied=False, documents=True),
]
OPTIMIZERS = [
    Case(mesh="4x2", zero=zero, microbatches=2, optimizer=name, style=style)
    for name, zero, style in (
        ("sgd", 2, "llama"),
        # A bias of keys has no gradient but rounding, of which these two make whole steps.
        ("lion", 3, "llama"),
        ("adafactor", 3, "llama"),
        ("muon", 1, "llama"),
        ("muon", 3, "gpt"),
    )
]


def test_the_grid_is_as_large_as_promised() -> None:
    assert len([*CASES, *BFLOAT16, *OPTIMIZERS]) >= 60
    tested = set().union(*map(pairs_of, CASES))
    wanted = {
        pair
        for mesh, zero in itertools.product(MESHES, range(4))
        for a, b in itertools.combinations(["mesh", "zero", *CHOICES], 2)
        for x, y in itertools.product(
            {"mesh": tuple(MESHES), "zero": tuple(range(4)), **CHOICES}[a],
            {"mesh": tuple(MESHES), "zero": tuple(range(4)), **CHOICES}[b],
        )
        if legal(dataclasses.replace(Case(mesh=mesh, zero=zero), **{a: x, b: y}))
        for pair in [frozenset([(a, x), (b, y)])]
    }
    missing = wanted - tested
    assert len(missing) <= 0.02 * len(wanted), missing


@pytest.mark.parametrize("case", shortened(CASES, FIRST.__contains__), ids=str)
def test_layout_equals_one_device(case: Case) -> None:
    result = difference(case)
    assert result.equal, result
    assert current() is None


@pytest.mark.parametrize("case", shortened(BFLOAT16, BFLOAT16[1:].__contains__), ids=str)
def test_layout_equals_one_device_in_bfloat16(case: Case) -> None:
    result = difference(case)
    assert result.equal, result


@pytest.mark.parametrize("case", OPTIMIZERS, ids=str)
def test_optimizer_equals_one_device(case: Case) -> None:
    result = difference(case)
    assert result.equal, result


def test_float32_is_within_its_bound() -> None:
    case = Case(mesh="4x2", zero=1, microbatches=2, dropout=0.2, precision="float32")
    result = difference(case)
    assert result.equal, result
    assert result.worst > 1e-12, "float32 cannot agree this well: was it computed in float64?"


def cases() -> st.SearchStrategy[Case]:
    """Any legal layout."""
    return st.builds(
        Case,
        mesh=st.sampled_from(list(MESHES)),
        zero=st.integers(0, 3),
        optimizer=st.sampled_from(["adamw", "adam", "sgd"]),
        **{name: st.sampled_from(values) for name, values in CHOICES.items()},
    ).filter(legal)


@settings(max_examples=2, suppress_health_check=list(HealthCheck))
@given(cases())
def test_random_layouts(case: Case) -> None:
    result = difference(case)
    assert result.equal, (str(case), result)


@pytest.mark.campaign
@settings(max_examples=200, suppress_health_check=list(HealthCheck), derandomize=False)
@given(cases())
def test_many_random_layouts(case: Case) -> None:
    result = difference(case)
    assert result.equal, (str(case), result)
