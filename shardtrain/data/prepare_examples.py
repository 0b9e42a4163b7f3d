"""Examples to tokens: which of them are learned, and which examples are too long.

Owns: the tokens of an example, part by part. Does not own: records (`examples`), token files, and
which file an example goes to.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Final

import numpy as np

from shardtrain.data.cache import Say
from shardtrain.data.documents import SourceFile, read_examples
from shardtrain.data.examples import BadRecords, Example
from shardtrain.data.tokenizer import Tokenizer
from shardtrain.data.tokens import TokenWriter
from shardtrain.errors import DataError

_GROUP: Final = 1 << 22
"""Bytes of text that are tokenized at once, on all cores."""


def write_examples(
    files: Sequence[SourceFile],
    tokenizer: Tokenizer,
    *,
    choose: Callable[[bytes], TokenWriter],
    bad: BadRecords,
    max_tokens: int,
    progress: Callable[[int, int], None],
    say: Say,
) -> None:
    """Tokenize every example, and write it as a document.

    Prompt and completion are tokenized each by itself, as they are when a model is used: it sees
    the prompt before there is a completion. What the tokenizer puts at the end is learned too.

    Args:
        files: of kind "examples".
        tokenizer: text to tokens.
        choose: an example's text -> the file that it goes to.
        bad: what is done with records that cannot be learned from.
        max_tokens: tokens of an example; one with more is bad. 0 = any.
        progress: told how many bytes are done, of how many.
        say: told how many records were skipped.

    Raises:
        DataError: a record is bad and that stops the run.
    """
    begin, end = np.array(tokenizer.begin, np.int64), np.array(tokenizer.end, np.int64)
    for group in _groups(_examples(files, bad, progress)):
        encoded = iter(tokenizer.encode([part.text for e in group for part in e.parts]))
        for example in group:
            parts = [(begin, False), *((next(encoded), part.counts) for part in example.parts)]
            parts.append((end, True))
            count = sum(tokens.size for tokens, _ in parts)
            if max_tokens and count > max_tokens:
                bad.meet(too_long(example.where, count, max_tokens))
                continue
            text = b"".join(part.text for part in example.parts)
            target = choose(text)
            for tokens, learned in parts:
                target.add(tokens, learned)
            target.text_bytes += len(text)
            target.end_document()
    bad.tell(say)


def too_long(where: str, tokens: int, most: int) -> DataError:
    """Return the fault of an example that does not fit a sequence; it is never cut."""
    return DataError(
        "the example is too long for a sequence",
        where=where,
        value=f"{tokens} tokens",
        allowed=f"{most}, one more than data.sequence_length",
        cure='raise data.sequence_length, shorten it, or set data.bad_records to "skip"',
    )


def _examples(
    files: Sequence[SourceFile], bad: BadRecords, progress: Callable[[int, int], None]
) -> Iterator[Example]:
    """Give the examples of all files, and tell how many bytes are done."""
    total, before = sum(file.size for file in files), 0
    for file in files:

        def reached(position: int, before: int = before) -> None:
            progress(before + position, total)

        yield from read_examples(file, bad, reached=reached)
        before += file.size


def _groups(examples: Iterator[Example]) -> Iterator[list[Example]]:
    """Collect examples, so that a tokenizer has something to do for every core."""
    group: list[Example] = []
    size = 0
    for example in examples:
        group.append(example)
        size += sum(len(part.text) + 64 for part in example.parts)
        if size >= _GROUP:
            yield group
            group, size = [], 0
    if group:
        yield group
