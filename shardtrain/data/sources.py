"""From the `[data]` section to training and validation data.

Owns: what `data.path` may be, and preparing text once into the cache. Does not own: how text is
read or tokenized, batches.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from shardtrain.data.cache import Say, cache_folder, make_folder, silent
from shardtrain.data.config import DataConfig
from shardtrain.data.documents import SourceFile, find_files, standard_library
from shardtrain.data.examples import BadRecords
from shardtrain.data.language import LanguageData, language_data, pack, require_batch
from shardtrain.data.prepare import (
    TRAIN,
    Prepared,
    Progress,
    Split,
    check_fraction,
    no_progress,
    open_if_current,
    open_prepared,
    prepare_files,
)
from shardtrain.data.prepare_examples import too_long
from shardtrain.data.token_arrays import array_path
from shardtrain.data.tokenizer import (
    TOKENIZER_FILE,
    Tokenizer,
    load_tokenizer,
    tokenizer_beside,
)
from shardtrain.data.tokens import TokenFile, is_token_file
from shardtrain.data.wordpiece import is_learned, make_tokenizer
from shardtrain.errors import DataError

_PATH = "data.path"


@dataclass(frozen=True, eq=False)
class DataInfo:
    """What the data is, for the screen, for comparisons between processes, and for generation."""

    source: str
    """In words: where the text is from."""
    train: TokenFile
    validation: TokenFile | None

    @property
    def folder(self) -> Path:
        """Where the token files lie."""
        return self.train.path.parent

    @property
    def vocab_size(self) -> int:
        """The tokenizer's vocabulary."""
        return self.train.header.vocab_size

    @property
    def tokenizer_name(self) -> str:
        """The tokenizer's name."""
        return self.train.header.tokenizer

    @property
    def digest(self) -> str:
        """Equal for equal training tokens, wherever they lie: 32 hex digits."""
        return self.train.header.content

    def tokenizer(self) -> Tokenizer:
        """Load the tokenizer that made the tokens.

        Raises:
            DataError: its file is gone, or the package that reads it is not installed.
        """
        return tokenizer_beside(self.train.path, self.train.header)


def open_data(
    config: DataConfig,
    *,
    seed: int = 0,
    say: Say = silent,
    progress: Progress = no_progress,
) -> tuple[LanguageData, LanguageData | None, DataInfo]:
    """Open a run's data; text is prepared into the cache the first time.

    Args:
        config: the `[data]` section.
        seed: decides the order of samples. Which documents are kept for validation does not depend
            on it, so that runs with several seeds are compared on the same text.
        say: told in a line what is done, waited for, skipped or left out.
        progress: told how far a preparation is.

    Returns:
        Training data, validation data (None if there is none) and what they are.

    Raises:
        DataError: the path is missing, empty, damaged, no text, or too short for one batch.
    """
    info = open_tokens(config, say=say, progress=progress)
    if config.bad_records == "skip" and not info.train.header.masked:
        say("data.bad_records has no effect: this data has no prompts and completions")
    train = _samples(config, info.train, seed, say)
    held = info.validation.header.tokens if info.validation is not None else 0
    require_batch(train, str(config.path or info.train.path), held=held)
    if info.validation is None:
        return train, None, info
    validation = _samples(config, info.validation, seed, say)
    if validation.num_samples == 0:
        count = info.validation.header.tokens
        say(f"no validation: {count} tokens are too few for a sequence of {config.sequence_length}")
        return train, None, info
    return train, validation, info


def open_tokens(
    config: DataConfig, *, say: Say = silent, progress: Progress = no_progress
) -> DataInfo:
    """Open the token files of a run; text is prepared into the cache the first time.

    Args:
        config: the `[data]` section.
        say: told in a line what is done, waited for or skipped.
        progress: told how far a preparation is.

    Raises:
        DataError: the path is missing, empty, damaged or no text.
    """
    path = Path(config.path).expanduser()
    if config.path and _is_prepared(path):
        prepared = open_prepared(path, cache=cache_folder(config.cache))
        _check_tokenizer(config, prepared)
        source = f"tokens in {path}"
    elif config.path:
        prepared = _from_cache(find_files([path], say=say), config, str(path), say, progress)
        source = str(path)
    else:
        source = "the source text of Python's standard library"
        prepared = _from_cache(standard_library(), config, source, say, progress)
    return DataInfo(source, prepared.train, prepared.validation)


def open_whole(
    config: DataConfig, tokenizer: Tokenizer | None, *, say: Say = silent
) -> tuple[LanguageData, TokenFile]:
    """Open all of a file, to evaluate a model on it.

    Args:
        config: the `[data]` section, with the file as its path.
        tokenizer: of the model; None = nobody knows it, and only tokens can be read.
        say: told in a line what is done.

    Returns:
        Every token, in samples of which the last may be shorter; and the token file.

    Raises:
        DataError: there is no such file, it is damaged, or has no two tokens.
    """
    path = Path(config.path).expanduser()
    if path.is_dir() and _is_prepared(path):
        raise DataError(
            "this folder holds more than one file of tokens",
            where=_PATH,
            value=config.path,
            cure=f"name {TRAIN} or validation.tokens in it",
        )
    if path.is_file() and _is_prepared(path):
        file = TokenFile.open(path, cache=cache_folder(config.cache))
    elif tokenizer is None and array_path(path) is None:
        raise DataError(
            "nobody knows the tokenizer of this model, so text cannot be read",
            where=_PATH,
            value=config.path,
            cure="give tokens (.npy, .tokens), or the tokenizer with data.tokenizer",
        )
    else:
        whole = config.model_copy(update={"validation_fraction": 0.0})
        files = find_files([path], say=say)
        made = tokenizer or load_tokenizer("bytes")
        file = _from_cache(files, whole, str(path), say, no_progress, made).train
    data = _samples(config, file, 0, say, to_the_end=True)
    if not data.num_samples:
        raise DataError("there is nothing to predict", where=_PATH, value=config.path)
    return data, file


