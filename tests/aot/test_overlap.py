"""Collectives that travel while products are made, read from programs compiled for 8 H100s.

Twelve layers of a model of 6.7 billion parameters, data parallel over one host, one microbatch. A
collective counts as hidden if products stand between its start and its done in XLA's schedule.
"""

from functools import cache
from typing import Any

import pytest

from shardtrain.config import load_config
from shardtrain.plan.collectives import collectives, totals
from shardtrain.plan.compiling import Job, compile_for
from shardtrain.plan.hlo import parse_hlo
from shardtrain.plan.targets import Target
from shardtrain.run_program import lower_step
from tests.aot.marks import needs_compiler
from tests.rows import shortened

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


SHORT, REST = (1, 3), (0, 2)
"""ZeRO stages of the short run, and of the marked one."""


@cache
def shares(*stages: int, overlap: bool = True) -> dict[int, dict[str, float]]:
    """Of the program of each ZeRO stage, the share of bytes that is hidden, by kind of collective
    over `data`."""
    configs = {
        zero: load_config(SECTIONS, {"sharding.zero": zero, "train.overlap": overlap})
        for zero in stages
    }
    jobs = {str(zero): Job(lower_step, (config, VOCAB)) for zero, config in configs.items()}
    done = compile_for(TARGET, jobs, seconds=600, overlap=overlap)
    mesh = {"pipeline": 1, "replica": 1, "data": 8, "context": 1, "tensor": 1}
    return {
        int(zero): {
            total.kind: total.wire_overlapped / total.wire
            for total in totals(collectives(parse_hlo(program.text), mesh))
            if total.axes == ("data",)
        }
        for zero, program in done.items()
    }


@pytest.mark.parametrize("zero", shortened(range(4), SHORT.__contains__))
def test_reductions_of_gradients_are_hidden(zero: int) -> None:
    kind = "all-reduce" if zero == 0 else "reduce-scatter"
    assert shares(*(SHORT if zero in SHORT else REST))[zero][kind] >= 0.9


def test_gathers_of_zero_3_are_hidden() -> None:
    assert shares(*SHORT)[3]["all-gather"] >= 0.75


@pytest.mark.campaign
def test_flags_and_the_layer_apart_are_what_hides_them() -> None:
    """Without `train.overlap` less of the same gradients is hidden."""
    alone = shares(1, overlap=False)[1]["reduce-scatter"]
    assert alone < shares(*SHORT)[1]["reduce-scatter"] - 0.2
