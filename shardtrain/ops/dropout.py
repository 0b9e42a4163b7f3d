"""Dropout whose masks belong to samples, not to devices.

A mask is keyed by (seed, step, sample, layer, site), so it is the same on every mesh, is found
again when a block is recomputed, and differs between samples, layers, sites and steps.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Key, UInt32


def sample_keys(key: Key[Array, ""], sample: UInt32[Array, " batch"]) -> Key[Array, " batch"]:
    """One key a sample, from the step's key."""
    return jax.vmap(jax.random.fold_in, in_axes=(None, 0))(key, sample)


def dropout(
    x: Float[Array, "batch residual_length embed"],
    rate: float,
    keys: Key[Array, " batch"] | None,
    layer: UInt32[Array, ""] | int,
    site: int,
) -> Float[Array, "batch residual_length embed"]:
    """Zeroes entries with probability `rate` and scales the rest by 1 / (1 - rate).

    Args:
        x: what is dropped from.
        rate: the probability; 0 is the identity.
        keys: one key a sample (`sample_keys`), or None: the identity (evaluation).
        layer: index of the layer, or of a place of its own outside the stack.
        site: which dropout of the layer.
    """
    if rate == 0 or keys is None:
        return x
    # Integer arithmetic, so that the mask does not depend on the precision of the run.
    threshold = jnp.uint32(round(rate * 2**32))

    def mask(key: jax.Array) -> jax.Array:
        key = jax.random.fold_in(jax.random.fold_in(key, layer), site)
        bits: jax.Array = jax.random.bits(key, x.shape[1:], jnp.uint32)
        keep: jax.Array = bits >= threshold
        return keep

    return jnp.where(jax.vmap(mask)(keys), x * jnp.asarray(1 / (1 - rate), x.dtype), 0)
