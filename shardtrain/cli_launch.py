"""The command line of `launch`.

Owns: which word is the config, and which words go to the processes. Does not own: the options
(`shardtrain.launch_job`) and engines (`shardtrain.launch`).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Final

import tyro

from shardtrain.config import RunConfig
from shardtrain.launch import launch
from shardtrain.launch_job import Job, LaunchOptions

SHORT: Final = {"-n": "--processes"}
"""Flags of one letter."""


@dataclass(frozen=True)
class LaunchFlags(LaunchOptions):
    """Run a config in several processes: on this machine, Slurm, Open MPI, Kubernetes or Ray."""

    config: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="CONFIG")] = "quickstart"
    """A TOML file, a run folder, or a shipped config."""


def launch_command(options: LaunchFlags, config: RunConfig, words: Sequence[str]) -> int:
    """Start, write or submit a run.

    Args:
        options: The command's options.
        config: The config, with the flags put in.
        words: The flags of the config, as they were written.

    Returns:
        The exit code of the run where it ran; 0 where it was written or submitted.

    Raises:
        UserError: An option or the config is wrong.
    """
    return launch(Job(config, options.config, tuple(words)), options)
