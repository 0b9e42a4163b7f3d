"""The command `import-config`: a DeepSpeed config as TOML of ours.

Owns: reading the file, checking what comes of it, how it is written. Does not own: which keys have
a counterpart (`interop.deepspeed`).
"""

import json
import sys
from pathlib import Path
from typing import Any

from shardtrain.config import SECTIONS
from shardtrain.config_keys import section_faults
from shardtrain.config_text import value_text
from shardtrain.errors import ConfigError, raise_all, unreadable, unwritable
from shardtrain.interop.deepspeed import Mapped, map_config


def import_config(path: str, *, out: str, devices: int) -> int:
    """`shardtrain import-config`: the TOML, and what has no counterpart.

    Args:
        path: a DeepSpeed config.
        out: a file to write, which must not exist; "" = standard output.
        devices: data-parallel devices of that run; 0 = unknown.

    Returns:
        0.

    Raises:
        ConfigError: it cannot be read, or a value is wrong.
    """
    values = _read(Path(path))
    try:
        mapped = map_config(values, devices=devices)
        raise_all(section_faults(mapped.sections, SECTIONS, {}, complete=False))
    except ConfigError as error:
        error.where = f"{path}: {error.where}"
        raise
    text = to_text(mapped, Path(path).name)
    if not out:
        print(text, end="")
    else:
        try:
            with Path(out).open("x", encoding="utf-8") as file:
                file.write(text)
        except FileExistsError:
            raise ConfigError(
                "is there already",
                where="--out",
                value=out,
                cure="name another file, or move it away",
            ) from None
        except OSError as error:
            raise unwritable("--out", out, error) from None
        print(f"{len(mapped.left)} keys have no counterpart; {out} lists them", file=sys.stderr)
    return 0


def to_text(mapped: Mapped, name: str) -> str:
    """Return what was found as TOML; what has no counterpart stands as comments."""
    lines = [
        f"# From the DeepSpeed config {name}, which says nothing about the model and the data:",
        "# [model], data.path, data.sequence_length and what [run] lacks are yours to write.",
    ]
    for section, keys in sorted(mapped.sections.items(), key=lambda s: list(SECTIONS).index(s[0])):
        lines += ["", f"[{section}]"]
        lines += [f"{key} = {value_text(value)}" for key, value in keys.items()]
    if mapped.left:
        lines += ["", "# Without counterpart:"]
        lines += [f"# {key}: {reason}" for key, reason in mapped.left]
    return "\n".join(lines) + "\n"


def _read(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise unreadable(path, error) from None
    if not isinstance(values, dict):
        raise ConfigError("is no JSON object", where=str(path))
    return values
