"""Planned bytes beside those of programs compiled for 8 H100s: eight rows of docs/plan_memory.md.

The rows are those of the page's own command, which makes all 35. Here are all of its layouts and
all of its models, one row of each kind of program.
"""

import runpy
from functools import cache
from pathlib import Path

import pytest

import shardtrain
from shardtrain.commands_plan import make_plan
from shardtrain.config import load_config
from shardtrain.models.config import LoraConfig
from shardtrain.plan.compiling import Job, compile_for
from shardtrain.plan.targets import parse_target
from shardtrain.run_program import lower_step
from tests.aot.marks import needs_compiler

pytestmark = needs_compiler("plan memory")

PAGE = runpy.run_path(str(Path(shardtrain.__file__).parents[1] / "docs" / "make_plan_memory.py"))
ROWS = (
    ("gpt", "data 8"),
    ("gpt", "data 8, zero 3, 2 microbatches"),  # its ends are gathered once
    ("llama", "data 8, zero 3"),
    ("bloom", "data 2 x tensor 4, zero 2, sequence parallel"),
    ("wide", "data 8, zero 3, 2 microbatches"),
    ("wide", "pipeline 4 x data 2, zero 1"),
    ("deep", "data 8, zero 1, 4 microbatches"),
    ("deep", "pipeline 4 x tensor 2, zero 0"),
)
CASES = {
    (model, layout): (load_config(sections, changes), sections["model"]["vocab_size"])
    for model, layout, sections, changes in PAGE["cases"]()
}


LORA = (("llama", "data 8, zero 3"),)
"""Rows that are made again with all weights frozen."""
for _model, _layout in LORA:
    _config, _vocab = CASES[_model, _layout]
    _lora = LoraConfig(rank=16, targets="qkv,out,up,down")
    CASES[_model, f"{_layout}, LoRA"] = (_config.model_copy(update={"lora": _lora}), _vocab)
CHANGES = {
    # sequences that are shared out, without loss chunks
    "context 4 x tensor 2": {"mesh.context": 4, "mesh.tensor": 2, "mesh.data": 1},
    "context 4 x data 2, zero 3": {"mesh.context": 4, "mesh.data": 2, "sharding.zero": 3},
    "context 8, loss in 16 chunks": {
        **{"mesh.context": 8, "mesh.data": 1, "data.batch_size": 4, "sharding.zero": 3},
        **{"task.loss_chunks": 16, "train.remat": "full", "model.tied": False},
    },
    "pipeline 2 x context 4": {"mesh.pipeline": 2, "mesh.context": 4, "mesh.data": 1},
    "adapters, base on the host": {
        **{"lora.rank": 16, "offload.parameters": "host", "mesh.data": 8, "data.batch_size": 32},
    },
    "attention weights dropped": {
        **{"model.attention_dropout": 0.1, "mesh.data": 8, "data.batch_size": 32},
    },
}
_sections = next(sections for model, _, sections, _ in PAGE["cases"]() if model == "llama")
FURTHER = {
    name: load_config(_sections, {"train.microbatches": 4, **changes})
    for name, changes in CHANGES.items()
}
WITH_LORA = (*ROWS, *((model, f"{layout}, LoRA") for model, layout in LORA))
FEW = (ROWS[1], ROWS[7], WITH_LORA[-1])
"""With ends gathered once, of stages and tensor, of frozen weights; the rest is marked."""
REST = tuple(row for row in WITH_LORA if row not in FEW)


@cache
def peaks(rows: tuple[tuple[str, str], ...]) -> dict[tuple[str, str], int]:
    """XLA's peak of each row's step; all are compiled in one child."""
    jobs = {": ".join(row): Job(lower_step, CASES[row]) for row in rows}
    done = compile_for(parse_target(PAGE["TARGET"]), jobs, seconds=600)
    return {row: done[": ".join(row)].memory["peak"] for row in rows}


def test_every_layout_and_model_of_the_page_has_a_row() -> None:
    assert {model for model, _ in ROWS} == set(PAGE["MODELS"])
    assert {layout for _, layout in ROWS} == set(PAGE["LAYOUTS"])


@pytest.mark.parametrize(
    "row", [*FEW, *(pytest.param(row, marks=pytest.mark.campaign) for row in REST)], ids=": ".join
)
def test_planned_bytes_are_those_of_the_program(row: tuple[str, str]) -> None:
    planned = make_plan(CASES[row][0], PAGE["TARGET"], search=False).own.memory.total
    peak = peaks(FEW if row in FEW else REST)[row]
    assert planned == pytest.approx(peak, rel=0.1)


@pytest.mark.campaign
@pytest.mark.parametrize("name", FURTHER)
def test_planned_bytes_are_those_of_further_programs(name: str) -> None:
    config = FURTHER[name]
    job = Job(lower_step, (config, _sections["model"]["vocab_size"]))
    peak = compile_for(parse_target(PAGE["TARGET"]), {"step": job}, seconds=600)["step"]
    planned = make_plan(config, PAGE["TARGET"], search=False).own.memory.total
    assert planned == pytest.approx(peak.memory["peak"], rel=0.1)
