"""What cannot be about a run of a recommender, found before anything is compiled.

Owns: checks between its model, its data and its layout. Does not own: those that all runs share
(`shardtrain.config`), and files (`shardtrain.data`).
"""

from collections.abc import Iterator, Mapping
from typing import Final

from shardtrain.config_stackless import stackless_faults
from shardtrain.data.config import InteractionsConfig
from shardtrain.data.interaction_formats import misfits
from shardtrain.errors import ConfigError
from shardtrain.models.config import DlrmConfig, TwoTowerConfig
from shardtrain.optim.config import OptimizerConfig
from shardtrain.plan.layout import Degrees, batch_faults
from shardtrain.sharding.config import ShardingConfig
from shardtrain.strategies.config import OffloadConfig, TrainConfig

Model = DlrmConfig | TwoTowerConfig
_WITHOUT: Final[Mapping[str, str]] = {
    "pipeline": "it is no stack of layers",
    "context": "there is no sequence to share out",
    "tensor": "its layers are small, and tables are split over mesh.data and mesh.replica",
}
_FIXED: Final = ("batch", "rows", "tables", "columns")
"""Axes whose rules the exchange of rows counts on."""


def recommender_faults(
    model: Model,
    data: InteractionsConfig,
    train: TrainConfig,
    sharding: ShardingConfig,
    offload: OffloadConfig,
    degrees: Degrees,
    *,
    optimizer: OptimizerConfig,
    rank: int,
) -> list[ConfigError]:
    """Return every fault of such a run.

    Args:
        model: The model's section.
        data: The data's section.
        train: How a step is computed.
        sharding: Rules that replace others.
        offload: What rests on the host.
        degrees: Degree of each mesh axis; -1 where it is still open.
        optimizer: Its section.
        rank: `lora.rank`.

    Returns:
        One error per fault, none when all is well.
    """
    return [
        *stackless_faults(model.type, _WITHOUT, train, sharding, degrees),
        *_rules(sharding),
        *_step(model, train, offload, optimizer, rank),
        *_tables(model, degrees),
        *_columns(model, data),
        *batch_faults(data.batch_size, sharding, degrees, train.microbatches),
    ]


def _rules(sharding: ShardingConfig) -> Iterator[ConfigError]:
    for name in _FIXED:
        if name in sharding.rules:
            yield ConfigError(
                "tables are split over the devices that share out the batch; leave it out, and "
                "choose with model.placement",
                where=f"sharding.rules.{name}={sharding.rules[name]}",
            )


def _step(
    model: Model, train: TrainConfig, offload: OffloadConfig, optimizer: OptimizerConfig, rank: int
) -> Iterator[ConfigError]:
    if train.precision not in ("float32", "float64"):
        yield ConfigError(
            "rows of tables are updated in the type that they rest in, so that there is no second "
            'copy of a table; use "float32"',
            where=f'train.precision="{train.precision}"',
        )
    for key, value in (
        ("optimizer", offload.optimizer),
        ("master", offload.master),
        ("parameters", offload.parameters),
    ):
        if value != "device":
            yield ConfigError(
                f'model.type="{model.type}" has nothing to come layer by layer; use "device"',
                where=f'offload.{key}="{value}"',
            )
    if rank:
        yield ConfigError(
            f'model.type="{model.type}" cannot use it; model.freeze_tables is for fine-tuning',
            where=f"lora.rank={rank}",
        )
    if optimizer.ema_decay and any(size > model.dense_rows for size in model.table_sizes):
        yield ConfigError(
            "an average of all rows would be read and written in every step; use 0",
            where=f"optimizer.ema_decay={optimizer.ema_decay}",
        )


def _tables(model: Model, degrees: Degrees) -> Iterator[ConfigError]:
    split = degrees["replica"] * degrees["data"]
    if split <= 1 or all(size <= model.dense_rows for size in model.table_sizes):
        return
    if model.table_parts % split:
        yield ConfigError(
            f"model.table_parts={model.table_parts} does not divide by {split} devices; use "
            f"{split} or a multiple of it there, or fewer devices",
            where=f"mesh.data={degrees['data']}, mesh.replica={degrees['replica']}",
        )
    if model.placement == "columns" and model.embed_dim % split:
        yield ConfigError(
            f"model.embed_dim={model.embed_dim} columns do not divide by {split} devices",
            where='model.placement="columns"',
            allowed=f"a multiple of {split} columns, or another placement",
        )


def _columns(model: Model, data: InteractionsConfig) -> Iterator[ConfigError]:
    """What a row of the data has, against what the model reads."""
    fields, numbers = len(model.table_sizes), model.num_dense
    if isinstance(model, TwoTowerConfig) and fields < 2:
        yield ConfigError(
            "two towers need a table for the user and, last, one for the item",
            where=f"model.table_sizes={model.table_sizes}",
        )
    if data.path and data.format != "auto":
        yield from misfits(data.format, data, fields=fields, num_dense=numbers)
