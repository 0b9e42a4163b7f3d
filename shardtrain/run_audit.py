"""A run's own step, checked before its first update: `train.audit`.

Owns: which devices can be checked, what the devices here say of a cluster, how a broken promise
ends a run. Does not own: the promises, and how they are read off a program
(`shardtrain.plan.audit`).
"""

from collections import Counter
from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import Mesh

from shardtrain.config import RunConfig, only_language
from shardtrain.errors import EXIT_BROKEN, ConfigError, UserError
from shardtrain.plan.audit import Audit, audit
from shardtrain.plan.compiling import read_program
from shardtrain.plan.evidence import Fault
from shardtrain.plan.expected import expect
from shardtrain.plan.hardware import Cluster
from shardtrain.sharding.chips import KNOWN_KINDS
from shardtrain.sharding.mesh import mesh_platform
from shardtrain.train.build import Program

_FAULTS = 3
"""Places that are told of a broken promise; `plan --audit` has more."""


class PromiseError(UserError):
    """The compiled step does not do what its layout says."""

    exit_code = EXIT_BROKEN


def require_auditable(config: RunConfig, mesh: Mesh) -> None:
    """Refuses `train.audit` where nothing could be checked.

    Args:
        config: from `load_config`.
        mesh: of the run.

    Raises:
        ConfigError: it is asked for, and the devices are no GPUs.
    """
    platform = mesh_platform(mesh)
    if config.train.audit and platform != "gpu":
        raise ConfigError(
            f"programs for {platform} devices cannot be checked, only those for NVIDIA GPUs",
            where="train.audit=True",
            allowed="false here",
            cure="leave it out; `shardtrain plan CONFIG --target h100:1x8 --audit` checks the "
            "program for GPUs that are not here",
        )


def check_step(config: RunConfig, program: Program, vocab_size: int, step: Any) -> str:
    """Checks a run's compiled step against each promise of its layout.

    Args:
        config: from `load_config`.
        program: of the config, on the mesh for which the step was compiled.
        vocab_size: tokens of the data; `model.vocab_size` goes first.
        step: from `Program.compile_step`.

    Returns:
        What was found, in a line.

    Raises:
        PromiseError: a promise is broken; the message has the instruction and what it belongs to.
    """
    found = audit_step(config, program, vocab_size, step)
    if found.broken:
        raise _broken(found)
    states = Counter(promise.outcome.state for promise in found.promises)
    return f"audit: {states['kept']} promises are kept, {states['not checked']} cannot be checked"


def audit_step(config: RunConfig, program: Program, vocab_size: int, step: Any) -> Audit:
    """The audit of a run's compiled step; the arguments are those of `check_step`."""
    mesh, language = program.layout.mesh, only_language(config, "an audit")
    assert isinstance(mesh, Mesh)
    devices = list(mesh.devices.flat)
    chip = KNOWN_KINDS.get(devices[0].device_kind)
    expected = expect(
        program,
        model=language.model,
        vocab_size=vocab_size,
        length=language.data.sequence_length,
        batch_size=config.data.batch_size,
        remat=config.train.remat,
        domain=domain_of(devices),
        memory=chip.memory if chip else None,
        loss_chunks=language.task.loss_chunks,
    )
    # What XLA said while it compiled went to this process's own stderr.
    return audit(read_program(step, rematerialized=None), expected)


def domain_of(devices: Sequence[jax.Device]) -> int:
    """How many neighbouring devices the fast link joins, as far as the devices tell.

    The devices of a process are taken for those of a host. With one process a device they tell
    nothing, and the host is the one that such chips are usually in.
    """
    each = min(Counter(device.process_index for device in devices).values())
    chip = KNOWN_KINDS.get(devices[0].device_kind)
    if each == 1 and len(devices) > 1 and chip and chip.host:
        each = min(chip.host.chips, len(devices))
    if chip is None:
        return each
    return Cluster(chip, hosts=max(len(devices) // each, 1), per_host=each).domain


def _broken(found: Audit) -> PromiseError:
    lines = []
    for promise in found.broken:
        lines.append(f"{promise.name}: {promise.outcome.words}")
        lines += [f"  {_told(fault)}" for fault in promise.outcome.faults[:_FAULTS]]
    count = len(found.broken)
    return PromiseError(
        f"the compiled step breaks {count} promise{'s' if count > 1 else ''} of its layout",
        where="train.audit=True",
        value="\n".join(lines),
        cure="change the layout, or leave train.audit out to train all the same; docs/plan.md says "
        "what each promise is",
    )


def _told(fault: Fault) -> str:
    wanted = "" if fault.expected is None else f", {fault.expected:,.4g} expected"
    of = f" of {fault.belongs_to[:120]}" if fault.belongs_to else ""
    return f"{fault.instruction or 'all'}: {fault.found:,.4g}{wanted} {fault.unit}{of}"
