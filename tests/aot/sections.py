"""The model whose programs are compiled: without biases, so that formulas have few terms."""

from typing import Any


def model_sections(
    num_layers: int, embed_dim: int, vocab_size: int, length: int, batch_size: int
) -> dict[str, dict[str, Any]]:
    """A config in bfloat16, on as many devices as there are."""
    return {
        "run": {"steps": 10},
        "model": {
            "num_layers": num_layers,
            "embed_dim": embed_dim,
            "num_heads": 8,
            "vocab_size": vocab_size,
            "norm_bias": False,
            "bias": False,
        },
        "data": {
            "sequence_length": length,
            "batch_size": batch_size,
            "separate_documents": False,
        },
        "optimizer": {"learning_rate": 1e-3},
        "train": {"precision": "bfloat16"},
    }
