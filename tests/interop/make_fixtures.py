"""Tiny random models of transformers and what they compute, for tests that have no transformers.

    pip install '.[reference]'
    python -m tests.interop.make_fixtures

writes `tests/interop/models/NAME/`, or the same in a folder that is named: config.json,
safetensors, `ids.npy` [2, 24] and `logits.npy`. Weights are drawn by NumPy from the name of each
tensor, so that they do not depend on torch. A test makes them anew and compares, where transformers
is installed.
"""

import sys
import zlib
from pathlib import Path
from typing import Any

import numpy as np

MODELS = Path(__file__).parent / "models"
VOCAB = 261  # bytes and five more; no multiple of 128, so that tables are padded
ROWS, LENGTH = 2, 24
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("GPT2", {"n_layer": 2, "n_embd": 32, "n_head": 4, "n_positions": 40}),
    "llama": (
        "Llama",
        {
            "num_hidden_layers": 2,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 64,
            "rms_norm_eps": 1e-6,
            "tie_word_embeddings": False,
        },
    ),
    "llama3": (
        "Llama",
        {
            "num_hidden_layers": 2,
            "hidden_size": 24,
            "intermediate_size": 40,
            "num_attention_heads": 4,
            "num_key_value_heads": 1,
            "head_dim": 8,
            "max_position_embeddings": 64,
            "rope_parameters": LLAMA3_ROPE,
            "tie_word_embeddings": True,
        },
    ),
    "bloom": ("Bloom", {"n_layer": 2, "hidden_size": 32, "n_head": 4}),
    "bloom_6_heads": ("Bloom", {"n_layer": 2, "hidden_size": 24, "n_head": 6}),
    "bert": (
        "Bert",
        {
            "num_hidden_layers": 2,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_attention_heads": 4,
            "max_position_embeddings": 512,
            "attention_probs_dropout_prob": 0.0,
        },
    ),
    "bert_masked": (
        "Bert",
        {
            "num_hidden_layers": 1,
            "hidden_size": 16,
            "intermediate_size": 40,
            "num_attention_heads": 2,
            "max_position_embeddings": 32,
            "hidden_act": "gelu_new",
        },
    ),
}
"""Class and config of each; `llama` is written in several files."""
HEADS = {"gpt2": "LMHeadModel", "bert": "ForPreTraining", "bert_masked": "ForMaskedLM"}
"""What a class is called after its family, where it is no ForCausalLM."""
LONG = 15
"""Tokens of a row of BERT; the others are padding. The second part begins at SECOND."""
SECOND = 6


def drawn(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """The weights of a tensor: such that every one of them matters."""
    rng = np.random.default_rng(zlib.crc32(name.encode()))
    values = rng.normal(size=shape).astype(np.float32)
    if len(shape) == 1:
        centre = 1.0 if "norm" in name.lower() or "ln_" in name else 0.0
        return np.float32(centre if name.endswith("weight") else 0.0) + np.float32(0.2) * values
    return np.float32(0.15) * values


def make(folder: Path) -> None:
    """Writes all models into a folder."""
    import torch
    import transformers

    for name, (kind, sizes) in CASES.items():
        config = getattr(transformers, f"{kind}Config")(
            vocab_size=VOCAB, bos_token_id=0, eos_token_id=0, **sizes
        )
        model = getattr(transformers, kind + HEADS.get(name, "ForCausalLM"))(config).eval()
        with torch.no_grad():
            for parameter, tensor in model.named_parameters():
                tensor.copy_(torch.from_numpy(drawn(parameter, tuple(tensor.shape))))
        model.save_pretrained(folder / name, max_shard_size="60KB" if name == "llama" else "5GB")
        ids = np.random.default_rng(1).integers(0, VOCAB, (ROWS, LENGTH))
        np.save(folder / name / "ids.npy", ids.astype(np.int32))
        if kind == "Bert":
            for what, array in bert_logits(model, ids).items():
                np.save(folder / name / f"{what}.npy", array)
            continue
        np.save(folder / name / "logits.npy", logits(model, ids))


def logits(model: Any, ids: np.ndarray) -> np.ndarray:
    """What a model of transformers computes."""
    import torch

    with torch.no_grad():
        found: np.ndarray = model(torch.from_numpy(ids.astype(np.int64))).logits.numpy()
    return found


def bert_inputs(ids: np.ndarray) -> dict[str, np.ndarray]:
    """Two parts, and in the first row padding behind them."""
    parts, mask = np.zeros_like(ids), np.ones_like(ids)
    parts[:, SECOND:], mask[0, LONG:] = 1, 0
    return {"token_type_ids": parts, "attention_mask": mask}


def bert_logits(model: Any, ids: np.ndarray) -> dict[str, np.ndarray]:
    """What a BERT of transformers computes: scores of tokens, and of the next sentence."""
    import torch

    inputs = {"input_ids": ids, **bert_inputs(ids)}
    with torch.no_grad():
        found = model(**{n: torch.from_numpy(a.astype(np.int64)) for n, a in inputs.items()})
    if "seq_relationship_logits" not in found:
        return {"logits": found.logits.numpy()}
    scores = found.prediction_logits.numpy(), found.seq_relationship_logits.numpy()
    return dict(zip(("logits", "next"), scores, strict=True))


if __name__ == "__main__":
    make(Path(sys.argv[1]) if len(sys.argv) > 1 else MODELS)
