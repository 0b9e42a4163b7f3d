"""Clusters: which chips, how many, what joins them; and chips from a user's own file.

Owns: reading `h100:64x8`, which devices the fast link joins, what of a host's network one device
has, and the TOML form of a row. Does not own: the rows that come with the package
(`shardtrain/sharding/chips.py`), and which chips the compiler knows (`targets`).
"""

import difflib
import re
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Final, Literal, TypeAlias

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic_core import ErrorDetails

from shardtrain.errors import ConfigError, UserError, raise_all, unreadable
from shardtrain.sharding.chip import KINDS, Chip, FastLink, Host
from shardtrain.sharding.chips import CHIPS

Chips: TypeAlias = Mapping[str, Chip]
"""A table of chips by name."""


@dataclass(frozen=True)
class Cluster:
    """Equal hosts with some chips each."""

    chip: Chip
    hosts: int
    per_host: int

    def __str__(self) -> str:
        return f"{self.chip.name}:{self.hosts}x{self.per_host}"

    @property
    def num_devices(self) -> int:
        """All chips."""
        return self.hosts * self.per_host

    @property
    def domain(self) -> int:
        """How many neighbouring devices the fast link joins: whole hosts, or a part of one."""
        link = self.chip.fast_link
        if link is None:
            return 1
        if link.between_hosts and link.chips > self.per_host:
            return min(self.hosts, link.chips // self.per_host) * self.per_host
        return min(link.chips, self.per_host)

    @property
    def fast_link(self) -> float | None:
        """Bytes/s that a device sends to others of its domain; None where nothing joins them."""
        link = self.chip.fast_link
        return None if link is None or self.domain == 1 else link.bandwidth

    @property
    def network_per_device(self) -> float | None:
        """Bytes/s that a device sends to other hosts while its neighbours do too.

        It is a chip's part of its usual host. With fewer chips a host it is not more, as a card
        belongs to a chip; with more chips they share the cards.
        """
        host = self.chip.host
        if host is None or host.network is None:
            return None
        return host.network / max(host.chips, self.per_host)

    def notes(self) -> list[str]:
        """What a reader of a plan for this cluster has to know about its figures."""
        chip, link, host = self.chip, self.chip.fast_link, self.chip.host
        notes = []
        if chip.compiler_name is None and chip.compile_as:
            notes.append(
                f"{chip.name} is compiled as {chip.compile_as}, the nearest that the compiler knows"
            )
        if self.per_host > self.domain:
            joined = f"{link.name} joins {self.domain} of" if link else "no fast link joins"
            notes.append(
                f"{joined} the {self.per_host} chips of a host; the rest goes over the host's bus"
            )
        if host and host.network and self.per_host > host.chips:
            notes.append(
                f"the network is that of {host.name} with {host.chips} chips, shared by "
                f"{self.per_host}"
            )
        if missing := self._missing():
            notes.append(f"no figure for {', '.join(missing)} of {chip.name}")
        return notes

    def _missing(self) -> list[str]:
        chip, host = self.chip, self.chip.host
        figures = {
            "FLOP/s": chip.flops or None,
            "memory": chip.memory,
            "memory bandwidth": chip.memory_bandwidth,
            "host link": chip.host_link,
            "host memory": host and host.memory,
            "network": self.network_per_device if self.hosts > 1 else 0.0,
        }
        return [name for name, figure in figures.items() if figure is None]


def parse_cluster(text: str, chips: Chips = CHIPS) -> Cluster:
    """Reads a cluster.

    Args:
        text: `CHIP:HOSTSxCHIPS`; a desktop with one card is 1x1.
        chips: those that may be named.

    Returns:
        The cluster.

    Raises:
        ConfigError: it is written otherwise, or there is no such chip.

    Example:
        >>> cluster = parse_cluster("gb200:36x4")
        >>> cluster.num_devices, cluster.domain
        (144, 72)
    """
    found = re.fullmatch(r"([\w.-]+):([1-9]\d*)x([1-9]\d*)", text)
    if found is None:
        raise ConfigError(
            "not a cluster",
            where="target",
            value=text,
            allowed="CHIP:HOSTSxCHIPS, for example h100:64x8 or rtx4090:1x1",
        )
    chip = _known("target", found[1], chips)
    return Cluster(chip, hosts=int(found[2]), per_host=int(found[3]))


def read_chips(path: str | Path) -> Chips:
    """Reads a user's chips.

    A table a chip, under its name. `like` names the chip whose figures it has where it gives none
    of its own; a name of the package's table with `like` set to itself changes that row.

    Args:
        path: a TOML file.

    Returns:
        The package's table with those of the file in it.

    Raises:
        ConfigError: it cannot be read, or a row is wrong; all faults of the file together.
    """
    chips, faults = dict(CHIPS), list[UserError]()
    for name, table in _read(path).items():
        try:
            chips[name] = _chip(path, name, table, chips)
        except ConfigError as fault:
            faults += [fault, *fault.also]
            fault.also = ()
    raise_all(faults)
    return chips


_ROW = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)
_Rate = Annotated[float, Field(gt=0)]
_Count = Annotated[int, Field(ge=1)]
# KINDS, which a type cannot be made of
_Kind = Literal["bfloat16", "float16", "float32", "tf32", "float64", "float8"]


class _LinkRow(BaseModel):
    model_config = _ROW

    name: str = "fast link"
    bandwidth: _Rate
    chips: _Count
    between_hosts: bool = False


class _HostRow(BaseModel):
    model_config = _ROW

    name: str = "host"
    chips: _Count
    memory: _Rate | None = None
    network: _Rate | None = None
    disk_read: _Rate | None = None
    disk_write: _Rate | None = None


