"""Flags: one for each key of the config, made from the same sections, and each command's own.

Owns: reading a command line into options, a config source and overrides. Does not own: what the
commands are and do (`shardtrain.cli`), and whether a config is right (`shardtrain.config`).
"""

import copy
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, TypeVar, cast, get_origin, get_type_hints

import tyro
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from shardtrain.config import SECTIONS, TYPES, section_classes
from shardtrain.config_files import put, read_source
from shardtrain.config_init import inherit
from shardtrain.config_keys import MISSING, section_faults, unknown_key
from shardtrain.errors import ConfigError, raise_all

Options = TypeVar("Options")


@dataclass(frozen=True)
class Given:
    """What stands on a command line, before any value is looked at."""

    words: tuple[str, ...]
    """Words that belong to no flag."""
    values: Mapping[str, tuple[str, ...]]
    """Flag (with underscores, without dashes) to the words that follow it."""


def scan(arguments: Sequence[str], arity: Mapping[str, int | None]) -> Given:
    """Sort a command line into words and flags.

    Args:
        arguments: The command line after the command.
        arity: How many words follow a flag: a number, or None for any; 1 for unknown flags.

    Returns:
        The words and the flags.

    Raises:
        ConfigError: A flag is given twice.
    """
    words: list[str] = []
    values: dict[str, tuple[str, ...]] = {}
    rest = list(arguments)
    while rest:
        word = rest.pop(0)
        if not word.startswith("--"):
            words.append(word)
            continue
        name, equals, value = word[2:].partition("=")
        flag = name.replace("-", "_")
        if flag in values:
            raise ConfigError("is given twice on the command line", where=f"--{name}")
        taken = [value] if equals else []
        room = 0 if equals else arity.get(flag, 1)
        while rest and not rest[0].startswith("--") and (room is None or len(taken) < room):
            taken.append(rest.pop(0))
        values[flag] = tuple(taken)
    return Given(tuple(words), values)


def parse(
    kind: type[Options],
    arguments: Sequence[str],
    *,
    command: str,
    source: str,
    sections: Callable[[str], Mapping[str, Any]] | None = None,
) -> tuple[Options, str, dict[str, Any]]:
    """Read the command line of a command that works on a config.

    Args:
        kind: The command's options, a dataclass.
        arguments: The command line after the command.
        command: Name of the command.
        source: The option that names the config; its default is used when it is not given.
        sections: How what is named becomes sections, where it is no config.

    Returns:
        The options, the config source, and the values of config flags by dotted key.

    Raises:
        ConfigError: A flag is unknown or given twice, or the config cannot be read.
        SystemExit: Help was asked for, or a value is of the wrong kind; tyro has said it.
    """
    given = scan(arguments, _arity(kind))
    dotted = {flag: words for flag, words in given.values.items() if "." in flag}
    name = given.words[0] if given.words else _defaults(kind)[source]
    if not isinstance(name, str):
        if "help" not in given.values and "-h" not in arguments:
            raise ConfigError(f"{source.upper()} is missing", where=f"shardtrain {command}")
        name = None
    raw, places, _ = read_source(sections(name) if sections and name else name)
    for flag, words in dotted.items():
        if flag in ("model.type", "task.type", "data.type", "run.init") and words:
            put(raw, flag, words[0])
            places.pop(flag, None)
    raw = inherit(raw)
    if "model" not in raw and not any(flag.startswith("model.") for flag in dotted):
        raise ConfigError(
            "the model is missing",
            where=name or "",
            cure="write [model], or begin with weights that have one: --run.init RUN",
        )
    classes = section_classes(raw)
    raise_all([fault for flag in dotted if (fault := _unknown(flag, classes)) is not None])
    asks = "help" in given.values or "-h" in arguments
    faults = section_faults(raw, classes, places, complete=not asks)
    raise_all([fault for fault in faults if not (fault.where in dotted and _is_missing(fault))])
    parts: list[Any] = [("options", Annotated[kind, tyro.conf.arg(name="")])]
    parts += [(key, _flags(part, raw.get(key, {}))) for key, part in classes.items()]
    found = _run(dataclasses.make_dataclass("Arguments", parts), arguments, command, kind.__doc__)
    values = {
        flag: getattr(getattr(found, flag.split(".")[0]), flag.split(".")[1]) for flag in dotted
    }
    return found.options, getattr(found.options, source), values


