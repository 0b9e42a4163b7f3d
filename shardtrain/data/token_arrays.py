"""Tokens that others have made: NumPy's `.npy`, Megatron-LM's `.bin` and `.idx`, MosaicML's MDS.

Owns: which paths are such arrays, and their documents, checked. Does not own: the token files that
are made of them, and the formats of others (`megatron`, `mds`).
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from shardtrain.data.mds import INDEX, TokenShards, is_index, read_index, token_column
from shardtrain.data.megatron import chunks, negative_token, read_megatron
from shardtrain.data.tokenizer import Tokenizer
from shardtrain.errors import DataError


def array_path(path: Path) -> Path | None:
    """Return the file that a path of tokens stands for; None if it is no such array.

    Args:
        path: the file itself, Megatron-LM's `.bin`, the name that its two files have in common, or
            a folder of MDS shards with tokens and no text, or its index.

    Raises:
        DataError: an index of MDS shards is damaged.
    """
    index = path / INDEX if path.is_dir() else path
    if is_index(index):
        return index if token_column(read_index(index)) else None
    if path.suffix in (".npy", ".idx") and path.is_file():
        return path
    if path.suffix == ".bin":
        index = path.with_suffix(".idx")
        return index if index.is_file() else None
    index = Path(f"{path}.idx")
    return index if index.is_file() and not path.exists() else None


def array_files(path: Path) -> tuple[Path, ...]:
    """Return the files of an array: its size and time are theirs."""
    if path.name == INDEX:
        return (path, *(shard.path for shard in read_index(path)))
    data = path.with_suffix(".bin")
    return (path, data) if path.suffix == ".idx" and data.is_file() else (path,)


class Tokens(Protocol):
    """Tokens in documents."""

    @property
    def path(self) -> Path:
        """The file that they are named by."""

    @property
    def nbytes(self) -> int:
        """How much there is to read."""

    def largest(self) -> int:
        """The largest token."""

    def documents(self) -> Iterator[NDArray[np.integer[Any]]]:
        """The documents in order, without empty ones."""


@dataclass(frozen=True, eq=False)
class TokenArray:
    """Tokens in documents, mapped and not read."""

    path: Path
    tokens: NDArray[np.integer[Any]] = field(repr=False)
    offsets: NDArray[np.int64] = field(repr=False)
    """Where each document begins, and the end of the last."""

    @classmethod
    def open(cls, path: Path) -> "TokenArray":
        """Open an array.

        Args:
            path: of `array_path`.

        Raises:
            DataError: it is damaged, or no array of whole numbers with one or two dims.
        """
        if path.suffix == ".idx":
            return cls(path, *read_megatron(path))
        try:
            array = np.load(path, mmap_mode="r", allow_pickle=False)
        except (OSError, ValueError, EOFError) as error:
            if isinstance(error, EOFError) or re.match("EOF|mmap length", str(error)):
                raise DataError(
                    "the file is shorter than its header says",
                    where=str(path),
                    value=f"{path.stat().st_size} bytes",
                    cure="copy it again, or save it again",
                ) from None
            raise DataError(
                f"the array cannot be read: {error}", where=str(path), cure="save it again"
            ) from None
        if array.dtype.kind not in "iu" or array.ndim not in (1, 2) or not array.size:
            raise DataError(
                "this is no array of tokens",
                where=str(path),
                value=f"{array.dtype.name} {list(array.shape)}",
                allowed="whole numbers, [tokens] or [documents, tokens]",
            )
        length = array.shape[-1]
        tokens = np.asarray(array.reshape(-1))
        return cls(path, tokens, np.arange(0, tokens.size + 1, length, dtype=np.int64))

    @property
    def nbytes(self) -> int:
        """Of all tokens."""
        return self.tokens.nbytes

    def largest(self) -> int:
        """Read all of it for its largest token.

        Raises:
            DataError: a token is negative.
        """
        largest = before = 0
        for part in chunks(self.tokens):
            if int(part.min()) < 0:
                raise negative_token(self.path, part, before)
            largest, before = max(largest, int(part.max())), before + len(part)
        return largest

    def documents(self) -> Iterator[NDArray[np.integer[Any]]]:
        """Give the documents in order; one without tokens is left out."""
        for start, stop in pairwise(self.offsets.tolist()):
            if start < stop:
                yield self.tokens[start:stop]


def open_arrays(paths: Sequence[Path]) -> list[Tokens]:
    """Open arrays one after another; see `TokenArray.open`.

    Args:
        paths: of `array_path`.

    Raises:
        DataError: one is damaged, or none of whole numbers.
    """
    return [
        TokenShards(path, token_column(read_index(path)))
        if path.name == INDEX
        else TokenArray.open(path)
        for path in paths
    ]


@dataclass(frozen=True)
class Vocabulary:
    """What a token file's header says about its tokens."""

    size: int
    tokenizer: str
    """Its name; "" where nobody knows what made the tokens."""
    tokenizer_digest: str

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> "Vocabulary":
        """The vocabulary of a tokenizer."""
        return cls(tokenizer.vocab_size, tokenizer.name, tokenizer.digest)


def vocabulary(arrays: Sequence[Tokens], tokenizer: Tokenizer) -> Vocabulary:
    """Find the vocabulary of tokens that others have made.

    Args:
        arrays: the tokens, of which all are looked at.
        tokenizer: the one that is said to have made them. Bytes are the default, so tokens that are
            none are of a tokenizer that nobody knows, with as many tokens as it takes.

    Raises:
        DataError: a token lies outside of the tokenizer's vocabulary.
    """
    sizes = [array.largest() + 1 for array in arrays]
    own = Vocabulary.of(tokenizer)
    if max(sizes) <= own.size:
        return own
    if tokenizer.name == "bytes":
        return Vocabulary(max(sizes), "", "")
    array, size = max(zip(arrays, sizes, strict=True), key=lambda pair: pair[1])
    raise DataError(
        "a token lies outside the vocabulary",
        where=str(array.path),
        value=str(size - 1),
        allowed=f"0 to {own.size - 1} ({tokenizer.name})",
        cure="set data.tokenizer to the one that made these tokens",
    )
