"""What a row of the table of chips says: a chip, its fast link and the host it is usually in.

Owns: what each figure means, and its unit. Does not own: the figures (`chips`).

A bandwidth is bytes per second in one direction. A figure that no source has is None, or has no
key, rather than a guess.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final


@dataclass(frozen=True, kw_only=True)
class FastLink:
    """What joins chips without a network card: NVLink, or a TPU's inter-chip interconnect."""

    name: str
    bandwidth: float
    """Bytes/s that one chip sends, over all its links of this kind together."""
    chips: int
    """How many it joins at most: a pair, a host, a rack or a pod."""
    between_hosts: bool = False
    """Whether it goes on from host to host."""
    source: str


@dataclass(frozen=True, kw_only=True)
class Host:
    """A system that chips of this kind are usually in."""

    name: str
    chips: int
    memory: float | None = None
    """Bytes of host memory."""
    network: float | None = None
    """Bytes/s that the host sends to other hosts, over all cards that are there for it."""
    disk_read: float | None = None
    """Bytes/s from local disks."""
    disk_write: float | None = None
    """Bytes/s to local disks."""
    source: str


@dataclass(frozen=True, kw_only=True)
class Chip:
    """One row of the table."""

    name: str
    """Ours, as in `h100:64x8`."""
    device_kinds: tuple[str, ...] = ()
    """What `jax.Device.device_kind` says of it."""
    compiler_name: str | None = None
    """What the compiler for chips that are not here calls it; None if it has no such target."""
    compile_as: str | None = None
    """Name of the nearest chip which that compiler does know."""
    flops: Mapping[str, float] = field(default_factory=dict, hash=False)
    """Dense FLOP/s by what is multiplied, one of `KINDS`. float32 is without TF32, which has a key
    of its own; float64 is with matrix units where they have it; 16-bit formats add up in float32.
    """
    memory_gb: float | None = None
    """Memory as the maker names it, in "GB", which may mean 1e9 bytes or 2**30."""
    usable_memory: int | None = None
    """Bytes of it that a program sees, where a description of the device says so."""
    memory_bandwidth: float | None = None
    """Bytes/s, reads and writes together."""
    fast_link: FastLink | None = None
    host_link: float | None = None
    """Bytes/s between this chip and its host's memory."""
    host: Host | None = None
    products_reach: float | None = None
    """Part of `flops` that large products reach in practice; None = what the planner assumes."""
    price_per_hour: float | None = None
    """Of one chip, in any currency. The table has no prices."""
    sources: Mapping[str, str] = field(default_factory=dict, hash=False)
    """Field of this class to where its figure is from."""

    @property
    def full_name(self) -> str:
        """What others call it."""
        return self.compiler_name or (self.device_kinds or (self.name,))[0]

    @property
    def memory(self) -> float | None:
        """Bytes to plan with: those a program sees, else the maker's gigabytes of 1e9 bytes."""
        gigabytes = None if self.memory_gb is None else self.memory_gb * 1e9
        return gigabytes if self.usable_memory is None else self.usable_memory

    @property
    def target(self) -> str | None:
        """Name of the chip to compile for: this one, or the nearest; None for neither."""
        return self.name if self.compiler_name else self.compile_as


KINDS: Final = ("bfloat16", "float16", "float32", "tf32", "float64", "float8")
"""The keys that `Chip.flops` may have."""
