"""Text, or tokens of others, to token files, once, in bounded memory.

Owns: the pass over the documents, the split into training and validation, and opening what a
folder of prepared tokens holds. Does not own: the format, the cache folder's layout, which text a
run uses.

`train.tokens` is written last and names the `validation.tokens` that belongs to it, so the two are
never mixed up, whatever was interrupted or done twice at once.
"""

import errno
import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from shardtrain.data.cache import Say, exclusive, make_folder, silent, sweep
from shardtrain.data.documents import (
    PIECE,
    Piece,
    SourceFile,
    find_files,
    read_pieces,
)
from shardtrain.data.examples import BadRecordPolicy, BadRecords
from shardtrain.data.megatron import chunks
from shardtrain.data.prepare_examples import write_examples
from shardtrain.data.token_arrays import Tokens, Vocabulary, open_arrays, vocabulary
from shardtrain.data.tokenizer import Tokenizer
from shardtrain.data.tokens import TokenFile, TokenWriter, Verify
from shardtrain.data.wordpiece import make_tokenizer
from shardtrain.errors import DataError

TRAIN = "train.tokens"
VALIDATION = "validation.tokens"
LOCK = ".lock"

Progress = Callable[[int, int], None]
"""Told how many bytes of text are done, of how many."""

_RULES = 1
_GROUP = 4 * PIECE


@dataclass(frozen=True, eq=False)
class Prepared:
    """The token files of one folder."""

    train: TokenFile
    validation: TokenFile | None


def no_progress(done: int, total: int) -> None:
    """Show nothing."""


def prepare(
    paths: Sequence[Path | str],
    out: Path | str,
    *,
    tokenizer: str = "bytes",
    validation_fraction: float = 0.05,
    seed: int = 0,
    progress: Progress = no_progress,
    say: Say = silent,
    column: str = "",
    bad_records: BadRecordPolicy = "stop",
    max_tokens: int = 0,
) -> Prepared:
    """Turn text into `train.tokens` and `validation.tokens`.

    Args:
        paths: text files, JSONL, Parquet, MDS, ArrayRecord, and folders of them; or arrays of
            tokens.
        out: the folder to write to; token files in it are replaced.
        tokenizer: `bytes`, the path of a `tokenizer.json`, or `wordpiece:N` to learn one of at most
            N tokens from the text; the file is left in `out`.
        validation_fraction: part of the documents kept for validation, 0 to below 1.
        seed: decides which documents those are, together with their text.
        progress: told how far the work is.
        say: told in a line what is skipped or waited for.
        column: the field that holds the text, where there are fields.
        bad_records: what a record of prompt and completion does that cannot be learned from.
        max_tokens: an example with more is one of them; 0 = any length.

    Returns:
        The open token files.

    Raises:
        DataError: no text, damaged text, a folder that cannot be written, a full disk.
    """
    check_fraction(validation_fraction)
    files = find_files([Path(path).expanduser() for path in paths], where="paths", say=say)
    loaded = make_tokenizer(tokenizer, files, say=say, column=column)
    out = Path(out).expanduser()
    make_folder(out, where="out", cure="choose a folder that you can write to")
    if column:  # whatever else a record has
        files = [replace(f, kind="jsonl") if f.kind == "examples" else f for f in files]
    if (bad_records == "skip" or max_tokens) and not _are_examples(files):
        say("bad_records and max_tokens have no effect: there are no prompts and completions")
    split = Split(loaded, validation_fraction, seed, column, bad_records, max_tokens)
    return prepare_files(files, out, split, reuse=False, progress=progress, say=say)


@dataclass(frozen=True)
class Split:
    """How text becomes two token files."""

    tokenizer: Tokenizer
    validation_fraction: float
    seed: int = 0
    """Decides which documents are kept for validation, together with their text."""
    column: str = ""
    """The field that holds the text, where there are fields."""
    bad_records: BadRecordPolicy = "stop"
    """What a bad example does."""
    max_tokens: int = 0
    """Tokens of an example; one with more is bad. 0 = any."""

    def key(self, files: Sequence[SourceFile]) -> str:
        """Name what token files are made from: the same key, the same tokens.

        Args:
            files: the text.

        Returns:
            32 hex digits.
        """
        listed = [[str(f.path.resolve()), f.kind, f.size, f.mtime_ns] for f in files]
        tokenizer = [self.tokenizer.name, self.tokenizer.digest]
        rules = [_RULES, *tokenizer, self.validation_fraction, self.seed, self.column]
        if _are_examples(files):
            rules += [self.bad_records, self.max_tokens]
        return hashlib.sha256(json.dumps([rules, listed]).encode()).hexdigest()[:32]

    def in_validation(self, text: bytes) -> bool:
        """Decide by the text itself, so that equal documents are never on both sides.

        Args:
            text: the first piece of a document.
        """
        salt = (self.seed % 2**64).to_bytes(8, "little")
        digest = hashlib.blake2b(text, digest_size=8, salt=salt).digest()
        return int.from_bytes(digest, "little") < self.validation_fraction * 2.0**64


