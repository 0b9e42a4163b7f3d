"""Norms: value and gradient against automatic differentiation in float64, and what is kept."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from shardtrain.ops.norm import layer_norm, rms_norm

WIDTH = 24


def plain(x, scale, bias, *, centred):
    x = x - x.mean(-1, keepdims=True) if centred else x
    y = x / jnp.sqrt((x * x).mean(-1, keepdims=True) + 1e-5) * scale
    return y if bias is None else y + bias


def norm(kind, bias):
    def run(x, scale, shift):
        if kind == "rms":
            return rms_norm(x, scale)
        return layer_norm(x, scale, shift if bias else None)

    return run


@pytest.mark.parametrize(("kind", "bias"), [("layer", True), ("layer", False), ("rms", False)])
@pytest.mark.parametrize(
    ("dtype", "bound"), [(np.float64, 1e-12), (np.float32, 1e-5), (jnp.bfloat16, 2e-2)]
)
def test_value_and_gradient(kind, bias, dtype, bound):
    rng = np.random.default_rng(0)
    with jax.enable_x64(True):
        x, scale, shift, g = (
            jnp.asarray(rng.standard_normal(shape), dtype)
            for shape in ((2, 5, WIDTH), (WIDTH,), (WIDTH,), (2, 5, WIDTH))
        )
        y, back = jax.vjp(norm(kind, bias), x, scale, shift)
        wide = [jnp.asarray(a, np.float64) for a in (x, scale, shift, g)]
        want, want_back = jax.vjp(
            lambda x, s, b: plain(x, s, b if bias else None, centred=kind == "layer"), *wide[:3]
        )
        for got, exact in zip((y, *back(g)), (want, *want_back(wide[3])), strict=True):
            assert got.dtype == dtype
            got, exact = np.asarray(got, np.float64), np.asarray(exact)
            assert np.abs(got - exact).max(initial=0) <= bound * max(1, np.abs(exact).max())


@pytest.mark.parametrize("kind", ["layer", "rms"])
def test_a_backward_finds_the_input_and_no_wide_copy(kind):
    x, scale = jnp.ones((2, 5, WIDTH), jnp.bfloat16), jnp.ones(WIDTH, jnp.bfloat16)
    _, back = jax.vjp(norm(kind, False), x, scale, scale)
    kept = [leaf for leaf in jax.tree.leaves(back) if leaf.size >= x.size]
    assert [(leaf.shape, leaf.dtype) for leaf in kept] == [(x.shape, x.dtype)]


def test_a_constant_input_is_not_divided_by_zero():
    x = jnp.full((1, 2, WIDTH), 3.0)
    y, back = jax.vjp(lambda x: layer_norm(x, jnp.ones(WIDTH)), x)
    assert np.isfinite(y).all()
    assert np.isfinite(back(jnp.ones_like(y))[0]).all()
