"""`shardtrain launch`: a run on several processes, through engines that exist.

Owns: the table of engines, and what is checked before one of them is asked. Does not own: any
engine; each has a file `launch_NAME`.
"""

import difflib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from shardtrain import launch_k8s, launch_mpi, launch_ray, launch_slurm
from shardtrain.errors import ConfigError, raise_all
from shardtrain.launch_job import (
    Job,
    LaunchOptions,
    check_devices,
    count_faults,
    need_processes,
    refuse_unused,
)
from shardtrain.launch_local import run_local


@dataclass(frozen=True)
class Engine:
    """Something that starts the processes of a run."""

    uses: frozenset[str]
    """The options that it looks at."""
    launch: Callable[[Job, LaunchOptions], int]
    """Starts, writes or submits the job; returns the exit code."""


def _local(job: Job, options: LaunchOptions) -> int:
    count = need_processes(options)
    check_devices(job.config, count)
    return run_local(job.words(), count, restarts=max(0, options.restarts))


ENGINES: Final = {
    "local": Engine(frozenset({"processes", "restarts"}), _local),
    "slurm": Engine(launch_slurm.USES, launch_slurm.launch_slurm),
    "mpi": Engine(launch_mpi.USES, launch_mpi.launch_mpi),
    "k8s": Engine(launch_k8s.USES, launch_k8s.launch_k8s),
    "ray": Engine(launch_ray.USES, launch_ray.launch_ray),
}


def launch(job: Job, options: LaunchOptions) -> int:
    """Start, write or submit a job.

    Args:
        job: What is run.
        options: Where and how.

    Returns:
        The exit code: that of the run where it ran, 0 where it was written or submitted.

    Raises:
        ConfigError: An option is wrong or of no use to the engine.
    """
    if options.engine not in ENGINES:
        near = difflib.get_close_matches(options.engine, ENGINES, n=1)
        raise ConfigError(
            "there is no such engine",
            where="--engine",
            value=options.engine,
            allowed=", ".join(ENGINES),
            cure=f"did you mean {near[0]}?" if near else "",
        )
    engine = ENGINES[options.engine]
    raise_all([*refuse_unused(options, engine.uses), *count_faults(options)])
    return engine.launch(job, options)
