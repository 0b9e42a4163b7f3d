"""What is launched, and the options of all engines.

Owns: the command line of one process of the run, the options, and the refusal of options and values
that an engine has no use for. Does not own: engines (`launch` has the table of them).
"""

import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any

import tyro

from shardtrain.config import RunConfig, config_faults, resolve_mesh
from shardtrain.errors import ConfigError, ShardingError, UserError, unwritable
from shardtrain.sharding.devices import expected_devices


@dataclass(frozen=True)
class LaunchOptions:
    """The options of `launch`; each engine takes some of them. "" and 0 mean: not given."""

    engine: str = "local"
    """local (processes on this machine), slurm, mpi, k8s or ray."""
    processes: Annotated[int, tyro.conf.arg(aliases=["-n"])] = 0
    """Processes of the run: of this machine (local), ranks (mpi), pods (k8s), workers (ray)."""
    restarts: int = -1
    """local, slurm, k8s, ray: times to start again when a process was lost (76) or hung (124).
    -1 = 0 for local, 10 for the others."""
    gpus: int = 0
    """slurm: GPUs of a node; k8s: of a pod; ray: of a worker."""
    out: str = ""
    """slurm, k8s: the file to write. "" = print it."""
    submit: bool = False
    """slurm: hand the script to sbatch as well."""
    show: bool = False
    """mpi: print the command line and run nothing."""
    nodes: int = 0
    """slurm: nodes of the job. 0 = 1."""
    tasks: int = 0
    """slurm: processes on each node, which share its GPUs. 0 = 1."""
    time: str = ""
    """slurm: time limit of each start, as sbatch takes it. "" = the partition's."""
    partition: str = ""
    """slurm: partition of the job."""
    account: str = ""
    """slurm: account that pays."""
    lines: tuple[str, ...] = ()
    """slurm: further lines of the script, before the run starts, such as "module load cuda"."""
    hosts: str = ""
    """mpi: hosts and their slots, such as a:4,b:4. "" = this machine."""
    image: str = ""
    """k8s: container image that has shardtrain."""
    claim: str = ""
    """k8s: persistent volume claim that all pods share; relative paths of the config lie on it."""
    namespace: str = ""
    """k8s: namespace of the job. "" = the current one."""
    address: str = ""
    """ray: address of a running cluster. "" = RAY_ADDRESS, or a new one on this machine."""
    min_processes: int = 0
    """ray: fewest processes to go on with when nodes are lost. 0 = 1."""


@dataclass(frozen=True)
class Job:
    """A run that is to be started on an engine."""

    config: RunConfig
    """The config with the flags put in."""
    source: str
    """The config as the user named it."""
    flags: tuple[str, ...]
    """The flags of `train` as the user wrote them."""

    def words(self, *, source: str = "", extra: Sequence[str] = ()) -> list[str]:
        """Return the command line of one process.

        Args:
            source: Another name of the config.
            extra: Flags that go before the user's.

        Returns:
            Words; the first is the interpreter that runs now.
        """
        words = [sys.executable, "-m", "shardtrain", "train", source or self.source]
        given = {flag.partition("=")[0] for flag in self.flags}
        added = [flag for flag in extra if flag.partition("=")[0] not in given]
        return [*words, *added, *self.flags]

    @property
    def name(self) -> str:
        """The run's name, as engines allow it: small letters, digits and dashes."""
        plain = re.sub(r"[^a-z0-9]+", "-", self.config.run.name.lower()).strip("-")
        return plain[:40].strip("-") or "run"


def refuse_unused(options: LaunchOptions, used: frozenset[str]) -> list[ConfigError]:
    """Return what is wrong with options that the chosen engine does not look at.

    Args:
        options: The options.
        used: Names of those that the engine looks at.

    Returns:
        One error for each that was given all the same.
    """
    faults = []
    for field in fields(LaunchOptions):
        value: Any = getattr(options, field.name)
        if field.name in used or field.name == "engine" or value == field.default:
            continue
        faults.append(
            ConfigError(
                f"the engine {options.engine} has no use for it",
                where=flag_of(field.name),
                value=str(value),
                allowed=f"with {options.engine}: " + ", ".join(flag_of(n) for n in sorted(used)),
            )
        )
    return faults


def flag_of(name: str) -> str:
    """Return the flag of an option, as a user writes it."""
    return f"--{name}"


def count_faults(options: LaunchOptions) -> list[ConfigError]:
    """Return what is wrong with numbers, for every engine.

    Args:
        options: The options.

    Returns:
        One error for each number below 0.
    """
    numbers = ("processes", "gpus", "nodes", "tasks", "min_processes")
    return [
        ConfigError("must not be negative", where=flag_of(name), value=str(value))
        for name in numbers
        if (value := getattr(options, name)) < 0
    ] + [
        ConfigError("must be -1 or more", where="--restarts", value=str(options.restarts))
        for _ in range(options.restarts < -1)
    ]


def need_processes(options: LaunchOptions) -> int:
    """Return the number of processes.

    Args:
        options: The options.

    Returns:
        At least 1.

    Raises:
        ConfigError: It was not given.
    """
    if options.processes:
        return options.processes
    raise ConfigError(
        "how many processes the run has is not given",
        where=f"shardtrain launch --engine {options.engine}",
        allowed="1 and more",
        cure="add -n 2",
    )


def device_faults(config: RunConfig, processes: int) -> list[UserError]:
    """Return why the degrees of the mesh do not make up the devices, where those are known.

    What else is wrong with these degrees would be said of a mesh that cannot be, so a fault of the
    devices comes before it; but for `data`, whose degree then is another one.

    Args:
        config: The config, of sections that are right each by itself.
        processes: Processes of the run, on machines like this one.
    """
    devices = config.run.cpu_devices
    expected = None if devices % processes else expected_devices(devices // processes)
    if expected is None:
        return []
    try:
        config.mesh.degrees(expected * processes)
    except ShardingError as fault:
        return [*config_faults(config, config.mesh.model_dump() | {"data": -1}), fault]
    return []


def check_devices(config: RunConfig, processes: int) -> None:
    """See to it that the devices can be shared out, and that there is a mesh on them.

    Args:
        config: The config.
        processes: Processes of the run, on machines like this one.

    Raises:
        UserError: They cannot, or there is none.
    """
    devices = config.run.cpu_devices
    if devices % processes:
        below = devices // processes * processes
        raise ConfigError(
            f"the run's virtual CPU devices cannot be shared out equally to {processes} processes",
            where=f"run.cpu_devices={devices}",
            allowed="0, or a multiple of the processes, such as "
            + " or ".join(str(count) for count in (below, below + processes) if count),
            cure=f"add --run.cpu_devices {below + processes}, or change -n",
        )
    expected = expected_devices(devices // processes)
    if expected is not None:
        resolve_mesh(config, expected * processes)


def write_text(path: str, text: str) -> Path:
    """Write a file that the user asked for.

    Args:
        path: The file; its folder is there.
        text: What goes in.

    Returns:
        The path.

    Raises:
        ConfigError: It cannot be written.
    """
    target = Path(path)
    try:
        target.write_text(text, encoding="utf-8")
    except OSError as error:
        raise unwritable("--out", path, error) from None
    return target
