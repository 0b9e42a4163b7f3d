"""What is said about a wrong key or a wrong value.

Owns: the check of each section by itself, and the words for it. Does not own: which sections there
are, and checks that span them (`shardtrain.config`).
"""

import difflib
import re
from collections.abc import Mapping
from typing import Any, Final

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from shardtrain.errors import ConfigError
from shardtrain.plan.layout import listed

Sections = Mapping[str, type[BaseModel]]
"""Section name to its class."""


MISSING: Final = "is missing; it has no default"
"""What is said of a key that must be given."""


def section_faults(
    raw: Mapping[str, Any], sections: Sections, places: Mapping[str, str], *, complete: bool
) -> list[ConfigError]:
    """Return what is wrong with single keys and values.

    Args:
        raw: Sections as read.
        sections: Class of each section.
        places: Where each dotted key stands, as far as known.
        complete: Whether a missing key is a fault.

    Returns:
        One error per fault, none when each section is right by itself.
    """
    faults = [
        unknown_key(sections, "", name, places, what="section" if isinstance(part, dict) else "key")
        for name, part in raw.items()
        if name not in sections
    ]
    for name in sections:
        part = raw.get(name, {})
        if not isinstance(part, Mapping):
            given = value_type(part)
            faults.append(
                ConfigError(f"must be a section, not {given}", where=_place(name, places))
            )
            continue
        try:
            sections[name](**part)
        except ValidationError as error:
            for detail in error.errors(include_url=False):
                if complete or detail["type"] != "missing":
                    faults.append(_translated(sections, name, detail, places))
    # a key with a choice of types has one error per type
    return list({fault.where: fault for fault in reversed(faults)}.values())[::-1]


def unknown_key(
    sections: Sections,
    section: str,
    key: str,
    places: Mapping[str, str],
    *,
    what: str = "key",
) -> ConfigError:
    """Return the error for a key that does not exist.

    Args:
        sections: Class of each section.
        section: Its section, "" for the top level.
        key: Its name.
        places: Where each dotted key stands, as far as known.
        what: "key" or "section".

    Returns:
        An error that names the nearest key, or the section that the key belongs to.
    """
    dotted = f"{section}.{key}" if section else key
    known = sections[section].model_fields if section else sections
    return ConfigError(
        f"unknown {what}",
        where=_place(dotted, places),
        allowed=", ".join(known),
        cure=_nearest(sections, section, key),
    )


def _nearest(sections: Sections, section: str, key: str) -> str:
    homes = [name for name, part in sections.items() if key in part.model_fields]
    if homes:
        return f"{key} belongs to {listed([f'[{name}]' for name in homes])}: " + listed(
            [f"{name}.{key}" for name in homes]
        )
    names = (
        {name: f"{section}.{name}" for name in sections[section].model_fields} if section else {}
    )
    everywhere = {
        name: f"{home}.{name}" for home, part in sections.items() for name in part.model_fields
    }
    for candidates in (
        names,
        {name: f"[{name}]" for name in sections} if not section else {},
        everywhere,
    ):
        if near := difflib.get_close_matches(key, candidates, n=1, cutoff=0.7):
            return f"did you mean {candidates[near[0]]}?"
    return ""


def _place(dotted: str, places: Mapping[str, str]) -> str:
    return f"{places[dotted]}: {dotted}" if dotted in places else dotted


_BOUNDS = {
    "greater_than": ("gt", "more than"),
    "greater_than_equal": ("ge", "at least"),
    "less_than": ("lt", "less than"),
    "less_than_equal": ("le", "at most"),
}
_KINDS = {
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "bool_type": "true or false",
    "string_type": "a string",
    "list_type": "a list",
    "dict_type": "a table",
}


def _translated(
    sections: Sections, section: str, detail: ErrorDetails, places: Mapping[str, str]
) -> ConfigError:
    """What pydantic found, in the words of a config file."""
    key, kind, value = str(detail["loc"][0]), detail["type"], detail["input"]
    entry = [str(part) for part in detail["loc"][1:2] if isinstance(part, str)]
    dotted, context = ".".join([section, key, *entry]), detail.get("ctx", {})
    if kind == "extra_forbidden":
        return unknown_key(sections, section, key, places)
    where = _place(dotted, places)
    if kind == "missing":
        return ConfigError(
            MISSING,
            where=dotted,
            cure=f"write `{key} = ...` under [{section}], or give --{dotted}",
        )
    shown = f'"{value}"' if isinstance(value, str) else repr(value)
    allowed = cure = ""
    if kind == "literal_error":
        message, allowed = "unknown value", context["expected"].replace("'", "")
        cure = _nearest_choice(value, context["expected"])
    elif kind in _BOUNDS:
        name, words = _BOUNDS[kind]
        message = f"must be {words} {context[name]}"
    elif kind in _KINDS:
        message = f"must be {_KINDS[kind]}, not {value_type(value)}"
        cure = _unquoted(key, kind, value)
    elif kind == "finite_number":
        message = "must be a finite number"
    else:
        message = str(context["error"]) if "error" in context else detail["msg"]
    return ConfigError(message, where=where, value=shown, allowed=allowed, cure=cure)


def _nearest_choice(value: object, expected: str) -> str:
    """The cure for a word or a number that is none of those expected, as pydantic lists them."""
    known = re.findall(r"'(\w+)'", expected)
    if not known and isinstance(value, int):
        numbers = [int(number) for number in re.findall(r"-?\d+", expected)]
        return f"the nearest is {min(numbers, key=lambda number: abs(number - value))}"
    near = difflib.get_close_matches(str(value).lower(), known, n=1)
    return f'did you mean "{near[0]}"?' if near else ""


def _unquoted(key: str, kind: str, value: object) -> str:
    """The cure for a number or a truth value in quotes."""
    if not isinstance(value, str):
        return ""
    pattern = {"bool_type": r"(?i)true|false", "int_type": r"[+-]?\d+"}.get(kind)
    if kind == "float_type":
        pattern = r"[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?"
    if pattern and re.fullmatch(pattern, value, re.IGNORECASE):
        return f"write it without quotes: {key} = {value.lower()}"
    return ""


def value_type(value: object) -> str:
    """Return the kind of a value in the words of a config file.

    Args:
        value: As TOML or a caller gives it.

    Returns:
        For example "a string".
    """
    names = {bool: "true or false", int: "a whole number", float: "a number", str: "a string"}
    names |= {list: "a list", dict: "a table"}
    return names.get(type(value), type(value).__name__)
