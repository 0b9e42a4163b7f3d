"""The token file: a header, tokens one document after another, then where each document starts.

Owns: the format, reading it (memory-mapped, checked) and writing it (bounded memory, whole or
absent). Does not own: tokenizing, sampling, the train and validation split.

Layout, little-endian: 4096 bytes of header (magic, version, length and text of a JSON object,
zeros, a digest of what came before), the tokens as uint8, uint16 or uint32, zeros up to a multiple
of 8, and `documents + 1` offsets as int64; where only some tokens are learned, then a byte for each
token, 1 for those. The header's `content` is a digest of all of it.
"""

import hashlib
import json
import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np
from numpy.typing import NDArray

from shardtrain.data.cache import Fingerprint, cache_folder, temporary_name
from shardtrain.errors import DataError

Tokens = NDArray[np.integer[Any]]
Verify = Literal["always", "once", "never"]

MAGIC = b"SHARDTOK"
HEADER_BYTES = 4096
_VERSION = 1
_DTYPES: dict[str, np.dtype[np.unsignedinteger[Any]]] = {
    "uint8": np.dtype("<u1"),
    "uint16": np.dtype("<u2"),
    "uint32": np.dtype("<u4"),
}
_CHUNK = 1 << 22
_SEAL = 16
_PREPARE_AGAIN = "prepare the text again with `shardtrain prepare`"


def dtype_for(vocab_size: int) -> np.dtype[np.unsignedinteger[Any]]:
    """Return the smallest unsigned type that holds every token of a vocabulary.

    Args:
        vocab_size: number of tokens, up to 2**31 (the model's tokens are int32).

    Raises:
        DataError: a size outside 1 to 2**31.
    """
    if not 1 <= vocab_size <= 2**31:
        raise DataError("impossible vocabulary size", value=str(vocab_size), allowed="1 to 2**31")
    return _DTYPES[
        "uint8" if vocab_size <= 1 << 8 else "uint16" if vocab_size <= 1 << 16 else "uint32"
    ]


@dataclass(frozen=True)
class Header:
    """What a token file says about itself."""

    dtype: str
    """uint8, uint16 or uint32."""
    vocab_size: int
    tokens: int
    documents: int
    content: str
    """Digest of tokens and offsets."""
    tokenizer: str = ""
    tokenizer_digest: str = ""
    source: str = ""
    """Key of the text, the tokenizer and the split it was made from."""
    partner: str = ""
    """In a training file: `content` of the validation file made with it, if there is one."""
    masked: bool = False
    """Whether only some tokens are learned, such as those of completions."""
    text_bytes: int = 0
    """Bytes of the text that the tokens were made of; 0 = unknown."""

    @property
    def offsets_at(self) -> int:
        """Where the offsets begin in the file, in bytes."""
        end = HEADER_BYTES + self.tokens * _DTYPES[self.dtype].itemsize
        return end + -end % 8

    @property
    def file_bytes(self) -> int:
        """The size of the whole file, in bytes."""
        return self.mask_at + self.masked * self.tokens

    @property
    def mask_at(self) -> int:
        """Where the bytes that tell learned tokens begin, or would."""
        return self.offsets_at + 8 * (self.documents + 1)

    def pack(self) -> bytes:
        """Return the header's bytes."""
        text = json.dumps(vars(self)).encode()
        body = MAGIC + struct.pack("<II", _VERSION, len(text)) + text
        assert len(body) <= HEADER_BYTES - _SEAL, "the header's texts are too long"
        body = body.ljust(HEADER_BYTES - _SEAL, b"\0")
        return body + hashlib.sha256(body).digest()[:_SEAL]


def is_token_file(path: Path) -> bool:
    """Tell whether a file begins like a token file."""
    with path.open("rb") as handle:
        return handle.read(len(MAGIC)) == MAGIC


