"""Precisions in programs compiled for 8 H100s: bytes held and moved as planned, fp8 products."""

from collections import Counter
from collections.abc import Iterable
from functools import cache
from typing import Any

import pytest

from shardtrain.commands_plan import make_plan
from shardtrain.config import RunConfig, load_config
from shardtrain.plan.collectives import collectives
from shardtrain.plan.compiling import Compiled, Job, compile_for
from shardtrain.plan.hlo import parse_hlo
from shardtrain.plan.targets import parse_target
from shardtrain.plan.traffic import traffic
from shardtrain.run_program import lower_step
from shardtrain.run_workload import layout_of, make_workload
from tests.aot.marks import needs_compiler
from tests.aot.sections import model_sections

pytestmark = needs_compiler("precision programs")

TARGET, VOCAB = "h100:1x8", 8192
NARROW = "bfloat16,master=bfloat16,moments=bfloat16,rounding=stochastic"
WIDE = "params=float32,compute=bfloat16"
ROWS: dict[str, dict[str, Any]] = {
    "fp8": {"train.precision": "fp8", "sharding.zero": 1},
    "fp8, zero 3, 2 microbatches": {
        "train.precision": "fp8",
        "sharding.zero": 3,
        "train.microbatches": 2,
    },
    "fp8, 2 microbatches, remat": {
        "train.precision": "fp8",
        "train.microbatches": 2,
        "train.remat": "full",
    },
    "fp8_delayed, 2 microbatches": {
        "train.precision": "fp8_delayed",
        "sharding.zero": 1,
        "train.microbatches": 2,
    },
    "fp8, tensor 2": {"train.precision": "fp8", "mesh.tensor": 2, "sharding.zero": 1},
    "fp8, pipeline 2": {
        "train.precision": "fp8",
        "mesh.pipeline": 2,
        "train.microbatches": 4,
        "sharding.zero": 1,
    },
    "fp8, without first and last": {"train.precision": "fp8,first=1,last=1"},
    "wide parameters, zero 1": {"train.precision": WIDE, "sharding.zero": 1},
    "wide parameters, zero 3": {"train.precision": WIDE, "sharding.zero": 3},
    "narrow state": {"train.precision": NARROW, "sharding.zero": 1},
    "wide reduction": {"train.precision": "bfloat16,reduce=float32", "sharding.zero": 1},
    "narrow reduction": {
        "train.precision": "bfloat16,reduce=bfloat16",
        "sharding.zero": 1,
        "train.microbatches": 2,
    },
}


SHORT = ("fp8, zero 3, 2 microbatches",)
"""In the short run; the others are in the marked one."""


def marked(rows: Iterable[str]) -> list[Any]:
    return [row if row in SHORT else pytest.param(row, marks=pytest.mark.campaign) for row in rows]


@cache
def config(row: str) -> RunConfig:
    sections = model_sections(8, 1024, VOCAB, 512, 32 * ROWS[row].get("train.microbatches", 1))
    return load_config(sections, ROWS[row])


@cache
def program(row: str) -> Compiled:
    """A row's step, products left to cuBLASLt: without a device XLA cannot try its own out."""
    job = Job(lower_step, (config(row), VOCAB))
    flags = ("--xla_gpu_enable_triton_gemm=false",)
    return compile_for(parse_target(TARGET), {row: job}, xla_flags=flags)[row]


@pytest.mark.parametrize("row", marked(ROWS))
def test_memory_is_as_planned(row: str) -> None:
    planned = make_plan(config(row), TARGET, search=False).own.memory.total
    assert planned == pytest.approx(program(row).memory["peak"], rel=0.1)


# Of a layer in fp8 or not both branches stand in the program, each with its reductions; one is run.
@pytest.mark.parametrize("row", marked(row for row in ROWS if "without" not in row))
def test_bytes_sent_are_as_planned(row: str) -> None:
    workload, layout = make_workload(config(row), VOCAB, "gpu"), layout_of(config(row), 8)
    planned: Counter[tuple[str, tuple[str, ...]]] = Counter()
    for sent in traffic(workload, layout):
        planned[sent.kind, sent.axes] += round(sent.payload * sent.times)
    found: Counter[tuple[str, tuple[str, ...]]] = Counter()
    for c in collectives(parse_hlo(program(row).text), config(row).mesh.degrees(8)):
        found[c.kind, c.axes] += c.payload * c.times
    for key, size in planned.items():
        assert found[key] == pytest.approx(size, rel=0.01), key


@pytest.mark.parametrize("row", marked(ROWS))
def test_the_layers_products_are_in_fp8(row: str) -> None:
    """Four products of a layer, each with its two gradients; in a loop each stands once, and a
    recomputed forward once more but for the last product, whose result nobody reads."""
    eight = program(row).text.count('"__cublas$lt$matmul$f8"')
    again = 3 if "remat" in row else 0
    assert eight == (12 + again if row.startswith("fp8") else 0)


def test_planned_times_know_the_faster_products() -> None:
    """Not twice as fast: attention and head stay, and small products wait for memory."""

    def products(precision: str) -> float:
        changed = load_config(config("fp8").model_dump(), {"train.precision": precision})
        return make_plan(changed, TARGET, search=False).own.cost.low.products

    eight, sixteen = products("fp8"), products("bfloat16")
    part = products("fp8,first=2,last=2")
    assert 0.5 * sixteen < eight < 0.8 * sixteen
    assert eight < part < sixteen