def _is_missing(fault: ConfigError) -> bool:
    """Whether it says that a key is not in the file, which a flag may give."""
    return fault.message == MISSING


def config_words(kind: type[Any], arguments: Sequence[str]) -> list[str]:
    """Return the flags of the config, so that another command line can have them.

    Args:
        kind: The command's options, a dataclass.
        arguments: The command line after the command.

    Returns:
        Those words that are flags of config keys, with their values.
    """
    words: list[str] = []
    for flag, values in scan(arguments, _arity(kind)).values.items():
        if "." not in flag:
            continue
        one = len(values) == 1 and values[0].startswith("-")
        words += [f"--{flag}={values[0]}"] if one else [f"--{flag}", *values]
    return words


def parse_plain(kind: type[Options], arguments: Sequence[str], *, command: str) -> Options:
    """Read the command line of a command without a config.

    Args:
        kind: The command's options, a dataclass.
        arguments: The command line after the command.
        command: Name of the command.

    Returns:
        The options.

    Raises:
        ConfigError: A flag is given twice.
        SystemExit: Help was asked for, or a value is of the wrong kind; tyro has said it.
    """
    scan(arguments, _arity(kind))
    return cast(Options, _run(kind, arguments, command, kind.__doc__))


def _run(parser: type, arguments: Sequence[str], command: str, description: str | None) -> Any:
    return tyro.cli(
        parser,
        prog=f"shardtrain {command}",
        description=description,
        args=list(arguments),
        use_underscores=True,
        config=(tyro.conf.FlagCreatePairsOff,),
    )


def _flags(part: type[BaseModel], values: Mapping[str, Any]) -> Any:
    """A section as tyro takes it: its keys and help, but no check, which `load_config` makes.

    Defaults are the values of the file. Booleans take a value.
    """
    fields: list[Any] = []
    for key, field in part.model_fields.items():
        argument = tyro.conf.arg(help=" ".join((field.description or "").split()))
        default = values.get(key, _default(field))
        fields.append((key, Annotated[_plain(field), argument], _field(default)))
    flags = dataclasses.make_dataclass(part.__name__, fields)
    flags.__doc__ = part.__doc__
    return Annotated[flags, tyro.conf.FlagConversionOff]


def _field(default: Any) -> Any:
    if isinstance(default, list | dict):
        return dataclasses.field(default_factory=partial(copy.copy, default))
    return dataclasses.field(default=default)


def _default(field: FieldInfo) -> Any:
    if field.is_required():
        return tyro.MISSING
    return field.get_default(call_default_factory=True, validated_data={})


def _plain(field: FieldInfo) -> Any:
    """The type of a flag; a row of a table is one word on the command line."""
    return dict[str, str] if get_origin(field.annotation) is dict else field.annotation


def _unknown(flag: str, classes: Mapping[str, type[BaseModel]]) -> ConfigError | None:
    section, key = flag.split(".", 1)
    if section in classes and key in classes[section].model_fields:
        return None
    what = "key" if section in classes else "section"
    known, name = (section, key) if section in classes else ("", section)
    fault = unknown_key(classes, known, name, {}, what=what)
    fault.where = f"--{flag}"
    return fault


def _arity(kind: type) -> dict[str, int | None]:
    """How many words follow each flag: none for a command's own switches, any for lists."""
    arity: dict[str, int | None] = {"help": 0}
    hints = get_type_hints(kind)
    arity |= {name: 0 for name, hint in hints.items() if hint is bool}
    arity |= {name: None for name, hint in hints.items() if get_origin(hint) is tuple}
    parts = [*SECTIONS.items()]
    parts += [(name, part) for name, types in TYPES.items() for part in types.values()]
    for section, part in parts:
        for key, field in part.model_fields.items():
            if get_origin(field.annotation) in (dict, list):
                arity[f"{section}.{key}"] = None
    return arity


def _defaults(kind: type) -> dict[str, Any]:
    return {field.name: field.default for field in dataclasses.fields(kind)}
