"""A config as TOML text: where its keys stand, and how it is written.

Owns: lines and places in a TOML file, the resolved file and the commented template. Does not own:
what the keys mean or whether they are right (`shardtrain.config`).
"""

import json
import re
import textwrap
from collections.abc import Collection, Mapping

from pydantic import BaseModel
from pydantic.fields import FieldInfo

_TABLE = re.compile(r"^\s*\[\s*([^\[\]]+?)\s*\]\s*(#.*)?$")
_KEY = re.compile(
    r"""^\s*((?:[\w-]+|"[^"]*"|'[^']*')(?:\s*\.\s*(?:[\w-]+|"[^"]*"|'[^']*'))*)\s*="""
)
_BARE = re.compile(r"^[A-Za-z0-9_-]+$")


def key_lines(text: str) -> list[tuple[str, int]]:
    r"""Return each key of a TOML text with the line it stands on, repetitions included.

    Args:
        text: TOML, valid or not.

    Returns:
        Pairs of dotted key (tables too) and line number from 1, in the order of the file.

    Example:
        >>> key_lines("[mesh]\ntensor = 2\ntensor = 4")
        [('mesh', 1), ('mesh.tensor', 2), ('mesh.tensor', 3)]
    """
    found: list[tuple[str, int]] = []
    table = ""
    for number, line in enumerate(text.splitlines(), start=1):
        if match := _TABLE.match(line):
            table = _plain(match[1])
            found.append((table, number))
        elif match := _KEY.match(line):
            key = _plain(match[1])
            found.append((f"{table}.{key}" if table else key, number))
    return found


def first_repeated(text: str) -> tuple[str, int, int] | None:
    """Return the first key that a TOML text gives twice.

    Args:
        text: TOML.

    Returns:
        The dotted key and both of its lines, or None when no key is repeated.
    """
    seen: dict[str, int] = {}
    for key, number in key_lines(text):
        if key in seen:
            return key, seen[key], number
        seen[key] = number
    return None


def write(config: BaseModel, idle: Collection[str]) -> str:
    """Return a config as TOML, every key of every section.

    Args:
        config: Sections by name.
        idle: Keys without effect in this run, which is said beside them.

    Returns:
        TOML that loads as the same config.
    """
    lines: list[str] = []
    for name, section in _sections(config).items():
        lines += ["", f"[{name}]"]
        for key in type(section).model_fields:
            line = f"{key} = {value_text(getattr(section, key))}"
            idles = f"{name}.{key}" in idle
            lines.append(f"{line}  # no effect in this run" if idles else line)
    return "\n".join(lines[1:]) + "\n"


def template(config: BaseModel) -> str:
    """Return a commented config to start from.

    Args:
        config: Sections by name; types are written, values that differ from their defaults, and
            those without a default; the others stand as comments.

    Returns:
        TOML that loads as the same config.
    """
    lines: list[str] = []
    for name, section in _sections(config).items():
        lines += ["", *_comment(_sentence(type(section).__doc__)), f"[{name}]"]
        for key, field in type(section).model_fields.items():
            value = getattr(section, key)
            default = not field.is_required() and value == _default(field) and key != "type"
            lines += _comment(_sentence(field.description))
            lines.append(f"{'# ' if default else ''}{key} = {value_text(value)}")
    return "\n".join(lines[1:]) + "\n"


def value_text(value: object) -> str:
    """Return a value as TOML writes it.

    Args:
        value: A bool, number, string, list or mapping; None is written as "".

    Returns:
        One line of TOML.
    """
    if value is None:
        return '""'
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, Mapping):
        items = ", ".join(f"{_key_text(key)} = {value_text(item)}" for key, item in value.items())
        return f"{{ {items} }}" if items else "{}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(value_text, value))}]"
    return repr(value)


def _comment(text: str) -> list[str]:
    return textwrap.wrap(text, 96, initial_indent="# ", subsequent_indent="# ")


def _sections(config: BaseModel) -> dict[str, BaseModel]:
    return {name: getattr(config, name) for name in type(config).model_fields}


def _default(field: FieldInfo) -> object:
    return field.get_default(call_default_factory=True, validated_data={})


def _plain(key: str) -> str:
    return ".".join(part.strip().strip("\"'") for part in key.split("."))


def _key_text(key: str) -> str:
    return key if _BARE.match(key) else value_text(key)


def _sentence(text: str | None) -> str:
    return " ".join((text or "").split())