def read_header(path: Path) -> Header:
    """Read a token file's header and check it against the file's size.

    Args:
        path: the file.

    Returns:
        The header.

    Raises:
        DataError: missing, no token file, of a later format, damaged, truncated, or empty.
    """
    try:
        with path.open("rb") as handle:
            block = handle.read(HEADER_BYTES)
            size = os.fstat(handle.fileno()).st_size
    except OSError as error:
        raise DataError(
            f"the token file cannot be read: {error.strerror}", where=str(path), cure=_PREPARE_AGAIN
        ) from error
    if block[: len(MAGIC)] != MAGIC:
        raise DataError(
            "this is not a token file of shardtrain",
            where=str(path),
            value=f"{size} bytes that begin with {block[:8]!r}",
            cure=_PREPARE_AGAIN,
        )
    if len(block) < HEADER_BYTES:
        raise DataError("the token file is truncated", where=str(path), cure=_PREPARE_AGAIN)
    version, length = struct.unpack_from("<II", block, len(MAGIC))
    if version != _VERSION:
        raise DataError(
            "the token file has another format version",
            where=str(path),
            value=str(version),
            allowed=str(_VERSION),
            cure=_PREPARE_AGAIN,
        )
    if hashlib.sha256(block[:-_SEAL]).digest()[:_SEAL] != block[-_SEAL:]:
        raise DataError(
            "the token file's header is damaged: bad checksum", where=str(path), cure=_PREPARE_AGAIN
        )
    header = Header(**json.loads(block[len(MAGIC) + 8 :][:length]))
    _check_header(path, header, size)
    return header


def _check_header(path: Path, header: Header, size: int) -> None:
    if header.dtype not in _DTYPES:
        raise DataError(
            "the token file has another dtype",
            where=str(path),
            value=header.dtype,
            allowed=", ".join(_DTYPES),
            cure=_PREPARE_AGAIN,
        )
    if size != header.file_bytes:
        word = "truncated" if size < header.file_bytes else "longer than its header says"
        raise DataError(
            f"the token file is {word}",
            where=str(path),
            value=f"{size} bytes",
            allowed=f"{header.file_bytes} bytes for {header.tokens} tokens",
            cure=_PREPARE_AGAIN,
        )
    if header.tokens == 0:
        raise DataError("the token file is empty", where=str(path), cure="prepare some text")


@dataclass(frozen=True, eq=False)
class TokenFile:
    """An open token file; its arrays are memory-mapped and read-only."""

    path: Path
    header: Header
    tokens: NDArray[np.unsignedinteger[Any]] = field(repr=False)
    """All tokens, [tokens]."""
    offsets: NDArray[np.int64] = field(repr=False)
    """Where each document starts, and the end of the last, [documents + 1]."""
    learned: NDArray[np.uint8] | None = field(default=None, repr=False)
    """1 for each token that counts as a target, [tokens]; None = all do."""

    @classmethod
    def open(
        cls,
        path: Path,
        *,
        verify: Verify = "once",
        dtype: np.dtype[Any] | None = None,
        cache: Path | None = None,
    ) -> Self:
        """Open and check a token file.

        The header and the file's size are always checked.

        Args:
            path: the file.
            verify: whether the whole content is read and compared with its checksum: always, once
                (not again while the file keeps size and time, as noted in the cache), or never.
            dtype: the type the caller will read, if it insists on one.
            cache: the cache folder; the user's by default.

        Returns:
            The open file.

        Raises:
            DataError: missing, damaged, truncated, empty, of another dtype, or not a token file.
        """
        header = read_header(path)
        stored = _DTYPES[header.dtype]
        if dtype is not None and np.dtype(dtype) != stored:
            raise DataError(
                "the token file has another dtype",
                where=str(path),
                value=header.dtype,
                allowed=np.dtype(dtype).name,
                cure="read it with the dtype of its header",
            )
        tokens = np.memmap(path, stored, "r", HEADER_BYTES, header.tokens).view(np.ndarray)
        offsets = np.memmap(path, "<i8", "r", header.offsets_at, header.documents + 1)
        learned = None
        if header.masked:
            mask = np.memmap(path, np.uint8, "r", header.mask_at, header.tokens)
            learned = mask.view(np.ndarray)
        file = cls(path, header, tokens, offsets.view(np.ndarray), learned)
        if verify == "never":
            return file
        cache = cache_folder() if cache is None else cache
        before = Fingerprint.of(path)
        if verify == "always" or not before.was_verified(header.content, cache):
            file.verify()
            before.remember_verified(header.content, cache)
        return file

    def verify(self) -> None:
        """Read everything and compare it with the header.

        Raises:
            DataError: the checksum differs, or a token lies outside the vocabulary.
        """
        digest, largest = hashlib.sha256(), 0
        for start in range(0, len(self.tokens), _CHUNK):
            chunk = self.tokens[start : start + _CHUNK]
            digest.update(chunk.data)
            largest = max(largest, int(chunk.max()))
        offsets = hashlib.sha256(self.offsets.data).digest()
        mask = b"" if self.learned is None else hashlib.sha256(self.learned.data).digest()
        if _content(digest.digest(), offsets, mask) != self.header.content:
            raise DataError(
                "the token file is damaged: bad checksum", where=str(self.path), cure=_PREPARE_AGAIN
            )
        if largest >= self.header.vocab_size:
            raise DataError(
                "the token file has tokens outside its vocabulary",
                where=str(self.path),
                value=str(largest),
                allowed=f"0 to {self.header.vocab_size - 1}",
                cure=_PREPARE_AGAIN,
            )


