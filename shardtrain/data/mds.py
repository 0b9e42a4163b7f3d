"""MosaicML's MDS: a folder with `index.json` and shards, in which a sample has named columns.

Owns: the format, checked, as far as text and tokens need it. Does not own: which column is the text
(`fields`), and what tokens become (`token_arrays`).

The index lists shards with the names, encodings and fixed sizes of their columns, and the file's
bytes and hashes. A shard, little-endian: the number of samples (uint32), where each begins and the
last ends (uint32, from the start of the file), the columns as JSON, the samples. A sample is the
sizes (uint32) of those columns whose size is not fixed, then all columns, in the index's order.
"""

import bz2
import gzip
import hashlib
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from shardtrain.data.megatron import negative_token
from shardtrain.errors import DataError

INDEX: Final = "index.json"
_PACKED: Final[dict[str, Callable[[bytes], bytes]]] = {
    "gz": gzip.decompress,
    "bz2": bz2.decompress,
}
"""What packed shards can be read of: what Python brings along."""
_TOKENS: Final = ("tokens", "input_ids")
"""Names that columns of tokens usually have."""
_VALUES: Final[dict[int, str]] = {
    8: "<u1", 9: "<i1", 16: "<u2", 17: "<i2", 32: "<u4", 33: "<i4", 64: "<u8", 65: "<i8",
}  # fmt: skip
"""Types of arrays that say themselves what they are of; 18, 34 and 66 are floats."""
_DIMS: Final = ("<u1", "<u2", "<u4", "<u8")
_CURE: Final = "copy the folder again, or write it anew with MDSWriter"


@dataclass(frozen=True)
class Shard:
    """One shard, as the index has it."""

    path: Path
    """The file as it is there, perhaps packed."""
    compression: str
    """Of that file; "" where it is not packed."""
    samples: int
    size: int
    """Bytes when it is not packed."""
    hashes: tuple[tuple[str, str], ...]
    """Of the file that is there: name and hex digits."""
    names: tuple[str, ...]
    encodings: tuple[str, ...]
    sizes: tuple[int | None, ...]
    """Bytes of each column; None where they differ."""

    def encoding(self, column: str) -> str:
        """How a column is written.

        Raises:
            DataError: there is no such column.
        """
        if column not in self.names:
            raise DataError(
                f"there is no column {column}",
                where=str(self.path),
                value=f"columns {self.described()}",
                cure="name another column with --column",
            )
        return self.encodings[self.names.index(column)]

    def described(self) -> str:
        """The columns, for messages."""
        both = zip(self.names, self.encodings, strict=True)
        return ", ".join(f"{name} ({encoding})" for name, encoding in both)


def is_index(path: Path) -> bool:
    """Whether a file is the index of such a folder, and no other `index.json`."""
    if path.name != INDEX or not path.is_file():
        return False
    try:
        return _has_shards(json.loads(path.read_bytes()))
    except (OSError, ValueError):
        return False


def _has_shards(found: Any) -> bool:
    shards = found.get("shards") if isinstance(found, dict) else None
    if not isinstance(shards, list):
        return False
    return all(isinstance(shard, dict) and shard.get("format") == "mds" for shard in shards)


def read_index(path: Path) -> tuple[Shard, ...]:
    """Read an index.

    Args:
        path: of `index.json`.

    Returns:
        The shards in order; each file is there.

    Raises:
        DataError: it is damaged, of another version, or a shard is missing.
    """
    try:
        return _read_index(path, path.stat().st_mtime_ns)
    except OSError as error:
        raise DataError(f"the index cannot be read: {error}", where=str(path), cure=_CURE) from None


@lru_cache(maxsize=64)
def _read_index(path: Path, _mtime_ns: int) -> tuple[Shard, ...]:
    try:
        found = json.loads(path.read_bytes())
    except ValueError as error:
        raise DataError(f"the index is not JSON: {error}", where=str(path), cure=_CURE) from None
    if not _has_shards(found):
        raise DataError("this is no index of MDS shards", where=str(path), cure=_CURE)
    return tuple(
        _shard(path, f"{path}: shard {number}", entry)
        for number, entry in enumerate(found["shards"])
    )


