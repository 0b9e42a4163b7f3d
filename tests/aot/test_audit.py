"""The audit on programs compiled for two hosts of H100s: good layouts, and planted faults.

No GPU is needed: the compiler's plug-in is enough (extra `plan`). A fault is planted while the step
is lowered, in the child that compiles; what is expected comes from the config, which says nothing
of it.
"""

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any
from unittest import mock

import jax
import pytest

from shardtrain.config import RunConfig, load_config
from shardtrain.models import transformer
from shardtrain.plan.audit import Audit, audit
from shardtrain.plan.compiling import Compiled, Job, compile_for
from shardtrain.plan.evidence import Outcome
from shardtrain.plan.expected import expect
from shardtrain.plan.targets import Target
from shardtrain.run_program import lower_step, make_program
from shardtrain.sharding.mesh import abstract_mesh
from shardtrain.sharding.placement import Placement
from shardtrain.strategies import accumulate, stack
from tests.aot.marks import needs_compiler
from tests.aot.sections import model_sections
from tests.rows import shortened

pytestmark = needs_compiler("audit")

TARGET = Target("h100", hosts=2, per_host=8)
LAYERS, EMBED, VOCAB, LENGTH, BATCH = 4, 256, 2048, 128, 96
BASE = model_sections(LAYERS, EMBED, VOCAB, LENGTH, BATCH)
BASE["model"]["num_heads"] = 16

SEQUENCE: dict[str, Any] = {"mesh.tensor": 2, "sharding.sequence_parallel": True}
PIPELINE: dict[str, Any] = {"mesh.pipeline": 2, "mesh.tensor": 2, "train.microbatches": 4}
GOOD: dict[str, dict[str, Any]] = {
    "zero 0, 2 microbatches": {"train.microbatches": 2},
    "zero 3, sequence, full": {
        **SEQUENCE,
        "sharding.zero": 3,
        "train.remat": "full",
    },
    "pipeline, zero 1": {**PIPELINE, "sharding.zero": 1},
    "pipeline, zero 3": {**PIPELINE, "sharding.zero": 3, "train.remat": "full"},
}
REST = frozenset(GOOD) - {"pipeline, zero 3"} | {"across hosts"}
"""In the marked run."""
Lowered = jax.stages.Lowered
Devices = Sequence[jax.Device]


def reduced_each(devices: Devices, config: RunConfig, vocab_size: int) -> Lowered:
    """Adds up gradients that are reduced in every microbatch."""

    def each(loss: Any, placement: Any, dtype: Any, _reduce: Any) -> Any:
        return accumulate._scattered_each(loss, placement, dtype)

    with mock.patch.object(accumulate, "_reduced_once", each):
        return lower_step(devices, config, vocab_size)


def unconstrained(devices: Devices, config: RunConfig, vocab_size: int) -> Lowered:
    """Leaves out the constraint on what is inside the MLP."""
    whole = transformer.constrain

    def constrain(x: jax.Array, *names: str | None) -> jax.Array:
        return x if "mlp" in names else whole(x, *names)

    with mock.patch.object(transformer, "constrain", constrain):
        return lower_step(devices, config, vocab_size)


def saves_all(devices: Devices, config: RunConfig, vocab_size: int) -> Lowered:
    """Saves everything under every policy."""
    save = jax.checkpoint_policies.everything_saveable

    def remat(policy: str) -> Callable[..., Any]:
        return lambda block: jax.checkpoint(block, policy=save)

    with mock.patch.object(stack, "remat", remat):
        return lower_step(devices, config, vocab_size)


def replicated(devices: Devices, config: RunConfig, vocab_size: int) -> Lowered:
    """Keeps the whole optimizer state on every device."""
    with mock.patch.object(Placement, "optimizer", Placement.computed):
        return lower_step(devices, config, vocab_size)


FAULTS: dict[str, tuple[Callable[..., Lowered], dict[str, Any]]] = {
    "reduced each": (reduced_each, {"train.microbatches": 2}),
    "weight whole": (unconstrained, SEQUENCE),
    "across hosts": (lower_step, {"mesh.tensor": 16}),
    "saves all": (saves_all, {"train.remat": "full"}),
    "replicated": (replicated, {"sharding.zero": 1}),
}


CASES = {name: (lower_step, changes) for name, changes in GOOD.items()} | FAULTS
CONFIGS = {name: load_config(BASE, changes) for name, (_, changes) in CASES.items()}


