"""GPUs and TPUs that are not here: which the compiler knows, and device objects to compile for.

Owns: which chips of the table are targets, their descriptions, which are read at run time out of
XLA's CUDA plug-in (jax 0.12 and newer carry them as text), and the cure where it is missing.
Does not own: compiling (`compiling`, in a child process, because the compiler may abort), and what
is of TPUs alone (`targets_tpu`).
"""

import importlib.metadata
import importlib.util
import platform
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Final

from shardtrain.errors import ConfigError, UserError
from shardtrain.plan.layout import all_divisors
from shardtrain.plan.targets_tpu import (
    ENVIRONMENT,
    TPUS,
    require_tpu_compiler,
    slice_shape,
    tpu_devices,
)
from shardtrain.sharding import chips

if TYPE_CHECKING:
    import jax

CHIPS: Final[Mapping[str, str]] = {
    chip.name: chip.compiler_name for chip in chips.CHIPS.values() if chip.compiler_name
}
"""Our name of each chip and the compiler's."""

CURE: Final = "pip install 'shardtrain[plan]' on Python 3.12 or newer"
_PLUGINS: Final = ("xla_cuda13", "xla_cuda12")
_OLDEST: Final = (0, 12)


@dataclass(frozen=True)
class Target:
    """A cluster of equal hosts, each with some chips joined by the fast link."""

    chip: str
    """One of `CHIPS` or `TPUS`."""
    hosts: int
    per_host: int

    def __post_init__(self) -> None:
        if self.is_tpu:
            slice_shape(self.chip, self.hosts, self.per_host)
        elif self.chip not in CHIPS:
            row = chips.CHIPS.get(self.chip)
            nearest = row.compile_as if row else None
            raise ConfigError(
                "the compiler has no such chip",
                where="target",
                value=self.chip,
                allowed=", ".join([*CHIPS, *TPUS]),
                cure=f"{nearest} is the nearest that it has" if nearest else "",
            )

    def __str__(self) -> str:
        return f"{self.chip}:{self.hosts}x{self.per_host}"

    @property
    def num_devices(self) -> int:
        """All chips."""
        return self.hosts * self.per_host

    @property
    def is_tpu(self) -> bool:
        """Whether libtpu compiles for it."""
        return self.chip in TPUS

    @property
    def environment(self) -> Mapping[str, str]:
        """What a process that compiles for it has to have."""
        return ENVIRONMENT if self.is_tpu else {}

    @property
    def topology(self) -> str:
        """XLA's word for GPUs: fast-link domains x hosts in each x GPUs of a host.

        All domains have as many hosts; where that leaves a rack partly empty it counts as less.
        """
        link, together = chips.CHIPS[self.chip].fast_link, 1
        if link and link.between_hosts:
            most = link.chips // self.per_host
            together = max((n for n in all_divisors(self.hosts) if n <= most), default=1)
        return f"{self.hosts // together}x{together}x{self.per_host}"


def parse_target(text: str) -> Target:
    """Reads a target.

    Args:
        text: `CHIP:HOSTSxGPUS`.

    Returns:
        The target.

    Raises:
        ConfigError: it is written otherwise, or the chip is not known.

    Example:
        >>> parse_target("h100:64x8").num_devices
        512
    """
    found = re.fullmatch(r"([a-z0-9-]+):([1-9]\d*)x([1-9]\d*)", text)
    if found is None:
        raise ConfigError(
            "not a target",
            where="target",
            value=text,
            allowed="CHIP:HOSTSxGPUS, for example h100:64x8",
        )
    return Target(found[1], int(found[2]), int(found[3]))


def require_compiler() -> Path:
    """Finds the CUDA compiler plug-in.

    Returns:
        The library that holds the descriptions of its targets.

    Raises:
        UserError: a part is missing or too old; the message says how to get it.
    """
    library, missing = _plugin(), missing_parts()
    if missing or library is None:
        raise UserError(
            "compiling for a GPU that is not here needs " + " and ".join(missing),
            where="plan",
            value=f"Python {platform.python_version()}, jax {_version('jax')}",
            cure=CURE,
        )
    return library


def require_compiler_of(target: Target) -> None:
    """Refuses to go on without the compiler for a target.

    Raises:
        UserError: a part is missing or too old; the message says how to get it.
    """
    if target.is_tpu:
        require_tpu_compiler()
    else:
        require_compiler()


def missing_parts() -> list[str]:
    """What the compiler for absent GPUs lacks here, in words; empty when it is complete."""
    missing = []
    if _numbers(_version("jax")) < _OLDEST:
        missing.append("jax 0.12 or newer")
    library = _plugin()
    if library is None:
        missing.append("the CUDA plug-in (jax-cuda13-plugin)")
    # A ptxas on PATH would hide its absence from this machine, and not from the next.
    if not _version("nvidia-cuda-nvcc") and not _version("nvidia-cuda-nvcc-cu12"):
        missing.append("ptxas and libdevice (nvidia-cuda-nvcc)")
    return missing


def describe(target: Target) -> str:
    """The compiler's own description of a target's chip.

    Raises:
        UserError: the plug-in is missing or does not know the chip.
    """
    known = descriptions(require_compiler())
    name = CHIPS[target.chip]
    if name not in known:
        raise UserError(
            f"this version of the compiler does not describe {name}",
            where=f"target {target}",
            allowed=", ".join(chip for chip, full in CHIPS.items() if full in known),
            cure="pip install --upgrade jax jax-cuda13-plugin",
        )
    return known[name]


@cache
def descriptions(library: Path) -> Mapping[str, str]:
    """The descriptions in a plug-in's library, by the chip's full name.

    They lie in it as text of XLA's message `GpuTargetConfigProto`, each from `gpu_device_info` to
    the line of its name.
    """
    found = {}
    for part in library.read_bytes().split(b"gpu_device_info {\n")[1:]:
        text = part.partition(b"\0")[0].decode("utf-8", "replace")
        named = re.search(r'^device_description_str: "([^"]*)".*$', text, re.MULTILINE)
        if named:
            found[named[1]] = "gpu_device_info {\n" + text[: named.end()] + "\n"
    return found


def target_devices(target: Target) -> "list[jax.Device]":
    """Devices to lower and compile for; nothing can run on them.

    Only for a process with JAX_PLATFORMS=cpu, in which the plug-in looks for no driver.
    """
    if target.is_tpu:
        return tpu_devices(target.chip, target.hosts, target.per_host)
    from jax.experimental import topologies

    topology = topologies.get_topology_desc(
        platform="cuda", target_config=describe(target), topology=target.topology
    )
    return list(topology.devices)


def _plugin() -> Path | None:
    """The plug-in's library, found without importing it."""
    spec = importlib.util.find_spec("jax_plugins")
    for folder in (spec and spec.submodule_search_locations) or ():
        for name in _PLUGINS:
            library = Path(folder) / name / "xla_cuda_plugin.so"
            if library.exists():
                return library
    return None


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(n) for n in re.findall(r"\d+", version)[:2])