def _shard(index: Path, where: str, entry: dict[str, Any]) -> Shard:
    if entry.get("version") != 2:
        value = f"version {entry.get('version')}"
        raise DataError("a shard of another kind", where=where, value=value, allowed="version 2")
    try:
        raw, packed = entry["raw_data"], entry.get("zip_data")
        plain = index.parent / raw["basename"]
        # Whoever has unpacked a shard leaves the packed file or takes it away.
        use = raw if packed is None or plain.is_file() else packed
        shard = Shard(
            path=index.parent / use["basename"],
            compression="" if use is raw else str(entry["compression"]),
            samples=int(entry["samples"]),
            size=int(raw["bytes"]),
            hashes=tuple(sorted((use.get("hashes") or {}).items())),
            names=tuple(entry["column_names"]),
            encodings=tuple(entry["column_encodings"]),
            sizes=tuple(entry["column_sizes"]),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise DataError(f"the index is damaged: {error!r}", where=where, cure=_CURE) from None
    if not len(shard.names) == len(shard.encodings) == len(shard.sizes):
        raise DataError("the index is damaged: columns differ in number", where=where, cure=_CURE)
    if not shard.path.is_file():
        raise DataError("a shard is missing", where=where, value=str(shard.path), cure=_CURE)
    return shard


def shard_of(path: Path) -> Shard:
    """Return the shard that a file is.

    Raises:
        DataError: the index that says what it holds is missing or damaged, or does not know it.
    """
    for shard in read_index(path.with_name(INDEX)):
        if shard.path == path:
            return shard
    raise DataError("the index beside it does not know this shard", where=str(path), cure=_CURE)


def read_column(shard: Shard, column: str) -> Iterator[tuple[memoryview, int]]:
    """Read one column of every sample, after the whole shard was checked.

    Args:
        shard: from the index.
        column: its name.

    Yields:
        The bytes of the column, and where the sample ends in the unpacked file.

    Raises:
        DataError: the file is cut off, is not what its hash says, or its samples are not where
            they should be.
    """
    shard.encoding(column)
    data = memoryview(_content(shard))
    place = shard.names.index(column)
    ends = _offsets(shard, data)
    varying = sum(size is None for size in shard.sizes)
    for number, (begin, end) in enumerate(pairwise(ends)):
        written = iter(_numbers(data[begin : min(begin + 4 * varying, end)]))
        sizes = [next(written, -1) if size is None else size for size in shard.sizes]
        if min(sizes) < 0 or 4 * varying + sum(sizes) != end - begin:
            raise _damaged(shard, f"sample {number} is not as long as it says")
        start = begin + 4 * varying + sum(sizes[:place])
        yield data[start : start + sizes[place]], end


def _content(shard: Shard) -> bytes:
    """The unpacked file, of the size and with the hashes that the index has."""
    content = shard.path.read_bytes()
    for name, wanted in shard.hashes:
        # xxhash is no part of Python: such a hash is left to whoever wrote the shard
        if name in hashlib.algorithms_guaranteed:
            found = hashlib.new(name, content).hexdigest()
            if found != wanted:
                raise _damaged(shard, f"its {name} is not that of the index", value=found)
    kind = shard.compression.partition(":")[0]
    if kind and kind not in _PACKED:
        raise DataError(
            f"shards packed with {kind} are not read",
            where=str(shard.path),
            allowed=f"not packed, or {', '.join(_PACKED)}",
            cure=f"unpack each into a file of the same name without .{kind}",
        )
    if kind:
        try:
            content = _PACKED[kind](content)
        except (EOFError, OSError, ValueError) as error:
            raise _damaged(shard, f"it cannot be unpacked: {error}") from None
    if len(content) != shard.size:
        word = "cut off" if len(content) < shard.size else "too long"
        value = f"{len(content)} bytes, in the index {shard.size}"
        raise _damaged(shard, f"the shard is {word}", value=value)
    return content


def _offsets(shard: Shard, data: memoryview) -> list[int]:
    """Where samples begin, and the end of the last."""
    head = _numbers(data[: 4 * (shard.samples + 2)])
    if not head or head[0] != shard.samples or len(head) != shard.samples + 2:
        value = f"{head[0] if head else 0} samples, in the index {shard.samples}"
        raise _damaged(shard, "it has another number of samples", value=value)
    offsets = head[1:]
    if offsets[0] < 4 * len(head) or offsets[-1] != len(data) or sorted(offsets) != offsets:
        raise _damaged(shard, "its samples do not lie one after another")
    return offsets


def _numbers(data: memoryview) -> list[int]:
    return list(np.frombuffer(data[: len(data) // 4 * 4], "<u4").tolist())


def _damaged(shard: Shard, message: str, *, value: str = "") -> DataError:
    return DataError(message, where=str(shard.path), value=value, cure=_CURE)


# -- tokens


def token_column(shards: tuple[Shard, ...]) -> str:
    """Return the column of tokens of a folder without a column of text; "" if there is none."""
    if not shards or "str" in shards[0].encodings:
        return ""
    return next((name for name in _TOKENS if name in shards[0].names), "")


def tokens_of(data: memoryview, encoding: str, where: str) -> NDArray[np.integer[Any]]:
    """Read an array of tokens out of one sample.

    Args:
        data: the bytes of its column.
        encoding: `ndarray`, `ndarray:TYPE` or `ndarray:TYPE:DIMS`.
        where: file and sample, for messages.

    Raises:
        DataError: it is no array of whole numbers, or not as long as it says.
    """
    kind, *form = encoding.split(":")
    if kind != "ndarray":
        raise DataError(
            f"tokens as {encoding} do not say of what type they are",
            where=where,
            allowed="ndarray, such as ndarray:uint16",
            cure="write the folder anew with that encoding, or the text itself",
        )
    try:
        # [type] [number of sizes, and their type] [sizes] [values]; the encoding may have said them
        dtype = np.dtype(form[0]).newbyteorder("<") if form else np.dtype(_VALUES[data[0]])
        data = data if form else data[1:]
        count = len(data) // dtype.itemsize
        if len(form) < 2:
            dims, width = data[0] >> 2, np.dtype(_DIMS[data[0] & 3])
            sizes = np.frombuffer(data[1 : 1 + dims * width.itemsize], width)
            count, data = int(sizes.prod()), data[1 + dims * width.itemsize :]
        if dtype.kind not in "iu" or count * dtype.itemsize != len(data):
            raise ValueError(f"{len(data)} bytes of {count} x {dtype.name}")
        return np.frombuffer(data, dtype)
    except (IndexError, KeyError, TypeError, ValueError) as error:
        raise DataError(f"this is no array of tokens: {error}", where=where, cure=_CURE) from None


@dataclass(frozen=True, eq=False)
class TokenShards:
    """The tokens of such a folder, a document a sample; a shard is in memory at a time."""

    path: Path
    """Of the index."""
    column: str

    @property
    def nbytes(self) -> int:
        """Of all shards, which have a little more than tokens."""
        return sum(shard.size for shard in read_index(self.path))

    def largest(self) -> int:
        """Read all of it for its largest token.

        Raises:
            DataError: it is damaged, or a token is negative.
        """
        largest = before = 0
        for tokens in self.documents():
            if int(tokens.min()) < 0:
                raise negative_token(self.path, tokens, before)
            largest, before = max(largest, int(tokens.max())), before + len(tokens)
        return largest

    def documents(self) -> Iterator[NDArray[np.integer[Any]]]:
        """Give the documents in order; one without tokens is left out."""
        for shard in read_index(self.path):
            encoding = shard.encoding(self.column)
            for number, (data, _) in enumerate(read_column(shard, self.column)):
                where = f"{shard.path}: sample {number}"
                tokens = tokens_of(data, encoding, where)
                if tokens.size:
                    yield tokens
