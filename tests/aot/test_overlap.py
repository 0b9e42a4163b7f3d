"""Collectives that travel while products are made, read from programs compiled for 8 H100s.

Twelve layers of a model of 6.7 billion parameters, data parallel over one host, one microbatch. A
collective counts as hidden if products stand between its start and its done in XLA's schedule.
"""

from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from typing import Any

import pytest

from shardtrain.config import load_config
from shardtrain.plan.collectives import collectives, totals
from shardtrain.plan.compiling import Compiled, Job, compile_for
from shardtrain.plan.hlo import parse_hlo
from shardtrain.plan.targets import Target
from shardtrain.run_program import lower_step
from tests.aot.marks import in_marked_run, needs_compiler

pytestmark = needs_compiler("overlap")

TARGET = Target("h100", hosts=1, per_host=8)
VOCAB = 50304
SECTIONS: dict[str, Any] = {
    "run": {"steps": 10},
    "model": {
        "num_layers": 12,
        "embed_dim": 4096,
        "num_heads": 32,
        "vocab_size": VOCAB,
        "position": "rope",
        "bias": False,
        "norm_bias": False,
    },
    "data": {"sequence_length": 2048, "batch_size": 32, "separate_documents": False},
    "optimizer": {"learning_rate": 1e-3},
    "train": {"precision": "bfloat16", "remat": "full", "overlap": True},
}


@cache
def shares(*stages: int) -> dict[str, dict[str, float]]:
    """Of the program of each ZeRO stage, and of one that is left alone, the share of bytes that is
    hidden, by kind of collective over `data`."""
    jobs = {
        f"zero {zero}": Job(lower_step, (load_config(SECTIONS, {"sharding.zero": zero}), VOCAB))
        for zero in stages
    }
    plain = load_config(SECTIONS, {"sharding.zero": 1, "train.overlap": False})
    compiled = partial(compile_for, TARGET, seconds=600)
    with ThreadPoolExecutor(2) as pool:
        tuned = pool.submit(compiled, jobs, overlap=True)
        alone = pool.submit(compiled, {"alone": Job(lower_step, (plain, VOCAB))})
        done: dict[str, Compiled] = {**tuned.result(), **alone.result()}
    mesh = {"pipeline": 1, "replica": 1, "data": 8, "context": 1, "tensor": 1}
    return {
        name: {
            total.kind: total.wire_overlapped / total.wire
            for total in totals(collectives(parse_hlo(program.text), mesh))
            if total.axes == ("data",)
        }
        for name, program in done.items()
    }


SHORT, REST = (1, 3), (0, 2)
"""ZeRO stages of the short run, and of the marked one."""


@pytest.mark.parametrize("zero", [*map(in_marked_run, REST), *SHORT])
def test_reductions_of_gradients_are_hidden(zero: int) -> None:
    kind = "all-reduce" if zero == 0 else "reduce-scatter"
    assert shares(*(SHORT if zero in SHORT else REST))[f"zero {zero}"][kind] >= 0.9


def test_gathers_of_zero_3_are_hidden() -> None:
    assert shares(*SHORT)["zero 3"]["all-gather"] >= 0.75


def test_flags_and_the_layer_apart_are_what_hides_them() -> None:
    """Without `train.overlap` less of the same gradients is hidden."""
    found = shares(*SHORT)
    assert found["alone"]["reduce-scatter"] < found["zero 1"]["reduce-scatter"] - 0.2
