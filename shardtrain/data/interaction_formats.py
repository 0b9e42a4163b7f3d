"""Lines of interaction files as rows: MovieLens, Criteo, and CSV with named columns.

Owns: what a line means, and why one cannot be used. Does not own: files, policies, the binary form
(`interaction_files`).
"""

import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from shardtrain.data.config import InteractionsConfig
from shardtrain.errors import ConfigError

Row = tuple[float, list[float], list[int]]
"""Label, dense numbers, ids."""
Parse = Callable[[list[str]], Row]
"""From the columns of a line.

Raises BadRowError: it cannot be used."""
CRITEO_DENSE: Final = 13
CRITEO_FIELDS: Final = 26
_RATING: Final = ("userId", "movieId", "rating", "timestamp")


_FORMS: Final = {
    "movielens": (2, (0, 1)),
    "criteo": (CRITEO_FIELDS, (CRITEO_DENSE,)),
}
"""Ids of a format, and how many numbers a run may want of it."""


class BadRowError(Exception):
    """Why a row cannot be used."""


@dataclass(frozen=True)
class Schema:
    """What a run wants of a row."""

    sizes: tuple[int, ...]
    """Rows of each field's table."""
    num_dense: int
    config: InteractionsConfig


def misfits(
    kind: str, config: InteractionsConfig, *, fields: int, num_dense: int
) -> list[ConfigError]:
    """Return why rows of a format are not what a model reads.

    Args:
        kind: the format.
        config: the `[data]` section.
        fields: ids that the model reads, one a table.
        num_dense: numbers that it reads.
    """
    faults = []
    if kind in _FORMS:
        ids, numbers = _FORMS[kind]
        if fields != ids or num_dense not in numbers:
            fault = ConfigError(
                f"such rows have {ids} ids and {' or '.join(map(str, numbers))} numbers, and the "
                f"model reads {fields} and {num_dense}",
                where=f'data.format="{kind}"',
                cure="give model.table_sizes and model.num_dense accordingly",
            )
            faults.append(fault)
        return faults
    for key, names, wanted, of in (
        ("ids", config.ids, fields, "model.table_sizes"),
        ("dense", config.dense, num_dense, "model.num_dense"),
    ):
        if len(names) != wanted:
            where = f"data.{key}={names}"
            faults.append(ConfigError(f"{of} wants {wanted} of them, one a column", where=where))
    return faults


def parse_movielens(schema: Schema) -> Parse:
    """User, movie, rating, seconds since 1970: the rating is high or not, the time may be a number.

    Args:
        schema: of two fields, and of one number or none.
    """

    def parse(columns: list[str]) -> Row:
        values = filled(columns, _RATING)
        rating = number(values[2], "rating")
        dense = [number(values[3], "timestamp") / 1e9 - 1][: schema.num_dense]
        ids = [known_id(values[f], _RATING[f], schema.sizes[f]) for f in range(2)]
        return float(rating >= schema.config.positive), dense, ids

    return parse


def parse_criteo(schema: Schema) -> Parse:
    """A label, 13 whole numbers, 26 words of 8 hex digits; what is empty is 0, as published.

    Numbers become log(1 + x), 0 where negative. A word's row is 1 + its value modulo the table's
    rows less one; row 0 is for no word.

    Args:
        schema: of 13 numbers and 26 fields.
    """
    names = ["label", *(f"I{i}" for i in range(1, 14)), *(f"C{i}" for i in range(1, 27))]

    def parse(columns: list[str]) -> Row:
        if len(columns) != len(names):
            raise BadRowError(f"{len(columns)} columns, not {len(names)}")
        dense = [
            math.log1p(max(number(text, name), 0.0)) if text else 0.0
            for text, name in zip(columns[1:14], names[1:14], strict=True)
        ]
        ids = [
            _hex(text, name, size)
            for text, name, size in zip(columns[14:], names[14:], schema.sizes, strict=True)
        ]
        return label(columns[0], "label"), dense, ids

    return parse


def parse_named(schema: Schema, header: Sequence[str]) -> Parse:
    """The columns that the config names.

    Args:
        schema: as the config says.
        header: names of the file's columns.
    """
    config = schema.config
    places = {name: header.index(name) for name in (config.label, *config.dense, *config.ids)}

    def parse(columns: list[str]) -> Row:
        values = filled(columns, header, set(places))
        dense = [number(values[places[name]], name) for name in config.dense]
        ids = [
            to_id(values[places[name]], name, size, hashes=config.hash_ids)
            for name, size in zip(config.ids, schema.sizes, strict=True)
        ]
        return label(values[places[config.label]], config.label), dense, ids

    return parse


# -- values


def filled(columns: list[str], names: Sequence[str], wanted: set[str] | None = None) -> list[str]:
    """Columns as many as there should be, none of them empty.

    Args:
        columns: of a line.
        names: of all columns.
        wanted: those that must have a value; None = all.

    Raises:
        BadRowError: some are missing.
    """
    if len(columns) != len(names):
        raise BadRowError(f"{len(columns)} columns, not {len(names)}")
    for text, name in zip(columns, names, strict=True):
        if not text.strip() and (wanted is None or name in wanted):
            raise BadRowError(f"a missing value in column {name}")
    return columns


def number(text: str, name: str) -> float:
    """A finite number, or a `BadRowError`."""
    try:
        value = float(text)
    except ValueError:
        raise BadRowError(f'"{text}" in column {name} is no number') from None
    if not math.isfinite(value):
        raise BadRowError(f'"{text}" in column {name} is no finite number')
    return value


def label(text: str, name: str) -> float:
    """0 or 1, or a `BadRowError`."""
    value = number(text, name)
    if value not in (0.0, 1.0):
        raise BadRowError(f'"{text}" in column {name} is neither 0 nor 1')
    return value


def known_id(text: str, name: str, size: int) -> int:
    """A row of a table, or a `BadRowError`."""
    try:
        value = int(text)
    except ValueError:
        raise BadRowError(f'"{text}" in column {name} is no whole number') from None
    if not 0 <= value < size:
        raise BadRowError(f"id {value} in column {name} is out of its table of {size} rows")
    return value


def to_id(text: str, name: str, size: int, *, hashes: bool) -> int:
    """A row of a table: the number itself, or the hash of any word."""
    if not hashes:
        return known_id(text, name, size)
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") % size


def _hex(text: str, name: str, size: int) -> int:
    if not text or size == 1:
        return 0
    try:
        return 1 + int(text, 16) % (size - 1)
    except ValueError:
        raise BadRowError(f'"{text}" in column {name} is no hex word') from None
