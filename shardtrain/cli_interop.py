"""The options of `import`, `export` and `import-config`.

Owns: the options, and how a folder of another trainer becomes sections. Does not own: what is done
(`commands_interop`), imported when it runs.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import tyro

from shardtrain.config import RunConfig, section_classes
from shardtrain.config_init import FREE, other_model
from shardtrain.errors import raise_all
from shardtrain.interop.hf_config import read_folder
from shardtrain.launch_job import check_devices
from shardtrain.sharding.devices import prepare_devices


@dataclass(frozen=True)
class ImportOptions:
    """Make a run folder of a Hugging Face model: GPT-2, Llama, BLOOM or BERT."""

    hf_dir: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="HF_DIR")]
    """A folder with config.json, safetensors and, for text, tokenizer.json."""
    out: str
    """The run folder, which must not have checkpoints."""
    json: bool = False
    """Print JSON and nothing else."""


@dataclass(frozen=True)
class ExportOptions:
    """Write the newest checkpoint of a run as a Hugging Face model."""

    run: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
    """A run folder, or the config of one."""
    out: str
    """The folder, which must not exist or be empty."""
    to: Literal["hf"] = "hf"
    """Whose format: hf = Hugging Face transformers."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Type of the weights. auto = as they were imported where nothing was trained since; else
    float32, the optimizer's own."""
    json: bool = False
    """Print JSON and nothing else."""


@dataclass(frozen=True)
class ImportConfigOptions:
    """Turn a DeepSpeed config into one of ours, and list what has no counterpart."""

    path: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="DS_CONFIG")]
    """A DeepSpeed config, JSON."""
    out: str = ""
    """A TOML file to write. "" = print it."""
    devices: int = 0
    """Data-parallel devices of that run, which decide its batch where it is not written. 0 =
    unknown."""


def import_sections(folder: str) -> dict[str, Any]:
    """Return the sections that an import starts from; flags go before them."""
    return read_folder(folder)


def check_import(folder: str, sections: Mapping[str, Any], flags: Mapping[str, Any]) -> None:
    """Refuse flags that would make another model of the weights.

    Args:
        folder: Of Hugging Face.
        sections: Of `import_sections`.
        flags: Values by dotted key, as given.

    Raises:
        ConfigError: The weights settle a key otherwise.
    """
    whole = section_classes(sections)["model"](**sections["model"]).model_dump()
    # How far the table is padded is chosen here, and is gone after an export.
    free = (*FREE, "vocab_multiple")
    settled = {key: value for key, value in whole.items() if key not in free}
    given = {flag[6:]: value for flag, value in flags.items() if flag.startswith("model.")}
    raise_all(other_model(given, settled, folder, "config.json there has it"))


def import_command(options: ImportOptions, config: RunConfig) -> int:
    """Import weights.

    Args:
        options: The command's options.
        config: Of `import_sections`, and flags.

    Returns:
        0.

    Raises:
        UserError: A file is missing, damaged or of another model, or the folder is a run already.
    """
    check_devices(config, 1)
    prepare_devices(config.run.cpu_devices)
    from shardtrain.commands_interop import import_weights

    return import_weights(config, folder=options.hf_dir, out=options.out, json=options.json)


def export_command(options: ExportOptions, config: RunConfig) -> int:
    """Export weights.

    Args:
        options: The command's options.
        config: Of the run.

    Returns:
        0.

    Raises:
        UserError: There is no checkpoint, or the model belongs to no family.
    """
    os.environ["JAX_PLATFORMS"] = "cpu"  # nothing is computed, and a GPU of a run is left alone
    from shardtrain.commands_interop import export_weights

    return export_weights(config, out=options.out, dtype=options.dtype, json=options.json)


def import_config_command(options: ImportConfigOptions) -> int:
    """Turn a DeepSpeed config into ours.

    Args:
        options: The command's options.

    Returns:
        0.

    Raises:
        ConfigError: It cannot be read, or a value is wrong.
    """
    from shardtrain.commands_import_config import import_config

    return import_config(options.path, out=options.out, devices=options.devices)
