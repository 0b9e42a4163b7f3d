"""Llama 1 to 3 (arXiv 2302.13971, 2307.09288, 2407.21783) as transformers' `llama` writes it.

Its matrices are [out, in]; queries, keys and values are apart, and so are the halves of the MLP. Of
each head, channel i turns with channel i + head_dim / 2, as in ours.
"""

from typing import Any

from shardtrain.interop.family import Family, Sizes
from shardtrain.interop.hf_keys import Keys
from shardtrain.interop.tensors import Tensor
from shardtrain.models.config import TransformerConfig

_ACTIVATIONS = {
    "silu": "swiglu",
    "swish": "swiglu",
    "gelu_pytorch_tanh": "geglu",
    "gelu_new": "geglu",
}
_HEADS = "kv_heads group head_dim"
_GROUP = {"q": (0, -2), "k": (-2, -1), "v": (-1, None)}
"""Of each group: its queries, then one key, then one value."""
_GATES = {"gate": (0, 1), "up": (1, 2)}


def _projections(what: str, layout: str) -> tuple[Tensor, ...]:
    return tuple(
        Tensor(f"layers.{{}}.self_attn.{letter}_proj.{what}", layout, "group", start, stop)
        for letter, (start, stop) in _GROUP.items()
    )


def _halves(what: str, layout: str) -> tuple[Tensor, ...]:
    return tuple(
        Tensor(f"layers.{{}}.mlp.{name}_proj.{what}", layout, "gate", start, stop)
        for name, (start, stop) in _GATES.items()
    )


TABLE = {
    "embedding": (Tensor("embed_tokens.weight", "vocab, embed"),),
    "layers/attention_norm/scale": (Tensor("layers.{}.input_layernorm.weight", "embed"),),
    "layers/attention/qkv": _projections("weight", f"{_HEADS}, embed"),
    "layers/attention/qkv_bias": _projections("bias", _HEADS),
    "layers/attention/out": (Tensor("layers.{}.self_attn.o_proj.weight", f"embed, {_HEADS}"),),
    "layers/attention/out_bias": (Tensor("layers.{}.self_attn.o_proj.bias", "embed"),),
    "layers/mlp_norm/scale": (Tensor("layers.{}.post_attention_layernorm.weight", "embed"),),
    "layers/mlp/up": _halves("weight", "gate mlp, embed"),
    "layers/mlp/up_bias": _halves("bias", "gate mlp"),
    "layers/mlp/down": (Tensor("layers.{}.mlp.down_proj.weight", "embed, mlp"),),
    "layers/mlp/down_bias": (Tensor("layers.{}.mlp.down_proj.bias", "embed"),),
    "norm/scale": (Tensor("norm.weight", "embed"),),
    "head": (Tensor("lm_head.weight", "vocab, embed"),),
}


def _read(keys: Keys) -> dict[str, Any]:
    keys.must_be("sliding_window", None)
    keys.must_be("partial_rotary_factor", 1.0, 1)
    keys.pass_over("pretraining_tp")
    heads = keys.number("num_attention_heads")
    kv_heads = keys.number("num_key_value_heads", default=None) or heads
    embed, size = keys.number("hidden_size"), keys.number("head_dim", default=None)
    truth = {True: True, False: False}
    bias = keys.choice("attention_bias", default=False, allowed=truth)
    if keys.choice("mlp_bias", default=False, allowed=truth) != bias:
        keys.fault("mlp_bias", not bias, f"{str(bias).lower()}, as attention_bias: one key here")
    return {
        "num_layers": keys.number("num_hidden_layers"),
        "embed_dim": embed,
        "num_heads": heads,
        "num_kv_heads": 0 if kv_heads == heads else kv_heads,
        "head_dim": 0 if size in (None, embed // heads) else size,
        "mlp_dim": keys.number("intermediate_size"),
        "vocab_size": keys.number("vocab_size"),
        "norm": "rmsnorm",
        "norm_epsilon": keys.number("rms_norm_eps", default=1e-6, whole=False),
        "position": "rope",
        **_read_rope(keys),
        "activation": keys.choice("hidden_act", default="silu", allowed=_ACTIVATIONS),
        "bias": bias,
        "tied": keys.choice("tie_word_embeddings", default=False, allowed=truth),
        "attention_dropout": keys.fraction("attention_dropout", default=0.0),
    }


def _read_rope(keys: Keys) -> dict[str, Any]:
    """The rotations; transformers 5 has one table, older versions a key and a table."""
    theta = keys.number("rope_theta", default=10000.0, whole=False)
    tables = [keys.table("rope_scaling"), keys.table("rope_parameters")]
    table = next((table for table in tables if table is not None), None)
    if table is None:
        return {"rope_theta": theta}
    found = {"rope_theta": table.number("rope_theta", default=theta, whole=False)}
    kinds = {kind: kind for kind in ("default", "linear", "llama3")}
    kind = table.choice("rope_type", "type", default="default", allowed=kinds)
    table.must_be("partial_rotary_factor", 1.0, 1)
    if kind == "linear":
        factor = table.number("factor", whole=False)
        found |= {"rope_scaling": "linear", "rope_factor": factor}
    if kind == "llama3":
        found |= {
            "rope_scaling": "llama3",
            "rope_factor": table.number("factor", whole=False),
            "rope_trained_length": table.number("original_max_position_embeddings"),
            "rope_low": table.number("low_freq_factor", whole=False),
            "rope_high": table.number("high_freq_factor", whole=False),
        }
    table.finish()
    return found


def _max_length(keys: Keys) -> int:
    length: int = keys.number("max_position_embeddings", default=2048)
    return length


def _write(model: TransformerConfig, sizes: Sizes) -> dict[str, Any]:
    names = {ours: theirs for theirs, ours in reversed(_ACTIVATIONS.items())}
    scaling: dict[str, Any] | None = None
    if model.rope_scaling != "none":
        scaling = {"rope_type": model.rope_scaling, "factor": model.rope_factor}
    if scaling and model.rope_scaling == "llama3":
        scaling |= {
            "original_max_position_embeddings": model.rope_trained_length,
            "low_freq_factor": model.rope_low,
            "high_freq_factor": model.rope_high,
        }
    return {
        "vocab_size": sizes.vocab_size,
        "hidden_size": model.embed_dim,
        "intermediate_size": model.mlp_size,
        "num_hidden_layers": model.num_layers,
        "num_attention_heads": model.num_heads,
        "num_key_value_heads": model.kv_heads,
        "head_dim": model.head_size,
        "hidden_act": names[model.activation],
        "max_position_embeddings": sizes.length,
        "rms_norm_eps": model.norm_epsilon,
        "rope_theta": model.rope_theta,
        "rope_scaling": scaling,
        "attention_bias": model.bias,
        "mlp_bias": model.bias,
        "attention_dropout": model.attention_dropout,
        "tie_word_embeddings": model.tied,
    }


def _needs(_model: TransformerConfig) -> dict[str, tuple[Any, ...]]:
    return {
        "position": ("rope",),
        "norm": ("rmsnorm",),
        "activation": tuple(dict.fromkeys(_ACTIVATIONS.values())),
        "embed_norm": (False,),
        "dropout": (0.0,),
    }


LLAMA = Family(
    model_type="llama",
    architecture="LlamaForCausalLM",
    prefix="model.",
    table=TABLE,
    buffers=r"(model\.)?layers\.\d+\.self_attn\.rotary_emb\.inv_freq",
    read=_read,
    max_length=_max_length,
    write=_write,
    needs=_needs,
)
