"""GPT-2 (Radford et al. 2019) as transformers' `gpt2` writes it.

Its matrices are [in, out], and one makes all queries, then all keys, then all values.
"""

from typing import Any

from shardtrain.interop.family import Family, Sizes
from shardtrain.interop.hf_keys import Keys
from shardtrain.interop.tensors import Tensor
from shardtrain.models.config import TransformerConfig

_ACTIVATIONS = {
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu": "gelu",
    "relu": "relu",
    "silu": "silu",
    "swish": "silu",
}

TABLE = {
    "embedding": (Tensor("wte.weight", "vocab, embed"),),
    "positions": (Tensor("wpe.weight", "position, embed"),),
    "layers/attention_norm/scale": (Tensor("h.{}.ln_1.weight", "embed"),),
    "layers/attention_norm/bias": (Tensor("h.{}.ln_1.bias", "embed"),),
    "layers/attention/qkv": (Tensor("h.{}.attn.c_attn.weight", "embed, group kv_heads head_dim"),),
    "layers/attention/qkv_bias": (Tensor("h.{}.attn.c_attn.bias", "group kv_heads head_dim"),),
    "layers/attention/out": (Tensor("h.{}.attn.c_proj.weight", "kv_heads group head_dim, embed"),),
    "layers/attention/out_bias": (Tensor("h.{}.attn.c_proj.bias", "embed"),),
    "layers/mlp_norm/scale": (Tensor("h.{}.ln_2.weight", "embed"),),
    "layers/mlp_norm/bias": (Tensor("h.{}.ln_2.bias", "embed"),),
    "layers/mlp/up": (Tensor("h.{}.mlp.c_fc.weight", "embed, mlp"),),
    "layers/mlp/up_bias": (Tensor("h.{}.mlp.c_fc.bias", "mlp"),),
    "layers/mlp/down": (Tensor("h.{}.mlp.c_proj.weight", "mlp, embed"),),
    "layers/mlp/down_bias": (Tensor("h.{}.mlp.c_proj.bias", "embed"),),
    "norm/scale": (Tensor("ln_f.weight", "embed"),),
    "norm/bias": (Tensor("ln_f.bias", "embed"),),
    "head": (Tensor("lm_head.weight", "vocab, embed"),),
}


def _read(keys: Keys) -> dict[str, Any]:
    keys.must_be("scale_attn_weights", True)
    keys.must_be("scale_attn_by_inverse_layer_idx", False)
    keys.must_be("add_cross_attention", False)
    keys.pass_over("reorder_and_upcast_attn", "n_ctx")  # the order of sums; an old name
    keys.pass_over("summary_type", "summary_use_proj", "summary_activation")
    keys.pass_over("summary_proj_to_labels", "summary_first_dropout")
    dropouts = [keys.fraction(f"{what}_pdrop", default=0.1) for what in ("embd", "resid")]
    return {
        "num_layers": keys.number("n_layer", "num_hidden_layers"),
        "embed_dim": keys.number("n_embd", "hidden_size"),
        "num_heads": keys.number("n_head", "num_attention_heads"),
        "mlp_dim": keys.number("n_inner", default=None) or 0,
        "vocab_size": keys.number("vocab_size"),
        "max_length": _max_length(keys),
        "norm_epsilon": keys.number("layer_norm_epsilon", default=1e-5, whole=False),
        "activation": keys.choice("activation_function", default="gelu_new", allowed=_ACTIVATIONS),
        "tied": keys.choice(
            "tie_word_embeddings", default=True, allowed={True: True, False: False}
        ),
        "dropout": dropouts[0] if dropouts[0] == dropouts[1] else 0.0,
        "attention_dropout": keys.fraction("attn_pdrop", default=0.1),
    }


def _max_length(keys: Keys) -> int:
    length: int = keys.number("n_positions", "max_position_embeddings", default=1024)
    return length


def _notes(keys: Keys) -> list[str]:
    names = ("embd_pdrop", "resid_pdrop")
    drops = {name: keys.fraction(name, default=0.1) for name in names}
    notes = []
    if drops["embd_pdrop"] != drops["resid_pdrop"]:
        both = f"embd_pdrop={drops['embd_pdrop']} and resid_pdrop={drops['resid_pdrop']}"
        notes.append(f"{both} are one key here, model.dropout, which is 0 now")
    return notes


def _write(model: TransformerConfig, sizes: Sizes) -> dict[str, Any]:
    names = {ours: theirs for theirs, ours in reversed(_ACTIVATIONS.items())}
    return {
        "vocab_size": sizes.vocab_size,
        "n_positions": sizes.length,
        "n_embd": model.embed_dim,
        "n_layer": model.num_layers,
        "n_head": model.num_heads,
        "n_inner": model.mlp_dim or None,
        "activation_function": names[model.activation],
        "layer_norm_epsilon": model.norm_epsilon,
        "embd_pdrop": model.dropout,
        "resid_pdrop": model.dropout,
        "attn_pdrop": model.attention_dropout,
        "tie_word_embeddings": model.tied,
    }


def _needs(model: TransformerConfig) -> dict[str, tuple[Any, ...]]:
    return {
        "position": ("learned",),
        "norm": ("layernorm",),
        "norm_bias": (True,),
        "bias": (True,),
        "activation": tuple(dict.fromkeys(_ACTIVATIONS.values())),
        "embed_norm": (False,),
        "num_kv_heads": (0, model.num_heads),
        "head_dim": (0, model.embed_dim // model.num_heads),
    }


GPT2 = Family(
    model_type="gpt2",
    architecture="GPT2LMHeadModel",
    prefix="transformer.",
    table=TABLE,
    buffers=r"(transformer\.)?h\.\d+\.attn\.(masked_)?bias",
    read=_read,
    max_length=_max_length,
    write=_write,
    needs=_needs,
    notes=_notes,
)
