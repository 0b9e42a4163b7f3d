"""Interaction files in binary form: each read once, then mapped into memory.

Owns: reading lines and columns of one file, what happens to rows that cannot be used, and the
cache. Does not own: what a line means (`interaction_formats`), which files there are
(`interaction_files`).
"""

import csv
import difflib
import gzip
import hashlib
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from shardtrain.data.cache import cache_folder, exclusive, make_folder, temporary_name, write_atomic
from shardtrain.data.interaction_formats import (
    BadRowError,
    Parse,
    Row,
    Schema,
    parse_criteo,
    parse_movielens,
    parse_named,
)
from shardtrain.data.interactions import record
from shardtrain.errors import DataError

Say = Callable[[str], None]
VERSION: Final = 1
"""Of the binary form; another one is made anew."""
_CHUNK: Final = 65_536
_SHOWN: Final = 5


@dataclass(eq=False)
class BadRows:
    """What happens to rows of one file that cannot be used."""

    policy: str
    """ "stop" or "skip"."""
    path: Path
    count: int = 0
    shown: list[str] = field(default_factory=list)
    """The first of them."""

    def met(self, line: int, why: str, *, unit: str = "line") -> None:
        """Counts a row, or stops.

        Raises:
            DataError: the policy is "stop".
        """
        if self.policy == "stop":
            raise DataError(
                "a row cannot be used",
                where=f"{self.path}, {unit} {line}",
                value=why,
                cure='repair or delete it, or set data.bad_rows to "skip"',
            )
        self.count += 1
        if self.count <= _SHOWN:
            self.shown.append(f"{unit} {line}: {why}")


@dataclass(frozen=True, eq=False)
class Shard:
    """A file in binary form."""

    records: NDArray[Any] = field(repr=False)
    digest: str
    skipped: int
    told: tuple[str, ...]
    """The first rows that were skipped."""


def open_shard(path: Path, kind: str, schema: Schema, say: Say) -> Shard:
    """A file's rows, from the cache where it was read before.

    Args:
        path: the file.
        kind: "movielens", "criteo", "csv" or "parquet".
        schema: what a row must be.
        say: told what takes long.

    Raises:
        DataError: it cannot be read, or a row of it cannot be used and the policy is to stop.
    """
    config = schema.config
    folder = cache_folder(config.cache) / "interactions"
    make_folder(folder, where="data.cache", cure="set data.cache to a folder that you may write")
    try:
        stat = path.stat()
    except OSError as error:
        raise DataError(f"cannot be read: {error.strerror}", where=str(path)) from error
    chosen = (config.label, config.dense, config.ids, config.positive, config.hash_ids)
    about = [VERSION, str(path.resolve()), stat.st_size, stat.st_mtime_ns, kind]
    about += [*schema.sizes, schema.num_dense, config.bad_rows, *map(str, chosen)]
    name = hashlib.sha256(json.dumps(about).encode()).hexdigest()[:32]
    array, told = folder / f"{name}.npy", folder / f"{name}.json"
    with exclusive(folder / f"{name}.lock", say=say) as alive:
        if not told.is_file():
            say(f"reading {path}")
            bad = BadRows(config.bad_rows, path)
            rows = _rows(path, kind, schema, bad)
            digest = _write(array, rows, record(schema.num_dense, len(schema.sizes)), alive)
            found = {"digest": digest, "skipped": bad.count, "told": bad.shown}
            write_atomic(told, json.dumps(found).encode())
    about_it = json.loads(told.read_bytes())
    records = np.load(array, mmap_mode="r")
    return Shard(records, about_it["digest"], about_it["skipped"], tuple(about_it["told"]))


def _write(
    array: Path, rows: Iterator[NDArray[Any]], kind: np.dtype[Any], alive: Callable[[], None]
) -> str:
    """Writes records as .npy, whole or not at all; returns their digest."""
    temporary, digest, count = temporary_name(array), hashlib.blake2b(digest_size=16), 0
    try:
        with temporary.open("xb") as handle:
            header = {"descr": np.lib.format.dtype_to_descr(kind), "fortran_order": False}
            # Room for the number of rows, which is known at the end.
            np.lib.format.write_array_header_1_0(handle, {**header, "shape": (2**62,)})
            size = handle.tell()
            for chunk in rows:
                alive()
                count += len(chunk)
                digest.update(chunk.tobytes())
                handle.write(chunk.tobytes())
            handle.seek(0)
            np.lib.format.write_array_header_1_0(handle, {**header, "shape": (count,)})
            assert handle.tell() == size, "numpy fills headers up to multiples of 64"
        temporary.replace(array)
    finally:
        temporary.unlink(missing_ok=True)
    return digest.hexdigest()