def prepare_files(
    files: Sequence[SourceFile],
    out: Path,
    split: Split,
    *,
    reuse: bool,
    progress: Progress = no_progress,
    say: Say = silent,
    cache: Path | None = None,
) -> Prepared:
    """Write the token files of a folder, one process at a time.

    Args:
        files: the text, in the order of its documents.
        out: the folder, which exists.
        split: how they are made.
        reuse: whether good files of the same text, made meanwhile, are taken as they are.
        progress: told how far the work is.
        say: told in a line what is waited for.
        cache: the cache folder; the user's by default.

    Returns:
        The open token files.

    Raises:
        DataError: no text, damaged text, a full disk.
    """
    key = split.key(files)
    with exclusive(out / LOCK, say=say) as alive:
        if reuse:
            made = open_if_current(out, key, cache=cache)
            if made is not None:
                return made

        def report(done: int, total: int) -> None:
            progress(done, total)
            alive()

        sweep(out)
        try:
            _build(files, out, split, key, report, say)
        except OSError as error:
            full = error.errno in (errno.ENOSPC, errno.EDQUOT)
            raise DataError(
                f"the token files cannot be written: {error.strerror}",
                where=str(out),
                cure="make room on this disk, or choose a folder on another"
                if full
                else "choose another folder",
            ) from error
    return open_prepared(out, verify="never")


def open_if_current(
    folder: Path, key: str, *, cache: Path | None = None, say: Say = silent
) -> Prepared | None:
    """Open the token files of a folder if they are whole and made from this key.

    Args:
        folder: the folder.
        key: the key, from `Split.key`.
        cache: the cache folder; the user's by default.
        say: told when files are there but damaged.

    Returns:
        The files, or None if they have to be made.
    """
    if not (folder / TRAIN).exists():
        return None
    try:
        prepared = open_prepared(folder, cache=cache)
    except DataError as error:
        say(f"preparing again: {error.where}: {error.message}")
        return None
    return prepared if prepared.train.header.source == key else None


def check_fraction(fraction: float) -> None:
    """Refuse an impossible validation fraction.

    Args:
        fraction: the fraction.

    Raises:
        DataError: it is outside [0, 1).
    """
    if not 0 <= fraction < 1:
        raise DataError(
            "impossible part of the documents",
            where="validation_fraction",
            value=str(fraction),
            allowed="0 to below 1",
        )


def _build(
    files: Sequence[SourceFile], out: Path, split: Split, key: str, progress: Progress, say: Say
) -> None:
    tokenizer, masked = split.tokenizer, _are_examples(files)
    arrays = open_arrays([file.path for file in files if file.kind == "array"])
    kind = vocabulary(arrays, tokenizer) if arrays else Vocabulary.of(tokenizer)

    def writer(name: str) -> TokenWriter:
        return TokenWriter(
            out / name,
            vocab_size=kind.size,
            tokenizer=kind.tokenizer,
            tokenizer_digest=kind.tokenizer_digest,
            masked=masked,
        )

    with writer(TRAIN) as train, writer(VALIDATION) as validation:
        if arrays:
            _write_arrays(arrays, split, train, validation, progress)
        elif masked:
            write_examples(
                files,
                tokenizer,
                choose=lambda text: validation if split.in_validation(text) else train,
                bad=BadRecords(split.bad_records),
                max_tokens=split.max_tokens,
                progress=progress,
                say=say,
            )
        else:
            _write(files, split, train, validation, progress)
        if train.tokens == 0:
            train, validation = validation, train
        if train.tokens == 0:
            raise DataError(
                "there is no text in it",
                where=str(files[0].path),
                value=f"{len(files)} files without a document that has text",
                cure="name a file or folder that holds text",
            )
        if validation.tokens == 0 and split.validation_fraction > 0:
            _move_tail(train, validation, split.validation_fraction)
        if kind.tokenizer:
            tokenizer.save(out)
        partner = ""
        if validation.tokens:
            partner = validation.finish(out / VALIDATION, source=key).content
        train.finish(out / TRAIN, source=key, partner=partner)
        if not partner:
            (out / VALIDATION).unlink(missing_ok=True)


