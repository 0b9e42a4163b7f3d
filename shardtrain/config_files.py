"""Where configs are found and how a file becomes plain sections.

Owns: shipped configs, the names that stand for a file, reading TOML, putting in overrides. Does not
own: what keys mean, and whether they are right (`shardtrain.config`).
"""

import copy
import difflib
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shardtrain.config_text import first_repeated, key_lines
from shardtrain.errors import ConfigError, unreadable


def shipped_configs() -> dict[str, Path]:
    """Return the configs that come with the package.

    Returns:
        Name to file. They lie in the package when installed, beside it in a source tree.
    """
    here = Path(__file__).parent
    folder = here / "configs" if (here / "configs").is_dir() else here.parent / "configs"
    return {path.stem: path for path in sorted(folder.glob("*.toml"))}


def find_config(name: str | Path) -> Path:
    """Return the file that a name stands for.

    Args:
        name: A file, a run folder (its `resolved.toml`), or the name of a shipped config.

    Returns:
        An existing file.

    Raises:
        ConfigError: There is none.
    """
    path = Path(name)
    if path.is_dir():
        if (path / "resolved.toml").is_file():
            return path / "resolved.toml"
        raise ConfigError(
            "this folder is not a run: it has no resolved.toml",
            where=str(name),
            cure="give a config file, or the folder of a run that has started",
        )
    shipped = shipped_configs()
    if path.is_file():
        return path
    if path.parent.name in ("", "configs") and path.stem in shipped:
        return shipped[path.stem]
    raise _not_there(path, shipped)


def _not_there(path: Path, shipped: Mapping[str, Path]) -> ConfigError:
    """What is said of a name that nothing goes by: it was meant as a file, a run or a config."""
    near = difflib.get_close_matches(path.stem, shipped, n=1)
    if path.suffix == ".toml":
        other = "name a file that is there, or a shipped config such as quickstart"
        return ConfigError(
            "there is no such file",
            where=str(path),
            cure=f"did you mean {near[0]}?" if near else other,
        )
    if path.parent.name:
        runs = [folder.parent.name for folder in path.parent.glob("*/resolved.toml")]
        near = difflib.get_close_matches(path.name, runs, n=1)
        return ConfigError(
            "there is no such run folder",
            where=str(path),
            allowed=f"in {path.parent}: {', '.join(sorted(runs)[:20])}" if runs else "",
            cure=f"did you mean {path.parent / near[0]}?"
            if near
            else "name a run folder, the one that has resolved.toml",
        )
    return ConfigError(
        "there is no such config",
        where=str(path),
        allowed=f"a TOML file, a run folder, or a shipped config: {', '.join(shipped)}",
        cure=f"did you mean {near[0]}?" if near else "",
    )


def read_source(
    source: str | Path | Mapping[str, Any] | None,
) -> tuple[dict[str, Any], dict[str, str], str]:
    """Read sections without checking them.

    Args:
        source: As `load_config` takes it.

    Returns:
        Sections, the place of each dotted key (`file:line`), and the name that the run gets.

    Raises:
        ConfigError: There is no such file, it cannot be read, or it is not TOML.
    """
    if isinstance(source, Mapping):
        return copy.deepcopy(dict(source)), {}, "run"
    path = find_config("quickstart" if source is None else source)
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise unreadable(path, error) from None
    try:
        raw = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise _not_toml(path, text, str(error)) from None
    places = {key: f"{path}:{line}" for key, line in key_lines(text)}
    if source is not None and Path(source).is_dir():
        _move(raw, Path(source))
    return raw, places, path.stem


def _move(raw: dict[str, Any], folder: Path) -> None:
    """A run goes on where it lies, from any folder, with the tokenizer that lies in it."""
    tokenizer = raw.get("data", {}).get("tokenizer")
    before = raw.get("run", {}).get("dir")
    if before and isinstance(tokenizer, str) and Path(tokenizer).parent == Path(before):
        put(raw, "data.tokenizer", str(folder / Path(tokenizer).name))
    put(raw, "run.dir", str(folder))


def _not_toml(path: Path, text: str, reason: str) -> ConfigError:
    repeated = first_repeated(text)
    if repeated and re.search(r"overwrite|twice|mutable|already", reason):
        key, first, second = repeated
        return ConfigError(
            f"{key} is given twice, first on line {first}",
            where=f"{path}:{second}",
            cure="keep one of them",
        )
    line = re.search(r"\s*\(at line (\d+), column (\d+)\)", reason)
    where = f"{path}:{line[1]}:{line[2]}" if line else str(path)
    return ConfigError(f"not TOML: {reason.replace(line[0] if line else '', '')}", where=where)


def put(raw: dict[str, Any], key: str, value: Any) -> None:
    """Put a value under a dotted key; wrong keys are put too, and found with the others.

    Args:
        raw: Sections; changed in place.
        key: Section and key, or section, key and entry of a table.
        value: The value; tuples become lists.

    Raises:
        ConfigError: The key has no section.
    """
    section, _, rest = key.partition(".")
    if not rest:
        raise ConfigError(
            "an override needs section and key",
            where=key,
            cure='write it like "mesh.tensor"',
        )
    part = raw.setdefault(section, {})
    if not isinstance(part, dict):
        return
    name, _, entry = rest.partition(".")
    if entry and isinstance(part.setdefault(name, {}), dict):
        part[name][entry] = value
    else:
        part[rest] = list(value) if isinstance(value, tuple) else value
