"""Model FLOPs and their part of the chip's peak: the convention, by hand."""

import math
from types import SimpleNamespace

import jax
import pytest
from fault_programs import STYLES, config, program

from shardtrain.models.config import TransformerConfig
from shardtrain.models.flops import matrix_parameters, training_flops_per_token
from shardtrain.optim.optimizers import is_matrix
from shardtrain.train.flops import PEAK_FLOPS, utilisation

SMALL = TransformerConfig(num_layers=2, embed_dim=64, num_heads=4, head_dim=16)


def flops(model: TransformerConfig, *, length: int = 128, causal: bool = False) -> int:
    return training_flops_per_token(model, vocab_size=256, length=length, causal=causal)


def attention(model: TransformerConfig, *, causal: bool = False) -> int:
    return flops(model, causal=causal) - flops(model, length=0)


def test_o42_attention() -> None:
    """O-42: 2 layers, 4 heads of 16, 128 tokens: 196,608 a token in full (ours), 98,304 causal."""
    assert attention(SMALL) == 196_608
    assert attention(SMALL, causal=True) == 98_304


def test_o42_the_head_size_is_not_the_width_over_the_heads() -> None:
    """O-42: width 64 and 4 heads of 32; and width 96 with heads that stay 16 wide."""
    assert attention(SMALL.model_copy(update={"head_dim": 32})) == 2 * 196_608
    assert attention(SMALL.model_copy(update={"embed_dim": 96})) == 196_608


def test_o42_matrices_by_hand() -> None:
    """O-42: 6 for each entry of a matrix; grouped queries and gates count as built."""
    assert flops(SMALL, length=0) == 6 * (2 * (64 * 3 * 64 + 64 * 64 + 2 * 64 * 256) + 256 * 64)
    grouped = SMALL.model_copy(update={"num_kv_heads": 1})
    assert flops(SMALL, length=0) - flops(grouped, length=0) == 6 * 2 * 64 * (2 * 3 * 16)
    assert attention(grouped) == attention(SMALL)
    gated = SMALL.model_copy(update={"activation": "swiglu"})
    assert flops(gated, length=0) - flops(SMALL, length=0) == 6 * 2 * 64 * 256
    untied = SMALL.model_copy(update={"tied": False})
    assert flops(untied) == flops(SMALL)


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("tied", [True, False])
def test_o42_matrices_are_those_of_the_model(style, tied) -> None:
    """O-42: the count is that of the model's own parameters, without lookups and padding."""
    keys = {**STYLES[style], "model.tied": tied, "model.head_dim": 6, "model.vocab_multiple": 8}
    of = program(keys, vocab_size=101)
    sizes = {
        jax.tree_util.keystr(path, simple=True, separator="/"): (math.prod(leaf.shape), names)
        for (path, leaf), names in zip(
            jax.tree.leaves_with_path(of.shapes.params),
            jax.tree.leaves(of.placement.names, is_leaf=lambda x: isinstance(x, tuple)),
            strict=True,
        )
    }
    stack = sum(n for path, (n, names) in sizes.items() if "layers/" in path and is_matrix(names))
    head = sizes["embedding"][0] // 104 * 101
    assert matrix_parameters(config(keys).model, 101) == stack + head


def chips(kind: str, count: int = 2) -> list:
    return [SimpleNamespace(device_kind=kind)] * count


def test_o42_utilisation() -> None:
    """O-42: of all chips; an unknown one has no percentage rather than a wrong one."""
    peak = PEAK_FLOPS["NVIDIA H200"]["bfloat16"]
    assert utilisation(peak, chips("NVIDIA H200"), "bfloat16") == 0.5
    assert utilisation(1e12, chips("a chip of tomorrow"), "bfloat16") is None
    assert utilisation(1e12, chips("TPU v4"), "float64") is None
    assert utilisation(1e12, jax.devices(), "float32") is None
