"""Which embedding table is split over devices in which way, and where its rows are.

Owns: the choice by size and use, and from the ids of a sample to rows. Does not own: the exchange
(`ops.tables`) and the parameters (`models.tables`).

Tables of one kind lie in one array, a bank, one after another. Nothing here depends on the mesh, so
that a checkpoint fits any: `parts` says how many devices there may be.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from shardtrain.errors import ConfigError

WHOLE: Final = "dense"
"""Small tables: every device has all of them, with a gradient of all their rows."""
KINDS: Final = (WHOLE, "rows", "columns", "tables")
NOTHING: Final = -1
"""The row that looks nothing up."""
_NARROWEST: Final = 16
"""Columns that a device's part of a row has at least: 64 bytes, the least that memory hands out."""
_MOST_ROWS: Final = 2**31 - 2**28
"""Numbers above those of rows stand for lookups of none (`ops.tables.summed`)."""
_WORDS: Final = {
    WHOLE: "whole on every device",
    "rows": "split by rows",
    "columns": "split by columns",
    "tables": "whole, each on one device",
}


@dataclass(frozen=True)
class Bank:
    """The tables of one kind."""

    kind: str
    slots: tuple[int, ...]
    """What is looked up, in order: numbers of fields, `NOTHING` where a slot is there for equal
    numbers in all parts alone."""
    offsets: tuple[int, ...]
    """The first row of each slot's table."""
    rows: int
    """Of all tables together, with those that only fill up."""

    def ids(self, ids: Any, where: Callable[..., Any]) -> Any:
        """Rows of the bank.

        Args:
            ids: of each field [..., fields].
            where: numpy's or jax.numpy's.
        """
        fields = np.array([max(slot, 0) for slot in self.slots])
        used = np.array(self.slots) != NOTHING
        rows = ids[..., fields] + np.array(self.offsets, np.int32)
        return where(used, rows, np.int32(NOTHING))


@dataclass(frozen=True)
class TableLayout:
    """All tables of a model."""

    sizes: tuple[int, ...]
    """Rows of each field's table."""
    width: int
    parts: int
    banks: tuple[Bank, ...]

    @property
    def order(self) -> tuple[int, ...]:
        """Of each field, its place in the slots of all banks."""
        slots = [slot for bank in self.banks for slot in bank.slots]
        return tuple(slots.index(field) for field in range(len(self.sizes)))

    @property
    def split(self) -> tuple[Bank, ...]:
        """Those that are split over devices."""
        return tuple(bank for bank in self.banks if bank.kind != WHOLE)

    def gradient_bytes(self, batch: int, num_devices: int) -> int:
        """Bytes on one device of the gradient of a batch's rows, in float32.

        Args:
            batch: samples of a step.
            num_devices: that tables are split over.
        """
        total = 0
        for bank in self.split:
            slots, width = len(bank.slots), self.width
            if bank.kind == "tables":
                slots //= num_devices
            elif bank.kind == "columns":
                width //= num_devices
            total += 4 * batch * slots * (width + 1)
        return total

    def words(self) -> list[str]:
        """A line for each kind: which fields, how many rows and bytes of float32."""
        lines = []
        for bank in self.banks:
            fields = [slot for slot in bank.slots if slot != NOTHING]
            rows = sum(self.sizes[field] for field in fields)
            names = ", ".join(map(str, sorted(fields)))
            lines.append(
                f"tables {_WORDS[bank.kind]}: field{'s' if len(fields) > 1 else ''} {names}; "
                f"{rows:,} rows, {4 * bank.rows * self.width:,} bytes in float32"
            )
        return lines


def lay_out(
    sizes: Sequence[int], width: int, *, placement: str, dense_rows: int, parts: int
) -> TableLayout:
    """Choose a kind for every table.

    Tables of at most `dense_rows` rows are whole everywhere. Of the others, with "auto", those that
    are no more than a fair share are whole on one device each, by size, the largest first, to the
    part with the fewest rows and with equally many tables everywhere, since each is read once a
    sample; larger ones are split by columns, which sends the least, or by rows where columns would
    be narrower than 64 bytes.

    Args:
        sizes: rows of each table.
        width: of all tables.
        placement: "auto", or the kind for all that are not small.
        dense_rows: largest that is small.
        parts: into how many a table may be split.

    Raises:
        ConfigError: a bank has more rows than there are numbers for them.
    """
    fields = range(len(sizes))
    kinds = {WHOLE: [f for f in fields if sizes[f] <= dense_rows]}
    large = [f for f in fields if sizes[f] > dense_rows]
    if placement == "auto":
        fits = width % parts == 0 and width // parts >= _NARROWEST
        shared = _no_more_than_a_share(large, sizes, parts)
        kinds["columns" if fits else "rows"] = [f for f in large if f not in shared]
        kinds["tables"] = shared
    else:
        kinds[placement] = large
    made = {
        kind: _in_parts(chosen, sizes, parts)
        if kind == "tables"
        else _in_a_row(kind, chosen, sizes, parts)
        for kind, chosen in kinds.items()
        if chosen
    }
    banks = tuple(made[kind] for kind in KINDS if kind in made)
    for bank in banks:
        if bank.rows > _MOST_ROWS:
            raise ConfigError(
                "they have more rows together than 32 bits can number",
                where=f"model.table_sizes: fields {', '.join(map(str, bank.slots))}",
                value=f"{bank.rows:,}",
                allowed=f"{_MOST_ROWS:,}",
                cure="hash ids to smaller tables",
            )
    return TableLayout(tuple(sizes), width, parts, banks)


def _no_more_than_a_share(fields: list[int], sizes: Sequence[int], parts: int) -> list[int]:
    """Those that can be shared out whole so that no part has much more than another."""
    while fields:
        share = sum(sizes[f] for f in fields) / parts
        fewer = [f for f in fields if sizes[f] <= share]
        if len(fewer) == len(fields):
            break
        fields = fewer
    return fields


def _in_a_row(kind: str, fields: list[int], sizes: Sequence[int], parts: int) -> Bank:
    ends = np.cumsum([sizes[f] for f in fields]).tolist()
    rows = -(-ends[-1] // parts) * parts if kind == "rows" else ends[-1]
    return Bank(kind, tuple(fields), (0, *ends[:-1]), rows)


def _in_parts(fields: list[int], sizes: Sequence[int], parts: int) -> Bank:
    most = -(-len(fields) // parts)
    owned: list[list[int]] = [[] for _ in range(parts)]
    filled = [0] * parts
    for field in sorted(fields, key=lambda f: (-sizes[f], f)):
        part = min((p for p in range(parts) if len(owned[p]) < most), key=lambda p: (filled[p], p))
        owned[part].append(field)
        filled[part] += sizes[field]
    block = max(filled)
    slots, offsets = [], []
    for part, own in enumerate(owned):
        first = part * block
        for place in range(most):
            slots.append(own[place] if place < len(own) else NOTHING)
            offsets.append(first if place < len(own) else 0)
            first += sizes[own[place]] if place < len(own) else 0
    return Bank("tables", tuple(slots), tuple(offsets), parts * block)
