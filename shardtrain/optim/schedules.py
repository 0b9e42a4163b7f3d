"""Learning-rate schedules: pure functions of the number of the update, the first being 1."""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from shardtrain.optim.config import OptimizerConfig

Schedule = Callable[[jax.Array | int], jax.Array]
Decay = Callable[[jax.Array, OptimizerConfig], jax.Array]
"""(part of the decay gone by, in [0, 1]; config) -> factor on the peak."""


def _cosine(done: jax.Array, config: OptimizerConfig) -> jax.Array:
    return config.final_ratio + (1 - config.final_ratio) * 0.5 * (1 + jnp.cos(jnp.pi * done))


def _linear(done: jax.Array, config: OptimizerConfig) -> jax.Array:
    return 1 - (1 - config.final_ratio) * done


def _constant(done: jax.Array, _config: OptimizerConfig) -> jax.Array:
    return jnp.ones_like(done)


def _stable_then_linear(done: jax.Array, config: OptimizerConfig) -> jax.Array:
    start = 1 - config.decay_fraction
    return _linear(jnp.maximum(done - start, 0) / config.decay_fraction, config)


SCHEDULES: dict[str, Decay] = {
    "cosine": _cosine,
    "linear": _linear,
    "constant": _constant,
    "wsd": _stable_then_linear,
}
"""One row a schedule: the shape after the warm-up."""


def make_schedule(config: OptimizerConfig, steps: int, batch_size: int = 0) -> Schedule:
    """The learning rate as a function of the update's number.

    Update k uses `schedule(k)`, so the first update is not wasted on a rate of zero: with
    `warmup_steps = 4` and a peak of 1 the updates use 0.25, 0.5, 0.75, 1. The last uses the final
    rate.

    Args:
        config: the `[optimizer]` section.
        steps: updates of the whole run (`run.steps`), whatever ends it early.
        batch_size: samples of a step, for the linear scaling rule (`reference_batch`).
    """
    reference = config.reference_batch
    peak = config.learning_rate * (batch_size / reference if reference else 1.0)
    shape = SCHEDULES[config.schedule]
    warmup = config.warmup_steps

    def schedule(update: jax.Array | int) -> jax.Array:
        # The widest there is: in float32 two programs may round a cosine apart, and so runs that
        # are compared in float64.
        at = jnp.asarray(update, jnp.result_type(float))
        done = jnp.clip((at - warmup) / max(steps - warmup, 1), 0, 1)
        rise = jnp.minimum(at / max(warmup, 1), 1) if warmup else jnp.ones_like(at)
        return peak * rise * shape(done, config)

    return schedule
