"""Writes `docs/config.md`, the page of all keys, from the sections themselves.

python docs/make_config.py      after a key has changed; a test fails while the page is stale
"""

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from shardtrain.config import MODELS, SECTIONS, TYPES, section_classes
from shardtrain.config_text import value_text

PAGE = Path(__file__).with_name("config.md")
INTRODUCTION = """\
# Every key of a config

<!-- Made by docs/make_config.py from the sections in shardtrain/*/config.py; do not edit. -->

A config is a TOML file with the sections below. A key that is not there has its default, and a
section without required keys may be left out. An unknown key, a wrong type or a key given twice is
refused, with the nearest known key. Every key is a flag too:
`shardtrain train my.toml --mesh.tensor 2`. Booleans take a value, `True` or `False`. The rows of
`sharding.rules` are written `rules = { vocab = "tensor", mlp = "" }` in a file, and as pairs in one
flag, `--sharding.rules vocab tensor`, on the command line.

`model.type` says what kind of run it is, and with it go the types of `[task]` and `[data]`: a
"transformer" learns from "text", a "resnet" from "images" (docs/vision.md), a "bert" from
"masked_text" (docs/bert.md), a "dlrm" and a "two_tower" from "interactions" (docs/recommenders.md).

`shardtrain config my.toml` prints a config with every key resolved, and says which keys have no
effect in that run. `shardtrain config my.toml --template` writes it with the texts of this page as
comments.
"""
BOUNDS = {Ge: ("ge", ">="), Gt: ("gt", ">"), Le: ("le", "<="), Lt: ("lt", "<")}


def page() -> str:
    """The page: one table a section, one row a key."""
    counts = {name: keys(section_classes({"model": {"type": name}})) for name in MODELS}
    told = ", ".join(f"{count} keys with a {name}" for name, count in counts.items())
    parts = [INTRODUCTION, f"There are {len(SECTIONS)} sections; a run has {told}.\n"]
    for name, section in SECTIONS.items():
        kinds = TYPES.get(name, {"": section})
        for word, part in kinds.items():
            title = f'## [{name}], type = "{word}"' if word else f"## [{name}]"
            parts.append(f"{title}\n\n{sentence(part.__doc__)}\n\n{table(name, part)}")
    return "\n".join(parts)


def keys(sections: Mapping[str, type[BaseModel]]) -> int:
    """How many keys some sections have."""
    return sum(len(section.model_fields) for section in sections.values())


def table(name: str, section: type[BaseModel]) -> str:
    """The rows of one section."""
    rows = ["| key | type | default | meaning |", "| --- | --- | --- | --- |"]
    for key, field in section.model_fields.items():
        cells = (f"`{name}.{key}`", kind(field), default(field), sentence(field.description))
        rows.append(f"| {' | '.join(cell.replace('|', '&#124;') for cell in cells)} |")
    return "\n".join(rows) + "\n"


def kind(field: FieldInfo) -> str:
    """A type in words, with its bounds."""
    words = word(field.annotation)
    bounds = [
        f"{sign} {number(getattr(limit, name))}"
        for limit in field.metadata
        for type_, (name, sign) in BOUNDS.items()
        if isinstance(limit, type_)
    ]
    return f"{words} {', '.join(bounds)}" if bounds else words


def number(value: float) -> str:
    """A bound, as short as it can be written."""
    return "2^32" if value == 2**32 else f"{value:g}"


def word(annotation: Any) -> str:
    """A type in words."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        return ", ".join(f"`{value_text(value)}`" for value in arguments)
    if origin is list:
        return f"list of {word(arguments[0])}"
    if origin is dict:
        return "table"
    return {bool: "boolean", int: "integer", float: "number", str: "string"}[annotation]


def default(field: FieldInfo) -> str:
    """A default as TOML writes it."""
    if field.is_required():
        return "required"
    return f"`{value_text(field.get_default(call_default_factory=True, validated_data={}))}`"


def sentence(text: str | None) -> str:
    """A docstring on one line."""
    return " ".join((text or "").split())


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    print(f"wrote {PAGE}", file=sys.stderr)
