"""BLOOM (Le Scao et al. 2022, arXiv 2211.05100) as transformers' `bloom` writes it.

Its matrices are [out, in], and queries, keys and values stand together head by head.
"""

from typing import Any

from shardtrain.interop.family import Family, Sizes
from shardtrain.interop.hf_keys import Keys
from shardtrain.interop.tensors import Tensor
from shardtrain.models.config import TransformerConfig

TABLE = {
    "embedding": (Tensor("word_embeddings.weight", "vocab, embed"),),
    "embed_norm/scale": (Tensor("word_embeddings_layernorm.weight", "embed"),),
    "embed_norm/bias": (Tensor("word_embeddings_layernorm.bias", "embed"),),
    "layers/attention_norm/scale": (Tensor("h.{}.input_layernorm.weight", "embed"),),
    "layers/attention_norm/bias": (Tensor("h.{}.input_layernorm.bias", "embed"),),
    "layers/attention/qkv": (
        Tensor("h.{}.self_attention.query_key_value.weight", "kv_heads group head_dim, embed"),
    ),
    "layers/attention/qkv_bias": (
        Tensor("h.{}.self_attention.query_key_value.bias", "kv_heads group head_dim"),
    ),
    "layers/attention/out": (
        Tensor("h.{}.self_attention.dense.weight", "embed, kv_heads group head_dim"),
    ),
    "layers/attention/out_bias": (Tensor("h.{}.self_attention.dense.bias", "embed"),),
    "layers/mlp_norm/scale": (Tensor("h.{}.post_attention_layernorm.weight", "embed"),),
    "layers/mlp_norm/bias": (Tensor("h.{}.post_attention_layernorm.bias", "embed"),),
    "layers/mlp/up": (Tensor("h.{}.mlp.dense_h_to_4h.weight", "mlp, embed"),),
    "layers/mlp/up_bias": (Tensor("h.{}.mlp.dense_h_to_4h.bias", "mlp"),),
    "layers/mlp/down": (Tensor("h.{}.mlp.dense_4h_to_h.weight", "embed, mlp"),),
    "layers/mlp/down_bias": (Tensor("h.{}.mlp.dense_4h_to_h.bias", "embed"),),
    "norm/scale": (Tensor("ln_f.weight", "embed"),),
    "norm/bias": (Tensor("ln_f.bias", "embed"),),
    "head": (Tensor("lm_head.weight", "vocab, embed"),),
}


def _read(keys: Keys) -> dict[str, Any]:
    keys.must_be("apply_residual_connection_post_layernorm", False)
    # Fused kernels and the order of sums, and what the original trainer was told.
    keys.pass_over("pretraining_tp", "slow_but_exact", "attention_softmax_in_fp32", "offset_alibi")
    keys.pass_over("bias_dropout_fusion", "masked_softmax_fusion", "skip_bias_add")
    keys.pass_over("skip_bias_add_qkv")
    embed = keys.number("hidden_size", "n_embed")
    inner = keys.number("n_inner", default=None)
    if inner not in (None, 4 * (embed or 0)):
        keys.fault("n_inner", inner, "null: four times hidden_size")
    return {
        "num_layers": keys.number("n_layer", "num_hidden_layers"),
        "embed_dim": embed,
        "num_heads": keys.number("n_head", "num_attention_heads"),
        "vocab_size": keys.number("vocab_size"),
        "norm_epsilon": keys.number("layer_norm_epsilon", default=1e-5, whole=False),
        "position": "alibi",
        "activation": "gelu_tanh",
        "embed_norm": True,
        "tied": keys.choice(
            "tie_word_embeddings", default=True, allowed={True: True, False: False}
        ),
        "dropout": keys.fraction("hidden_dropout", default=0.0),
        "attention_dropout": keys.fraction("attention_dropout", default=0.0),
    }


def _max_length(keys: Keys) -> int:
    length: int = keys.number("seq_length", default=2048)
    return length


def _write(model: TransformerConfig, sizes: Sizes) -> dict[str, Any]:
    return {
        "vocab_size": sizes.vocab_size,
        "hidden_size": model.embed_dim,
        "n_layer": model.num_layers,
        "n_head": model.num_heads,
        "seq_length": sizes.length,
        "layer_norm_epsilon": model.norm_epsilon,
        "hidden_dropout": model.dropout,
        "attention_dropout": model.attention_dropout,
        "tie_word_embeddings": model.tied,
    }


def _needs(model: TransformerConfig) -> dict[str, tuple[Any, ...]]:
    return {
        "position": ("alibi",),
        "norm": ("layernorm",),
        "norm_bias": (True,),
        "bias": (True,),
        "activation": ("gelu_tanh",),
        "embed_norm": (True,),
        "num_kv_heads": (0, model.num_heads),
        "head_dim": (0, model.embed_dim // model.num_heads),
        "mlp_dim": (0, 4 * model.embed_dim),
    }


BLOOM = Family(
    model_type="bloom",
    architecture="BloomForCausalLM",
    prefix="transformer.",
    table=TABLE,
    buffers=r"$^",
    read=_read,
    max_length=_max_length,
    write=_write,
    needs=_needs,
)
