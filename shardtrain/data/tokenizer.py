"""Text to tokens and back.

Owns: the byte tokenizer and the one read from a `tokenizer.json`. Does not own: files of tokens.
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from shardtrain.data.cache import write_atomic
from shardtrain.data.tokens import Header, Tokens
from shardtrain.errors import DataError

TOKENIZER_FILE = "tokenizer.json"
_KEY = "data.tokenizer"
_ENDS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|eos|>", "[EOS]")


class Tokenizer(Protocol):
    """What turns text into tokens below `vocab_size` and back."""

    @property
    def name(self) -> str:
        """A short name, recorded in token files."""

    @property
    def digest(self) -> str:
        """Tells two tokenizers of one name apart."""

    @property
    def vocab_size(self) -> int:
        """Every token is below it."""

    @property
    def begin(self) -> tuple[int, ...]:
        """Tokens before each document."""

    @property
    def end(self) -> tuple[int, ...]:
        """Tokens after each document."""

    def encode(self, pieces: Sequence[bytes]) -> list[Tokens]:
        """Turn pieces of UTF-8 text into tokens, without begin and end."""

    def decode(self, tokens: Sequence[int] | Tokens) -> str:
        """Turn tokens into text; what is no text becomes a replacement character."""

    def save(self, folder: Path) -> None:
        """Leave in a folder what `tokenizer_beside` needs."""


@dataclass(frozen=True)
class ByteTokenizer:
    """One token a byte: nothing to learn, nothing to download, every text representable."""

    name: str = "bytes"
    digest: str = "bytes"
    vocab_size: int = 256
    begin: tuple[int, ...] = ()
    end: tuple[int, ...] = ()

    def encode(self, pieces: Sequence[bytes]) -> list[Tokens]:
        """Turn pieces of text into bytes."""
        return [np.frombuffer(piece, np.uint8) for piece in pieces]

    def decode(self, tokens: Sequence[int] | Tokens) -> str:
        """Turn bytes into text; tokens above 255 (padding of the vocabulary) are skipped."""
        values = np.asarray(tokens)
        return values[values < self.vocab_size].astype(np.uint8).tobytes().decode(errors="replace")

    def save(self, folder: Path) -> None:
        """Leave nothing: the name says all."""


@dataclass(frozen=True)
class HuggingFaceTokenizer:
    """A tokenizer read from a `tokenizer.json`."""

    path: Path
    name: str
    digest: str
    vocab_size: int
    begin: tuple[int, ...]
    end: tuple[int, ...]
    _tokenizer: Any = field(repr=False, compare=False)

    def encode(self, pieces: Sequence[bytes]) -> list[Tokens]:
        """Turn pieces of UTF-8 text into tokens, several at a time on all cores."""
        texts = [piece.decode(errors="replace") for piece in pieces]
        encoded = self._tokenizer.encode_batch(texts, add_special_tokens=False)
        return [np.array(one.ids, np.int64) for one in encoded]

    def vocabulary(self) -> dict[str, int]:
        """Every token's text and number."""
        known: dict[str, int] = self._tokenizer.get_vocab(with_added_tokens=True)
        return known

    def word_pieces(self) -> str:
        """What pieces that go on with a word begin with; empty where they are no WordPieces."""
        model = json.loads(self._tokenizer.to_str())["model"]
        prefix = model.get("continuing_subword_prefix") if model.get("type") == "WordPiece" else ""
        return str(prefix or "")

    def decode(self, tokens: Sequence[int] | Tokens) -> str:
        """Turn tokens into text; tokens outside the vocabulary are skipped."""
        ids = [int(token) for token in tokens if token < self.vocab_size]
        return str(self._tokenizer.decode(ids))

    def save(self, folder: Path) -> None:
        """Copy the file, so that the tokens can be read back where they lie."""
        write_atomic(folder / TOKENIZER_FILE, self.path.read_bytes())


