"""What cannot be about a run that classifies images, found before anything is compiled.

Owns: checks between its model, its data and its layout. Does not own: those that all runs share
(`shardtrain.config`), and files (`shardtrain.data`).
"""

from collections.abc import Iterator, Mapping

from shardtrain.config_stackless import stackless_faults
from shardtrain.data.config import ImageDataConfig
from shardtrain.errors import ConfigError
from shardtrain.models.config import ResNetConfig
from shardtrain.plan.layout import Degrees, batch_faults
from shardtrain.sharding.config import ShardingConfig
from shardtrain.strategies.config import OffloadConfig, TrainConfig
from shardtrain.strategies.precision_words import words_of

_WITHOUT: Mapping[str, str] = {
    "pipeline": "its blocks differ, so that stages could not share them",
    "context": "there is no sequence to share out",
    "tensor": "its channels are not split",
}
"""Mesh axes that a convolutional network has no use for."""


def image_faults(
    model: ResNetConfig,
    data: ImageDataConfig,
    train: TrainConfig,
    sharding: ShardingConfig,
    offload: OffloadConfig,
    degrees: Degrees,
) -> list[ConfigError]:
    """Return every fault of such a run.

    Args:
        model: The model's section.
        data: The data's section.
        train: How a step is computed.
        sharding: Rules that replace others.
        offload: What rests on the host.
        degrees: Degree of each mesh axis; -1 where it is still open.

    Returns:
        One error per fault, none when all is well.
    """
    return [
        *stackless_faults("resnet", _WITHOUT, train, sharding, degrees),
        *_norm(model, train),
        *_layers(train, offload),
        *_channels(data),
        *batch_faults(data.batch_size, sharding, degrees, train.microbatches),
    ]


def weight_faults(init: str, rank: int) -> list[ConfigError]:
    """Return why such a run cannot begin with weights of others, or adapt them.

    Args:
        init: `run.init`.
        rank: `lora.rank`.

    Returns:
        One error for each that is set.
    """
    return [
        ConfigError('model.type="resnet" cannot use it; leave it out', where=f"{key}={value}")
        for key, value in (("run.init", init), ("lora.rank", rank))
        if value
    ]


def _layers(train: TrainConfig, offload: OffloadConfig) -> Iterator[ConfigError]:
    """What is for stacks of equal layers alone."""
    words = words_of(train.precision)
    if words is not None and words.products:
        yield ConfigError(
            'model.type="resnet" has no stack of layers whose products could be in fp8; use '
            '"bfloat16"',
            where=f'train.precision="{train.precision}"',
        )
    if offload.parameters != "device":
        yield ConfigError(
            'model.type="resnet" has no stack of layers that could come one by one; use "device"',
            where=f'offload.parameters="{offload.parameters}"',
        )


def _norm(model: ResNetConfig, train: TrainConfig) -> Iterator[ConfigError]:
    if train.microbatches > 1 and model.norm_statistics == "global":
        yield ConfigError(
            "batch norm cannot have the statistics of the whole batch while that is worked off in "
            'parts; use 1, or choose other statistics by name: model.norm_statistics="microbatch" '
            'or "per_replica"',
            where=f"train.microbatches={train.microbatches}",
        )


def _channels(data: ImageDataConfig) -> Iterator[ConfigError]:
    for key, values in (("mean", data.mean), ("deviation", data.deviation)):
        if len(values) != data.channels:
            yield ConfigError(
                f"data.channels={data.channels} wants {data.channels} of them",
                where=f"data.{key}={values}",
            )
