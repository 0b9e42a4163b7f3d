"""A command's own options, from a command line that is sorted already.

Owns: which words are whose, and the refusal of options and words that a command does not take. Does
not own: sorting the line and the config's keys (`cli_flags`), and what an option means.
"""

import dataclasses
import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, get_origin, get_type_hints

import tyro
from pydantic import BaseModel

from shardtrain.cli_values import choice_of, value_of
from shardtrain.errors import ConfigError, raise_all

Options = TypeVar("Options")


@dataclass(frozen=True)
class Given:
    """What stands on a command line, before any value is looked at."""

    words: tuple[str, ...]
    """Words that belong to no flag."""
    values: Mapping[str, tuple[str, ...]]
    """Flag (with underscores, without dashes) to the words that follow it."""


def read_options(
    kind: type[Options], given: Given, *, command: str, sections: Mapping[str, type[BaseModel]]
) -> Options:
    """Read a command's own options.

    Args:
        kind: Their dataclass.
        given: The command line after the command.
        command: Name of the command, for messages.
        sections: Class of each section of the config, whose keys are flags too; none without one.

    Returns:
        The options.

    Raises:
        ConfigError: One is unknown, missing or of another kind, or there is a word too many.
    """
    types = get_type_hints(kind)
    words, values = list(given.words), {}
    places = [
        name for name, hint in get_type_hints(kind, include_extras=True).items() if _word(hint)
    ]
    flags = {name: flag for name, flag in flags_of(kind).items() if name not in places}
    own = list(flags.values())
    unknown = [flag for flag in given.values if "." not in flag and flag not in own]
    raise_all([_no_option(flag, own, sections) for flag in unknown])
    for field in dataclasses.fields(kind):  # type: ignore[arg-type]  # a dataclass
        name, flag = field.name, flags.get(field.name, "")
        where = shown = f"--{flag}"
        taken: Sequence[str] | None = given.values.get(flag)
        if name in places:
            where, shown = f"shardtrain {command} {name.upper()}", name.upper()
            room = len(words) if get_origin(types[name]) is tuple else 1
            taken, words = words[:room] or None, words[room:]
        if taken is not None:
            value = choice_of(types[name], value_of(types[name], taken, where), where)
            values[name] = value if flag in ("", name) else not value
        elif field.default is dataclasses.MISSING:
            raise ConfigError(f"{shown} is missing", where=f"shardtrain {command}")
    if words:
        raise _too_many(words, places, command)
    return kind(**values)


def flags_of(kind: type[Any]) -> dict[str, str]:
    """Return the flag of each option: its name, or `no_NAME` for a switch that is on by itself."""
    return {
        field.name: f"no_{field.name}" if field.default is True else field.name
        for field in dataclasses.fields(kind)
    }


def _word(hint: Any) -> bool:
    """Whether an option is a word without a flag."""
    return tyro.conf.Positional in getattr(hint, "__metadata__", ())


def _no_option(
    flag: str, own: Sequence[str], sections: Mapping[str, type[BaseModel]]
) -> ConfigError:
    keys = [f"{name}.{key}" for name, part in sections.items() for key in part.model_fields]
    near = [key for key in keys if key.split(".")[1] == flag]
    near = near or difflib.get_close_matches(flag, own, n=1)
    near = near or [
        key for key in keys if difflib.get_close_matches(flag, [key.split(".")[1]], cutoff=0.8)
    ]
    allowed = ", ".join(f"--{name}" for name in own)
    keys_too = "; and every key of the config, such as --run.steps" if keys else ""
    return ConfigError(
        "there is no such option",
        where=f"--{flag}",
        allowed=allowed + keys_too if own else keys_too.removeprefix("; and "),
        cure=f"did you mean {' or '.join(f'--{name}' for name in near)}?" if near else "",
    )


def _too_many(words: Sequence[str], places: Sequence[str], command: str) -> ConfigError:
    takes = ", ".join(name.upper() for name in places)
    one = f"one {takes}" if len(places) == 1 else takes
    return ConfigError(
        "there are more words than the command takes",
        where=f"shardtrain {command}",
        value=" ".join(words),
        allowed=f"{one} and flags" if places else "flags, and no words without one",
    )
