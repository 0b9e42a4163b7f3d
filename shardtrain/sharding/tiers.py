"""Where the state of a run rests: in the device's memory, in its host's, or on a disk.

Owns: the choice of leaves and the names of memories. Does not own: how a leaf is split (that is the
same in every memory, `placement`), how leaves travel (`optim.sweep`), and the disk (`disk`).
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import jax
from jax.sharding import NamedSharding, SingleDeviceSharding
from numpy.typing import NDArray

from shardtrain.errors import ConfigError

DEVICE: Final = "device"
HOST: Final = "pinned_host"
"""jax's names of memories; pages of `HOST` stay where they are, so that devices can copy alone."""

MASTER: Final = "master"
"""Where the optimizer's state has the wider copy of the parameters; all else are moments."""


@dataclass(frozen=True)
class Tiers:
    """Where each part of the state rests: "device", "host" or "disk"."""

    moments: str = "device"
    master: str = "device"
    parameters: str = "device"
    """Those of the layers; the ends are needed all the time."""
    fraction: float = 1.0
    """Part of those bytes that is not on the device at least; the largest leaves go first."""
    updates: bool = False
    """Whether the host computes the update."""

    @property
    def any(self) -> bool:
        """Whether anything is not on the device."""
        return {self.moments, self.master, self.parameters} != {"device"}

    def uses(self, tier: str) -> bool:
        """Whether anything rests there."""
        return tier in (self.moments, self.master, self.parameters)

    def state_in(self, tier: str, leaves: Iterable[tuple[str, int]]) -> frozenset[str]:
        """The leaves of the optimizer's state that rest in a tier.

        Args:
            tier: "host" or "disk".
            leaves: (path, bytes) of those that have a parameter's shape.

        Returns:
            Their paths.
        """
        return self._largest(
            (path, size)
            for path, size in leaves
            if tier == (self.master if path.split("/")[0] == MASTER else self.moments)
        )

    def layers_in(self, tier: str, leaves: Iterable[tuple[str, int]]) -> frozenset[str]:
        """The parameters that rest in a tier.

        Args:
            tier: "host" or "disk".
            leaves: (path, bytes) of those of the layers.

        Returns:
            Their paths.
        """
        return self._largest(leaves if self.parameters == tier else ())

    def _largest(self, leaves: Iterable[tuple[str, int]]) -> frozenset[str]:
        """So many of the largest leaves as make `fraction` of all."""
        wanted = list(leaves)
        goal, moved = self.fraction * sum(size for _, size in wanted), 0
        chosen = []
        for path, size in sorted(wanted, key=lambda leaf: -leaf[1]):
            if moved >= goal:
                break
            chosen.append(path)
            moved += size
        return frozenset(chosen)


def of_pieces(
    shape: tuple[int, ...], target: NamedSharding, piece: Callable[[jax.Device], NDArray[Any]]
) -> jax.Array:
    """An array of what each device of this process has of it, in any memory.

    Args:
        shape: the global one.
        target: its sharding.
        piece: a device -> its part, as an array of the host.
    """
    pieces = [
        jax.device_put(piece(device), SingleDeviceSharding(device, memory_kind=target.memory_kind))
        for device in target.mesh.local_devices
    ]
    return jax.make_array_from_single_device_arrays(shape, target, pieces)


def require_host_memory(devices: Sequence[jax.Device]) -> None:
    """Refuses devices that cannot reach their host's memory.

    Raises:
        ConfigError: jax names no such memory for them.
    """
    for device in devices:
        if device.process_index == jax.process_index():
            kinds = [memory.kind for memory in device.addressable_memories()]
            if HOST not in kinds:
                raise ConfigError(
                    f"{device.device_kind} has no host memory that jax can use",
                    where="offload",
                    value=", ".join(kinds) or "no memory at all",
                    allowed=f"devices with {HOST}: NVIDIA GPUs, TPUs, CPUs",
                    cure='set offload.optimizer, offload.master and offload.parameters to "device"',
                )
