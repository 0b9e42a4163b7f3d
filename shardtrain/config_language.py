"""What cannot be about a run that learns from text, found before anything is compiled.

Owns: checks between its model, its task, its data and its layout. Does not own: those that all runs
share (`shardtrain.config`), which layouts are legal (`shardtrain.plan.layout`).
"""

import difflib
from pathlib import Path
from typing import Final

from shardtrain.config_precision import layer_precision_faults
from shardtrain.data.config import DataConfig
from shardtrain.errors import ConfigError
from shardtrain.models.config import TransformerConfig
from shardtrain.plan.layout import Degrees, layout_faults, model_faults
from shardtrain.plan.stages import make_stages
from shardtrain.sharding.config import ShardingConfig
from shardtrain.strategies.config import PipelineConfig, TrainConfig, host_names
from shardtrain.tasks.config import LanguageModelConfig

TOKENIZERS: Final[dict[str, int]] = {"bytes": 256}
"""Tokens of each tokenizer that needs no file; others are `tokenizer.json` files."""
_TOKEN_FILES: Final = (".tokens", ".npy", ".bin", ".idx")


def known_tokens(data: DataConfig) -> int | None:
    """Return the tokens of the data where they are known without reading it.

    Args:
        data: The data's section.

    Returns:
        The size, or None for a tokenizer file, a prepared folder or an array of tokens, which say
        it themselves.
    """
    path = Path(data.path)
    others = path.suffix in _TOKEN_FILES or Path(f"{path}.idx").exists()
    if data.path and (others or (path / "train.tokens").exists()):
        return None
    return TOKENIZERS.get(data.tokenizer)


def language_faults(
    model: TransformerConfig,
    task: LanguageModelConfig,
    data: DataConfig,
    train: TrainConfig,
    sharding: ShardingConfig,
    pipeline: PipelineConfig,
    degrees: Degrees,
    *,
    settled: bool,
) -> list[ConfigError]:
    """Return every fault of such a run.

    Args:
        model: The model's section.
        task: The task's section.
        data: The data's section.
        train: How a step is computed.
        sharding: Rules and sequence parallelism.
        pipeline: How stages share the layers.
        degrees: Degree of each mesh axis; -1 where it is still open.
        settled: Whether the model is that of weights.

    Returns:
        One error per fault, none when all is well.
    """
    vocab = known_tokens(data)
    return [
        *_token_faults(data),
        *layer_precision_faults(train.precision, model),
        *_vocabulary_faults(model, data, vocab),
        *model_faults(model, data, settled=settled),
        *layout_faults(model, data, sharding, degrees, train.microbatches, vocab),
        *_loss_faults(task, data, degrees["context"]),
        *stage_faults(model, data, train, pipeline, degrees["pipeline"], vocab),
    ]


def _token_faults(data: DataConfig) -> list[ConfigError]:
    faults: list[ConfigError] = []
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
    return faults


def _vocabulary_faults(
    model: TransformerConfig, data: DataConfig, vocab: int | None
) -> list[ConfigError]:
    if not vocab or not 0 < model.vocab_size < vocab:
        return []
    return [
        ConfigError(
            f'data.tokenizer="{data.tokenizer}" has {vocab} tokens; use {vocab} or more, or 0',
            where=f"model.vocab_size={model.vocab_size}",
        )
    ]


def _loss_faults(task: LanguageModelConfig, data: DataConfig, context: int) -> list[ConfigError]:
    chunks, length = task.loss_chunks, data.sequence_length // max(context, 1)
    if chunks <= length:
        return []
    return [
        ConfigError(
            f"a device has {length} positions of a sequence; use {length} or less",
            where=f"task.loss_chunks={chunks}",
        )
    ]


def stage_faults(
    model: TransformerConfig,
    data: DataConfig,
    train: TrainConfig,
    pipeline: PipelineConfig,
    stages: int,
    vocab: int | None,
) -> list[ConfigError]:
    """Return why there is no such pipeline.

    Args:
        model: The model's section.
        data: The data's section.
        train: How a step is computed.
        pipeline: How stages share the layers.
        stages: `mesh.pipeline`.
        vocab: Tokens of the data, where they are known.
    """
    if stages == 1:
        return []
    if host_names(train.remat):
        return [
            ConfigError(
                f"mesh.pipeline={stages}: stages keep in their own slots, on the device; leave out "
                '":host", or use more stages, or train.remat="full"',
                where=f'train.remat="{train.remat}"',
            )
        ]
    try:
        make_stages(
            pipeline,
            model,
            stages=stages,
            microbatches=train.microbatches,
            length=data.sequence_length,
            vocab_size=model.vocab_size or vocab,
        )
    except ConfigError as fault:
        return [fault]
    return []
