"""What a run takes from the weights that it begins with, `run.init`: the model and its tokenizer.

Owns: what `run.init` may name, and which sections come from there. Does not own: reading the
weights (`run_weights`). Nothing here imports jax.
"""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from pydantic import BaseModel

from shardtrain.checkpoint import folder
from shardtrain.data.config import LEARNED
from shardtrain.errors import ConfigError, raise_all
from shardtrain.interop.hf_config import CONFIG_FILE, TOKENIZER_FILE, read_folder
from shardtrain.models.config import BertConfig, DlrmConfig, TransformerConfig, TwoTowerConfig
from shardtrain.train.rundir import RESOLVED, checkpoints_in

_KEY = "run.init"
FREE: Final = (
    *("dropout", "attention_dropout", "attention", "layer_loop"),
    *("table_optimizer", "table_rate", "table_epsilon", "freeze_tables"),
)
"""Keys of the model that do not change what its weights mean."""
_MODELS: Mapping[str, type[BaseModel]] = {
    "bert": BertConfig,
    "dlrm": DlrmConfig,
    "two_tower": TwoTowerConfig,
}
"""Models besides transformers whose weights may be begun with."""


@dataclass(frozen=True)
class Origin:
    """Where weights are."""

    folder: Path
    """A run folder, or one of Hugging Face."""
    step: int | None
    """A checkpoint of the run; None = the newest, or a Hugging Face folder."""
    is_run: bool


def find_origin(name: str) -> Origin:
    """Find what `run.init` names.

    Args:
        name: A run folder, a checkpoint in it (RUN/checkpoints/STEP), or a Hugging Face folder.

    Raises:
        ConfigError: It is none of them.
    """
    path = Path(name).expanduser()
    if (path / RESOLVED).is_file():
        return Origin(path, None, is_run=True)
    if path.name.isdecimal() and (path.parent.parent / RESOLVED).is_file():
        run = path.parent.parent
        if int(path.name) in folder.complete_steps(checkpoints_in(run)):
            return Origin(run, int(path.name), is_run=True)
    elif (path / CONFIG_FILE).is_file():
        return Origin(path, None, is_run=False)
    is_there = path.exists() or (path.parent.parent / RESOLVED).is_file()
    raise ConfigError(
        "there are no weights here" if is_there else "there is no such folder",
        where=_KEY,
        value=name,
        allowed="a run folder, a checkpoint of one such as runs/base/checkpoints/500, or a folder "
        "of Hugging Face transformers",
    )


def inherit(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Fill in what the weights of `run.init` decide.

    Args:
        raw: Sections as written.

    Returns:
        Sections with the model of the weights, and their tokenizer where none was given.

    Raises:
        ConfigError: There are no such weights, or what is written does not agree with them.
    """
    sections = dict(raw)
    run, model, data = (sections.get(name, {}) for name in ("run", "model", "data"))
    if not all(isinstance(part, Mapping) for part in (run, model, data)):
        return sections
    name = run.get("init")
    kind = _MODELS.get(str(model.get("type", "")), TransformerConfig)
    if not name or not isinstance(name, str) or set(kind.model_fields) <= set(model):
        return sections  # a run that goes on has its whole model written down
    origin = find_origin(name)
    theirs, tokenizer = _theirs(origin)
    settled = {key: value for key, value in theirs.items() if key not in FREE}
    raise_all(other_model(model, settled, _KEY, f"it is taken from {name}")[:1])
    sections["model"] = {**theirs, **model}
    if tokenizer and _takes(data.get("tokenizer"), origin, tokenizer):
        sections["data"] = {**data, "tokenizer": tokenizer}
    return sections


def other_model(
    given: Mapping[str, Any], settled: Mapping[str, Any], weights: str, why: str
) -> list[ConfigError]:
    """Return what is asked of a model and does not agree with its weights.

    Args:
        given: Keys of the model that somebody wrote.
        settled: Keys that the weights settle.
        weights: What names the weights.
        why: Why such a key may be left out.
    """
    return [
        ConfigError(
            f"the weights of {weights} are of another model",
            where=f"model.{key}",
            value=str(value),
            allowed=str(settled[key]),
            cure=f"leave model.{key} out: {why}",
        )
        for key, value in given.items()
        if key in settled and settled[key] != value
    ]


def _takes(given: Any, origin: Origin, tokenizer: str) -> bool:
    """Whether a run takes the tokenizer of the weights; one learned anew would not fit them."""
    if given is None or given == _learned(origin):
        return True
    if not isinstance(given, str) or not given.startswith(LEARNED):
        return False
    raise ConfigError(
        f"the weights of {_KEY} have a tokenizer, and one that is learned anew would not fit them",
        where="data.tokenizer",
        value=given,
        cure=f"leave it out, or give {tokenizer}",
    )


def _learned(origin: Origin) -> str:
    """What a run has learned its tokenizer as, such as `wordpiece:4096`; else empty."""
    if not origin.is_run:
        return ""
    name = str(_sections(origin)["data"].get("tokenizer", ""))
    return name if name.startswith(LEARNED) else ""


def _theirs(origin: Origin) -> tuple[dict[str, Any], str]:
    """The model's section of weights, and their tokenizer."""
    if not origin.is_run:
        sections = read_folder(origin.folder)
        return sections["model"], sections["data"].get("tokenizer", "")
    sections = _sections(origin)
    model, data = dict(sections["model"]), sections["data"]
    if model.get("position") == "learned" and not model.get("max_length"):
        model["max_length"] = data["sequence_length"]
    tokenizer = str(data.get("tokenizer", ""))
    beside = origin.folder / Path(tokenizer).name
    if _learned(origin):  # learned from that run's text, and kept there
        beside = origin.folder / TOKENIZER_FILE
    return model, str(beside) if tokenizer != "bytes" and beside.is_file() else tokenizer


def _sections(origin: Origin) -> dict[str, Any]:
    """The config of a run as it was run."""
    path = origin.folder / RESOLVED
    try:
        sections = tomllib.loads(path.read_text(encoding="utf-8"))
        sections["model"], sections["data"]  # both are there
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(f"cannot be read: {error}", where=str(path)) from None
    return sections
