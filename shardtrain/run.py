"""A run, from its config: the one place where every layer meets."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding

from shardtrain.config import RunConfig
from shardtrain.models.transformer import Transformer
from shardtrain.optim.optimizers import make_transform
from shardtrain.optim.schedules import make_schedule
from shardtrain.sharding.mesh import make_mesh
from shardtrain.sharding.rules import compute_table
from shardtrain.strategies.precision import policy
from shardtrain.strategies.stack import choose_loop, make_stack
from shardtrain.tasks.language_model import LanguageModel
from shardtrain.train.build import Create, Layout, Program

PyTree = Any


def make_program(
    config: RunConfig,
    *,
    vocab_size: int,
    devices: Sequence[jax.Device] | None = None,
    mesh: Any = None,
) -> Program:
    """The functions of a config's run.

    Args:
        config: the whole config.
        vocab_size: tokens of the data.
        devices: devices to use, all of them; by default every device.
        mesh: a mesh to use instead, which may be abstract.
    """
    degrees = config.mesh
    mesh = mesh or make_mesh(
        pipeline=degrees.pipeline,
        replica=degrees.replica,
        data=degrees.data,
        context=degrees.context,
        tensor=degrees.tensor,
        devices=devices,
    )
    platform = mesh.devices.flat[0].platform
    sharding = config.sharding
    loop = choose_loop(config.model.layer_loop, config.model.num_layers, platform)
    layout = Layout(
        mesh=mesh,
        compute=compute_table(
            sequence_parallel=sharding.sequence_parallel, overrides=sharding.rules
        ),
        zero=sharding.zero,
        microbatches=config.train.microbatches,
        stack=make_stack(policy=config.train.remat, loop=loop),
    )
    vocab_size = config.model.vocab_size or vocab_size
    return Program(
        create=model_creator(config, vocab_size),
        task=LanguageModel(config.task, vocab_size),
        layout=layout,
        policy=policy(config.train.precision),
        make_transform=lambda names: make_transform(config.optimizer, names),
        schedule=make_schedule(config.optimizer, config.run.steps),
        clip_norm=config.optimizer.clip_norm,
        seed=config.run.seed,
    )


def model_creator(config: RunConfig, vocab_size: int) -> Create:
    """(dtype, rngs) -> the config's model."""
    max_length = config.model.max_length or config.data.sequence_length

    def create(dtype: Any, rngs: nnx.Rngs) -> nnx.Module:
        return Transformer(
            config.model, vocab_size=vocab_size, max_length=max_length, dtype=dtype, rngs=rngs
        )

    return create
