"""A folder of a Hugging Face model as sections of ours, and a model of ours as a `config.json`.

Owns: which families there are, which of them a model belongs to, what an imported run starts from.
Does not own: what a family's keys mean (its own file), weights. Nothing here imports jax.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from shardtrain.errors import ConfigError, raise_all
from shardtrain.interop.bert import BERT
from shardtrain.interop.bloom import BLOOM
from shardtrain.interop.family import Family, Model, Sizes
from shardtrain.interop.gpt2 import GPT2
from shardtrain.interop.hf_keys import Keys
from shardtrain.interop.llama import LLAMA

CONFIG_FILE: Final = "config.json"
TOKENIZER_FILE: Final = "tokenizer.json"
KEPT_CONFIG: Final = "hf_config.json"
"""The imported `config.json`, beside an imported run."""
BESIDE: Final = (
    TOKENIZER_FILE,
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "generation_config.json",
    "chat_template.jinja",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
)
"""Files that go along with weights as they are."""
FAMILIES: Final[dict[str, Family]] = {
    family.model_type: family for family in (GPT2, LLAMA, BLOOM, BERT)
}
"""The families by `model_type`."""
_VOCAB_MULTIPLE = 128
_LENGTH = 1024


def family_of(keys: Keys) -> Family:
    """Return the family that a `config.json` names.

    Raises:
        ConfigError: we have no such family.
    """
    kind = keys.get("model_type", default="")
    if kind not in FAMILIES:
        raise ConfigError(
            "there is no such model here",
            where=f"{keys.where}: model_type",
            value=json.dumps(kind),
            allowed=", ".join(FAMILIES),
        )
    for name in ("auto_map", "quantization_config"):
        keys.must_be(name, None)
    return FAMILIES[kind]


def read_folder(folder: str | Path) -> dict[str, Any]:
    """Read a folder of a Hugging Face model as sections of a config.

    Args:
        folder: as `save_pretrained` of transformers writes it.

    Returns:
        `[model]`, and what a run needs besides: all of that may be changed before the first update.

    Raises:
        ConfigError: it is no such folder, or the model cannot be expressed here; all faults are in
            the message.
    """
    path = Path(folder)
    keys = Keys.read(path / CONFIG_FILE)
    family = family_of(keys)
    model = family.read(keys)
    length = family.max_length(keys)
    family.notes(keys)
    keys.finish()
    raise_all(keys.faults)
    data: dict[str, Any] = {"sequence_length": min(length, _LENGTH), "batch_size": 8}
    if family.kind == "bert":
        data["type"] = "masked_text"
    if (path / TOKENIZER_FILE).is_file():
        data["tokenizer"] = str(path / TOKENIZER_FILE)
    return {
        "run": {"name": path.resolve().name, "steps": 1000},
        "model": {"vocab_multiple": _VOCAB_MULTIPLE, **model},
        "data": data,
        "optimizer": {"learning_rate": 1e-5},
    }


def training_notes(folder: str | Path) -> list[str]:
    """Return what a `config.json` says about training that has no counterpart, a line each."""
    keys = Keys.read(Path(folder) / CONFIG_FILE)
    return family_of(keys).notes(keys)


def choose_family(model: Model) -> Family:
    """Return the family that a model of ours belongs to.

    Args:
        model: its section.

    Raises:
        ConfigError: it is of none; what keeps it from the nearest is in the message.
    """
    faults = {
        name: family.faults(model) for name, family in FAMILIES.items() if family.kind == model.type
    }
    nearest = min(faults, key=lambda name: len(faults[name]))
    raise_all(faults[nearest])
    return FAMILIES[nearest]


def kept_keys(folder: Path, family: Family) -> dict[str, Any]:
    """Return the keys of the imported `config.json` that do not describe the model's function.

    Args:
        folder: the run.
        family: what is exported; a file of another one does not count.
    """
    path = folder / KEPT_CONFIG
    if not path.is_file():
        return {}
    values: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return values if values.get("model_type") == family.model_type else {}


def write_config(
    family: Family,
    model: Model,
    sizes: Sizes,
    *,
    dtype: str,
    kept: Mapping[str, Any],
) -> str:
    """Return the `config.json` of a model of ours.

    Args:
        family: the one that it belongs to.
        model: its section.
        sizes: what else it says.
        dtype: of the weights, in words of transformers: "bfloat16".
        kept: as from `kept_keys`; what describes the function is written anew.
    """
    values = {
        **kept,
        "architectures": [family.architecture],
        **family.write(model, sizes),
        "model_type": family.model_type,
        "torch_dtype": dtype,
    }
    for name in ("rope_parameters", "dtype"):  # the same under newer names
        values.pop(name, None)
    return json.dumps(values, indent=2) + "\n"
