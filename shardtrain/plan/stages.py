"""The stages of a pipeline, from a config: which schedule, and which layers on each stage.

Owns: how the `[pipeline]` section becomes a proven table and a layout, and what the ends of a model
cost in layers. Does not own: schedules and layouts (`shardtrain.strategies.schedules`). Needs no
device, and never imports jax.
"""

from pathlib import Path

from shardtrain.errors import ConfigError
from shardtrain.models.config import TransformerConfig
from shardtrain.models.flops import head_in_layers
from shardtrain.strategies.config import PipelineConfig
from shardtrain.strategies.schedules.csv_file import read_table
from shardtrain.strategies.schedules.kinds import make_schedule
from shardtrain.strategies.schedules.layout import Layout, balance, read_layout
from shardtrain.strategies.schedules.table import Schedule

_SECTION = {
    "schedule": "pipeline.schedule",
    "virtual_stages": "pipeline.virtual_stages",
    "layout": "pipeline.layout",
    "num_layers": "model.num_layers",
    "stages": "mesh.pipeline",
    "microbatches": "train.microbatches",
}
"""The key of a config for each word of the schedules' own messages."""


def make_stages(
    pipeline: PipelineConfig,
    model: TransformerConfig,
    *,
    stages: int,
    microbatches: int,
    length: int,
    vocab_size: int | None,
    proven: bool = True,
) -> tuple[Schedule, Layout]:
    """Return the table that a run goes by, and the layers of each of its parts.

    Args:
        pipeline: The section.
        model: The model's section.
        stages: `mesh.pipeline`.
        microbatches: `train.microbatches`.
        length: Tokens of a sequence.
        vocab_size: Tokens that the head scores; None = not known yet, so that it costs nothing.
        proven: False leaves the proof of a schedule by name out, for a table that is only priced.

    Returns:
        The proven table and the layout.

    Raises:
        ConfigError: They do not exist, or a part would be empty; it names the key.
    """
    try:
        schedule = _schedule(pipeline, stages, microbatches, proven)
        virtual = schedule.work.num_virtual
        if pipeline.layout:
            return schedule, read_layout(pipeline.layout, stages, virtual, model.num_layers)
        head = head_in_layers(model, vocab_size, length) if vocab_size else 0.0
        most = -(-model.num_layers // (stages * virtual))  # no more padding than there must be
        return schedule, balance(model.num_layers, stages, virtual, head=head, most=most)
    except ConfigError as error:
        word, equals, value = error.where.partition("=")
        raise ConfigError(
            error.message,
            where=f"{_SECTION.get(word, word)}{equals}{value}",
            value=error.value,
            allowed=error.allowed,
            cure=error.cure,
        ) from None


def _schedule(pipeline: PipelineConfig, stages: int, microbatches: int, proven: bool) -> Schedule:
    virtual = pipeline.virtual_stages
    if not pipeline.table:
        return make_schedule(pipeline.schedule, stages, microbatches, virtual, proven=proven)
    schedule = read_table(Path(pipeline.table).expanduser(), stages, microbatches)
    if virtual not in (1, schedule.work.num_virtual):
        raise ConfigError(
            f"{pipeline.table} has {schedule.work.num_virtual}",
            where=f"virtual_stages={virtual}",
            cure="leave it out: the table says it",
        )
    return schedule
