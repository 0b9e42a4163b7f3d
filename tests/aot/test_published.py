"""A published run, compiled for its cluster on this machine: BLOOM's step for 384 A100s."""

import pytest

from shardtrain.commands_plan import compiled_program, make_plan
from shardtrain.config import load_config
from shardtrain.plan.answer import Plan, Program
from tests.aot.marks import needs_compiler

pytestmark = needs_compiler("published")

Compiled = tuple[Plan, Program]


@pytest.fixture(scope="module")
def bloom() -> Compiled:
    config = load_config("bloom_176b")
    plan = make_plan(config, "a100-80:48x8", search=False)
    return plan, compiled_program(plan, config)


def test_state_is_what_was_planned(bloom: Compiled) -> None:
    plan, program = bloom
    held = plan.own.memory
    state = held.state + held.batch
    assert program.bytes_per_device["arguments"] == pytest.approx(state, rel=1e-3)


def test_peak_is_what_was_planned(bloom: Compiled) -> None:
    plan, program = bloom
    assert plan.own.memory.total == pytest.approx(program.bytes_per_device["total"], rel=0.1)


def test_no_promise_is_broken(bloom: Compiled) -> None:
    _, program = bloom
    assert program.audit.broken == ()
