"""A BERT in plain PyTorch beside ours: same weights, batches and SGD, same losses.

    python -m benchmarks.reference.bert                # 2 processes of DDP beside data 4 x tensor 2
    python -m benchmarks.reference.bert --ranks 1      # one process of torch

The text is that of `bert_mini`: hidden tokens and next sentences, padding, ragged numbers of both.
It ends with 1 if a loss differs by more than the bound.
"""

import argparse
import sys
from typing import TYPE_CHECKING

import numpy as np

from benchmarks.reference.ddp import Trial, largest, ours, table, theirs

if TYPE_CHECKING:
    from shardtrain.run import Run

MODULE = "benchmarks.reference.bert_torch"
DEVICES = 8
BOUND = 1e-4
KEYS = {
    "run.steps": 1600,
    "model.embed_dim": 32,
    "model.num_heads": 4,
    "model.mlp_dim": 128,
    "model.max_length": 128,
    "data.tokenizer": "wordpiece:2048",
    "data.sequence_length": 128,
    "data.batch_size": 16,
    "mesh.data": 4,
    "mesh.tensor": 2,
    "sharding.zero": 3,
    "optimizer.name": "sgd",
    "optimizer.momentum": 0.0,
    "optimizer.weight_decay": 0.0,
    "optimizer.learning_rate": 0.5,
    "optimizer.warmup_steps": 5,
    "optimizer.final_ratio": 0.1,
    "optimizer.clip_norm": 0.0,
}


def main() -> int:
    """The command line."""
    flags = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    flags.add_argument("--ranks", type=int, default=2)
    flags.add_argument("--steps", type=int, default=10)
    flags.add_argument("--torch", default="", help="the interpreter that has torch")
    options = flags.parse_args()
    from shardtrain.sharding.devices import prepare_devices

    prepare_devices(DEVICES)
    trial, mine = train(options.steps)
    other = theirs(trial, MODULE, options.ranks, options.torch)
    print(table(mine, other))
    return 0 if largest(mine, other) <= BOUND else 1


def train(steps: int) -> tuple[Trial, list[float]]:
    """Our side, on the first devices.

    Args:
        steps: updates.

    Returns:
        What the other side needs, and the losses.
    """
    import jax

    from shardtrain.config import load_config
    from shardtrain.run import build

    config = load_config("bert_mini", KEYS)
    run = build(config, devices=jax.devices()[:DEVICES])
    trial, losses = ours(run, steps, settings(run))
    batches = trial.batches
    rows = batches["tokens"].shape[:2]
    # A term is a mean over the global batch, which no rank sees alone.
    for name, of in (("masked_total", "weights"), ("next_total", "next_weights")):
        total = batches[of].reshape(steps, -1).sum(1)
        batches[name] = np.broadcast_to(total[:, None], rows).astype(np.float32)
    batches["row_total"] = np.full(rows, rows[1], np.float32)
    return trial, losses


def settings(run: "Run") -> dict[str, int]:
    """What the model of torch wants to know of ours."""
    config = run.config
    inner = config.model.as_transformer
    return {
        "vocab": run.size,
        "length": inner.max_length,
        "embed": inner.embed_dim,
        "heads": inner.num_heads,
        "hidden": inner.mlp_size,
        "layers": inner.num_layers,
    }


if __name__ == "__main__":
    sys.exit(main())
