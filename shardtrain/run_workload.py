"""A config's work, as the planner takes it: with no layout, and with the config's own.

Owns: which parts of a config are work and which are layout. Does not own: what is made of them
(`shardtrain.plan`).
"""

from collections.abc import Mapping
from typing import Any

from shardtrain.config import LanguageRunConfig, RunConfig
from shardtrain.plan.workload import Layout, Workload
from shardtrain.run_program import make_program
from shardtrain.sharding.mesh import abstract_mesh
from shardtrain.train import build


def make_workload(config: LanguageRunConfig, vocab_size: int, platform: str) -> Workload:
    """A config's work, whatever its layout.

    Args:
        config: from `load_config`.
        vocab_size: tokens of the data; `model.vocab_size` goes first.
        platform: of the devices: "gpu", "tpu" or "cpu".
    """
    model, data = config.model, config.data
    vocab_size = model.vocab_size or vocab_size
    sections = config.model_dump()
    one = {
        "mesh": {},
        "sharding": {},
        "pipeline": {},
        "train": {"precision": config.train.precision},
    }
    alone = LanguageRunConfig.model_validate({**sections, **one})
    rows = model.padded_vocab(vocab_size)

    def program(update: dict[str, Any], vocab: int) -> build.Program:
        part = alone.model_copy(update={"model": model.model_copy(update=update)})
        return make_program(part, vocab_size=vocab, mesh=abstract_mesh({}, platform))

    def part(tensor: int) -> build.Program:
        update = {
            "num_heads": model.num_heads // tensor,
            "num_kv_heads": model.kv_heads // tensor,
            "head_dim": model.head_size,
            "mlp_dim": model.mlp_size // tensor,
            "vocab_size": rows // tensor,
            "vocab_multiple": 1,
        }
        return program(update, rows // tensor)

    return Workload(
        program=program({}, vocab_size),
        part=part,
        model=model,
        vocab_size=vocab_size,
        length=data.sequence_length,
        batch_size=data.batch_size,
        separate_documents=data.separate_documents,
        platform=platform,
        rules=config.sharding.rules,
    )


def layout_of(config: RunConfig, num_devices: int) -> Layout:
    """A config's own layout.

    Raises:
        UserError: its mesh does not fit so many devices.
    """
    return _layout(config, config.mesh.degrees(num_devices))


def choices_of(config: RunConfig) -> Layout:
    """A config's own choices, for devices that its mesh does not fit; `data` is left at 1."""
    return _layout(config, config.mesh.model_dump() | {"data": 1})


def _layout(config: RunConfig, degrees: Mapping[str, int]) -> Layout:
    pipeline, train, sharding = config.pipeline, config.train, config.sharding
    return Layout(
        **degrees,
        zero=sharding.zero,
        sequence_parallel=sharding.sequence_parallel,
        microbatches=train.microbatches,
        remat=train.remat,
        schedule=pipeline.schedule,
        virtual_stages=pipeline.virtual_stages,
        layers=pipeline.layout,
        table=pipeline.table,
    )
