"""The options of the `checkpoints` command.

Owns: the options. Does not own: what is done (`commands_checkpoints`), imported when it runs.
"""

import os
from dataclasses import dataclass
from typing import Annotated, Literal

import tyro


@dataclass(frozen=True)
class CheckpointsOptions:
    """List, verify, compare or adopt the checkpoints of a run; needs none of its devices."""

    run: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
    """A run folder."""
    action: Annotated[Literal["list", "verify", "diff", "adopt"], tyro.conf.Positional] = "list"
    """list them; verify each file and array of them; diff two of them; adopt one from elsewhere."""
    what: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="WHAT")] = ()
    """verify: steps, all by default. diff: two of STEP or RUN:STEP. adopt: the folder of a step."""
    json: bool = False
    """Print JSON and nothing else."""


def checkpoints_command(options: CheckpointsOptions) -> int:
    """Do what is asked for.

    Args:
        options: The command's options.

    Returns:
        0; 1 where something is damaged or differs.

    Raises:
        UserError: There is no such run or step, or it cannot be adopted.
    """
    os.environ["JAX_PLATFORMS"] = "cpu"  # a laptop is enough, and a GPU of a run is left alone
    from shardtrain.commands_checkpoints import adopt, diff, list_steps, verify

    actions = {"list": list_steps, "verify": verify, "diff": diff, "adopt": adopt}
    return actions[options.action](options.run, options.what, json=options.json)
