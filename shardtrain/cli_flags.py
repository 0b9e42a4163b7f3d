"""Flags: one for each key of the config, made from the same sections, and each command's own.

Owns: reading a command line into options, a config source and overrides; the help. Does not own:
text to value (`cli_values`), the commands' own options (`cli_options`), what the commands are and
do (`shardtrain.cli`), and whether a config is right (`shardtrain.config`).
"""

import copy
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Annotated, Any, Literal, NoReturn, TypeVar, get_origin, get_type_hints

import tyro
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from shardtrain.cli_options import Given, flags_of, read_options
from shardtrain.cli_values import value_of
from shardtrain.config import SECTIONS, TYPES, section_classes
from shardtrain.config_files import put, read_source
from shardtrain.config_init import inherit
from shardtrain.config_keys import section_faults, unknown_key
from shardtrain.errors import ConfigError, raise_all

Options = TypeVar("Options")


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
        ConfigError: A flag is unknown, given twice or of the wrong kind, or the config cannot be
            read.
        SystemExit: Help was asked for.
    """
    asks = _asks_for_help(arguments)
    given = scan(arguments, _arity(kind))
    dotted = {flag: words for flag, words in given.values.items() if "." in flag}
    name = given.words[0] if given.words else _defaults(kind)[source]
    if not isinstance(name, str):
        if not asks:
            raise ConfigError(f"{source.upper()} is missing", where=f"shardtrain {command}")
        name = None
    raw, places, _ = read_source(sections(name) if sections and name else name)
    for flag, words in dotted.items():
        if flag in ("model.type", "task.type", "data.type", "run.init") and words:
            put(raw, flag, words[0])
    raw = inherit(raw)
    if "model" not in raw and not any(flag.startswith("model.") for flag in dotted):
        raise ConfigError(
            "the model is missing",
            where=name or "",
            cure="write [model], or begin with weights that have one: --run.init RUN",
        )
    classes = section_classes(raw)
    if asks:
        raise_all(section_faults(raw, classes, places, complete=False))
        _help(kind, command, {key: _flags(part, raw.get(key, {})) for key, part in classes.items()})
    faults = [fault for flag in dotted if (fault := _unknown(flag, classes)) is not None]
    values: dict[str, Any] = {}
    for flag, words in dotted.items():
        section, key = flag.split(".", 1)
        field = classes[section].model_fields.get(key) if section in classes else None
        try:
            if field is not None:
                values[flag] = value_of(field.annotation, words, flag)
        except ConfigError as fault:
            faults.append(fault)
    raise_all(faults)
    options = read_options(kind, given, command=command, sections=classes)
    return options, getattr(options, source), values


def names_source(kind: type[Any], arguments: Sequence[str]) -> bool:
    """Return whether a command line names its config, or help is asked for.

    Args:
        kind: The command's options, a dataclass.
        arguments: The command line after the command.
    """
    return bool(scan(arguments, _arity(kind)).words) or _asks_for_help(arguments)


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
        ConfigError: A flag is unknown, given twice or of the wrong kind.
        SystemExit: Help was asked for.
    """
    if _asks_for_help(arguments):
        _help(kind, command, {})
    return read_options(kind, scan(arguments, _arity(kind)), command=command, sections={})


def _asks_for_help(arguments: Sequence[str]) -> bool:
    return "--help" in arguments or "-h" in arguments


def _help(kind: type[Any], command: str, sections: Mapping[str, Any]) -> NoReturn:
    """Print the help of a command, which tyro lays out, and exit."""
    parts: list[Any] = [("options", Annotated[kind, tyro.conf.arg(name="")]), *sections.items()]
    tyro.cli(
        dataclasses.make_dataclass("Arguments", parts),
        prog=f"shardtrain {command}",
        description=kind.__doc__,
        args=["--help"],
        use_underscores=True,
        config=(tyro.conf.FlagCreatePairsOff,),
    )
    raise AssertionError("tyro exits after the help")


def _flags(part: type[BaseModel], values: Mapping[str, Any]) -> Any:
    """A section for tyro's help: its keys, and as defaults the values of the file."""
    fields: list[Any] = []
    for key, field in part.model_fields.items():
        argument = tyro.conf.arg(help=" ".join((field.description or "").split()))
        default = values.get(key, _default(field))
        if field.annotation is bool and isinstance(default, bool):
            default = str(default).lower()
        fields.append((key, Annotated[_plain(field), argument], _field(default)))
    flags = dataclasses.make_dataclass(part.__name__, fields)
    flags.__doc__ = part.__doc__
    return flags


def _field(default: Any) -> Any:
    if isinstance(default, list | dict):
        return dataclasses.field(default_factory=partial(copy.copy, default))
    return dataclasses.field(default=default)


def _default(field: FieldInfo) -> Any:
    if field.is_required():
        return tyro.MISSING
    return field.get_default(call_default_factory=True, validated_data={})


def _plain(field: FieldInfo) -> Any:
    """The type of a flag as the help shows it; a row of a table is one word there."""
    if field.annotation is bool:
        return Literal["true", "false"]
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
    arity |= {flag: 0 for name, flag in flags_of(kind).items() if hints[name] is bool}
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
