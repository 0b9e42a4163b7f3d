"""Megatron-LM's token files: `NAME.bin` with the tokens, `NAME.idx` with where they lie.

Owns: the format, reading and writing it. Does not own: how a run reads tokens (`token_arrays`).

The index, little-endian, as Megatron Core documents it: the magic, version 1 as uint64, a code for
the type of the tokens as uint8, the numbers of sequences and of document bounds as uint64, then the
length of each sequence (int32), its place in the other file in bytes (int64), and the number of the
sequence with which each document begins, with the number of all at the end (int64).
"""

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from shardtrain.data.tokens import TokenFile
from shardtrain.errors import DataError

MAGIC: Final = b"MMIDIDX\0\0"
_HEAD: Final = struct.Struct("<9sQBQQ")
_CODES: Final[dict[int, str]] = {1: "<u1", 2: "<i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}
"""Types of tokens; 6 and 7 are floats, which tokens are not."""
_SHORT: Final = 65500
"""Vocabularies below it are written in 16 bits."""
_LONGEST: Final = 2**31 - 1
_CHUNK: Final = 1 << 22


def read_megatron(index: Path) -> tuple[NDArray[np.integer[Any]], NDArray[np.int64]]:
    """Map a pair of files.

    Args:
        index: the `.idx`; the `.bin` lies beside it.

    Returns:
        All tokens, and where each document begins, with the end of the last: [documents + 1].

    Raises:
        DataError: a file is missing, cut off, of another version, or not what the other says.
    """
    data = index.with_suffix(".bin")
    if not data.is_file():
        raise _wrong("the file of its tokens is missing", index, value=str(data))
    size = index.stat().st_size
    with index.open("rb") as handle:
        head = handle.read(_HEAD.size)
    if len(head) < _HEAD.size or not head.startswith(MAGIC):
        raise _wrong("this is no index of Megatron-LM", index, value=repr(head[: len(MAGIC)]))
    _, version, code, sequences, bounds = _HEAD.unpack(head)
    if version != 1 or code not in _CODES:
        value = f"version {version}, code {code}"
        allowed = f"version 1, codes {', '.join(map(str, _CODES))} (whole numbers)"
        raise _wrong("tokens of another kind", index, value=value, allowed=allowed)
    expected = _HEAD.size + 12 * sequences + 8 * bounds
    if size != expected or not bounds:
        word = "cut off" if size < expected else "longer than its head says"
        value, allowed = f"{size} bytes", f"{expected} bytes for {sequences} sequences"
        raise _wrong(f"this index is {word}", index, value=value, allowed=allowed)
    lengths = np.fromfile(index, "<i4", sequences, offset=_HEAD.size)
    places = np.memmap(index, "<i8", "r", _HEAD.size + 4 * sequences, sequences + bounds)
    ends = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths, dtype=np.int64)])
    dtype = np.dtype(_CODES[code])
    if lengths.min(initial=0) < 0 or (places[:sequences] != ends[:-1] * dtype.itemsize).any():
        raise _wrong("its sequences do not lie one after another", index)
    documents = places[sequences:]
    if documents[0] != 0 or documents[-1] != sequences or (np.diff(documents) < 0).any():
        raise _wrong("its documents do not follow one another", index)
    if data.stat().st_size != ends[-1] * dtype.itemsize:
        value, allowed = f"{data.stat().st_size} bytes", f"{ends[-1] * dtype.itemsize} bytes"
        raise _wrong(f"this file is not what {index.name} says", data, value=value, allowed=allowed)
    if not ends[-1]:
        raise _wrong("there are no tokens in it", data)
    return np.memmap(data, dtype, "r").view(np.ndarray), ends[documents]


def write_megatron(file: TokenFile, index: Path, *, longest: int = _LONGEST) -> None:
    """Write a token file of ours as a pair of Megatron-LM's.

    Args:
        file: the tokens.
        index: the `.idx`; the `.bin` goes beside it. What is there is replaced.
        longest: tokens of a sequence at most; a longer document becomes several sequences.
    """
    code = 8 if file.header.vocab_size < _SHORT else 4
    dtype = np.dtype(_CODES[code])
    lengths, documents = _cut(np.diff(file.offsets), longest)
    with index.with_suffix(".bin").open("wb") as handle:
        for start in range(0, len(file.tokens), _CHUNK):
            handle.write(file.tokens[start : start + _CHUNK].astype(dtype).data)
    ends = np.cumsum(lengths, dtype=np.int64) * dtype.itemsize
    with index.open("wb") as handle:
        handle.write(_HEAD.pack(MAGIC, 1, code, len(lengths), len(documents)))
        handle.write(lengths.astype("<i4").data)
        handle.write((ends - lengths * dtype.itemsize).astype("<i8").data)
        handle.write(documents.astype("<i8").data)


def _cut(sizes: NDArray[np.int64], longest: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Lengths of sequences, and with which of them each document begins."""
    counts = -(-sizes // longest)
    lengths = np.full(int(counts.sum()), longest, np.int64)
    last = np.cumsum(counts)
    lengths[last - 1] = sizes - (counts - 1) * longest
    return lengths, np.concatenate([np.zeros(1, np.int64), last])


def _wrong(message: str, path: Path, *, value: str = "", allowed: str = "") -> DataError:
    return DataError(
        message,
        where=str(path),
        value=value,
        allowed=allowed,
        cure="copy both files again, or make them anew with Megatron-LM's preprocess_data.py",
    )


def negative_token(path: Path, tokens: NDArray[np.integer[Any]], before: int) -> DataError:
    """Return what is said of a negative token.

    Args:
        path: where the tokens are from.
        tokens: some of them, of which one is negative.
        before: tokens before these.
    """
    first = int(np.argmax(tokens < 0))
    return DataError(
        "a token is negative",
        where=str(path),
        value=f"{int(tokens[first])}, at index {before + first:,} of all tokens",
        allowed="0 or more",
        cure="make the tokens again; where it stands for padding, leave it out",
    )


def chunks(tokens: NDArray[np.integer[Any]]) -> Iterator[NDArray[np.integer[Any]]]:
    """Read an array in parts that fit in memory."""
    for start in range(0, len(tokens), _CHUNK):
        yield tokens[start : start + _CHUNK]
