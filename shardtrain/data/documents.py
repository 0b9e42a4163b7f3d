"""Documents out of files: text, JSONL, Parquet, MDS and ArrayRecord, in bounded memory.

Owns: which files of a folder are read and in what order, and cutting them into pieces of
documents. Does not own: tokens. A piece is UTF-8 text of at most a few MiB, so that one huge file
needs no more memory than many small ones.
"""

import gzip
import json
import os
import sysconfig
from collections.abc import Callable, Iterator, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Literal, cast

from shardtrain.data.cache import Say, silent
from shardtrain.data.examples import BadRecords, Example, looks_like_examples, read_example
from shardtrain.data.fields import COLUMNS, text_columns, text_of
from shardtrain.data.mds import is_index, read_index
from shardtrain.data.records import is_array_record, is_shard, read_array_record, read_mds
from shardtrain.data.token_arrays import array_files, array_path
from shardtrain.data.tokens import MAGIC
from shardtrain.errors import DataError

PIECE = 1 << 20
_SNIFF = 1 << 16
_BOM = b"\xef\xbb\xbf"
_VARYING = {"distutils", "ensurepip", "idlelib", "lib2to3", "turtledemo"}
_NOT_SOURCE = {"__pycache__", "dist-packages", "site-packages", "test", "tests"}

Kind = Literal["text", "jsonl", "examples", "parquet", "mds", "array_record", "array"]
_BY_NAME: dict[Kind, Callable[[Path], bool]] = {
    "parquet": lambda path: path.suffix == ".parquet",
    "array_record": is_array_record,
    "mds": is_shard,
}
"""Kinds that a file's name tells."""
Piece = tuple[bytes, bool]
"""Some text, and whether its document ends with it."""
Reached = Callable[[int], None]


@dataclass(frozen=True)
class SourceFile:
    """A file that documents are read from."""

    path: Path
    kind: Kind
    size: int
    """Bytes on disk."""
    mtime_ns: int


def unnoticed(_position: int) -> None:
    """Take no notice of the position."""


def find_files(
    paths: Sequence[Path], *, where: str = "data.path", say: Say = silent
) -> list[SourceFile]:
    """List the files that documents will be read from, in a fixed order.

    A folder is read recursively, sorted by path, without hidden files; what is not text there is
    skipped, and counted. Arrays of tokens are read where they are named outright.

    Args:
        paths: files and folders.
        where: the setting they came from, for messages.
        say: told what is skipped.

    Returns:
        The files, each once.

    Raises:
        DataError: a path is missing or unreadable, a file named outright is not text, text and
            arrays of tokens are mixed, or nothing is left.
    """
    arrays = [array for path in paths if (array := array_path(path)) is not None]
    if arrays:
        return _arrays(arrays, paths, where)
    found: dict[Path, SourceFile] = {}
    skipped: list[Path] = []
    for path in paths:
        if not path.exists():
            raise DataError(
                "there is no such file or folder",
                where=where,
                value=str(path),
                cure="check the path; relative paths start at the current folder",
            )
        for file in _listed(path):
            kind = _kind(file)
            if kind is not None:
                stat = file.stat()
                found.setdefault(
                    file.resolve(), SourceFile(file, kind, stat.st_size, stat.st_mtime_ns)
                )
            elif path.is_dir():
                skipped.append(file)
            else:
                raise DataError(
                    "this is not text in UTF-8",
                    where=where,
                    value=str(file),
                    allowed="text, .jsonl, .parquet, .array_record, a folder of MDS shards, tokens "
                    "as .npy or .bin with .idx, or a folder with train.tokens",
                    cure="convert it to UTF-8 text, or prepare the original text again",
                )
    if skipped:
        say(f"skipped {len(skipped)} files that are not UTF-8 text, such as {skipped[0]}")
    if not any(file.size for file in found.values()):
        raise DataError(
            "there is no text in it" if found else "there are no text files in it",
            where=where,
            value=", ".join(map(str, paths)),
            allowed="text files, .jsonl, .parquet, .array_record, MDS",
            cure="name a file or folder that holds text",
        )
    return list(found.values())


