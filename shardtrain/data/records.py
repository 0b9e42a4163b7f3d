"""Text out of files of records: MosaicML's MDS and ArrayRecord, which grain reads too.

Owns: what a record's text is, in each. Does not own: the format of MDS (`mds`), ArrayRecord's
(the package `array_record`, which comes with grain), pieces of documents.
"""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from shardtrain.data.fields import COLUMNS, text_columns, text_of
from shardtrain.data.mds import read_column, shard_of
from shardtrain.errors import DataError

_ARRAY_RECORD: Final = re.compile(r"\.array_?record(-\d+-of-\d+)?$")
_SHARD: Final = re.compile(r"\.mds(\.\w+)?$")
_GROUP: Final = 256
Text = tuple[str, float]
"""A document, and what part of the file is done with it."""


def is_array_record(path: Path) -> bool:
    """Whether a file's name says so: `a.array_record`, `a.array_record-00000-of-00002`."""
    return _ARRAY_RECORD.search(path.name) is not None


def is_shard(path: Path) -> bool:
    """Whether a file is named like a shard of MDS, packed or not."""
    return _SHARD.search(path.name) is not None


def read_mds(path: Path, column: str) -> Iterator[Text]:
    """Read the documents of a shard.

    Args:
        path: of the shard; the index lies beside it.
        column: of encoding str, bytes (UTF-8) or json; "" = `text`, `content`, or the only str.

    Yields:
        Documents in order.

    Raises:
        DataError: the shard is damaged, or has no such column.
    """
    shard = shard_of(path)
    both = zip(shard.names, shard.encodings, strict=True)
    names = [column] if column else text_columns(shard.names, [n for n, e in both if e == "str"])
    encoding = shard.encoding(names[0]) if len(names) == 1 else ""
    if encoding not in ("str", "bytes", "json"):
        raise DataError(
            "the shard has no column that is clearly the text",
            where=str(path),
            value=f"columns {shard.described()}",
            allowed=f"{column or ' or '.join(COLUMNS)} of encoding str, bytes or json, or a single "
            "column of str",
            cure="name the column with --column",
        )
    for number, (data, end) in enumerate(read_column(shard, names[0])):
        where = f"{path}: sample {number}, column {names[0]}"
        text = _decoded(bytes(data), where)
        if encoding == "json":
            text = text_of(_json(text, where), "", where)
        yield text, end / max(shard.size, 1)


def read_array_record(path: Path, column: str) -> Iterator[Text]:
    """Read the documents of a file whose records are UTF-8: text, or a JSON object each.

    Args:
        path: of the file.
        column: the field of each object that holds the text. "" = records are objects if the first
            of them is one with such a field, else they are the text itself.

    Yields:
        Documents in order.

    Raises:
        DataError: the file is damaged, or a record is something else.
    """
    reader = _reader(path)
    try:
        count = int(reader.num_records())
        objects = bool(column)
        for first in range(0, count, _GROUP):
            for number, record in enumerate(_records(reader, path, first, count), first):
                where = f"{path}: record {number}"
                text = _decoded(record, where)
                if number == 0 and not objects:
                    objects = _is_object(text)
                yield (
                    text_of(_json(text, where), column, where) if objects else text,
                    (number + 1) / count,
                )
    finally:
        _close(reader, path)


def _reader(path: Path) -> Any:
    try:
        from array_record.python.array_record_module import ArrayRecordReader
    except ImportError as error:
        raise DataError(
            "reading ArrayRecord needs the package `array_record`, which is not installed",
            where=str(path),
            cure="pip install array_record",
        ) from error
    reader = ArrayRecordReader(str(path))
    if not reader.ok():  # what is wrong is said when it is closed
        _close(reader, path)
        raise _damaged(path, "its records cannot be found")
    return reader


def _close(reader: Any, path: Path) -> None:
    try:
        reader.close()
    except (RuntimeError, ValueError) as error:
        raise _damaged(path, error) from None


def _records(reader: Any, path: Path, first: int, count: int) -> list[bytes]:
    try:
        found: list[bytes] = reader.read(first, min(first + _GROUP, count))
    except (RuntimeError, ValueError, IndexError) as error:
        raise _damaged(f"{path}: records from {first} on", error) from None
    return found


def _damaged(where: Path | str, error: Exception | str) -> DataError:
    said = str(error).partition("\n")[0][:200]
    return DataError(
        f"this is no whole ArrayRecord file: {said}",
        where=str(where),
        cure="copy the file again, or write it anew",
    )


def _is_object(text: str) -> bool:
    """Whether a record is a JSON object that has a field of text."""
    try:
        text_of(row := json.loads(text), "", "")
    except (ValueError, DataError):
        return False
    return isinstance(row, dict)


def _decoded(data: bytes, where: str) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise DataError(
            f"this record is not text in UTF-8: {error.reason} at byte {error.start}",
            where=where,
            value=repr(data[:40]),
            allowed="UTF-8: the text, or JSON that has it in a field",
            cure="write it anew as text; records of other kinds, such as tf.train.Example, are not "
            "read",
        ) from None


def _json(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise DataError(
            f"this record is not JSON: {error}",
            where=where,
            value=text[:80],
            cure="records of one file are all JSON objects, or all text",
        ) from None
