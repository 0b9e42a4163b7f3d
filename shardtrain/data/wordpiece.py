"""WordPiece tokenizers: learned from the text itself, and what of a tokenizer masking has to know.

Owns: learning one into the cache (Wu et al. 2016, arXiv 1609.08144, by the package `tokenizers`),
and the special tokens. Does not own: reading a `tokenizer.json` (`tokenizer`), tokens.
"""

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardtrain.data.cache import Say, cache_folder, exclusive, make_folder, silent, write_atomic
from shardtrain.data.config import LEARNED
from shardtrain.data.documents import SourceFile, read_pieces
from shardtrain.data.tokenizer import (
    TOKENIZER_FILE,
    HuggingFaceTokenizer,
    Tokenizer,
    load_tokenizer,
)
from shardtrain.errors import DataError

SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
_NAMES = {
    "cls": ("[CLS]", "<s>"),
    "sep": ("[SEP]", "</s>"),
    "mask": ("[MASK]", "<mask>"),
    "pad": ("[PAD]", "<pad>"),
}
"""What special tokens are called, in BERT's tokenizers and in RoBERTa's."""
_KEY = "data.tokenizer"
_RULES = 1
_FEWEST = 64


@dataclass(frozen=True, eq=False)
class Pieces:
    """What masking knows of a tokenizer."""

    cls: int
    sep: int
    mask: int
    pad: int
    ordinary: NDArray[np.int64]
    """Every token but those four."""
    goes_on: NDArray[np.bool_]
    """Of each token whether it goes on with a word; false throughout without WordPieces."""

    @classmethod
    def of(cls, tokenizer: Tokenizer, *, whole_words: bool) -> "Pieces":
        """Look them up.

        Args:
            tokenizer: the tokenizer.
            whole_words: whether words must be told apart.

        Raises:
            DataError: a special token is missing, or they are no WordPieces.
        """
        known = tokenizer.vocabulary() if isinstance(tokenizer, HuggingFaceTokenizer) else {}
        found = {
            what: next(known[name] for name in names if name in known)
            for what, names in _NAMES.items()
            if set(names) & set(known)
        }
        if missing := [names[0] for what, names in _NAMES.items() if what not in found]:
            raise DataError(
                f"masked text needs special tokens, and this tokenizer has no {missing[0]}",
                where=_KEY,
                value=tokenizer.name,
                cure=f'use the {TOKENIZER_FILE} of a BERT, or "{LEARNED}8192" to learn one from '
                "the text",
            )
        prefix = tokenizer.word_pieces() if isinstance(tokenizer, HuggingFaceTokenizer) else ""
        if whole_words and not prefix:
            raise DataError(
                "words can be told apart in WordPieces alone",
                where="data.whole_words",
                value="True",
                cure="use another tokenizer, or leave it out",
            )
        goes_on = np.zeros(tokenizer.vocab_size, np.bool_)
        if prefix:
            goes_on[[number for text, number in known.items() if text.startswith(prefix)]] = True
        ordinary = np.setdiff1d(np.arange(tokenizer.vocab_size), np.array([*found.values()]))
        return cls(**found, ordinary=ordinary, goes_on=goes_on)


def is_learned(name: str) -> bool:
    """Whether a setting asks for a tokenizer to be learned."""
    return name.startswith(LEARNED)


def learned_size(name: str) -> int | None:
    """Return the number of tokens in `wordpiece:N`; None where it is no such number."""
    number = name.removeprefix(LEARNED)
    if not number.isdecimal() or int(number) < _FEWEST:
        return None
    return int(number)


