"""Masks of positions in another order are the same masks."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from shardtrain.ops.dropout import bits_at, dropout, sample_keys


@pytest.mark.parametrize("shape", [(8, 6), (5, 3, 2), (1, 1)])
def test_rows_of_random_bits(shape: tuple[int, ...]) -> None:
    key = jax.random.fold_in(jax.random.key(3), 5)
    order = jnp.asarray(np.random.default_rng(0).permutation(shape[0]), jnp.int32)
    want = jax.random.bits(key, shape, jnp.uint32)[order]
    np.testing.assert_array_equal(bits_at(key, order, shape[1:]), want)


def test_rows_far_along() -> None:
    """Numbers of words above 2^32: rows of 2^21 x 4000 words that nobody makes as a whole."""
    key, size = jax.random.key(1), 4000
    rows = jnp.asarray([0, 1073741, 1073742, 2097151], jnp.int32)
    got = np.asarray(bits_at(key, rows, (size,)))
    words = jax.random.key_data(key)
    number = np.asarray(rows, np.uint64)[:, None] * np.uint64(size) + np.arange(
        size, dtype=np.uint64
    )
    high, low = (jnp.asarray(x, jnp.uint32) for x in (number >> 32, number & 0xFFFFFFFF))
    one, two = jax.extend.random.threefry2x32_p.bind(words[0], words[1], high, low)
    np.testing.assert_array_equal(got, one ^ two)


def test_masks_follow_their_positions() -> None:
    keys = sample_keys(jax.random.key(0), jnp.arange(3, dtype=jnp.uint32))
    x = jnp.ones((3, 8, 4))
    order = jnp.asarray([0, 7, 1, 6, 2, 5, 3, 4], jnp.int32)
    places = jnp.broadcast_to(order, (3, 8))
    got = dropout(x, 0.5, keys, 1, 0, places)
    np.testing.assert_array_equal(got, dropout(x, 0.5, keys, 1, 0)[:, order])
