"""Sums over mesh axes, inside a `shard_map`.

Owns: one way around a fault of XLA:CPU, which aborts on 16-bit sums in a region that is manual over
some axes only ("Invalid binary instruction opcode copy"): there they are made in 32 bits.
"""

import jax
import jax.numpy as jnp

from shardtrain.sharding.rules import current


def psum(x: jax.Array, axes: str | tuple[str, ...]) -> jax.Array:
    """The sum over mesh axes, in the dtype of `x`."""
    total: jax.Array = jax.lax.psum(_widened(x), axes)
    return total.astype(x.dtype)


def psum_scatter(x: jax.Array, axis: str, dim: int) -> jax.Array:
    """This device's part, along a dim, of the sum over a mesh axis; perhaps in a wider dtype."""
    part: jax.Array = jax.lax.psum_scatter(_widened(x), axis, scatter_dimension=dim, tiled=True)
    return part


def _widened(x: jax.Array) -> jax.Array:
    active = current()
    on_cpu = active is not None and active.platform == "cpu"
    return x.astype(jnp.float32) if on_cpu and x.dtype.itemsize == 2 else x
