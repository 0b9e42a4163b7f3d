"""Shipped configs of published models have the published number of parameters.

Counted on an abstract mesh, with the layout of the config, from the shapes that a run would have.
"""

import json
from typing import Any

import pytest

from shardtrain import cli
from shardtrain.commands import placement
from shardtrain.config import load_config
from shardtrain.interop.hf_config import family_of
from shardtrain.interop.hf_keys import Keys
from shardtrain.models.config import BertConfig
from shardtrain.run_work import work_of

EXACT = {
    # Radford et al. 2019; the sums of their published checkpoints
    "gpt2_124m": 124_439_808,
    "gpt2_355m": 354_823_168,
    "gpt2_774m": 774_030_080,
    "gpt2_1558m": 1_557_611_200,
    # the model cards of bigscience/bloom and bigscience/bloom-560m
    "bloom_560m": 559_214_592,
    "bloom_176b": 176_247_271_424,
    # the weights of meta-llama on Hugging Face's hub
    "llama2_7b": 6_738_415_616,
    "llama2_70b": 68_976_648_192,
    "llama3_8b": 8_030_261_248,
    "llama3_70b": 70_553_706_496,
    "llama3_405b": 405_853_388_800,
    # `BertForPreTraining` of transformers, with both heads
    "bert_base": 110_106_428,
    "bert_base_512": 110_106_428,
    "bert_large_lamb": 336_226_108,
    "bert_large_lamb_512": 336_226_108,
    # torchvision's models of 1000 classes
    "resnet50_imagenet_8gpu": 25_557_032,
}
RESNETS = {18: 11_689_512, 34: 21_797_672, 50: 25_557_032, 101: 44_549_160}
# multiply-adds of an image of 224 x 224, in billions, as torchvision documents them
GIGA_PRODUCTS = {18: 1.81, 34: 3.66, 50: 4.09, 101: 7.80}
ROUNDED = {
    # Brown et al. 2020, arXiv 2005.14165, table 2.1 says 175.0; by Narayanan et al. 2021, 174.6
    "gpt3_175b": (174.6, 1),
    # Smith et al. 2022, arXiv 2201.11990
    "megatron_turing_530b": (530, 0),
}
BILLION = 10**9


@pytest.mark.parametrize("name", EXACT)
def test_counts_to_the_last_one(name: str) -> None:
    assert placement(load_config(name))[2] == EXACT[name]


@pytest.mark.parametrize("depth", RESNETS)
def test_residual_networks_are_those_of_torchvision(depth: int) -> None:
    config = load_config("resnet50_imagenet_8gpu", {"model.depth": depth})
    assert placement(config)[2] == RESNETS[depth]
    work = work_of(config)
    assert round(work.flops(1000) / work.units / 6e9, 2) == GIGA_PRODUCTS[depth]


