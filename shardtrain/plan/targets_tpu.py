"""TPUs that are not here: their names, the shape of a slice, and device objects to compile for.

Owns: what libtpu calls a chip, which slices there are, and the cure where libtpu is missing. The
compiler for TPUs is in it, and needs no TPU. Does not own: compiling (`compiling`).
"""

import importlib.util
import itertools
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from shardtrain.errors import ConfigError, UserError
from shardtrain.plan.layout import all_divisors
from shardtrain.sharding import chips

if TYPE_CHECKING:
    import jax

TPUS: Final[Mapping[str, str]] = {
    "tpu-v4": "v4",
    "tpu-v5e": "v5e",
    "tpu-v5p": "v5p",
    "tpu-v6e": "v6e",
}
"""Our name of each chip and the compiler's."""

CURE: Final = "pip install 'shardtrain[plan-tpu]' on Python 3.12 or newer"

_FLAT: Final = {1: (1, 1), 4: (2, 2), 8: (2, 4)}
_SOLID: Final = {4: (2, 2, 1)}
_HOSTS: Final[Mapping[str, Mapping[int, tuple[int, ...]]]] = {
    "tpu-v4": _SOLID,
    "tpu-v5e": _FLAT,
    "tpu-v5p": _SOLID,
    "tpu-v6e": _FLAT,
}
"""Chips of a host to their place in the mesh of links, by chip."""

ENVIRONMENT: Final = {
    "TPU_SKIP_MDS_QUERY": "1",  # no question to a cloud that this machine is not in
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # no chip is taken, so two can compile at once
}
"""What a process that only compiles tells libtpu."""


def slice_shape(chip: str, hosts: int, per_host: int) -> tuple[int, ...]:
    """The shape of a slice, as near to a square or cube as its hosts allow.

    Args:
        chip: one of `TPUS`.
        hosts: of the slice.
        per_host: chips of each.

    Returns:
        Chips along each dim of the mesh of links.

    Raises:
        ConfigError: there are no such hosts, or no slice is so large.

    Example:
        >>> slice_shape("tpu-v5e", 4, 8), slice_shape("tpu-v5p", 16, 4)
        ((4, 8), (4, 4, 4))
    """
    where, value = "target", f"{chip}:{hosts}x{per_host}"
    bounds = _HOSTS[chip].get(per_host)
    if bounds is None or (per_host == 1 and hosts > 1):
        raise ConfigError(
            "there are no such hosts",
            where=where,
            value=value,
            allowed=" or ".join(
                f"{chip}:{'1' if n == 1 else 'HOSTS'}x{n}" for n in sorted(_HOSTS[chip])
            ),
        )
    link = chips.CHIPS[chip].fast_link
    if link and hosts * per_host > link.chips:
        raise ConfigError(
            "more chips than a pod has; several slices are not planned",
            where=where,
            value=value,
            allowed=f"at most {link.chips} chips",
        )
    shapes = (
        tuple(map(math.prod, zip(bounds, parts, strict=True)))
        for parts in itertools.product(all_divisors(hosts), repeat=len(bounds))
        if math.prod(parts) == hosts
    )
    return min(shapes, key=lambda shape: (max(shape) - min(shape), shape))


def missing_tpu_parts() -> list[str]:
    """What the compiler for absent TPUs lacks here, in words; empty when it is complete."""
    return [] if importlib.util.find_spec("libtpu") else ["its compiler (libtpu)"]


def require_tpu_compiler() -> None:
    """Refuses to go on without the compiler.

    Raises:
        UserError: it is missing; the message says how to get it.
    """
    if missing := missing_tpu_parts():
        raise UserError(
            "compiling for a TPU that is not here needs " + " and ".join(missing),
            where="plan",
            cure=CURE,
        )


def tpu_devices(chip: str, hosts: int, per_host: int) -> "list[jax.Device]":
    """Devices to lower and compile for; the arguments are those of `slice_shape`.

    Only for a process with JAX_PLATFORMS=cpu, in which nothing looks for a TPU.
    """
    from jax.experimental import topologies

    shape, bounds = slice_shape(chip, hosts, per_host), _HOSTS[chip][per_host]
    # A v4 has two cores, which programs see as one device.
    options: dict[str, Any] = {"chip_config_name": "megacore"} if chip == "tpu-v4" else {}
    topology = topologies.get_topology_desc(
        platform="tpu",
        topology_name=f"{TPUS[chip]}:{'x'.join(map(str, shape))}",
        chips_per_host_bounds=[*bounds, 1][:3],
        **options,
    )
    return list(topology.devices)
