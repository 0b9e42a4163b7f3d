"""What a pipeline promises about memory and sends, read from programs compiled for H100s.

Four stages of two data shards. Microbatches have one size, so that a step of more of them is longer
and nothing else: what a schedule holds at once must not grow with it, and the simulator must say
how much that is.
"""

import itertools
import math
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from shardtrain.config import RunConfig, load_config
from shardtrain.plan.collectives import Collective, collectives
from shardtrain.plan.compiling import Compiled, Job, compile_for
from shardtrain.plan.hlo import parse_hlo
from shardtrain.plan.targets import Target
from shardtrain.run_program import lower_step, make_program
from shardtrain.strategies.layer_vjp import LayerVjp
from shardtrain.strategies.pipeline import Pipeline
from shardtrain.strategies.schedules.simulate import Sizes, simulate
from tests.aot.marks import needs_compiler
from tests.aot.sections import model_sections
from tests.rows import shortened

pytestmark = needs_compiler("pipeline promises")

TARGET = Target("h100", hosts=1, per_host=8)
STAGES, SHARDS, EACH = 4, 2, 2
LAYERS, EMBED, VOCAB, LENGTH = 24, 512, 1024, 256
COUNTS = (8, 32)
CASES = shortened(itertools.product(("1f1b", "gpipe"), COUNTS), lambda case: case[0] == "1f1b")


def config(schedule: str, microbatches: int) -> RunConfig:
    sections: dict[str, Any] = {
        **model_sections(LAYERS, EMBED, VOCAB, LENGTH, EACH * SHARDS * microbatches),
        "mesh": {"pipeline": STAGES, "data": SHARDS},
        "sharding": {"zero": 1},
        "pipeline": {"schedule": schedule},
        "train": {"precision": "bfloat16", "microbatches": microbatches},
    }
    return load_config(sections)


@cache
def compiled(schedule: str) -> dict[int, Compiled]:
    """The step of each number of microbatches."""
    jobs = {str(count): Job(lower_step, (config(schedule, count), VOCAB)) for count in COUNTS}
    done = compile_for(TARGET, jobs, seconds=900)
    return {count: done[str(count)] for count in COUNTS}


@cache
def predicted(schedule: str, microbatches: int) -> float:
    """Temporary bytes on a device: what is in slots, and the sums of gradients.

    Without what the work under way needs, which is a layer's or the head's: so layers are many.
    """
    made = config(schedule, microbatches)
    program = make_program(made, vocab_size=VOCAB, devices=jax.devices())
    runner = program.layout.runner
    assert isinstance(runner, Pipeline)
    assert program.parts.cut is not None
    x = jax.ShapeDtypeStruct((EACH, LENGTH, EMBED), jnp.bfloat16)
    part = {"tokens": jax.ShapeDtypeStruct((EACH, LENGTH), jnp.int32)}
    cut = program.parts.cut
    params = program.placement.shapes
    params = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, jnp.bfloat16), params)
    layer = LayerVjp(
        cut.layer,
        jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape[1:], a.dtype), params["layers"]),
        jax.ShapeDtypeStruct((), jnp.uint32),
        x,
        jax.eval_shape(lambda p, b: cut.context(p, b, None), params, part),
    )
    sizes = Sizes(
        activation=x.size * x.dtype.itemsize,
        residual=sum(math.prod(k.shape) * k.dtype.itemsize for k in layer.kept),
    )
    figures = simulate(runner.schedule, sizes=sizes, share=runner.layout.share())
    return figures.slot_bytes + gradient_sums(program)


def gradient_sums(program: Any) -> int:
    """Float32 sums of a stage's layers and of both ends, before data shards share them out."""
    shapes, computed = program.placement.shapes, program.placement.computed
    whole = jax.tree.map(lambda a, s: math.prod(s.shard_shape(a.shape)) * 4, shapes, computed)
    return sum(jax.tree.leaves(whole))


def moved(case: Compiled) -> tuple[Collective, ...]:
    degrees = {"pipeline": STAGES, "replica": 1, "data": SHARDS, "context": 1, "tensor": 1}
    return collectives(parse_hlo(case.text), degrees)


@pytest.mark.parametrize(("schedule", "count"), CASES)
def test_memory_is_what_the_simulator_says(schedule: str, count: int) -> None:
    memory = compiled(schedule)[count].memory["temporaries"]
    assert memory == pytest.approx(predicted(schedule, count), rel=0.1)


def test_1f1b_needs_no_more_for_more_microbatches() -> None:
    few, many = (compiled("1f1b")[count].memory["temporaries"] for count in COUNTS)
    assert many == pytest.approx(few, rel=0.05)


@pytest.mark.campaign
def test_gpipe_needs_more_for_more_microbatches() -> None:
    few, many = (compiled("gpipe")[count].memory["temporaries"] for count in COUNTS)
    assert many > 2.5 * few


def test_gradients_cross_the_data_axis_once_a_step() -> None:
    """However many microbatches there are, at ZeRO 1: none of it inside the loop over ticks."""
    totals = []
    for count in COUNTS:
        over_data = [c for c in moved(compiled("1f1b")[count]) if "data" in c.axes]
        assert over_data
        assert all(not c.loops for c in over_data)
        totals.append(sum(c.payload * c.times for c in over_data))
    assert totals[0] == pytest.approx(totals[1], rel=1e-6)


def test_an_activation_travels_while_the_backward_computes() -> None:
    """Of the two sends of a tick, the forward's has products between its start and its end."""
    ticks = 8 + 2 * (STAGES - 1)
    sends = [c for c in moved(compiled("1f1b")[8]) if c.kind == "collective-permute"]
    assert {c.axes for c in sends} == {("pipeline",)}
    assert {c.payload for c in sends} == {EACH * LENGTH * EMBED * 2}
    assert [c.times for c in sends] == [ticks, ticks]
    hidden = sorted(c.hidden_flops for c in sends)
    assert hidden[1] > 0


@pytest.mark.parametrize(("schedule", "count"), CASES)
def test_nothing_is_gathered_for_want_of_a_better_way(schedule: str, count: int) -> None:
    assert compiled(schedule)[count].rematerialized == ()
