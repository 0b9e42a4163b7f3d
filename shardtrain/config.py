"""The config of a run: sections assembled and checked before anything is compiled.

Owns: `RunConfig`, loading it, and the checks that span sections. Does not own: the sections (each
lies in its layer's `config.py`), which layouts are legal (`shardtrain.plan.layout`), files
(`config_files`), wrong keys and values (`config_keys`), or the text of a config (`config_text`).
"""

import difflib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from pydantic import BaseModel, ConfigDict, Field

from shardtrain.checkpoint.config import CheckpointConfig
from shardtrain.config_files import put, read_source
from shardtrain.config_init import inherit
from shardtrain.config_keys import section_faults
from shardtrain.config_text import template, write
from shardtrain.data.config import DataConfig
from shardtrain.errors import ConfigError, raise_all
from shardtrain.models.config import LoraConfig, TransformerConfig
from shardtrain.optim.config import OptimizerConfig
from shardtrain.plan.layout import layout_faults, model_faults
from shardtrain.plan.stages import make_stages
from shardtrain.sharding.config import MeshConfig, ShardingConfig
from shardtrain.strategies.config import (
    BUDGET,
    OffloadConfig,
    PipelineConfig,
    TrainConfig,
)
from shardtrain.tasks.config import LanguageModelConfig
from shardtrain.train.chaos_words import parse_chaos
from shardtrain.train.config import (
    EvalConfig,
    GuardConfig,
    LogConfig,
    RunSection,
    TargetsConfig,
    WatchdogConfig,
)

MODELS: Final[dict[str, type[BaseModel]]] = {"transformer": TransformerConfig}
"""Section class of each `model.type`."""
TASKS: Final[dict[str, type[BaseModel]]] = {"language_model": LanguageModelConfig}
"""Section class of each `task.type`."""
TOKENIZERS: Final[dict[str, int]] = {"bytes": 256}
"""Tokens of each tokenizer that needs no file; others are `tokenizer.json` files."""
_TOKEN_FILES: Final = (".tokens", ".npy", ".bin", ".idx")


