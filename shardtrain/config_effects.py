"""Settings without effect: said at the start of a run, never ignored.

Owns: which keys are idle under which other settings. Does not own: faults (`shardtrain.config`).
"""

from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from pydantic import BaseModel

from shardtrain.config import (
    BertRunConfig,
    DlrmRunConfig,
    ImageRunConfig,
    LanguageRunConfig,
    RecommenderRunConfig,
    RunConfig,
    TwoTowerRunConfig,
)
from shardtrain.optim.config import WITH_SECOND_MOMENT
from shardtrain.strategies.precision_words import parse_precision

_ADAMS = WITH_SECOND_MOMENT


def explicit_keys(config: RunConfig) -> set[str]:
    """Return the keys that the file, the flags or the caller gave.

    Args:
        config: A loaded config.

    Returns:
        Dotted keys. A section with every key written is taken for one of a `resolved.toml`: of that
        only the keys count that differ from their defaults.
    """
    keys = set()
    for section in RunConfig.model_fields:
        part: BaseModel = getattr(config, section)
        fields = type(part).model_fields
        for key in part.model_fields_set:
            default = fields[key].get_default(call_default_factory=True, validated_data={})
            if len(part.model_fields_set) < len(fields) or getattr(part, key) != default:
                keys.add(f"{section}.{key}")
    return keys


def idle_keys(config: RunConfig, degrees: Mapping[str, int] | None = None) -> dict[str, str]:
    """Return every key that has no effect with the other settings as they are.

    Args:
        config: A loaded config.
        degrees: Degree of each mesh axis where the number of devices is known.

    Returns:
        Dotted key to the reason.
    """
    sizes = degrees or config.mesh.model_dump()
    layout = (*_layout(config, sizes), *_pipeline(config, sizes))
    own = EFFECTS[type(config)](config)
    return dict((*own, *_optimizer(config), *layout, *_times(config)))


def ineffective_settings(
    config: RunConfig,
    explicit: Collection[str] | None = None,
    degrees: Mapping[str, int] | None = None,
) -> list[str]:
    """Return what was set and has no effect in this run, or not the whole of it.

    Args:
        config: A loaded config.
        explicit: Keys that were given; None = as `explicit_keys` finds them.
        degrees: Degree of each mesh axis where the number of devices is known.

    Returns:
        One line a key, with the reason.
    """
    given = explicit_keys(config) if explicit is None else explicit
    lines = []
    for key, reason in idle_keys(config, degrees).items():
        section, name = key.split(".")
        if key in given:
            value = getattr(getattr(config, section), name)
            lines.append(f"{key}={value} has no effect: {reason}")
    for part, reason in _idle_parts(config, degrees or config.mesh.model_dump()):
        lines.append(f"train.precision: {part} has no effect: {reason}")
    warmup, steps = config.optimizer.warmup_steps, config.run.steps
    if warmup > steps > 0:
        lines.append(
            f"optimizer.warmup_steps={warmup} is more than run.steps={steps}: "
            "the peak learning rate is never reached"
        )
    return lines


def _images(config: ImageRunConfig) -> Iterator[tuple[str, str]]:
    yield "eval.sample_tokens", "a model of images writes no text"
    yield "targets.tokens_per_second", "there are no tokens; targets.mfu is one for any run"
    folders = [Path(config.data.path) / name for name in ("val", "valid", "validation", "test")]
    if config.data.path and any(folder.is_dir() for folder in folders):
        yield "data.validation_fraction", "the data has images for validation of its own"


def _bert(config: BertRunConfig) -> Iterator[tuple[str, str]]:
    yield "eval.sample_tokens", "a model that reads both ways writes no text"
    if not config.lora.rank:
        for key in ("alpha", "targets"):
            yield f"lora.{key}", "lora.rank=0 trains all weights"


def _recommenders(config: RecommenderRunConfig) -> Iterator[tuple[str, str]]:
    model, data = config.model, config.data
    yield "eval.sample_tokens", "a recommender writes no text"
    yield "targets.tokens_per_second", "there are no tokens; targets.mfu is one for any run"
    if all(size <= model.dense_rows for size in model.table_sizes):
        why = f"no table has more than model.dense_rows={model.dense_rows} rows"
        for key in ("placement", "table_parts", "table_optimizer", "table_rate", "table_epsilon"):
            yield f"model.{key}", why
    elif model.freeze_tables:
        for key in ("table_optimizer", "table_rate", "table_epsilon"):
            yield f"model.{key}", "model.freeze_tables=True moves no table"
    elif model.table_optimizer == "sgd":
        yield "model.table_epsilon", 'model.table_optimizer="sgd" has none'
    if data.path:
        yield "data.generated", "data.path has interactions"
        if not data.validation_fraction:
            yield "eval.steps", "data.validation_fraction=0 keeps nothing to evaluate on"
    else:
        for key in ("format", "bad_rows", "cache", "shards"):
            yield f"data.{key}", "interactions are generated"
    if not data.path or data.format in ("movielens", "criteo"):
        why = "only csv and parquet have columns with names"
        for key in ("label", "dense", "ids", "hash_ids"):
            yield f"data.{key}", why
    if data.format in ("criteo", "csv", "parquet") or not data.path:
        yield "data.positive", "only movielens has ratings"


