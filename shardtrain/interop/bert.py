"""BERT (arXiv 1810.04805) as transformers' `bert` writes it: with both heads, or with one.

Its matrices are [out, in]; queries, keys and values are apart. `BertForPreTraining` has a pooler
and a head for the next sentence, `BertForMaskedLM` has not: that is `model.next_sentence`.
"""

from typing import Any

from shardtrain.interop.family import Family, Sizes
from shardtrain.interop.hf_keys import Keys
from shardtrain.interop.tensors import Tensor
from shardtrain.models.config import BertConfig

_ACTIVATIONS = {
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
    "silu": "silu",
    "swish": "silu",
}
_BOTH, _ONE = "BertForPreTraining", "BertForMaskedLM"
_EMBEDDINGS, _LAYER = "bert.embeddings.", "bert.encoder.layer.{}."
_HEADS = "kv_heads group head_dim"
_GROUP = ("query", "key", "value")
_TRANSFORM = "cls.predictions.transform."


def _projections(what: str, layout: str) -> tuple[Tensor, ...]:
    return tuple(
        Tensor(f"{_LAYER}attention.self.{name}.{what}", layout, "group", start, start + 1)
        for start, name in enumerate(_GROUP)
    )


TABLE = {
    "embedding": (Tensor(f"{_EMBEDDINGS}word_embeddings.weight", "vocab, embed"),),
    "positions": (Tensor(f"{_EMBEDDINGS}position_embeddings.weight", "position, embed"),),
    "segments": (Tensor(f"{_EMBEDDINGS}token_type_embeddings.weight", "segment, embed"),),
    "embed_norm/scale": (Tensor(f"{_EMBEDDINGS}LayerNorm.weight", "embed"),),
    "embed_norm/bias": (Tensor(f"{_EMBEDDINGS}LayerNorm.bias", "embed"),),
    "layers/attention/qkv": _projections("weight", f"{_HEADS}, embed"),
    "layers/attention/qkv_bias": _projections("bias", _HEADS),
    "layers/attention/out": (Tensor(f"{_LAYER}attention.output.dense.weight", f"embed, {_HEADS}"),),
    "layers/attention/out_bias": (Tensor(f"{_LAYER}attention.output.dense.bias", "embed"),),
    "layers/attention_norm/scale": (Tensor(f"{_LAYER}attention.output.LayerNorm.weight", "embed"),),
    "layers/attention_norm/bias": (Tensor(f"{_LAYER}attention.output.LayerNorm.bias", "embed"),),
    "layers/mlp/up": (Tensor(f"{_LAYER}intermediate.dense.weight", "mlp, embed"),),
    "layers/mlp/up_bias": (Tensor(f"{_LAYER}intermediate.dense.bias", "mlp"),),
    "layers/mlp/down": (Tensor(f"{_LAYER}output.dense.weight", "embed, mlp"),),
    "layers/mlp/down_bias": (Tensor(f"{_LAYER}output.dense.bias", "embed"),),
    "layers/mlp_norm/scale": (Tensor(f"{_LAYER}output.LayerNorm.weight", "embed"),),
    "layers/mlp_norm/bias": (Tensor(f"{_LAYER}output.LayerNorm.bias", "embed"),),
    "transform": (Tensor(f"{_TRANSFORM}dense.weight", "embed, features"),),
    "transform_bias": (Tensor(f"{_TRANSFORM}dense.bias", "embed"),),
    "transform_norm/scale": (Tensor(f"{_TRANSFORM}LayerNorm.weight", "embed"),),
    "transform_norm/bias": (Tensor(f"{_TRANSFORM}LayerNorm.bias", "embed"),),
    "decoder_bias": (Tensor("cls.predictions.bias", "vocab"),),
    "next/pooler": (Tensor("bert.pooler.dense.weight", "embed, features"),),
    "next/pooler_bias": (Tensor("bert.pooler.dense.bias", "embed"),),
    "next/kernel": (Tensor("cls.seq_relationship.weight", "classes, embed"),),
    "next/bias": (Tensor("cls.seq_relationship.bias", "classes"),),
    "head": (Tensor("cls.predictions.decoder.weight", "vocab, embed"),),
}


def _read(keys: Keys) -> dict[str, Any]:
    keys.must_be("is_decoder", False)
    keys.must_be("add_cross_attention", False)
    keys.must_be("tie_word_embeddings", True)
    keys.must_be("position_embedding_type", "absolute")
    keys.must_be("type_vocab_size", 2)
    keys.pass_over("gradient_checkpointing", "classifier_dropout")
    return {
        "type": "bert",
        "num_layers": keys.number("num_hidden_layers"),
        "embed_dim": keys.number("hidden_size"),
        "num_heads": keys.number("num_attention_heads"),
        "mlp_dim": keys.number("intermediate_size"),
        "vocab_size": keys.number("vocab_size"),
        "max_length": _max_length(keys),
        "next_sentence": _has_both(keys),
        "norm_epsilon": keys.number("layer_norm_eps", default=1e-12, whole=False),
        "activation": keys.choice("hidden_act", default="gelu", allowed=_ACTIVATIONS),
        "dropout": keys.fraction("hidden_dropout_prob", default=0.1),
        "attention_dropout": keys.fraction("attention_probs_dropout_prob", default=0.1),
    }


def _has_both(keys: Keys) -> bool:
    kinds = keys.get("architectures", default=[_BOTH])
    if kinds not in ([_BOTH], [_ONE]):
        keys.fault("architectures", kinds, f'["{_BOTH}"], ["{_ONE}"]')
    return bool(kinds != [_ONE])


def _max_length(keys: Keys) -> int:
    length: int = keys.number("max_position_embeddings", default=512)
    return length


def _notes(keys: Keys) -> list[str]:
    notes = []
    if keys.get("architectures", default=[_BOTH]) == [_ONE]:
        notes.append(
            f"architectures is {_ONE}: a pooler and a head for the next sentence are left out if "
            f"the files have them; write {_BOTH} there to keep them"
        )
    return notes


def _write(model: BertConfig, sizes: Sizes) -> dict[str, Any]:
    names = {ours: theirs for theirs, ours in reversed(_ACTIVATIONS.items())}
    return {
        "architectures": [_BOTH if model.next_sentence else _ONE],
        "vocab_size": sizes.vocab_size,
        "max_position_embeddings": model.max_length,
        "type_vocab_size": 2,
        "hidden_size": model.embed_dim,
        "num_hidden_layers": model.num_layers,
        "num_attention_heads": model.num_heads,
        "intermediate_size": model.as_transformer.mlp_size,
        "hidden_act": names[model.activation],
        "layer_norm_eps": model.norm_epsilon,
        "hidden_dropout_prob": model.dropout,
        "attention_probs_dropout_prob": model.attention_dropout,
        "tie_word_embeddings": True,
    }


def _needs(model: BertConfig) -> dict[str, tuple[Any, ...]]:
    del model
    return {}


BERT = Family(
    model_type="bert",
    architecture=_BOTH,
    prefix="",
    table=TABLE,
    # the last two are those of a `BertForMaskedLM` that was cut out of the whole
    buffers=r"bert\.embeddings\.position_ids|cls\.predictions\.decoder\.bias"
    r"|bert\.pooler\..*|cls\.seq_relationship\..*",
    read=_read,
    max_length=_max_length,
    write=_write,
    needs=_needs,
    notes=_notes,
    kind="bert",
    renamed={"LayerNorm.gamma": "LayerNorm.weight", "LayerNorm.beta": "LayerNorm.bias"},
)