def _arrays(arrays: Sequence[Path], paths: Sequence[Path], where: str) -> list[SourceFile]:
    """Arrays of tokens as files; their size is that of all their parts."""
    if len(arrays) != len(paths):
        raise DataError(
            "text and arrays of tokens are not read together",
            where=where,
            value=", ".join(map(str, paths)),
            cure="prepare the text first, or the arrays alone",
        )
    found: dict[Path, SourceFile] = {}
    for path in arrays:
        stats = [file.stat() for file in array_files(path)]
        size, time = sum(stat.st_size for stat in stats), max(stat.st_mtime_ns for stat in stats)
        found.setdefault(path.resolve(), SourceFile(path, "array", size, time))
    return list(found.values())


def standard_library() -> list[SourceFile]:
    """List the source files of Python's own standard library, without tests and parts that vary.

    Returns:
        The files, sorted.

    Raises:
        DataError: this Python has its library in another form.
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    files = []
    for path in _walk(root, _VARYING | _NOT_SOURCE):
        if path.suffix == ".py" and not path.name.startswith("_sysconfigdata"):
            stat = path.stat()
            files.append(SourceFile(path, "text", stat.st_size, stat.st_mtime_ns))
    if not files:
        raise DataError(
            "this Python comes without the source of its standard library",
            where="data.path",
            value=str(root),
            cure="name a text file or folder with data.path",
        )
    return files


def read_pieces(
    file: SourceFile, *, column: str = "", reached: Reached = unnoticed
) -> Iterator[Piece]:
    """Read the documents of one file.

    Args:
        file: the file. A text file is one document, a line of JSONL, a row of Parquet or a
            record is one.
        column: the field that holds the text; by default `text`, `content` or the only string.
        reached: called now and then with the position in the file, in bytes.

    Yields:
        Pieces of documents, in order.

    Raises:
        DataError: a line or a column is not what it should be; a package is missing.
    """
    try:
        if file.kind == "parquet":
            yield from _parquet(file, column, reached)
        elif file.kind == "jsonl":
            yield from _jsonl(file, column, reached)
        elif file.kind in ("mds", "array_record"):
            read = read_mds if file.kind == "mds" else read_array_record
            for text, done in read(file.path, column):
                yield from _pieces(text)
                reached(round(file.size * done))
        else:
            yield from _text(file, reached)
        reached(file.size)
    except (EOFError, OSError) as error:
        raise DataError(f"the file cannot be read: {error}", where=str(file.path)) from error


def read_examples(
    file: SourceFile, bad: BadRecords, *, reached: Reached = unnoticed
) -> Iterator[Example]:
    """Read the examples of one file.

    Args:
        file: the file, of kind "examples".
        bad: what is done with records that are none.
        reached: called now and then with the position in the file, in bytes.

    Yields:
        Examples, in order.

    Raises:
        DataError: the file cannot be read, or a record is bad and that stops the run.
    """
    try:
        with _open(file.path) as (handle, position):
            for number, line in enumerate(handle, 1):
                if line.strip():
                    try:
                        example = read_example(line, f"{file.path}:{number}")
                    except DataError as fault:
                        bad.meet(fault)
                    else:
                        yield example
                if number % 256 == 0:
                    reached(position())
        reached(file.size)
    except (EOFError, OSError) as error:
        raise DataError(f"the file cannot be read: {error}", where=str(file.path)) from error


def _listed(path: Path) -> list[Path]:
    """The files of a path. Beside an index of MDS, which is no text, shards are those it has."""
    files = _walk(path) if path.is_dir() else [path]
    indices = {file.parent: file for file in files if is_index(file)}
    found: list[Path] = []
    for file in files:
        if file == indices.get(file.parent):
            found += [shard.path for shard in read_index(file)]
        elif file.parent not in indices or not is_shard(file):
            found.append(file)
    return found


def _walk(root: Path, left_out: Set[str] = frozenset()) -> list[Path]:
    files = []
    for folder, folders, names in os.walk(root):
        folders[:] = [n for n in folders if not n.startswith(".") and n not in left_out]
        files += [Path(folder, name) for name in names if not name.startswith(".")]
    return sorted((f for f in files if f.is_file()), key=lambda f: f.relative_to(root).as_posix())


def _kind(path: Path) -> Kind | None:
    """Tell how a file is read; None if it is not text."""
    inner = path.with_suffix("") if path.suffix == ".gz" else path
    if inner.suffix in (".jsonl", ".ndjson"):
        return "examples" if looks_like_examples(_first_line(path)) else "jsonl"
    for kind, named_so in _BY_NAME.items():
        if named_so(path):
            return kind
    try:
        with _open(path) as (handle, _):
            start = handle.read(_SNIFF)
    except (EOFError, OSError) as error:
        raise DataError(f"the file cannot be read: {error}", where=str(path)) from error
    if start.startswith(MAGIC) or b"\0" in start:
        return None
    try:
        start[: _text_boundary(start) if len(start) == _SNIFF else None].decode()
    except UnicodeDecodeError:
        return None
    return "text"


def _first_line(path: Path) -> bytes:
    """The first line of a file that is not blank; of one that cannot be read, nothing."""
    try:
        with _open(path) as (handle, _):
            return next((line for line in handle if line.strip()), b"")
    except (EOFError, OSError) as error:
        raise DataError(f"the file cannot be read: {error}", where=str(path)) from error


@contextmanager
def _open(path: Path) -> Iterator[tuple[BinaryIO, Callable[[], int]]]:
    """Open a file, unpacked if it is packed, and give the position on disk."""
    with path.open("rb") as raw:
        if path.suffix == ".gz":
            with gzip.GzipFile(fileobj=raw) as unpacked:
                yield cast(BinaryIO, unpacked), raw.tell
        else:
            yield raw, raw.tell


def _text_boundary(text: bytes) -> int:
    """Return the length of `text` without a character that was cut off at its end."""
    for back in range(1, min(4, len(text)) + 1):
        byte = text[-back]
        if byte < 0x80:
            break
        if byte >= 0xC0:
            width = 2 if byte < 0xE0 else 3 if byte < 0xF0 else 4
            return len(text) - back if back < width else len(text)
    return len(text)


def _text(file: SourceFile, reached: Reached) -> Iterator[Piece]:
    with _open(file.path) as (handle, position):
        piece = handle.read(PIECE).removeprefix(_BOM)
        while following := handle.read(PIECE):
            cut = piece.rfind(b"\n") + 1 or _text_boundary(piece)
            yield piece[:cut], False
            piece = piece[cut:] + following
            reached(position())
        yield piece, True


def _jsonl(file: SourceFile, column: str, reached: Reached) -> Iterator[Piece]:
    with _open(file.path) as (handle, position):
        for number, line in enumerate(handle, 1):
            if line.strip():
                where = f"{file.path}:{number}"
                try:
                    row = json.loads(line)
                except ValueError as error:
                    raise DataError(
                        f"this line is not JSON: {error}",
                        where=where,
                        cure="one JSON object a line",
                    ) from error
                yield from _pieces(text_of(row, column, where))
            if number % 256 == 0:
                reached(position())


def _parquet(file: SourceFile, column: str, reached: Reached) -> Iterator[Piece]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise DataError(
            "reading Parquet needs the package `pyarrow`, which is not installed",
            where=str(file.path),
            cure='pip install "shardtrain[parquet]"',
        ) from error
    try:
        table = pyarrow.parquet.ParquetFile(file.path)
    except pyarrow.ArrowInvalid as error:
        raise DataError(f"this is not a Parquet file: {error}", where=str(file.path)) from error
    with table:
        schema = table.schema_arrow
        strings = [f.name for f in schema if str(f.type) in ("string", "large_string")]
        names = [column] if column else text_columns(strings, strings)
        if len(names) != 1 or names[0] not in strings:
            raise DataError(
                "the Parquet file has no column that is clearly the text",
                where=str(file.path),
                value=f"columns {', '.join(schema.names)}; strings: {', '.join(strings) or 'none'}",
                allowed=column or f"{' or '.join(COLUMNS)}, or a single string column",
                cure="name the column with --column",
            )
        rows, done = max(1, table.metadata.num_rows), 0
        for batch in table.iter_batches(batch_size=256, columns=names):
            for text in batch.column(0).to_pylist():
                yield from _pieces(text or "")
            done += batch.num_rows
            reached(file.size * done // rows)


def _pieces(text: str) -> Iterator[Piece]:
    whole, start = text.encode(errors="replace"), 0
    while len(whole) - start > PIECE:
        cut = whole.rfind(b"\n", start, start + PIECE) + 1
        cut = cut or start + _text_boundary(whole[start : start + PIECE])
        yield whole[start:cut], False
        start = cut
    yield whole[start:], True
