"""What tests of imported models share: importing one, and what it computes."""

import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx

from shardtrain import cli
from shardtrain.commands_trained import restore_newest
from shardtrain.config import RunConfig, load_config
from shardtrain.run_program import make_program
from shardtrain.sharding.rules import use_rules
from shardtrain.strategies.stack import make_stack

MODELS = Path(__file__).parent / "models"
ALL = sorted(path.name for path in MODELS.iterdir())
BERTS = [name for name in ALL if name.startswith("bert")]
NAMES = [name for name in ALL if name not in BERTS]
"""Models that write; those of BERT have batches of their own."""


def run_import(source: Path, out: Path, *flags: str) -> int:
    return cli.main(["import", str(source), "--out", str(out), "--json", *flags])


def logits_of(run: Path, ids: np.ndarray, overrides: dict[str, Any] | None = None) -> np.ndarray:
    """The scores of a run's newest checkpoint, for each position."""
    return logits_with(load_config(run, overrides), ids)


def logits_with(config: RunConfig, ids: np.ndarray) -> np.ndarray:
    program = make_program(config, vocab_size=config.model.vocab_size)
    state = restore_newest(config, program)
    table, mesh = program.layout.compute, program.layout.mesh

    @jax.jit
    def scores(params: Any, tokens: jax.Array) -> jax.Array:
        with use_rules(table, mesh):
            model = nnx.merge(program.graph, params)
            return model({"tokens": tokens}, None, make_stack())

    rows = np.resize(ids, (mesh.size, ids.shape[1])).astype(np.int32)  # for every data shard
    found = np.asarray(scores(state.weights, rows))
    return found[: len(ids), :, : config.model.vocab_size]


def tensors_in(folder: Path) -> dict[str, bytes]:
    """Every tensor of a folder: type, shape and bytes, read here and not by the package."""
    found = {}
    for path in sorted(folder.glob("*.safetensors")):
        content = path.read_bytes()
        length = int.from_bytes(content[:8], "little")
        for name, entry in json.loads(content[8 : 8 + length]).items():
            if name != "__metadata__":
                start, stop = (8 + length + offset for offset in entry["data_offsets"])
                found[name] = repr((entry["dtype"], entry["shape"])).encode() + content[start:stop]
    return found
