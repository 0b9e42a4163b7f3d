"""Bytes that collectives move, as planned and in programs compiled for 8, 64 and 512 H100s."""

import math
from collections import Counter
from functools import cache
from typing import Any

import pytest

from shardtrain.config import load_config
from shardtrain.plan.collectives import Collective, collectives
from shardtrain.plan.compiling import Job, compile_for
from shardtrain.plan.hlo import parse_hlo
from shardtrain.plan.targets import Target
from shardtrain.plan.traffic import traffic
from shardtrain.run_program import lower_step
from shardtrain.run_workload import layout_of, make_workload
from tests.aot.marks import needs_compiler
from tests.aot.sections import model_sections
from tests.rows import shortened

pytestmark = needs_compiler("traffic")

LAYERS, EMBED, VOCAB, LENGTH = 4, 1024, 8192, 64
EACH = 2
"""Sequences of a microbatch on one device."""
HOSTS = (1, 8, 64)
LAYOUTS: dict[str, dict[str, Any]] = {
    "zero 0": {"sharding.zero": 0},
    "zero 1": {"sharding.zero": 1},
    "zero 2, 2 microbatches": {"sharding.zero": 2, "train.microbatches": 2},
    "zero 3": {"sharding.zero": 3, "train.remat": "full"},
    "tensor 8": {"mesh.tensor": 8, "sharding.zero": 1, "train.remat": "full"},
    "sequence parallel": {
        "mesh.tensor": 8,
        "sharding.zero": 1,
        "sharding.sequence_parallel": True,
        "train.remat": "dots",
    },
    "ring 4": {"mesh.context": 4, "sharding.zero": 1, "train.remat": "full"},
    "ring 4, tensor 2": {
        "mesh.context": 4,
        "mesh.tensor": 2,
        "sharding.zero": 3,
        "sharding.sequence_parallel": True,
        "task.loss_chunks": 2,
    },
    "ring 4, 2 microbatches": {
        "mesh.context": 4,
        "sharding.zero": 1,
        "train.microbatches": 2,
        "data.separate_documents": True,
    },
    "ulysses 8": {"mesh.context": 8, "model.attention": "ulysses", "train.remat": "full"},
    "pipeline 4": {"mesh.pipeline": 4, "sharding.zero": 1, "train.microbatches": 8},
}
LARGE = {8: LAYOUTS, 64: ["zero 1", "tensor 8"], 512: ["zero 3", "sequence parallel", "pipeline 4"]}
"""Layouts that are compiled for so many devices."""
CASES = [(count, name) for count, names in LARGE.items() for name in names]
SHORT = {(8, name) for name in ("zero 1", "zero 3", "ring 4", "pipeline 4")}
"""Cases of the short run; the others are in the marked one."""
MARKED = shortened(CASES, SHORT.__contains__)


def sections(devices: int, changes: dict[str, Any]) -> dict[str, Any]:
    others = math.prod(changes.get(f"mesh.{a}", 1) for a in ("tensor", "pipeline", "context"))
    batch = EACH * devices // others * changes.get("train.microbatches", 1)
    return model_sections(LAYERS, EMBED, VOCAB, LENGTH, batch)


@cache
def moved(count: int, *, short: bool) -> dict[str, tuple[Collective, ...]]:
    """The collectives of each case of so many devices; all are compiled in one child."""
    configs = {
        name: load_config(sections(count, LAYOUTS[name]), LAYOUTS[name])
        for devices, name in CASES
        if devices == count and ((devices, name) in SHORT) is short
    }
    jobs = {name: Job(lower_step, (config, VOCAB)) for name, config in configs.items()}
    done = compile_for(Target("h100", count // 8, 8), jobs, seconds=600)
    return {
        name: collectives(parse_hlo(program.text), configs[name].mesh.degrees(count))
        for name, program in done.items()
    }


@pytest.mark.parametrize(("devices", "name"), MARKED, ids=str)
def test_bytes_are_as_planned(devices: int, name: str) -> None:
    config = load_config(sections(devices, LAYOUTS[name]), LAYOUTS[name])
    workload, layout = make_workload(config, VOCAB, "gpu"), layout_of(config, devices)
    planned: Counter[tuple[str, tuple[str, ...]]] = Counter()
    for sent in traffic(workload, layout):
        planned[sent.kind, sent.axes] += round(sent.payload * sent.times)
    found: Counter[tuple[str, tuple[str, ...]]] = Counter()
    for collective in moved(devices, short=(devices, name) in SHORT)[name]:
        found[collective.kind, collective.axes] += collective.payload * collective.times
    for key, size in planned.items():
        assert found[key] == pytest.approx(size, rel=0.01), key
    unplanned = sum(size for key, size in found.items() if key not in planned)
    sends = 0
    if layout.pipeline > 1:
        ticks = workload.stages(layout, layout.microbatches)[0].work.num_ticks
        sends = 2 * ticks * workload.pieces(layout).activation * EACH
        assert found["collective-permute", ("pipeline",)] == sends
    assert unplanned - sends <= 0.01 * sum(found.values())