class RunConfig(BaseModel):
    """Everything about a run. Each section goes to whom it concerns; nobody below takes all."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    run: RunSection
    model: TransformerConfig
    lora: LoraConfig = Field(default_factory=LoraConfig)
    task: LanguageModelConfig = Field(default_factory=LanguageModelConfig)
    data: DataConfig
    mesh: MeshConfig = Field(default_factory=MeshConfig)
    sharding: ShardingConfig = Field(default_factory=ShardingConfig)
    train: TrainConfig = Field(default_factory=TrainConfig)
    offload: OffloadConfig = Field(default_factory=OffloadConfig)
    pipeline: PipelineConfig = Field(default_factory=PipelineConfig)
    optimizer: OptimizerConfig
    checkpoint: CheckpointConfig = Field(default_factory=CheckpointConfig)
    log: LogConfig = Field(default_factory=LogConfig)
    eval: EvalConfig = Field(default_factory=EvalConfig)
    guard: GuardConfig = Field(default_factory=GuardConfig)
    watchdog: WatchdogConfig = Field(default_factory=WatchdogConfig)
    targets: TargetsConfig = Field(default_factory=TargetsConfig)


SECTIONS: Final[dict[str, type[BaseModel]]] = {
    "run": RunSection,
    "model": TransformerConfig,
    "lora": LoraConfig,
    "task": LanguageModelConfig,
    "data": DataConfig,
    "mesh": MeshConfig,
    "sharding": ShardingConfig,
    "train": TrainConfig,
    "offload": OffloadConfig,
    "pipeline": PipelineConfig,
    "optimizer": OptimizerConfig,
    "checkpoint": CheckpointConfig,
    "log": LogConfig,
    "eval": EvalConfig,
    "guard": GuardConfig,
    "watchdog": WatchdogConfig,
    "targets": TargetsConfig,
}
"""Class of each section, with the default model and task."""


def load_config(
    source: str | Path | Mapping[str, Any] | None = None,
    overrides: Mapping[str, Any] | None = None,
) -> RunConfig:
    """Read and check a config.

    Args:
        source: A TOML file, a run folder, the name of a shipped config, sections as a mapping, or
            None for the shipped quickstart.
        overrides: Values by dotted key, e.g. `{"mesh.tensor": 2}`; they go before the source.

    Returns:
        The config, with `run.name` and `run.dir` filled in.

    Raises:
        ConfigError: A key, a value or a combination is wrong; all faults found are in the message.
    """
    raw, places, name = read_source(source)
    for key, value in (overrides or {}).items():
        put(raw, key, value)
        places.pop(key, None)
    raw = inherit(raw)
    classes = section_classes(raw)
    raise_all(section_faults(raw, classes, places, complete=True))
    config = RunConfig.model_validate(
        {key: kind(**raw.get(key, {})) for key, kind in classes.items()}
    )
    run = config.run
    named = run.model_copy(update={"name": run.name or name})
    if not run.dir:
        named = named.model_copy(update={"dir": f"runs/{named.name}"})
    config = config.model_copy(update={"run": named})
    raise_all(config_faults(config, config.mesh.model_dump()))
    return config


def to_toml(config: RunConfig) -> str:
    """Return the whole config as TOML.

    Args:
        config: A loaded config.

    Returns:
        Every key, so that loading it gives the same config; keys without effect say so.
    """
    from shardtrain.config_effects import idle_keys

    return write(config, idle_keys(config))


def to_template(config: RunConfig) -> str:
    """Return a commented config to start from.

    Args:
        config: A loaded config; what it sets is set, all else stands as a comment.

    Returns:
        TOML that loads as the same config, named after its file.
    """
    run = config.run.model_copy(update={"name": "", "dir": ""})
    return template(config.model_copy(update={"run": run}))


def resolve_mesh(config: RunConfig, num_devices: int) -> dict[str, int]:
    """Return the degree of every mesh axis on that many devices.

    Args:
        config: A loaded config.
        num_devices: Devices that the run will use.

    Returns:
        Axis to degree, slowest links first.

    Raises:
        ShardingError: The mesh does not multiply to the number of devices.
        ConfigError: Some size is not divisible on that mesh.
    """
    degrees = config.mesh.degrees(num_devices)
    raise_all(config_faults(config, degrees))
    return degrees


def known_vocab(config: RunConfig) -> int | None:
    """Return the tokens of the data where they are known without reading it.

    Args:
        config: A loaded config.

    Returns:
        The size, or None for a tokenizer file, a prepared folder or an array of tokens, which say
        it themselves.
    """
    path = Path(config.data.path)
    others = path.suffix in _TOKEN_FILES or Path(f"{path}.idx").exists()
    if config.data.path and (others or (path / "train.tokens").exists()):
        return None
    return TOKENIZERS.get(config.data.tokenizer)


def config_faults(config: RunConfig, degrees: Mapping[str, int]) -> list[ConfigError]:
    """Return every fault that spans sections.

    Args:
        config: Sections that are right each by itself.
        degrees: Degree of each mesh axis; -1 where it is still open.

    Returns:
        One error per fault, none when all is well.
    """
    faults = [*_time_faults(config), *_choice_faults(config)]
    model, data = config.model, config.data
    vocab = known_vocab(config)
    if vocab and 0 < model.vocab_size < vocab:
        faults.append(
            ConfigError(
                f'data.tokenizer="{data.tokenizer}" has {vocab} tokens; use {vocab} or more, or 0',
                where=f"model.vocab_size={model.vocab_size}",
            )
        )
    micro = config.train.microbatches
    faults += model_faults(model, data)
    faults += layout_faults(model, data, config.sharding, degrees, micro, vocab)
    faults += _loss_faults(config, degrees["context"])
    faults += _stage_faults(config, degrees["pipeline"], vocab)
    return faults


def with_defaults(sections: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return a saved config with the keys that are newer than it.

    Args:
        sections: A whole config, as it was saved.

    Returns:
        The same, and missing keys at their defaults: a new key changes nothing until it is set.
    """
    whole: dict[str, dict[str, Any]] = {}
    for name, kind in section_classes(sections).items():
        whole[name] = {
            key: field.get_default(call_default_factory=True, validated_data={})
            for key, field in kind.model_fields.items()
            if not field.is_required()
        } | dict(sections.get(name, {}))
    return whole


