"""The command line of `plan`.

Owns: which word is the config, and what must be settled before jax starts. Does not own: the
options (`shardtrain.plan.options`), the plan, or how it is told (`commands_plan`).
"""

import os
import sys
from dataclasses import dataclass
from typing import Annotated

import tyro

from shardtrain.config import LanguageRunConfig, RunConfig
from shardtrain.plan.options import PlanOptions


@dataclass(frozen=True)
class PlanFlags(PlanOptions):
    """Say whether a config fits a cluster, how fast it is, and which layout is best."""

    config: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="CONFIG")] = "quickstart"
    """A TOML file, a run folder, or a shipped config."""


def plan_command(options: PlanFlags, config: RunConfig) -> int:
    """Print a plan.

    Args:
        options: The command's options.
        config: The config that is planned.

    Returns:
        0 it fits, 4 it does not, 5 a promise is broken.

    Raises:
        UserError: The target, the layout or another option is wrong, or the compiler fails.
    """
    if not options.target:
        print(f"note: no --target is given: this plans for {options.cluster}", file=sys.stderr)
    # Nothing runs here, and an installed plug-in would look for its devices.
    os.environ["JAX_PLATFORMS"] = "cpu"
    if not isinstance(config, LanguageRunConfig):
        from shardtrain.commands_plan_bytes import plan_bytes

        return plan_bytes(options, config)
    from shardtrain.commands_plan import run_plan

    return run_plan(options, config)