# -- reading


def _rows(path: Path, kind: str, schema: Schema, bad: BadRows) -> Iterator[NDArray[Any]]:
    """Records of a file, in chunks."""
    if kind == "parquet":
        yield from _parquet(path, schema, bad)
        return
    chunk: list[tuple[Any, ...]] = []
    form = record(schema.num_dense, len(schema.sizes))
    for row in _parsed(path, kind, schema, bad):
        chunk.append(row)
        if len(chunk) == _CHUNK:
            yield np.array(chunk, form)
            chunk = []
    yield np.array(chunk, form)


def _parsed(path: Path, kind: str, schema: Schema, bad: BadRows) -> Iterator[Row]:
    lines = _lines(path, bad)
    if kind == "criteo":
        yield from _each(((n, line.split("\t")) for n, line in lines), parse_criteo(schema), bad)
    elif kind == "movielens":
        mark = {".dat": "::", ".csv": ","}.get(path.suffix, "\t")
        if mark == ",":
            _header(path, next(lines, (1, ""))[1], ["userId", "movieId", "rating", "timestamp"])
        yield from _each(((n, line.split(mark)) for n, line in lines), parse_movielens(schema), bad)
    else:
        config = schema.config
        columns = ((n, next(csv.reader([line]), [])) for n, line in lines)
        header = next(columns, (1, []))[1]
        wanted = [config.label, *config.dense, *config.ids]
        _header(path, ",".join(header), wanted)
        yield from _each(columns, parse_named(schema, header), bad)


def _header(path: Path, line: str, wanted: list[str]) -> None:
    """Refuses a file that lacks a column."""
    there = line.split(",")
    missing = [name for name in wanted if name not in there]
    if missing:
        near = difflib.get_close_matches(missing[0], there, n=1)
        raise DataError(
            "there is no such column",
            where=f"{path}, line 1",
            value=", ".join(missing),
            allowed=", ".join(there),
            cure=(f'did you mean "{near[0]}"? ' if near else "")
            + "data.label, data.dense and data.ids name the columns",
        )


def _each(columns: Iterator[tuple[int, list[str]]], parse: Parse, bad: BadRows) -> Iterator[Row]:
    for line, texts in columns:
        try:
            yield parse(texts)
        except BadRowError as why:
            bad.met(line, str(why))


def _lines(path: Path, bad: BadRows) -> Iterator[tuple[int, str]]:
    """Lines by number, without their ends; a file that is cut off ends there."""
    line = 0
    try:
        with path.open("rb") as packed:
            plain = gzip.GzipFile(fileobj=packed) if path.suffix == ".gz" else packed
            for line, text in enumerate(plain, 1):  # named where it is cut off
                yield line, text.decode(errors="replace").rstrip("\r\n")
    except (EOFError, gzip.BadGzipFile) as error:
        bad.met(line + 1, f"the file is cut off: {error}")
    except OSError as error:
        raise DataError(f"cannot be read: {error.strerror}", where=str(path)) from error


def _parquet(path: Path, schema: Schema, bad: BadRows) -> Iterator[NDArray[Any]]:
    """Rows of a Parquet file, a row group at a time; each value is checked like that of a CSV."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise DataError(
            "reading Parquet needs the package `pyarrow`, which is not installed",
            where=str(path),
            cure='pip install "shardtrain[parquet]"',
        ) from None
    config = schema.config
    names = [config.label, *config.dense, *config.ids]
    form = record(schema.num_dense, len(schema.sizes))
    try:
        file = pyarrow.parquet.ParquetFile(path)
        _header(path, ",".join(file.schema_arrow.names), names)
        parse, first = parse_named(schema, names), 1
        for group in range(file.num_row_groups):
            table = file.read_row_group(group, names)
            lists = [["" if v is None else str(v) for v in table[n].to_pylist()] for n in names]
            rows: list[Row] = []
            for place, values in enumerate(zip(*lists, strict=True)):
                try:
                    rows.append(parse(list(values)))
                except BadRowError as why:
                    bad.met(first + place, str(why), unit="row")
            first += table.num_rows
            yield np.array(rows, form)
    except (OSError, pyarrow.ArrowException) as error:
        bad.met(1, f"the file is cut off or damaged: {str(error).splitlines()[0]}", unit="row")