def section_classes(raw: Mapping[str, Any]) -> dict[str, type[BaseModel]]:
    """Return the class of each section, as `model.type` and `task.type` choose it.

    Args:
        raw: Sections as read; an unknown type is left to the check of its section.

    Returns:
        Section name to class.
    """
    classes = dict(SECTIONS)
    for name, types in (("model", MODELS), ("task", TASKS)):
        part = raw.get(name)
        if isinstance(part, Mapping) and isinstance(kind := part.get("type"), str):
            classes[name] = types.get(kind, SECTIONS[name])
    return classes


def _time_faults(config: RunConfig) -> list[ConfigError]:
    run = config.run
    if run.stop_at <= run.steps:
        return []
    return [
        ConfigError(
            f"run.steps={run.steps} is fewer; use {run.steps} or less, or 0 for no early stop",
            where=f"run.stop_at={run.stop_at}",
        )
    ]


def _choice_faults(config: RunConfig) -> list[ConfigError]:
    faults: list[ConfigError] = []
    data, model, precision = config.data, config.model, config.train.precision
    try:
        parse_chaos(config.run.chaos, config.run.seed)
    except ConfigError as fault:
        faults.append(fault)
    if data.tokenizer not in TOKENIZERS and not data.tokenizer.endswith(".json"):
        near = difflib.get_close_matches(data.tokenizer, TOKENIZERS, n=1)
        faults.append(
            ConfigError(
                "unknown tokenizer",
                where="data.tokenizer",
                value=f'"{data.tokenizer}"',
                allowed=f"{', '.join(TOKENIZERS)}, or the path of a tokenizer.json",
                cure=f'did you mean "{near[0]}"?' if near else "",
            )
        )
    train = config.train
    if train.loss_scale < train.loss_scale_floor:
        faults.append(
            ConfigError(
                f"train.loss_scale_floor={train.loss_scale_floor:g} is more; use "
                f"{train.loss_scale:g} or less there",
                where=f"train.loss_scale={train.loss_scale:g}",
            )
        )
    if (train.remat == BUDGET) != bool(train.memory_budget):
        faults.append(
            ConfigError(
                "they go together: the cheapest recomputation that fits so many bytes",
                where=f'train.remat="{train.remat}", train.memory_budget="{train.memory_budget}"',
                cure='train.remat="budget" and, say, train.memory_budget="70GiB"; or neither',
            )
        )
    if train.audit and config.lora.rank:
        faults.append(
            ConfigError(
                f"lora.rank={config.lora.rank}: promises are those of training all weights",
                where="train.audit=True",
                cure="leave it out",
            )
        )
    if model.attention == "cudnn" and precision not in ("bfloat16", "float16"):
        faults.append(
            ConfigError(
                f'train.precision="{precision}" has no such kernel; use "bfloat16" or "float16", '
                'or model.attention="auto"',
                where='model.attention="cudnn"',
            )
        )
    return faults


def _loss_faults(config: RunConfig, context: int) -> list[ConfigError]:
    chunks, length = config.task.loss_chunks, config.data.sequence_length // max(context, 1)
    if chunks <= length:
        return []
    return [
        ConfigError(
            f"a device has {length} positions of a sequence; use {length} or less",
            where=f"task.loss_chunks={chunks}",
        )
    ]


def _stage_faults(config: RunConfig, stages: int, vocab: int | None) -> list[ConfigError]:
    """Why there is no such pipeline."""
    if stages == 1:
        return []
    try:
        make_stages(
            config.pipeline,
            config.model,
            stages=stages,
            microbatches=config.train.microbatches,
            length=config.data.sequence_length,
            vocab_size=config.model.vocab_size or vocab,
        )
    except ConfigError as fault:
        return [fault]
    return []