@cache
def compiled(*, rest: bool) -> dict[str, Compiled]:
    """The programs of the short run, or the others; all are compiled in one child."""
    names = [name for name in CASES if (name in REST) is rest]
    jobs = {name: Job(CASES[name][0], (CONFIGS[name], VOCAB)) for name in names}
    return compile_for(TARGET, jobs, seconds=600)


@cache
def audited(name: str) -> Audit:
    """The audit of a layout or fault."""
    return audit_of(CONFIGS[name], compiled(rest=name in REST)[name])


def audit_of(config: RunConfig, compiled: Compiled) -> Audit:
    mesh = abstract_mesh(config.mesh.degrees(TARGET.num_devices))
    expected = expect(
        make_program(config, vocab_size=VOCAB, mesh=mesh),
        model=config.model,
        vocab_size=VOCAB,
        length=LENGTH,
        batch_size=BATCH,
        remat=config.train.remat,
        domain=TARGET.per_host,
    )
    return audit(compiled, expected)


def outcomes(found: Audit) -> dict[str, Outcome]:
    return {promise.name: promise.outcome for promise in found.promises}


@pytest.mark.parametrize("name", shortened(GOOD, lambda name: name not in REST))
def test_good_layouts_keep_their_promises(name: str) -> None:
    assert audited(name).broken == ()


def test_what_a_pipeline_does_not_tell_is_not_passed() -> None:
    found = outcomes(audited("pipeline, zero 3"))
    unknown = {
        name
        for name, outcome in found.items()
        if outcome.state == "not checked" and "branches" in outcome.words
    }
    assert unknown == {"gradients are reduced once", "parameters are gathered once"}
    assert found["one layer is gathered at a time"].state == "kept"
    assert found["remat saves memory"].state == "kept"


def the_fault(found: Audit, promise: str) -> Outcome:
    """The outcome of the one promise that is broken."""
    assert [p.name for p in found.broken] == [promise]
    return found.broken[0].outcome


def test_a_gradient_reduced_in_every_microbatch() -> None:
    found = audited("reduced each")
    fault = the_fault(found, "gradients are reduced once").faults[0]
    assert (fault.unit, fault.expected, fault.found) == ("times a step", LAYERS, 2 * LAYERS)
    assert "layers/mlp/up" in fault.belongs_to
    (at,) = (c for c in found.collectives if c.name == fault.instruction)
    assert (at.kind, at.axes, len(at.loops)) == ("all-reduce", ("data",), 2)


def test_a_weight_gathered_whole_for_want_of_a_constraint() -> None:
    found = audited("weight whole")
    outcome = outcomes(found)["weights stay split over tensor"]
    assert outcome.state == "broken"
    assert {fault.belongs_to for fault in outcome.faults} == {"layers/mlp/up", "layers/mlp/down"}
    for fault in outcome.faults:
        assert (fault.expected, fault.found) == (4 * EMBED**2 / 2, 4 * EMBED**2)
        (at,) = (c for c in found.collectives if c.name == fault.instruction)
        assert (at.kind, at.axes, at.times) == ("all-gather", ("tensor",), LAYERS)


@pytest.mark.campaign
def test_a_tensor_axis_across_hosts() -> None:
    found = audited("across hosts")
    outcome = the_fault(found, "tensor groups are in one domain")
    assert {(fault.expected, fault.found) for fault in outcome.faults} == {(1, 2)}
    assert "dot_general" in outcome.faults[0].belongs_to
    (row,) = (r for r in found.traffic if r.axes == ("tensor",) and r.kind == "all-reduce")
    assert row.crosses


def test_a_remat_policy_that_saves_everything() -> None:
    found = audited("saves all")
    again, kept, largest, *_ = the_fault(found, "remat saves memory").faults
    assert (again.belongs_to, again.found) == ("products done again", 0)
    assert again.expected == pytest.approx(0.2 * found.expected_flops, rel=0.1)
    assert kept.expected is not None
    assert kept.found > 4 * kept.expected
    rows = BATCH // TARGET.num_devices
    assert largest.found == LAYERS * rows * LENGTH * 4 * EMBED * 2  # what is inside the MLP
    assert largest.note.startswith(f"bf16[{LAYERS},{rows},{LENGTH},{4 * EMBED}]")


def test_a_replicated_optimizer_state() -> None:
    outcome = the_fault(audited("replicated"), "state rests as placed")
    fault = outcome.faults[0]
    assert fault.belongs_to == "state.opt_state['master']['layers']['mlp']['down']"
    size = 4 * LAYERS * 4 * EMBED**2
    assert (fault.expected, fault.found) == (size / TARGET.num_devices, size)