def make_tokenizer(
    name: str,
    files: Sequence[SourceFile],
    *,
    cache: str = "",
    say: Say = silent,
    column: str = "",
) -> Tokenizer:
    """Load a tokenizer, or learn it from text the first time.

    Args:
        name: as `load_tokenizer` takes it, or `wordpiece:N`.
        files: the text.
        cache: `data.cache`.
        say: told in a line what is done.
        column: the field that holds the text, where there are fields.

    Returns:
        The tokenizer.

    Raises:
        DataError: there is none, N is no number of tokens, or `tokenizers` is not installed.
    """
    if not is_learned(name):
        return load_tokenizer(name)
    size = learned_size(name)
    if size is None:
        raise DataError(
            "this is no number of tokens",
            where=_KEY,
            value=name,
            allowed=f"{LEARNED}N with N of at least {_FEWEST}",
        )
    if numbers := next((f for f in files if f.kind == "array"), None):
        raise DataError(
            "a tokenizer is learned from text, and these are tokens already",
            where=str(numbers.path),
            value=name,
            cure=f"give the {TOKENIZER_FILE} that they were made with",
        )
    listed = [[str(f.path.resolve()), f.kind, f.size, f.mtime_ns] for f in files]
    content = json.dumps([_RULES, size, column, listed]).encode()
    key = hashlib.sha256(content).hexdigest()[:32]
    folder = cache_folder(cache) / "tokenizers" / key
    path = folder / TOKENIZER_FILE
    make_folder(
        folder, where="data.cache", cure="set data.cache or SHARDTRAIN_CACHE to a folder of yours"
    )
    with exclusive(folder / ".lock", say=say) as alive:
        if not path.exists():
            say(f"learning a tokenizer of {size} WordPieces, once, into {folder}")

            def texts() -> Iterator[str]:
                for file in files:
                    for piece, _ in read_pieces(file, column=column):
                        alive()
                        yield piece.decode(errors="replace")

            write_atomic(path, learn(texts, size))
    return load_tokenizer(str(path))


def learn(texts: Callable[[], Iterable[str]], size: int) -> bytes:
    """Learn lower-case WordPieces from text: of the same text the same ones, in the same order.

    Args:
        texts: gives the text piece by piece; it is read twice.
        size: tokens at most, special ones included.

    Returns:
        A `tokenizer.json` that puts [CLS] before a document and [SEP] after it.

    Raises:
        DataError: `tokenizers` is not installed.
    """
    try:
        import tokenizers
    except ImportError as error:
        raise DataError(
            "learning a tokenizer needs the package `tokenizers`, which is not installed",
            where=_KEY,
            value=f"{LEARNED}{size}",
            cure='pip install "shardtrain[hf]"',
        ) from error
    drawn = tokenizers.Tokenizer(tokenizers.models.WordPiece({}, unk_token="[UNK]"))
    _set_up(tokenizers, drawn)
    # Of two pieces that are as frequent the one of lower numbers comes first, and the package gives
    # numbers to letters within words in the order of a hash table, unless they have theirs before.
    letters = sorted(set().union(*map(drawn.normalizer.normalize_str, texts())))
    inner = [f"##{letter}" for letter in letters if not letter.isspace()]
    trainer = tokenizers.trainers.WordPieceTrainer(
        vocab_size=size, special_tokens=[*SPECIAL, *inner], show_progress=False
    )
    drawn.train_from_iterator(texts(), trainer)
    found = sorted(set(drawn.get_vocab()) - set(SPECIAL))
    number = {text: i for i, text in enumerate((*SPECIAL, *found))}
    made = tokenizers.Tokenizer(tokenizers.models.WordPiece(number, unk_token="[UNK]"))
    _set_up(tokenizers, made)
    made.add_special_tokens(list(SPECIAL))
    made.post_processor = tokenizers.processors.BertProcessing(
        ("[SEP]", number["[SEP]"]), ("[CLS]", number["[CLS]"])
    )
    text: str = made.to_str()
    return text.encode()


def _set_up(tokenizers: Any, tokenizer: Any) -> None:
    """As the tokenizers of the published uncased models are."""
    tokenizer.normalizer = tokenizers.normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = tokenizers.decoders.WordPiece()
