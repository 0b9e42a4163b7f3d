"""`shardtrain verify --precision`: a config's precision against float32, in losses.

Owns: which two runs are compared, and what is printed. Does not own: the comparison (`verify`).
"""

import json as json_

import jax

from shardtrain.config import LanguageRunConfig, RunConfig, load_config
from shardtrain.errors import EXIT_FAILED, ConfigError
from shardtrain.run import build
from shardtrain.train.screen import make_console
from shardtrain.verify.precision_gap import Gap, loss_gap

_ROWS = 10
"""Steps of which the losses are printed."""


def precision_gap(config: RunConfig, *, steps: int) -> Gap:
    """Trains a config in its own precision and in float32 on this machine's devices.

    Args:
        config: from `load_config`; its schedule is that of `run.steps`, however many are done.
        steps: updates.

    Raises:
        ConfigError: it is float32 already.
    """
    if config.train.precision in ("float32", "float64"):
        raise ConfigError(
            "is what others are compared with",
            where="train.precision",
            value=config.train.precision,
            cure="add, for instance, --train.precision bfloat16",
        )
    devices = jax.devices()
    sections = config.model_dump()
    sections["train"] |= {"precision": "float32"}
    # That kernel is none for float32.
    if isinstance(config, LanguageRunConfig) and config.model.attention == "cudnn":
        sections["model"] |= {"attention": "auto"}
    own = build(config, devices=devices)
    # GPUs round the operands of float32 products to 10 bits unless told otherwise.
    with jax.default_matmul_precision("highest"):
        wide = build(load_config(sections), devices=devices)
        theirs = (wide.program, wide.batch_at)
        return loss_gap((own.program, own.batch_at), theirs, steps=steps)


def precision_command(config: RunConfig, *, steps: int, shrink: bool, json: bool) -> int:
    """`shardtrain verify --precision`: 0 within the limit, 1 beyond; 0 steps = all of the run."""
    if shrink:
        raise ConfigError(
            "a shrunken model says nothing of a loss",
            where="--shrink",
            cure="leave out one of --shrink and --precision",
        )
    gap = precision_gap(config, steps=steps or config.run.steps)
    if json:
        print(
            json_.dumps(
                {
                    "precision": gap.precision,
                    "steps": len(gap.found),
                    "final": gap.final,
                    "largest": gap.largest,
                    "largest_at": gap.step,
                    "limit": gap.limit.gap,
                    "source": gap.limit.source,
                    "within": gap.within,
                    "losses": list(gap.found),
                    "float32": list(gap.float32),
                }
            )
        )
        return 0 if gap.within else EXIT_FAILED
    console = make_console(stderr=False)
    console.print("  step  float32      here       gap (of smoothed losses)", markup=False)
    for row in range(1, _ROWS + 1):
        at = max(row * len(gap.found) // _ROWS, 1) - 1
        wide, own = gap.float32[at], gap.found[at]
        console.print(f"{at + 1:6d}  {wide:7.4f}  {own:8.4f}  {gap.smoothed[at]:+9.3%}")
    verdict = "within" if gap.within else "BEYOND"
    console.print(
        f"{gap.precision}: final {gap.final:+.3%}, largest {gap.largest:.3%} at step {gap.step}; "
        f"{verdict} the limit of {gap.limit.gap:.2%}\n{gap.limit.source}",
        markup=False,
        soft_wrap=True,
    )
    return 0 if gap.within else EXIT_FAILED
