"""Rotations and slopes against their formulas, written out."""

import math

import jax.numpy as jnp
import numpy as np
import pytest

from shardtrain.config import load_config
from shardtrain.errors import ConfigError
from shardtrain.models.config import TransformerConfig
from shardtrain.models.transformer import rope_frequencies
from shardtrain.ops.position import (
    alibi_slopes,
    llama3_frequencies,
    rotary,
    rotary_frequencies,
)


def model(**values) -> TransformerConfig:
    sizes = {"num_layers": 1, "embed_dim": 16, "num_heads": 1, "position": "rope"}
    return TransformerConfig(**sizes, **values)


def test_pairs_turn_by_their_frequencies() -> None:
    frequencies = rotary_frequencies(4, 100.0)
    np.testing.assert_allclose(frequencies, [1.0, 0.1], rtol=1e-15)
    x = jnp.asarray(np.array([1.0, 0.0, 0.0, 2.0], np.float32)).reshape(1, 1, 1, 1, 4)
    found = rotary(x, jnp.array([[3]]), frequencies)[0, 0, 0, 0]
    expected = [math.cos(3), -2 * math.sin(0.3), math.sin(3), 2 * math.cos(0.3)]
    np.testing.assert_allclose(found, expected, rtol=1e-6)


def test_linear_scaling_stretches_positions() -> None:
    """Position 4 at a factor of 4 is position 1 without."""
    plain = rope_frequencies(model())
    slow = rope_frequencies(model(rope_scaling="linear", rope_factor=4.0))
    np.testing.assert_allclose(4 * slow, plain, rtol=1e-15)


def test_llama3_by_wavelengths() -> None:
    """By the published rule, in its own words: wavelengths beside the trained length."""
    factor, trained, low, high = 8.0, 8192, 1.0, 4.0
    plain = rotary_frequencies(128, 500000.0)
    expected = []
    for frequency in plain:
        wavelength = 2 * math.pi / frequency
        if wavelength < trained / high:
            expected.append(frequency)
        elif wavelength > trained / low:
            expected.append(frequency / factor)
        else:
            smooth = (trained / wavelength - low) / (high - low)
            expected.append((1 - smooth) * frequency / factor + smooth * frequency)
    found = llama3_frequencies(plain, factor=factor, trained_length=trained, low=low, high=high)
    np.testing.assert_allclose(found, expected, rtol=1e-12)
    assert (found[0], found[-1]) == (plain[0], plain[-1] / 8)
    assert len(set((found / plain).round(6))) > 3  # some go over
    keys = {"rope_scaling": "llama3", "rope_theta": 500000.0, "head_dim": 128}
    np.testing.assert_array_equal(rope_frequencies(model(**keys)), found)


def test_slopes_of_six_heads() -> None:
    """Four of the series of four, then every second one of the series of eight."""
    expected = [2**-2, 2**-4, 2**-6, 2**-8, 2**-1, 2**-3]
    np.testing.assert_allclose(alibi_slopes(6), expected, rtol=1e-15)
    assert len(alibi_slopes(112)) == 112


def test_bounds_that_cross_are_refused() -> None:
    sections = {
        "run": {"steps": 1},
        "model": {"num_layers": 1, "embed_dim": 16, "num_heads": 2, "position": "rope"},
        "data": {"sequence_length": 8, "batch_size": 8},
        "optimizer": {"learning_rate": 0.1},
    }
    scaled = {"model.rope_scaling": "llama3", "model.rope_low": 4.0}
    with pytest.raises(ConfigError, match=r"rope_high=4\.0: model\.rope_low=4\.0 is not below"):
        load_config(sections, scaled)
