"""The words after a flag, read as the kind of value that the flag takes.

Owns: text to value, and the refusal of text that is no such value. Does not own: which values are
allowed for a key of the config (`load_config` says so, as for a file), and which flags there are.
"""

import difflib
from collections.abc import Callable, Sequence
from typing import Any, Literal, get_args, get_origin

from shardtrain.errors import ConfigError

_TRUTH = {"true": True, "false": False}


def value_of(kind: Any, words: Sequence[str], where: str) -> Any:
    """Read the words after a flag.

    Args:
        kind: Type of the value: a plain one, a literal, a list or tuple, or a table.
        words: The words that follow the flag.
        where: The flag or key, for messages.

    Returns:
        The value. A word that is none of a literal's stays text, for who checks choices.

    Raises:
        ConfigError: There are too few words, or one is of another kind.
    """
    origin = get_origin(kind)
    if origin in (list, tuple):
        return origin(_scalar(get_args(kind)[0], word, where) for word in words)
    if origin is dict:
        if len(words) % 2:
            raise ConfigError(
                "takes pairs of name and value",
                where=where,
                value=" ".join(words),
                cure=f"such as --{where.removeprefix('--')} mlp data vocab tensor",
            )
        return dict(zip(words[::2], words[1::2], strict=True))
    if kind is bool and not words:
        return True
    if not words:
        raise ConfigError("a value is missing after it", where=where)
    return _scalar(kind, words[0], where)


def choice_of(kind: Any, value: Any, where: str) -> Any:
    """Check a value against the choices of a command's own option.

    Args:
        kind: Type of the option.
        value: As `value_of` has read it.
        where: The option.

    Returns:
        The value.

    Raises:
        ConfigError: It is none of them.
    """
    choices = get_args(kind) if get_origin(kind) is Literal else (value,)
    if value in choices:
        return value
    near = difflib.get_close_matches(str(value).lower(), choices, n=1)
    raise ConfigError(
        "unknown value",
        where=where,
        value=f'"{value}"',
        allowed=", ".join(choices),
        cure=f'did you mean "{near[0]}"?' if near else "",
    )


def _scalar(kind: Any, word: str, where: str) -> Any:
    if kind is bool:
        alone = f"alone or as --{where.removeprefix('--')}=true it means true"
        return _read(
            lambda text: _TRUTH[text.lower()],
            word,
            where,
            "true or false",
            cure=f"a word after it is its value; {alone}",
        )
    if kind is int:
        return _read(int, word, where, "a whole number")
    if kind is float:
        return _read(float, word, where, "a number")
    if get_origin(kind) is Literal and all(isinstance(one, int) for one in get_args(kind)):
        return _read(int, word, where, "a whole number", ", ".join(map(str, get_args(kind))))
    return word


def _read(
    read: Callable[[str], Any], word: str, where: str, what: str, allowed: str = "", cure: str = ""
) -> Any:
    try:
        return read(word)
    except (ValueError, KeyError):
        raise ConfigError(
            f"must be {what}", where=where, value=f'"{word}"', allowed=allowed, cure=cure
        ) from None
