"""State on the host, in programs compiled for 8 H100s: it is really there, and travels once."""

from typing import Any

import pytest

from shardtrain.commands_plan import compiled_program, make_plan
from shardtrain.config import load_config
from shardtrain.plan.audit import audit
from shardtrain.plan.compiling import Job, compile_for
from shardtrain.plan.expected import expect
from shardtrain.plan.targets import parse_target
from shardtrain.run_program import lower_step, make_program
from shardtrain.sharding.mesh import abstract_mesh
from shardtrain.strategies.config import all_on_device
from tests.aot.marks import needs_compiler

pytestmark = needs_compiler("offload")

TARGET, VOCAB = "h100:1x8", 32768
TRAVELS = "copies to the host are as planned"
ON_HOST = {"offload.optimizer": "host", "offload.master": "host"}
LAYOUTS: dict[str, dict[str, Any]] = {
    "data 8, zero 3": {"sharding.zero": 3, "mesh.data": 8},
    "data 8, zero 1, 4 microbatches": {"mesh.data": 8, "train.microbatches": 4},
}


def config(**changes: Any) -> Any:
    sections = {
        "run": {"steps": 10},
        "model": {"num_layers": 24, "embed_dim": 4096, "num_heads": 32, "vocab_size": VOCAB},
        "data": {"sequence_length": 1024, "batch_size": 32},
        "train": {"precision": "bfloat16", "remat": "full"},
        "sharding": {"zero": 1},
        "optimizer": {"learning_rate": 1e-3},
    }
    return load_config(sections, changes)


@pytest.mark.campaign
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_device_holds_less_by_what_is_on_the_host(layout: str) -> None:
    """Nine tenths of it: three layers of the state are on their way at any time."""
    peaks = {}
    for name, more in (("device", {}), ("host", ON_HOST)):
        made = config(**LAYOUTS[layout], **more)
        plan = make_plan(made, TARGET, search=False)
        program = compiled_program(plan, made)
        peaks[name] = program.compiled.memory["peak"]
        assert plan.own.memory.total == pytest.approx(peaks[name], rel=0.1)
        promises = {p.name: p.outcome for p in program.audit.promises}
        assert not program.audit.broken, [p.name for p in program.audit.broken]
    assert program.compiled.memory["host_arguments"] == round(plan.own.memory.host)
    assert promises[TRAVELS].state == "kept"
    assert peaks["device"] - peaks["host"] > 0.9 * plan.own.memory.host


@pytest.mark.campaign
@pytest.mark.parametrize("kept", ["input:host", "attention,mlp:host"])
def test_activations_on_the_host_leave_the_device(kept: str) -> None:
    """The device holds less by what is kept on the host; the copies go beside other work."""
    sizes = {}
    for remat in (kept, all_on_device(kept)):
        made = config(**LAYOUTS["data 8, zero 3"], **{"train.remat": remat, "data.batch_size": 64})
        plan = make_plan(made, TARGET, search=False)
        program = compiled_program(plan, made)
        sizes[remat] = program.compiled.memory
        assert plan.own.memory.total == pytest.approx(program.compiled.memory["peak"], rel=0.1)
        assert not program.audit.broken, [p.outcome.words for p in program.audit.broken]
        if remat == kept:
            (outcome,) = (p.outcome for p in program.audit.promises if p.name == TRAVELS)
            assert outcome.state == "kept"
            assert program.compiled.memory["host_temporaries"] == plan.own.memory.host
    fewer = sizes[all_on_device(kept)]["temporaries"] - sizes[kept]["temporaries"]
    moved = sizes[kept]["host_temporaries"]
    assert moved > 2**30
    # Of what is kept beside the layer's input, copies on their way are held too.
    assert fewer > (0.99 if kept == "input:host" else 0.7) * moved


def test_a_7b_model_is_trained_on_a_workstation() -> None:
    """None of its layers rests on the card of 24 GB: it holds gradients and what is in work."""
    made = load_config("finetune_7b_workstation")
    plan = make_plan(made, "rtx4090:1x1", search=False)
    program = compiled_program(plan, made)
    held = program.compiled.memory
    assert held["peak"] < 24e9 * 0.92
    assert plan.own.memory.total == pytest.approx(held["peak"], rel=0.1)
    # What reads and writes the disk has a few of its layers in the host's memory.
    assert 35e9 < held["host_arguments"] < plan.own.memory.host < 45e9
    assert plan.own.memory.disk == pytest.approx(27e9, rel=0.01)
    assert plan.fits
    assert {"copies to the host are as planned", "a disk is used as planned"} <= {
        p.name for p in program.audit.promises if p.outcome.state == "kept"
    }
    assert not program.audit.broken, [p.outcome.words for p in program.audit.broken]


@pytest.mark.campaign
def test_an_update_on_the_host_moves_gradients_only() -> None:
    """Masters and moments stay there; gradients go down once, parameters come from there anyway."""
    made = load_config(
        "finetune_7b_workstation",
        {"offload.update": "host", "offload.optimizer": "host", "train.precision": "bfloat16"},
    )
    plan = make_plan(made, "rtx4090:1x1", search=False)
    program = compiled_program(plan, made)
    (outcome,) = (p.outcome for p in program.audit.promises if p.name == TRAVELS)
    assert outcome.state == "kept"
    held = program.compiled.memory
    assert plan.own.memory.total == pytest.approx(held["peak"], rel=0.1)
    there = held["host_arguments"] + held["host_temporaries"]
    assert plan.own.memory.host == pytest.approx(there, rel=0.15)


def test_an_offload_that_moves_nothing_is_found() -> None:
    """Compiled the usual way, all memory kinds are dropped without a word: the planted fault."""
    made = config(**LAYOUTS["data 8, zero 3"], **ON_HOST)
    job = Job(lower_step, (made, VOCAB))
    compiled = compile_for(parse_target(TARGET), {"step": job})["step"]
    expected = expect(
        make_program(made, vocab_size=VOCAB, mesh=abstract_mesh({"data": 8}, "gpu")),
        model=made.model,
        vocab_size=VOCAB,
        length=1024,
        batch_size=32,
        remat="full",
        domain=8,
        memory=None,
    )
    broken = {p.name: p.outcome for p in audit(compiled, expected).broken}
    assert "0 come in and 0 go out in a step" in broken[TRAVELS].words
    assert {fault.note for fault in broken[TRAVELS].faults} >= {"on the device"}