def open_tokenizer(config: DataConfig) -> Tokenizer:
    """Load the tokenizer of a run; text need not be there any more, prepared tokens must.

    Args:
        config: the `[data]` section.

    Returns:
        The tokenizer.

    Raises:
        DataError: it cannot be found or read.
    """
    path = Path(config.path).expanduser()
    if config.path and _is_prepared(path):
        train = open_prepared(path, cache=cache_folder(config.cache)).train
    elif config.path and array_path(path) is not None:
        train = _from_cache(find_files([path]), config, str(path), silent, no_progress).train
    else:
        return load_tokenizer(config.tokenizer)
    return tokenizer_beside(train.path, train.header)


def require_vocabulary(vocab_size: int, info: DataInfo) -> None:
    """Refuse a model whose vocabulary cannot hold the tokens.

    Args:
        vocab_size: the model's vocabulary.
        info: the data.

    Raises:
        DataError: the tokenizer has more tokens.
    """
    if vocab_size < info.vocab_size:
        raise DataError(
            f"the vocabulary is smaller than the tokens of {info.source}",
            where="model.vocab_size",
            value=str(vocab_size),
            allowed=f"at least {info.vocab_size} (tokenizer {info.tokenizer_name})",
            cure="leave model.vocab_size out: it is then the tokenizer's",
        )


def _is_prepared(path: Path) -> bool:
    """Tell token files from text; a name that promises tokens is held to it."""
    if path.is_dir():
        return (path / TRAIN).exists()
    return path.is_file() and (path.suffix == ".tokens" or is_token_file(path))


def _check_tokenizer(config: DataConfig, prepared: Prepared) -> None:
    """Refuse prepared tokens of another tokenizer than the one asked for (bytes is the default)."""
    if config.tokenizer == "bytes":
        return
    header = prepared.train.header
    if is_learned(config.tokenizer):
        raise DataError(
            f"the tokens of {prepared.train.path} are made already, and so is their tokenizer",
            where="data.tokenizer",
            value=config.tokenizer,
            cure=f"give {prepared.train.path.parent / TOKENIZER_FILE}",
        )
    asked = load_tokenizer(config.tokenizer)
    if asked.digest != header.tokenizer_digest:
        raise DataError(
            f"the tokens of {prepared.train.path} were made with another tokenizer",
            where="data.tokenizer",
            value=config.tokenizer,
            allowed=f"{header.tokenizer} of digest {header.tokenizer_digest}",
            cure="leave data.tokenizer out, or prepare the text again",
        )


def _from_cache(
    files: Sequence[SourceFile],
    config: DataConfig,
    source: str,
    say: Say,
    progress: Progress,
    tokenizer: Tokenizer | None = None,
) -> Prepared:
    check_fraction(config.validation_fraction)
    split = Split(
        tokenizer or make_tokenizer(config.tokenizer, files, cache=config.cache, say=say),
        config.validation_fraction,
        bad_records=config.bad_records,
        max_tokens=config.sequence_length + 1,
    )
    key = split.key(files)
    cache = cache_folder(config.cache)
    folder = cache / "tokens" / key
    made = open_if_current(folder, key, cache=cache, say=say)
    if made is not None:
        return made
    make_folder(
        folder, where="data.cache", cure="set data.cache or SHARDTRAIN_CACHE to a folder of yours"
    )
    size, count = sum(file.size for file in files), len(files)
    much = f"{size / 1e6:.1f} MB" if size >= 1e5 else f"{size:,} bytes"
    many = f"{count} file{'s' * (count != 1)}"
    say(f"preparing {source}: {many}, {much}, once, into {folder}")
    return prepare_files(files, folder, split, reuse=True, progress=progress, say=say, cache=cache)


def _samples(
    config: DataConfig, file: TokenFile, seed: int, say: Say, *, to_the_end: bool = False
) -> LanguageData:
    packed = _packed(config, file, say) if file.header.masked else None
    return language_data(
        file,
        sequence_length=config.sequence_length,
        batch_size=config.batch_size,
        seed=seed,
        shuffle=config.shuffle,
        separate_documents=config.separate_documents,
        to_the_end=to_the_end,
        packed=packed,
    )


def _packed(config: DataConfig, file: TokenFile, say: Say) -> NDArray[np.int64]:
    """Samples of whole examples.

    Raises:
        DataError: one is too long, and that stops the run; or examples are to see each other.
    """
    if not config.separate_documents:
        raise DataError(
            "examples never see each other",
            where="data.separate_documents",
            value="False",
            allowed="True where records have prompts and completions",
        )
    most, bad = config.sequence_length + 1, BadRecords(config.bad_records)
    packed, long = pack(file.offsets, most)
    for number, tokens in long:
        bad.meet(too_long(f"{file.path}: example {number + 1}", tokens, most))
    bad.tell(say)
    return packed