def load_tokenizer(name: str) -> Tokenizer:
    """Load a tokenizer.

    Args:
        name: `bytes`, or the path of a `tokenizer.json` or of a folder that holds one.

    Returns:
        The tokenizer.

    Raises:
        DataError: it does not exist, cannot be read, or needs a package that is not installed.
    """
    if name == "bytes":
        return ByteTokenizer()
    path = Path(name).expanduser()
    if path.is_dir():
        path = path / TOKENIZER_FILE
    if not path.is_file():
        raise DataError(
            "there is no such tokenizer",
            where=_KEY,
            value=name,
            allowed=f"bytes, or the path of a {TOKENIZER_FILE}",
            cure=f"give the path of a {TOKENIZER_FILE} on this machine; nothing is downloaded",
        )
    return _from_json(path)


def tokenizer_beside(tokens: Path, header: Header) -> Tokenizer:
    """Load the tokenizer that made a token file, to decode it.

    Args:
        tokens: the token file.
        header: its header.

    Returns:
        The tokenizer.

    Raises:
        DataError: its file is missing, another one, or needs a package that is not installed.
    """
    if header.tokenizer == "bytes":
        return ByteTokenizer()
    if not header.tokenizer:
        raise DataError(
            "these tokens came without their tokenizer",
            where=str(tokens),
            cure=f"set data.tokenizer to the {TOKENIZER_FILE} that they were made with, and "
            "prepare them again",
        )
    path = tokens.parent / TOKENIZER_FILE
    tokenizer = load_tokenizer(str(path))
    if tokenizer.digest != header.tokenizer_digest:
        raise DataError(
            f"this is not the tokenizer that made {tokens.name}",
            where=str(path),
            value=tokenizer.digest,
            allowed=header.tokenizer_digest,
            cure=f"put the original {TOKENIZER_FILE} there",
        )
    return tokenizer


def _from_json(path: Path) -> HuggingFaceTokenizer:
    try:
        import tokenizers
    except ImportError as error:
        raise DataError(
            f"reading a {TOKENIZER_FILE} needs the package `tokenizers`, which is not installed",
            where=_KEY,
            value=str(path),
            cure='pip install "shardtrain[hf]"',
        ) from error
    content = path.read_bytes()
    try:
        tokenizer = tokenizers.Tokenizer.from_buffer(content)
    except Exception as error:  # the package raises bare Exception
        raise DataError(
            f"the tokenizer cannot be read: {error}", where=_KEY, value=str(path)
        ) from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    vocabulary: dict[str, int] = tokenizer.get_vocab(with_added_tokens=True)
    if not vocabulary:
        raise DataError("the tokenizer has no vocabulary", where=_KEY, value=str(path))
    begin, end = _special_tokens(tokenizer)
    if not end:
        end = next(((vocabulary[text],) for text in _ENDS if text in vocabulary), ())
    return HuggingFaceTokenizer(
        path=path,
        name=path.name,
        digest=hashlib.sha256(content).hexdigest()[:32],
        vocab_size=max(vocabulary.values()) + 1,
        begin=begin,
        end=end,
        _tokenizer=tokenizer,
    )


def _special_tokens(tokenizer: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Tokens that the tokenizer itself puts before and after a text."""
    probe = tokenizer.encode("a", add_special_tokens=True)
    special = list(probe.special_tokens_mask)
    if all(special):
        return (), ()
    first = special.index(0)
    last = len(special) - special[::-1].index(0)
    return tuple(probe.ids[:first]), tuple(probe.ids[last:])


def encode_text(tokenizer: Tokenizer, text: str) -> NDArray[np.int64]:
    """Turn one text, such as a prompt, into tokens, with the tokens that begin a document.

    Args:
        tokenizer: the tokenizer.
        text: the text.

    Returns:
        Token ids, [any].
    """
    try:
        raw = text.encode(errors="surrogateescape")  # bytes of a command line that are no UTF-8
    except UnicodeEncodeError:
        raw = text.encode(errors="replace")
    body = tokenizer.encode([raw])[0]
    return np.concatenate([np.array(tokenizer.begin, np.int64), body.astype(np.int64)])
