"""Products in fp8: what is rounded how, that layouts agree, and that what is off stays off."""

import math
import re
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from shardtrain.errors import ConfigError
from shardtrain.ops.dense import dense
from shardtrain.ops.fp8 import E4M3, E5M2, LayersInFp8, largest_of, scaled

KINDS = [(E4M3, ml_dtypes.float8_e4m3fn, 256), (E5M2, ml_dtypes.float8_e5m2, 2**15)]


@pytest.mark.parametrize(("kind", "numpy_kind", "top"), KINDS, ids=["e4m3", "e5m2"])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_rounding_is_that_of_the_format(kind: Any, numpy_kind: Any, top: int, dtype: Any) -> None:
    """Against ml_dtypes; the largest entry lies in the upper half of the range, so none is lost."""
    x = jnp.asarray(np.random.default_rng(0).normal(size=4096) * 37.5, dtype)
    q = scaled(x, kind, largest_of(x))
    scale = float(q.scale)
    assert math.log2(scale) == round(math.log2(scale))
    assert top / 2 <= float(jnp.abs(x).max()) / scale < top
    want = (np.asarray(x, np.float32) / np.float32(scale)).astype(numpy_kind)
    np.testing.assert_array_equal(np.asarray(q.values, np.float32), want.astype(np.float32))


@pytest.mark.parametrize("value", [0.0, 2e-38, 3e38, -1.0])
def test_any_size_has_a_scale(value: float) -> None:
    x = jnp.full(4, value, jnp.float32)
    q = scaled(x, E4M3, largest_of(x))
    assert np.isfinite(np.asarray(q.values, np.float32)).all()
    np.testing.assert_allclose(np.asarray(q.values, np.float32) * float(q.scale), value, rtol=0.07)


@pytest.mark.parametrize("value", [jnp.inf, jnp.nan])
@pytest.mark.parametrize("kind", [E4M3, E5M2])
def test_what_is_no_number_is_not_hidden(value: float, kind: Any) -> None:
    x = jnp.asarray([1.0, value], jnp.float32)
    q = scaled(x, kind, largest_of(x))
    assert not np.isfinite(np.asarray(q.values, np.float32)[1])


@pytest.mark.parametrize("value", [jnp.inf, jnp.nan])
def test_nor_is_it_where_large_entries_are_cut_off(value: float) -> None:
    x = jnp.asarray([1.0, value], jnp.float32)
    q = scaled(x, E4M3, largest_of(x), jnp.float32(1.0))
    assert not np.isfinite(np.asarray(q.values, np.float32) * float(q.scale)).any()


def product(x: jax.Array, w: jax.Array, index: int, wrap: Any) -> tuple[jax.Array, ...]:
    """A layer's product and its gradients."""

    def loss(x: jax.Array, w: jax.Array) -> tuple[jax.Array, jax.Array]:
        y = wrap(lambda w, index, x: dense(x, w))(w, jnp.uint32(index), x)
        return jnp.sum(jnp.square(y.astype(jnp.float32))), y

    (dx, dw), y = jax.jit(jax.grad(loss, argnums=(0, 1), has_aux=True))(x, w)
    return y, dx, dw


def operands() -> tuple[jax.Array, jax.Array]:
    draw = np.random.default_rng(1)
    x = jnp.asarray(draw.normal(size=(2, 8, 32)), jnp.float32)
    return x, jnp.asarray(draw.normal(size=(32, 16)), jnp.float32)


def test_product_and_gradients_are_of_rounded_operands() -> None:
    """e4m3 operands, e5m2 gradient, exact products of those: by the formula, in float64."""
    x, w = operands()
    y, dx, dw = product(x, w, 0, LayersInFp8(1))

    def rounded(a: Any, kind: Any) -> np.ndarray:
        q = scaled(jnp.asarray(a, jnp.float32), kind, largest_of(jnp.asarray(a, jnp.float32)))
        return np.asarray(q.values, np.float64) * float(q.scale)

    qx, qw = rounded(x, E4M3).reshape(-1, 32), rounded(w, E4M3)
    np.testing.assert_allclose(np.asarray(y).reshape(-1, 16), qx @ qw, rtol=1e-5, atol=1e-5)
    g = rounded(2 * np.asarray(y), E5M2).reshape(-1, 16)
    np.testing.assert_allclose(np.asarray(dx).reshape(-1, 32), g @ qw.T, rtol=1e-4, atol=1e-3)
    np.testing.assert_allclose(np.asarray(dw), qx.T @ g, rtol=1e-4, atol=1e-3)


def test_layers_that_are_kept_out_are_exact() -> None:
    """Of five layers the first and the last two are products of whole operands, bit for bit."""
    x, w = operands()
    exact, in_fp8 = product(x, w, 0, lambda layer: layer), product(x, w, 0, LayersInFp8(1))
    wrap = LayersInFp8(5, first=1, last=2)
    for index in range(5):
        want = in_fp8 if index in (1, 2) else exact
        for found, right in zip(product(x, w, index, wrap), want, strict=True):
            np.testing.assert_array_equal(found, right)
    assert not np.array_equal(exact[0], in_fp8[0])


def test_head_and_embedding_are_never_in_fp8() -> None:
    """Of the whole step, only products of the layers have operands that were rounded to 8 bits."""
    from shardtrain.config import load_config
    from shardtrain.run_program import abstract_batch, make_program

    config = load_config(
        {
            "run": {"steps": 1},
            "model": {"num_layers": 3, "embed_dim": 16, "num_heads": 2, "layer_loop": "unroll"},
            "data": {"sequence_length": 8, "batch_size": 2},
            "mesh": {"data": 1},
            "train": {"precision": "fp8"},
            "optimizer": {"learning_rate": 0.1},
        }
    )
    of = make_program(config, vocab_size=64, devices=jax.devices()[:1])
    text = of.step.lower(of.abstract_state, abstract_batch(config, of)).as_text()
    # Each of 4 products of 3 layers: x, w and w again in the backward, and the gradient.
    casts = re.findall(r"convert \S+ : \(\S+\) -> tensor<\S+x(f8E4M3FN|f8E5M2)>", text)
    assert casts.count("f8E5M2") == 12
    assert casts.count("f8E4M3FN") in (24, 36)  # whether a second rounding of w was shared


def test_a_model_without_layers_is_refused() -> None:
    from shardtrain.strategies.precision_words import parse_precision
    from shardtrain.train.step import products_in_layers

    with pytest.raises(ConfigError, match="no stack of equal layers"):
        products_in_layers(parse_precision("fp8"), {"w": jnp.ones(3)})