def _content(tokens: bytes, offsets: bytes, mask: bytes) -> str:
    return hashlib.sha256(tokens + offsets + mask).hexdigest()[:32]


class TokenWriter:
    """Writes a token file, document by document, beside its final place; `finish` puts it there.

    Used as a context manager it removes what was not finished.
    """

    def __init__(
        self,
        path: Path,
        *,
        vocab_size: int,
        tokenizer: str = "",
        tokenizer_digest: str = "",
        masked: bool = False,
    ) -> None:
        """Start a file.

        Args:
            path: a path beside which it is written.
            vocab_size: every token is below it; decides the dtype.
            tokenizer: the tokenizer's name, recorded.
            tokenizer_digest: the tokenizer's digest, recorded.
            masked: whether `add` is told which tokens are learned.
        """
        self.tokens = 0
        self.text_bytes = 0
        self.documents = 0
        self._vocab_size = vocab_size
        self._tokenizer = (tokenizer, tokenizer_digest)
        self._dtype = dtype_for(vocab_size)
        self._digest = hashlib.sha256()
        self._open_tokens = 0
        self._body_path = temporary_name(path)
        self._offsets_path = temporary_name(path)
        self._body = self._body_path.open("x+b")
        self._offsets = self._offsets_path.open("x+b")
        self._mask_path = temporary_name(path)
        self._mask = self._mask_path.open("x+b") if masked else None
        self._body.write(bytes(HEADER_BYTES))
        self._offsets.write(struct.pack("<q", 0))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._body.close()
        self._offsets.close()
        if self._mask is not None:
            self._mask.close()
            self._mask_path.unlink(missing_ok=True)
        self._body_path.unlink(missing_ok=True)
        self._offsets_path.unlink(missing_ok=True)

    def add(self, tokens: Tokens, learned: bool | NDArray[np.uint8] = True) -> None:
        """Append tokens to the document at hand.

        Args:
            tokens: token ids, [any].
            learned: whether they count as targets, all of them or one by one.

        Raises:
            DataError: a token lies outside the vocabulary.
        """
        if not tokens.size:
            return
        low, high = int(tokens.min()), int(tokens.max())
        if low < 0 or high >= self._vocab_size:
            raise DataError(
                "a token lies outside the vocabulary",
                value=str(low if low < 0 else high),
                allowed=f"0 to {self._vocab_size - 1}",
            )
        stored = np.ascontiguousarray(tokens, self._dtype)
        self._body.write(stored.data)
        self._digest.update(stored.data)
        if self._mask is not None:
            self._mask.write(np.full(tokens.size, learned, np.uint8).data)
        self.tokens += tokens.size
        self._open_tokens += tokens.size

    def end_document(self) -> None:
        """Close the document at hand; one without tokens leaves no trace."""
        if self._open_tokens:
            self._offsets.write(struct.pack("<q", self.tokens))
            self.documents += 1
            self._open_tokens = 0

    def move_tail(self, target: "TokenWriter", start: int) -> None:
        """Move all from token `start` on to another writer; a document may be cut in two.

        Args:
            target: where the tail goes.
            start: the first token that moves, above 0.
        """
        assert not self._open_tokens
        assert 0 < start < self.tokens
        starts = self.starts()
        kept = int(np.searchsorted(starts, start, side="right"))
        bounds = [start, *(int(bound) for bound in starts[kept:])]
        cut = int(starts[kept - 1]) != start
        del starts
        for begin, end in pairwise(bounds):
            for at, chunk in self._read(begin, end):
                target.add(chunk, self._learned(at, len(chunk)))
            target.end_document()
        if self._mask is not None:
            self._mask.truncate(start)
            self._mask.seek(0, os.SEEK_END)
        self._digest = hashlib.sha256()
        for _, chunk in self._read(0, start):
            self._digest.update(chunk.data)
        self._body.truncate(HEADER_BYTES + start * self._dtype.itemsize)
        self._body.seek(0, os.SEEK_END)
        self._offsets.truncate(8 * kept)
        self._offsets.seek(0, os.SEEK_END)
        if cut:
            self._offsets.write(struct.pack("<q", start))
        self.tokens, self.documents = start, kept if cut else kept - 1

    def starts(self) -> NDArray[np.int64]:
        """Where each document starts so far, and the end of the last, [documents + 1]."""
        self._offsets.flush()
        return np.memmap(self._offsets_path, "<i8", "r").view(np.ndarray)

    def _read(
        self, start: int, stop: int
    ) -> Iterator[tuple[int, NDArray[np.unsignedinteger[Any]]]]:
        """Tokens, chunk by chunk, each with the place of its first."""
        size = self._dtype.itemsize
        self._body.seek(HEADER_BYTES + start * size)
        for begin in range(start, stop, _CHUNK):
            count = min(_CHUNK, stop - begin)
            yield begin, np.frombuffer(self._body.read(count * size), self._dtype)

    def _learned(self, start: int, count: int) -> bool | NDArray[np.uint8]:
        """Which tokens from a place on are learned."""
        if self._mask is None:
            return True
        self._mask.seek(start)
        return np.frombuffer(self._mask.read(count), np.uint8)

    def finish(self, path: Path, *, source: str = "", partner: str = "") -> Header:
        """Complete the file and put it in place, durably, replacing what was there.

        Args:
            path: the final path.
            source: the key of what it was made from.
            partner: `content` of the validation file that belongs to it.

        Returns:
            The header as written.
        """
        self.end_document()
        self._offsets.seek(0)
        offsets = hashlib.sha256()
        self._body.seek(0, os.SEEK_END)
        self._body.write(bytes(-self._body.tell() % 8))
        while block := self._offsets.read(_CHUNK):
            offsets.update(block)
            self._body.write(block)
        mask = b""
        if self._mask is not None:
            digest = hashlib.sha256()
            self._mask.seek(0)
            while block := self._mask.read(_CHUNK):
                digest.update(block)
                self._body.write(block)
            mask = digest.digest()
        header = Header(
            dtype=self._dtype.name,
            vocab_size=self._vocab_size,
            tokens=self.tokens,
            documents=self.documents,
            content=_content(self._digest.digest(), offsets.digest(), mask),
            tokenizer=self._tokenizer[0],
            tokenizer_digest=self._tokenizer[1],
            source=source,
            partner=partner,
            masked=self._mask is not None,
            text_bytes=self.text_bytes,
        )
        self._body.seek(0)
        self._body.write(header.pack())
        self._body.flush()
        os.fsync(self._body.fileno())
        self._body_path.replace(path)
        _sync_folder(path.parent)
        return header


def _sync_folder(folder: Path) -> None:
    """Make a rename durable."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
