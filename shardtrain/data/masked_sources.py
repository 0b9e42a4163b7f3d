"""From the `[data]` section of masked text to training and validation data.

Owns: what of the prepared tokens is refused. Does not own: preparing them (`sources`), samples.
"""

from shardtrain.data.cache import Say, silent
from shardtrain.data.config import MaskedTextConfig
from shardtrain.data.masked_text import MaskedText, masked_text, require_pairs
from shardtrain.data.sources import DataInfo, open_tokens
from shardtrain.data.tokens import TokenFile
from shardtrain.data.wordpiece import Pieces
from shardtrain.errors import DataError


def open_masked(
    config: MaskedTextConfig, *, pairs: bool, seed: int, say: Say = silent
) -> tuple[MaskedText, MaskedText | None, DataInfo]:
    """Open a run's data; text is prepared into the cache the first time.

    Args:
        config: the `[data]` section.
        pairs: whether the next sentence is predicted too.
        seed: decides the order of samples, and what is hidden.
        say: told in a line what is done, waited for or left out.

    Returns:
        Training data, validation data (None if there is none) and what they are.

    Raises:
        DataError: the text cannot be read, is too little, or its tokenizer has no [MASK].
    """
    info = open_tokens(config.as_text, say=say)
    if info.train.header.masked:
        raise DataError(
            "prompts with completions are for models that write",
            where="data.path",
            value=config.path,
            cure="use text: JSONL with a `text` field, for instance",
        )
    tokenizer = info.tokenizer()
    pieces = Pieces.of(tokenizer, whole_words=config.whole_words)
    ends = len(tokenizer.begin), len(tokenizer.end)

    def samples(file: TokenFile) -> MaskedText:
        return masked_text(
            file,
            pieces,
            ends=ends,
            sequence_length=config.sequence_length,
            batch_size=config.batch_size,
            pairs=pairs,
            seed=seed,
            shuffle=config.shuffle,
            fraction=config.mask_fraction,
            whole_words=config.whole_words,
        )

    train = samples(info.train)
    require_pairs(train, str(config.path or info.train.path))
    if info.validation is None:
        return train, None, info
    validation = samples(info.validation)
    if not validation.num_samples or (pairs and len(validation.starts) < 2):
        say("no validation: the part of the text that is kept for it has no two documents")
        return train, None, info
    return train, validation, info
