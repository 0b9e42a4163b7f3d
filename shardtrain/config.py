"""The config of a run: sections assembled and checked before anything is compiled.

Owns: `RunConfig`, loading it, and the checks that span sections. Does not own: the sections (each
lies in its layer's `config.py`), which layouts are legal (`shardtrain.plan.layout`), files
(`config_files`), wrong keys and values (`config_keys`), or the text of a config (`config_text`).
"""

import difflib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

from pydantic import BaseModel, ConfigDict, Field

from shardtrain.checkpoint.config import CheckpointConfig
from shardtrain.config_bert import bert_faults
from shardtrain.config_files import put, read_source
from shardtrain.config_images import image_faults, weight_faults
from shardtrain.config_init import inherit
from shardtrain.config_keys import section_faults
from shardtrain.config_language import known_tokens, language_faults
from shardtrain.config_lora import lora_faults
from shardtrain.config_offload import offload_faults
from shardtrain.config_precision import mesh_precision_faults, precision_faults
from shardtrain.config_recommenders import recommender_faults
from shardtrain.config_text import template, write
from shardtrain.data.config import (
    DataConfig,
    ImageDataConfig,
    InteractionsConfig,
    MaskedTextConfig,
)
from shardtrain.errors import ConfigError, raise_all
from shardtrain.models.config import (
    BertConfig,
    DlrmConfig,
    LoraConfig,
    ResNetConfig,
    TransformerConfig,
    TwoTowerConfig,
)
from shardtrain.optim.config import OptimizerConfig
from shardtrain.sharding.config import MeshConfig, ShardingConfig
from shardtrain.strategies.config import (
    BUDGET,
    OffloadConfig,
    PipelineConfig,
    TrainConfig,
)
from shardtrain.tasks.config import (
    ClickConfig,
    ImageClassificationConfig,
    LanguageModelConfig,
    MaskedLmConfig,
    RetrievalConfig,
)
from shardtrain.train.chaos_words import parse_chaos
from shardtrain.train.config import (
    EvalConfig,
    GuardConfig,
    LogConfig,
    RunSection,
    TargetsConfig,
    WatchdogConfig,
)

MODELS: Final[dict[str, type[BaseModel]]] = {
    "transformer": TransformerConfig,
    "resnet": ResNetConfig,
    "bert": BertConfig,
    "dlrm": DlrmConfig,
    "two_tower": TwoTowerConfig,
}
"""Section class of each `model.type`."""
TASKS: Final[dict[str, type[BaseModel]]] = {
    "language_model": LanguageModelConfig,
    "image_classification": ImageClassificationConfig,
    "masked_lm": MaskedLmConfig,
    "click": ClickConfig,
    "retrieval": RetrievalConfig,
}
"""Section class of each `task.type`."""
DATA: Final[dict[str, type[BaseModel]]] = {
    "text": DataConfig,
    "images": ImageDataConfig,
    "masked_text": MaskedTextConfig,
    "interactions": InteractionsConfig,
}
"""Section class of each `data.type`."""
TYPES: Final = {"model": MODELS, "task": TASKS, "data": DATA}
"""The sections that have a class for each type."""


