"""From a config to the functions of its run, without data.

Owns: which wrapper, placement and model each key of a config chooses. Does not own: the functions
(`shardtrain.train.build`), data, and the run as a whole (`shardtrain.run`).
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh

from shardtrain.config import RunConfig
from shardtrain.errors import raise_all
from shardtrain.models.config import LoraConfig
from shardtrain.models.lora import Everything, Lora, Training, choose_matrices
from shardtrain.models.transformer import MATRICES
from shardtrain.optim.optimizers import make_transform
from shardtrain.optim.schedules import make_schedule
from shardtrain.run_work import work_of
from shardtrain.sharding.mesh import make_mesh, mesh_platform
from shardtrain.sharding.report import Report, report
from shardtrain.sharding.rules import compute_table
from shardtrain.sharding.tiers import Tiers
from shardtrain.strategies.config import TrainConfig
from shardtrain.strategies.loss_scale import DynamicScale, LossScale, Unscaled
from shardtrain.strategies.precision import Policy, policy
from shardtrain.train.build import Layout, Program
from shardtrain.train.kept import EMA, Average, Kept, Part
from shardtrain.train.rundir import DISK

PyTree = Any
Batch = Mapping[str, jax.Array]


def make_program(
    config: RunConfig,
    *,
    vocab_size: int,
    devices: Sequence[jax.Device] | None = None,
    mesh: Mesh | AbstractMesh | None = None,
) -> Program:
    """The functions of a config's run, without data.

    Args:
        config: from `load_config`.
        vocab_size: tokens, or classes, of the data; those of `[model]` go first.
        devices: devices to use, all of them; by default every device.
        mesh: a mesh to use instead, which may be abstract.

    Raises:
        UserError: there is no such mesh, or it does not divide the vocabulary of the data.
    """
    mesh = mesh or make_mesh(**config.mesh.model_dump(), devices=devices)
    work = work_of(config)
    size = work.size(vocab_size)
    raise_all(work.size_faults(size, dict(mesh.shape)))
    sharding = config.sharding
    dtypes = policy(config.train.precision)
    compute = compute_table(sequence_parallel=sharding.sequence_parallel, overrides=sharding.rules)
    layout = Layout(
        mesh=mesh,
        compute=compute,
        zero=sharding.zero,
        runner=work.runner(mesh, size),
        tiers=make_tiers(config, dtypes),
        arrange=work.arrange(mesh, compute),
        disk_folder=config.offload.disk_path or f"{config.run.dir}/{DISK}",
    )
    return Program(
        create=work.create(size),
        task=work.task(size),
        layout=layout,
        policy=dtypes,
        make_transform=lambda names: make_transform(config.optimizer, names),
        schedule=make_schedule(config.optimizer, config.run.steps, config.data.batch_size),
        clip_norm=config.optimizer.clip_norm,
        seed=config.run.seed,
        skip_limit=config.guard.skip_limit if config.guard.bad_numbers == "skip" else 0,
        scaling=make_scaling(config.train, dtypes),
        kept=Kept((*work.kept(), *averages(config.optimizer.ema_decay))),
        training=work.training() or make_training(config.lora),
        row_rule=work.row_rule(),
    )


def averages(decay: float) -> tuple[tuple[str, Part], ...]:
    """The average of the parameters, where one is asked for."""
    return ((EMA, Average(decay)),) if decay else ()


def make_training(lora: LoraConfig) -> Training:
    """Which parameters are trained.

    Raises:
        ConfigError: `lora.targets` names a weight that the model does not have.
    """
    if not lora.rank:
        return Everything()
    return Lora(lora.rank, lora.alpha, choose_matrices(lora.targets, MATRICES))


def make_tiers(config: RunConfig, dtypes: Policy) -> Tiers:
    """What does not rest on the device."""
    offload = config.offload
    return Tiers(
        moments=offload.optimizer,
        master=offload.master if dtypes.has_master else "device",
        parameters=offload.parameters,
        fraction=offload.fraction,
        updates=offload.update == "host",
    )


def make_scaling(train: TrainConfig, dtypes: Policy) -> LossScale:
    """What the loss is multiplied by."""
    if not dtypes.is_narrow:
        return Unscaled()
    return DynamicScale(
        start=train.loss_scale,
        window=train.loss_scale_window,
        hysteresis=train.loss_scale_hysteresis,
        floor=train.loss_scale_floor,
    )


def make_report(program: Program) -> Report:
    """Bytes on one device, parameter by parameter."""
    return report(
        program.placement,
        params=program.shapes.params,
        opt_state=program.shapes.opt_state,
        model_state=program.shapes.model_state,
        gradient_dtype=program.policy.gradient_dtype(summed=program.layout.runner.sums_gradients),
        frozen=program.shapes.frozen,
        disk=program.disk.nbytes,
    )


def count_parameters(program: Program, vocab_size: int) -> int:
    """Parameters of the model, each layer once, without the padding of the vocabulary.

    Args:
        program: the run's functions; its mesh may be abstract.
        vocab_size: tokens.
    """

    def count(leaf: Any, names: tuple[str | None, ...]) -> int:
        dims = zip(leaf.shape, names, strict=True)
        return math.prod(min(size, vocab_size) if name == "vocab" else size for size, name in dims)

    saved, placement, weights = program.abstract_saved, program.placement, program.training.weights
    counts = jax.tree.map(
        count,
        weights(saved.params, saved.frozen),
        weights(placement.names, placement.frozen_names),
    )
    return sum(jax.tree.leaves(counts))


def abstract_batch(config: RunConfig, program: Program) -> dict[str, jax.ShapeDtypeStruct]:
    """Shapes and shardings of a run's batches, without data."""
    microbatches = program.layout.microbatches
    rows = work_of(config).blank(config.data.batch_size // microbatches)
    return {
        name: jax.ShapeDtypeStruct(
            (microbatches, *a.shape), a.dtype, sharding=program.batch_sharding(a.ndim + 1)
        )
        for name, a in rows.items()
    }


def lower_step(
    devices: Sequence[jax.Device], config: RunConfig, vocab_size: int
) -> jax.stages.Lowered:
    """A run's own step, lowered for devices that need not be here.

    Args:
        devices: all of them; their platform decides how the step is phrased.
        config: from `load_config`.
        vocab_size: tokens of the data.

    Returns:
        What is compiled to have the program that `train` runs on such devices.
    """
    program = make_program(config, vocab_size=vocab_size, devices=devices)
    traced = program.step.trace(program.abstract_state, abstract_batch(config, program))
    gpus = mesh_platform(program.layout.mesh) == "gpu"
    lowered: jax.stages.Lowered = traced.lower(lowering_platforms=("cuda",) if gpus else None)
    return lowered