class _ChipRow(BaseModel):
    """The keys of a row; what each means stands with the classes of `shardtrain.sharding.chip`."""

    model_config = _ROW

    like: str | None = None
    source: str | None = None
    device_kinds: list[str] = Field(default_factory=list)
    compile_as: str | None = None
    flops: dict[_Kind, _Rate] = Field(default_factory=dict)
    memory_gb: _Rate | None = None
    usable_memory: _Count | None = None
    memory_bandwidth: _Rate | None = None
    host_link: _Rate | None = None
    products_reach: Annotated[float, Field(gt=0, le=1)] | None = None
    price_per_hour: Annotated[float, Field(ge=0)] | None = None
    fast_link: _LinkRow | None = None
    host: _HostRow | None = None


_FIGURES: Final = ("flops", "memory_gb", "usable_memory", "memory_bandwidth", "host_link")
_PARTS: Final[Mapping[str, type[BaseModel]]] = {"fast_link": _LinkRow, "host": _HostRow}


def _read(path: str | Path) -> dict[str, Any]:
    try:
        return tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise unreadable(path, error) from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"not TOML: {error}", where=str(path)) from None


def _chip(path: str | Path, name: str, table: Any, chips: Chips) -> Chip:
    """One row of a file."""
    where = f"{path}: {name}"
    if not isinstance(table, dict) or re.fullmatch(r"[a-z0-9][a-z0-9.-]*", name) is None:
        raise ConfigError(
            "not a chip",
            where=where,
            allowed="a table under a name of small letters, digits, dots and dashes",
            cure=f"write [{name.lower()}] and its keys below",
        )
    like = table.get("like")
    base = _known(f"{where}.like", like, chips) if isinstance(like, str) else None
    try:
        row = _ChipRow.model_validate(_merged(base, table))
    except ValidationError as error:
        raise_all([_fault(where, detail) for detail in error.errors()])
        raise
    if "compile_as" in table:
        targets = {other.name: other for other in CHIPS.values() if other.compiler_name}
        _known(
            f"{where}.compile_as", row.compile_as or "", targets, "the compiler has no such chip"
        )
    return _made(name, row, base, table, row.source or str(path))


def _merged(base: Chip | None, table: Mapping[str, Any]) -> dict[str, Any]:
    """A row's keys over those of the chip that it is like."""
    if base is None:
        return dict(table)
    under = {
        key: getattr(base, key)
        for key in ("compile_as", "products_reach", "price_per_hour", *_FIGURES)
    }
    under["flops"] = dict(base.flops)
    for key, part in (("fast_link", base.fast_link), ("host", base.host)):
        if part is not None:
            under[key] = {name: getattr(part, name) for name in _PARTS[key].model_fields}
    if "memory_gb" in table:
        under["usable_memory"] = None
    for key, value in table.items():
        both = isinstance(value, dict) and isinstance(under.get(key), dict)
        under[key] = under[key] | value if both else value
    return under


def _made(
    name: str, row: _ChipRow, base: Chip | None, table: Mapping[str, Any], source: str
) -> Chip:
    """The chip of a row, with the file as the source of what the file gives."""
    link = host = None
    if row.fast_link:
        kept = base.fast_link if base and "fast_link" not in table else None
        link = kept or FastLink(**row.fast_link.model_dump(), source=source)
    if row.host:
        usual = base.host if base and "host" not in table else None
        host = usual or Host(**row.host.model_dump(), source=source)
    chip = (
        base
        if base and base.name == name
        else Chip(name=name, compile_as=base.target if base else None)
    )
    return replace(
        chip,
        device_kinds=tuple(row.device_kinds) or chip.device_kinds,
        compile_as=row.compile_as or chip.compile_as,
        flops={str(kind): rate for kind, rate in row.flops.items()},
        memory_gb=row.memory_gb,
        usable_memory=row.usable_memory,
        memory_bandwidth=row.memory_bandwidth,
        fast_link=link,
        host_link=row.host_link,
        host=host,
        products_reach=row.products_reach,
        price_per_hour=row.price_per_hour,
        sources=dict(base.sources if base else {})
        | dict.fromkeys([key for key in _FIGURES if key in table], source),
    )


def _known(where: str, name: str, chips: Chips, message: str = "there is no such chip") -> Chip:
    """The chip of that name, or a fault that names the nearest."""
    if name in chips:
        return chips[name]
    raise ConfigError(
        message,
        where=where,
        value=name,
        allowed=", ".join(chips),
        cure=_near(name.lower(), chips),
    )


def _near(name: str, names: Iterable[str]) -> str:
    near = difflib.get_close_matches(name, names, n=1)
    return f"did you mean {near[0]}?" if near else ""


def _fault(where: str, detail: ErrorDetails) -> ConfigError:
    """What pydantic found, in the words of a file."""
    path, kind, value = [str(part) for part in detail["loc"]], detail["type"], detail["input"]
    is_key = path[-1] == "[key]"
    if is_key:
        path.pop()
    place = ".".join([where, *path])
    if is_key or kind == "extra_forbidden":
        part = _PARTS.get(path[0], _ChipRow) if len(path) > 1 else _ChipRow
        keys = list(KINDS) if is_key else list(part.model_fields)
        return ConfigError(
            "unknown key", where=place, allowed=", ".join(keys), cure=_near(path[-1], keys)
        )
    if kind == "missing":
        return ConfigError("is missing", where=place)
    message = detail["msg"].removeprefix("Input ").rstrip(".")
    return ConfigError(message, where=place, value=repr(value))