def _language(config: LanguageRunConfig) -> Iterator[tuple[str, str]]:
    model = config.model
    if model.position != "rope":
        yield "model.rope_theta", f'only model.position="rope" rotates, not "{model.position}"'
        yield "model.rope_scaling", f'only model.position="rope" rotates, not "{model.position}"'
    if model.position != "rope" or model.rope_scaling == "none":
        yield "model.rope_factor", 'model.rope_scaling="none" slows nothing'
    if model.position != "rope" or model.rope_scaling != "llama3":
        for key in ("rope_trained_length", "rope_low", "rope_high"):
            yield f"model.{key}", 'only model.rope_scaling="llama3" uses it'
    if model.position != "learned":
        yield "model.max_length", f'model.position="{model.position}" has no table'
    if model.norm == "rmsnorm":
        yield "model.norm_bias", 'model.norm="rmsnorm" never has a bias'
    if not config.lora.rank:
        for key in ("alpha", "targets"):
            yield f"lora.{key}", "lora.rank=0 trains all weights"


def _optimizer(config: RunConfig) -> Iterator[tuple[str, str]]:
    part = config.optimizer
    if part.name not in ("sgd", "muon"):
        yield "optimizer.momentum", f"{part.name} has none (sgd and muon have)"
    if part.name != "sgd":
        yield "optimizer.nesterov", f"only sgd has a choice, not {part.name}"
    if part.name not in (*_ADAMS, "lion"):
        yield "optimizer.beta1", f"{part.name} has no first moment of that kind"
        yield "optimizer.beta2", f"{part.name} has no second moment of that kind"
    if part.name not in _ADAMS:
        yield "optimizer.epsilon", f"{part.name} does not use it"
    if part.schedule == "constant":
        yield "optimizer.final_ratio", 'schedule="constant" stays at the peak'
    if part.schedule != "wsd":
        yield "optimizer.decay_fraction", f'only schedule="wsd" has one, not "{part.schedule}"'
    if config.run.steps == 0:
        yield "optimizer.warmup_steps", "run.steps=0"


def _layout(config: RunConfig, sizes: Mapping[str, int]) -> Iterator[tuple[str, str]]:
    if config.sharding.zero and sizes["data"] * sizes["context"] == 1:
        yield "sharding.zero", "mesh.data=1 leaves nothing to split over"
    words = parse_precision(config.train.precision)
    if words.compute != "float16":
        for key in ("", "_window", "_hysteresis", "_floor"):
            yield (
                f"train.loss_scale{key}",
                f'train.precision="{config.train.precision}" needs no loss scale',
            )
    offload = config.offload
    if not words.has_master:
        yield "offload.master", f'train.precision="{config.train.precision}" has no masters'
    if offload.parameters != "device" and sizes["pipeline"] == 1:
        yield "model.layer_loop", f"layers that come from the {offload.parameters} come in a loop"
    masters = {offload.master} if words.has_master else set()
    tiers = {offload.optimizer, offload.parameters, *masters}
    if tiers == {"device"}:
        yield "offload.fraction", "nothing is offloaded"
        yield "offload.update", "nothing is offloaded"
    if "disk" not in tiers:
        yield "offload.disk_path", "nothing rests on a disk"
    if config.sharding.sequence_parallel and sizes["tensor"] == 1:
        yield "sharding.sequence_parallel", "mesh.tensor=1 leaves nothing to split over"


def _idle_parts(config: RunConfig, sizes: Mapping[str, int]) -> Iterator[tuple[str, str]]:
    """Parts of the precision that are said and do nothing."""
    text, piped = config.train.precision, sizes["pipeline"] > 1
    words = parse_precision(text)
    if words.reduce and sizes["data"] == sizes["replica"] == 1:
        yield f"reduce={words.reduce}", "mesh.data=1 sums no gradients over data shards"
    if "accumulate=" in text and config.train.microbatches == 1 and not piped:
        yield f"accumulate={words.accumulate}", "train.microbatches=1 adds up nothing"
    if config.optimizer.name == "sgd" and config.optimizer.momentum == 0 and "moments=" in text:
        yield f"moments={words.moments}", "sgd without momentum has none"


def _pipeline(config: RunConfig, sizes: Mapping[str, int]) -> Iterator[tuple[str, str]]:
    if sizes["pipeline"] == 1:
        for key in ("schedule", "virtual_stages", "layout", "table"):
            yield f"pipeline.{key}", "mesh.pipeline=1 has no stages"
        return
    if config.pipeline.table:
        yield "pipeline.schedule", "pipeline.table says what runs when"
    if config.train.overlap:
        yield "train.overlap", "a stage's loop reduces no gradient that could be hidden in it"


def _times(config: RunConfig) -> Iterator[tuple[str, str]]:
    steps = config.run.stop_at or config.run.steps
    if config.checkpoint.every > steps:
        yield "checkpoint.every", f"the run ends after {steps} steps, and saves then"
    if config.eval.every and not config.eval.steps:
        yield "eval.every", "eval.steps=0 turns evaluation off"
    elif config.eval.every > steps:
        yield "eval.every", f"the run ends after {steps} steps, and evaluates then"
    if config.eval.steps and not config.data.path and not config.data.validation_fraction:
        yield "eval.steps", "data.validation_fraction=0 keeps nothing to evaluate on"


EFFECTS: Final[dict[type[RunConfig], Callable[[Any], Iterator[tuple[str, str]]]]] = {
    LanguageRunConfig: _language,
    ImageRunConfig: _images,
    BertRunConfig: _bert,
    DlrmRunConfig: _recommenders,
    TwoTowerRunConfig: _recommenders,
}
"""What has no effect in each kind of run, beyond what has none in any."""
