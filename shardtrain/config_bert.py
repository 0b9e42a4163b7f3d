"""What cannot be about a run that pre-trains BERT, found before anything is compiled.

Owns: checks between its model, its data and its layout. Does not own: those that all runs share
(`shardtrain.config`), and which layouts of a stack are legal (`shardtrain.plan.layout`).
"""

from collections.abc import Iterator

from shardtrain.config_language import stage_faults
from shardtrain.config_precision import layer_precision_faults
from shardtrain.data.config import LEARNED, MaskedTextConfig
from shardtrain.errors import ConfigError
from shardtrain.models.config import BertConfig
from shardtrain.plan.layout import Degrees, layout_faults, model_faults
from shardtrain.sharding.config import ShardingConfig
from shardtrain.strategies.config import BUDGET, PipelineConfig, TrainConfig


def bert_faults(
    model: BertConfig,
    data: MaskedTextConfig,
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
        data: The data's section.
        train: How a step is computed.
        sharding: Rules and sequence parallelism.
        pipeline: How stages share the layers.
        degrees: Degree of each mesh axis; -1 where it is still open.
        settled: Whether the model is that of weights.

    Returns:
        One error per fault, none when all is well.
    """
    stack, text, vocab = model.as_transformer, data.as_text, model.vocab_size or None
    return [
        *_tokenizer(data),
        *layer_precision_faults(train.precision, stack),
        *model_faults(stack, text, settled=settled),
        *layout_faults(stack, text, sharding, degrees, train.microbatches, vocab),
        *_unknown(train, degrees),
        *stage_faults(stack, text, train, pipeline, degrees["pipeline"], vocab),
    ]


def _tokenizer(data: MaskedTextConfig) -> Iterator[ConfigError]:
    name = data.tokenizer
    if name.startswith(LEARNED) and name.removeprefix(LEARNED).isdecimal():
        return
    if not name.endswith(".json"):
        yield ConfigError(
            "masked text needs a tokenizer with [MASK]",
            where="data.tokenizer",
            value=f'"{name}"',
            allowed=f'the path of a tokenizer.json, or "{LEARNED}8192" to learn one of so many '
            "tokens from the text",
        )


def _unknown(train: TrainConfig, degrees: Degrees) -> Iterator[ConfigError]:
    """What is there for models that read one way alone."""
    if degrees["context"] > 1:
        yield ConfigError(
            'model.type="bert" cannot use it: attention over a split sequence is causal; use 1',
            where=f"mesh.context={degrees['context']}",
        )
    if train.audit:
        yield ConfigError(
            "it is there for language models alone; leave it out", where="train.audit=True"
        )
    if train.remat == BUDGET:
        yield ConfigError(
            "the cost model that chooses is that of language models; use another",
            where=f'train.remat="{BUDGET}"',
        )