class RunConfig(BaseModel):
    """Everything about a run. Each section goes to whom it concerns; nobody below takes all."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    run: RunSection
    model: TransformerConfig | ResNetConfig | BertConfig | DlrmConfig | TwoTowerConfig
    lora: LoraConfig = Field(default_factory=LoraConfig)
    task: (
        LanguageModelConfig
        | ImageClassificationConfig
        | MaskedLmConfig
        | ClickConfig
        | RetrievalConfig
    )
    data: DataConfig | ImageDataConfig | MaskedTextConfig | InteractionsConfig
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


class LanguageRunConfig(RunConfig):
    """A run that learns from text."""

    model: TransformerConfig
    task: LanguageModelConfig = Field(default_factory=LanguageModelConfig)
    data: DataConfig


class ImageRunConfig(RunConfig):
    """A run that learns to classify images."""

    model: ResNetConfig
    task: ImageClassificationConfig = Field(default_factory=ImageClassificationConfig)
    data: ImageDataConfig


class BertRunConfig(RunConfig):
    """A run that pre-trains BERT."""

    model: BertConfig
    task: MaskedLmConfig = Field(default_factory=MaskedLmConfig)
    data: MaskedTextConfig


TextRunConfig = LanguageRunConfig | BertRunConfig
"""Runs with a tokenizer, whose weights others publish."""


class RecommenderRunConfig(RunConfig):
    """A run that learns from interactions of users with items."""

    model: DlrmConfig | TwoTowerConfig
    task: ClickConfig | RetrievalConfig
    data: InteractionsConfig


class DlrmRunConfig(RecommenderRunConfig):
    """A run that learns how likely a click is."""

    model: DlrmConfig
    task: ClickConfig = Field(default_factory=ClickConfig)


class TwoTowerRunConfig(RecommenderRunConfig):
    """A run that learns which items to retrieve."""

    model: TwoTowerConfig
    task: RetrievalConfig = Field(default_factory=RetrievalConfig)


RUNS: Final[dict[str, type[RunConfig]]] = {
    "transformer": LanguageRunConfig,
    "resnet": ImageRunConfig,
    "bert": BertRunConfig,
    "dlrm": DlrmRunConfig,
    "two_tower": TwoTowerRunConfig,
}
"""What a run of each `model.type` is: with it go the types of its task and its data."""


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
"""Class of each section, with the default model, task and data."""


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
    config = assemble(source, overrides)
    raise_all(config_faults(config, config.mesh.model_dump()))
    return config


def assemble(
    source: str | Path | Mapping[str, Any] | None = None,
    overrides: Mapping[str, Any] | None = None,
) -> RunConfig:
    """Read a config whose sections are right each by itself; what spans them is not looked at.

    Args:
        source: As `load_config` takes it.
        overrides: As there.

    Returns:
        The config, for whoever has more to say of it first; `config_faults` has the rest.

    Raises:
        ConfigError: A key or a value is wrong.
    """
    raw, places, name = read_source(source)
    for key, value in (overrides or {}).items():
        put(raw, key, value)
        places.pop(key, None)
    raw = inherit(raw)
    classes = section_classes(raw)
    raise_all(section_faults(raw, classes, places, complete=True))
    config = run_class(raw).model_validate(
        {key: kind(**raw.get(key, {})) for key, kind in classes.items()}
    )
    run = config.run
    named = run.model_copy(update={"name": run.name or name})
    if not run.dir:
        named = named.model_copy(update={"dir": f"runs/{named.name}"})
    return config.model_copy(update={"run": named})


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


def known_vocab(config: LanguageRunConfig) -> int | None:
    """Return the tokens of the data where they are known without reading it.

    Args:
        config: A loaded config.

    Returns:
        The size, or None for a tokenizer file, a prepared folder or an array of tokens, which say
        it themselves.
    """
    return known_tokens(config.data)


def config_faults(config: RunConfig, degrees: Mapping[str, int]) -> list[ConfigError]:
    """Return every fault that spans sections.

    Args:
        config: Sections that are right each by itself.
        degrees: Degree of each mesh axis; -1 where it is still open.

    Returns:
        One error per fault, none when all is well.
    """
    own = FAULTS[type(config)](config, degrees)
    faults = [*_time_faults(config), *_choice_faults(config), *own]
    if not faults:
        faults += mesh_precision_faults(config.train.precision, config.sharding.zero, degrees)
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
    """Return the class of each section, as `model.type` chooses it.

    Args:
        raw: Sections as read; a type that is no word is left to the check of its section.

    Returns:
        Section name to class.

    Raises:
        ConfigError: There is no such model, or the task or the data are those of another one.
    """
    model, run = _type_of(raw, "model", "transformer"), run_class(raw)
    if model not in MODELS:
        near = difflib.get_close_matches(model, MODELS, n=1)
        raise ConfigError(
            "unknown model",
            where="model.type",
            value=f'"{model}"',
            allowed=", ".join(MODELS),
            cure=f'did you mean "{near[0]}"?' if near else "",
        )
    classes = {**SECTIONS, "model": MODELS[model]}
    for name, types in (("task", TASKS), ("data", DATA)):
        classes[name] = fitting = _section_class(run, name)
        given = types.get(_type_of(raw, name, ""), fitting)
        if given is not fitting:
            right = next(word for word, kind in types.items() if kind is fitting)
            raise ConfigError(
                f'model.type="{model}" goes with another one',
                where=f"{name}.type",
                value=f'"{_type_of(raw, name, "")}"',
                allowed=f'"{right}", which is also what it is without the key',
            )
    return classes


def run_class(raw: Mapping[str, Any]) -> type[RunConfig]:
    """Return what a run is with that `model.type`.

    Args:
        raw: Sections as read.
    """
    return RUNS.get(_type_of(raw, "model", "transformer"), LanguageRunConfig)


def _section_class(run: type[RunConfig], name: str) -> type[BaseModel]:
    kind = run.model_fields[name].annotation
    assert isinstance(kind, type)
    assert issubclass(kind, BaseModel)
    return kind


def _type_of(raw: Mapping[str, Any], name: str, default: str) -> str:
    part = raw.get(name)
    kind = part.get("type", default) if isinstance(part, Mapping) else default
    return kind if isinstance(kind, str) else default


def only_language(config: RunConfig, what: str) -> LanguageRunConfig:
    """Return a config for what is there for language models alone.

    Args:
        config: A loaded config.
        what: What that is, for the message.

    Raises:
        ConfigError: It is the config of another kind of run.
    """
    if isinstance(config, LanguageRunConfig):
        return config
    raise _another_kind(
        f"{what} is there for language models alone",
        LanguageRunConfig,
        "so it is not there for this run",
        config,
    )


def with_text(config: RunConfig, what: str) -> TextRunConfig:
    """Return a config for what is there for models of text alone.

    Args:
        config: A loaded config.
        what: What that is, for the message.

    Raises:
        ConfigError: It is the config of another kind of run.
    """
    if isinstance(config, TextRunConfig):
        return config
    raise _another_kind(
        f"{what} is there for models of text alone",
        TextRunConfig,
        "the weights of others are arrays in the run's checkpoints, which `shardtrain checkpoints "
        "RUN` lists",
        config,
    )


def _another_kind(message: str, kinds: Any, cure: str, config: RunConfig) -> ConfigError:
    return ConfigError(
        message,
        where="model.type",
        value=f'"{config.model.type}"',
        allowed=", ".join(f'"{name}"' for name, run in RUNS.items() if issubclass(run, kinds)),
        cure=f"that is what the model is; {cure}",
    )


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
    try:
        parse_chaos(config.run.chaos, config.run.seed)
    except ConfigError as fault:
        faults.append(fault)
    train = config.train
    faults += precision_faults(train.precision, config.optimizer)
    if train.loss_scale < train.loss_scale_floor:
        faults.append(
            ConfigError(
                f"train.loss_scale_floor={train.loss_scale_floor:g} is more; use "
                f"{train.loss_scale:g} or less there",
                where=f"train.loss_scale={train.loss_scale:g}",
            )
        )
    for key in ("master", "parameters"):
        tier = getattr(config.offload, key)
        if config.optimizer.ema_decay and tier != "device":
            faults.append(
                ConfigError(
                    f'offload.{key}="{tier}" is not there to be averaged; use "device", or 0 here',
                    where=f"optimizer.ema_decay={config.optimizer.ema_decay}",
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
    faults += offload_faults(config.offload, train)
    faults += lora_faults(config.lora, train)
    return faults


def _language_faults(config: LanguageRunConfig, degrees: Mapping[str, int]) -> list[ConfigError]:
    return language_faults(
        config.model,
        config.task,
        config.data,
        config.train,
        config.sharding,
        config.pipeline,
        degrees,
        settled=bool(config.run.init),
    )


def _image_faults(config: ImageRunConfig, degrees: Mapping[str, int]) -> list[ConfigError]:
    return [
        *image_faults(
            config.model, config.data, config.train, config.sharding, config.offload, degrees
        ),
        *weight_faults(config.run.init, config.lora.rank),
    ]


def _bert_faults(config: BertRunConfig, degrees: Mapping[str, int]) -> list[ConfigError]:
    return bert_faults(
        config.model,
        config.data,
        config.train,
        config.sharding,
        config.pipeline,
        degrees,
        settled=bool(config.run.init),
    )


def _recommender_faults(
    config: RecommenderRunConfig, degrees: Mapping[str, int]
) -> list[ConfigError]:
    return recommender_faults(
        config.model,
        config.data,
        config.train,
        config.sharding,
        config.offload,
        degrees,
        optimizer=config.optimizer,
        rank=config.lora.rank,
    )


FAULTS: Final[dict[type[RunConfig], Callable[[Any, Mapping[str, int]], list[ConfigError]]]] = {
    LanguageRunConfig: _language_faults,
    ImageRunConfig: _image_faults,
    BertRunConfig: _bert_faults,
    DlrmRunConfig: _recommender_faults,
    TwoTowerRunConfig: _recommender_faults,
}
"""What may be wrong about each kind of run, beyond what may be about all."""
