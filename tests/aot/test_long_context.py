"""Llama-3-8B on a window of 131,072 tokens, compiled for 8 H100s; `docs/long_context.md`."""

import pytest

from shardtrain.commands_plan import compiled_program, make_plan
from shardtrain.config import load_config
from shardtrain.plan.answer import Plan, Program
from tests.aot.marks import needs_compiler

pytestmark = needs_compiler("long context")

Compiled = tuple[Plan, Program]


@pytest.fixture(
    scope="module", params=["ring", pytest.param("ulysses", marks=pytest.mark.campaign)]
)
def llama(request: pytest.FixtureRequest) -> Compiled:
    config = load_config("llama3_8b_128k", {"model.attention": request.param})
    plan = make_plan(config, "h100:1x8", search=False)
    return plan, compiled_program(plan, config)


def test_it_fits(llama: Compiled) -> None:
    _, program = llama
    assert program.bytes_per_device["total"] < 32 * 2**30


def test_peak_is_what_was_planned(llama: Compiled) -> None:
    plan, program = llama
    assert plan.own.memory.total == pytest.approx(program.bytes_per_device["total"], rel=0.1)


def test_no_promise_is_broken(llama: Compiled) -> None:
    _, program = llama
    assert program.audit is not None
    assert program.audit.broken == ()