def _write(
    files: Sequence[SourceFile],
    split: Split,
    train: TokenWriter,
    validation: TokenWriter,
    progress: Progress,
) -> None:
    """Tokenize every document into the one file or the other."""
    tokenizer = split.tokenizer
    begin, end = np.array(tokenizer.begin, np.int64), np.array(tokenizer.end, np.int64)
    target, fresh = train, True
    for group in _groups(_pieces(files, split.column, progress)):
        encoded = tokenizer.encode([text for text, _ in group])
        for (text, last), tokens in zip(group, encoded, strict=True):
            if fresh and text:
                target = validation if split.in_validation(text) else train
                target.add(begin)
                fresh = False
            target.add(tokens)
            target.text_bytes += len(text)
            if last and not fresh:
                target.add(end)
                target.end_document()
                fresh = True


def _are_examples(files: Sequence[SourceFile]) -> bool:
    """Whether files hold prompts and completions.

    Raises:
        DataError: some do, and some do not.
    """
    found = [file.kind == "examples" for file in files]
    if any(found) and not all(found):
        raise DataError(
            "prompts with completions and plain text are not read together",
            where=str(files[found.index(False)].path),
            value=f"beside {files[found.index(True)].path}",
            cure="name the files of one kind",
        )
    return any(found)


def _write_arrays(
    arrays: Sequence[Tokens],
    split: Split,
    train: TokenWriter,
    validation: TokenWriter,
    progress: Progress,
) -> None:
    """Copy every document of tokens into the one file or the other."""
    total, done = sum(array.nbytes for array in arrays), 0
    for array in arrays:
        for tokens in array.documents():
            start = tokens[: PIECE // 8].astype("<i8").tobytes()
            target = validation if split.in_validation(start) else train
            for part in chunks(tokens):
                target.add(part)
                done += part.nbytes
                progress(done, total)
            target.end_document()


def _pieces(files: Sequence[SourceFile], column: str, progress: Progress) -> Iterator[Piece]:
    """Give the pieces of all files, and tell how many bytes are done."""
    total, before = sum(file.size for file in files), 0
    for file in files:

        def reached(position: int, before: int = before) -> None:
            progress(before + position, total)

        yield from read_pieces(file, column=column, reached=reached)
        before += file.size


def _groups(pieces: Iterator[Piece]) -> Iterator[list[Piece]]:
    """Collect small pieces, so that a tokenizer has something to do for every core."""
    group: list[Piece] = []
    size = 0
    for piece in pieces:
        group.append(piece)
        size += len(piece[0]) + 64
        if size >= _GROUP:
            yield group
            group, size = [], 0
    if group:
        yield group


def _move_tail(train: TokenWriter, validation: TokenWriter, fraction: float) -> None:
    """Keep the tail for validation when no document fell to it, as with a single one.

    The cut is at the nearest start of a document, unless that would move far too much: then a
    document is cut in two.
    """
    start = train.tokens - max(1, round(train.tokens * fraction))
    starts = train.starts()
    place = int(np.searchsorted(starts, start))
    near = [int(starts[i]) for i in (place - 1, place) if 0 < i < train.documents]
    del starts
    share = max(2 * fraction, 0.25)
    near = [at for at in near if train.tokens - at <= share * train.tokens]
    start = min(near, key=lambda at: abs(at - start), default=start)
    if 0 < start < train.tokens:
        train.move_tail(validation, start)


def open_prepared(folder: Path, *, verify: Verify = "once", cache: Path | None = None) -> Prepared:
    """Open the token files of a folder.

    Args:
        folder: the folder, or the training file itself.
        verify: see `TokenFile.open`.
        cache: the cache folder; the user's by default.

    Returns:
        The files; validation is None if none was made.

    Raises:
        DataError: a file is missing or damaged, or the two do not belong together.
    """
    path = folder / TRAIN if folder.is_dir() else folder
    train = TokenFile.open(path, verify=verify, cache=cache)
    if not train.header.partner:
        return Prepared(train, None)
    beside = path.with_name(VALIDATION)
    validation = TokenFile.open(beside, verify=verify, cache=cache)
    if validation.header.content != train.header.partner:
        raise DataError(
            f"this file was not made together with {path.name}",
            where=str(beside),
            cure="prepare the text again with `shardtrain prepare`",
        )
    return Prepared(train, validation)