def test_the_count_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["config", "gpt2_124m", "--placement", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["count"] == EXACT["gpt2_124m"]
    assert cli.main(["config", "gpt2_124m", "--placement"]) == 0
    assert "124,439,808 parameters; mesh data 8, ZeRO 1" in capsys.readouterr().out


def test_padding_does_not_count() -> None:
    config = load_config("gpt2_124m", {"model.vocab_multiple": 128})
    assert placement(config)[2] == EXACT["gpt2_124m"]


@pytest.mark.parametrize("name", ROUNDED)
def test_counts_as_rounded_in_the_paper(name: str) -> None:
    billions, digits = ROUNDED[name]
    assert round(placement(load_config(name))[2] / BILLION, digits) == billions


# What the published config.json of each says, without what does not describe the model.
PUBLISHED: dict[str, dict[str, Any]] = {
    "gpt2_124m": {
        "model_type": "gpt2",
        "activation_function": "gelu_new",
        "architectures": ["GPT2LMHeadModel"],
        "attn_pdrop": 0.1,
        "bos_token_id": 50256,
        "embd_pdrop": 0.1,
        "eos_token_id": 50256,
        "initializer_range": 0.02,
        "layer_norm_epsilon": 1e-05,
        "n_ctx": 1024,
        "n_embd": 768,
        "n_head": 12,
        "n_layer": 12,
        "n_positions": 1024,
        "resid_pdrop": 0.1,
        "summary_activation": None,
        "summary_first_dropout": 0.1,
        "summary_proj_to_labels": True,
        "summary_type": "cls_index",
        "summary_use_proj": True,
        "task_specific_params": {"text-generation": {"do_sample": True, "max_length": 50}},
        "vocab_size": 50257,
    },
    "bloom_176b": {
        "model_type": "bloom",
        "apply_residual_connection_post_layernorm": False,
        "attention_dropout": 0.0,
        "architectures": ["BloomForCausalLM"],
        "attention_softmax_in_fp32": True,
        "bias_dropout_fusion": True,
        "hidden_dropout": 0.0,
        "initializer_range": 0.02,
        "layer_norm_epsilon": 1e-05,
        "masked_softmax_fusion": True,
        "n_embed": 14336,
        "n_inner": None,
        "n_layer": 70,
        "num_attention_heads": 112,
        "offset_alibi": 100,
        "pad_token_id": 3,
        "pretraining_tp": 4,
        "seq_length": 2048,
        "skip_bias_add": True,
        "skip_bias_add_qkv": False,
        "use_cache": True,
        "vocab_size": 250880,
    },
    "llama3_8b": {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": 128000,
        "eos_token_id": 128001,
        "hidden_act": "silu",
        "hidden_size": 4096,
        "initializer_range": 0.02,
        "intermediate_size": 14336,
        "max_position_embeddings": 8192,
        "num_attention_heads": 32,
        "num_hidden_layers": 32,
        "num_key_value_heads": 8,
        "pretraining_tp": 1,
        "rms_norm_eps": 1e-05,
        "rope_scaling": None,
        "rope_theta": 500000.0,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "vocab_size": 128256,
    },
}
PUBLISHED["llama3_405b"] = PUBLISHED["llama3_8b"] | {
    "hidden_size": 16384,
    "intermediate_size": 53248,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "num_attention_heads": 128,
    "num_hidden_layers": 126,
    "rope_scaling": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_configs_are_the_published_ones(name: str) -> None:
    """An imported model is the shipped one, but for what was done after pre-training."""
    keys = Keys(PUBLISHED[name], "config.json")
    family = family_of(keys)
    found = family.read(keys)
    family.notes(keys)
    family.max_length(keys)
    keys.finish()
    assert keys.faults == []
    shipped = load_config(name).model
    later = {"dropout", "attention_dropout", "rope_scaling", "rope_factor", "max_length"}
    ours = type(shipped)(**{k: v for k, v in found.items() if k not in later})
    explicit = {"mlp_dim": ours.mlp_size, "max_length": shipped.max_length}
    assert ours.model_copy(update=explicit) == shipped.model_copy(
        update={"mlp_dim": shipped.mlp_size}
    )


def test_bert_is_the_published_one() -> None:
    """Its config.json names one head of the two that its files have."""
    published = {
        "model_type": "bert",
        "architectures": ["BertForMaskedLM"],
        "attention_probs_dropout_prob": 0.1,
        "gradient_checkpointing": False,
        "hidden_act": "gelu",
        "hidden_dropout_prob": 0.1,
        "hidden_size": 768,
        "initializer_range": 0.02,
        "intermediate_size": 3072,
        "layer_norm_eps": 1e-12,
        "max_position_embeddings": 512,
        "num_attention_heads": 12,
        "num_hidden_layers": 12,
        "pad_token_id": 0,
        "position_embedding_type": "absolute",
        "type_vocab_size": 2,
        "use_cache": True,
        "vocab_size": 30522,
    }
    keys = Keys(published, "config.json")
    family = family_of(keys)
    found = family.read(keys)
    (left,) = family.notes(keys)
    keys.finish()
    assert keys.faults == []
    assert "write BertForPreTraining there" in left
    later = {"vocab_multiple": 128, "next_sentence": True, "mlp_dim": 0}
    assert BertConfig(**found | later) == load_config("bert_base").model
