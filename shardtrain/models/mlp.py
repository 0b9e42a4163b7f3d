"""Layers of full connections, one after another, as recommenders have them.

Owns: parameters and arithmetic. Does not own: the MLP of a transformer's layer.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from shardtrain.models.transformer import constant, param
from shardtrain.sharding.rules import constrain


class Mlp(nnx.Module):
    """Linear maps with rectifiers between them, drawn as DLRM's (Naumov et al. 2019)."""

    def __init__(
        self, sizes: Sequence[int], dtype: Any, rngs: nnx.Rngs, *, linear: bool = True
    ) -> None:
        """Draws the parameters.

        Args:
            sizes: width of the input and of each layer's output.
            dtype: dtype of the parameters.
            rngs: the stream `params` is used.
            linear: whether there is no rectifier after the last one.
        """
        self.depth, self.linear, self.dtype = len(sizes) - 1, linear, dtype
        for index, (read, make) in enumerate(pairwise(sizes)):
            stddev = (2 / (read + make)) ** 0.5
            kernel = param(rngs, ("embed", "mlp"), (read, make), dtype, stddev)
            setattr(self, f"kernel{index}", kernel)
            setattr(self, f"bias{index}", constant(("mlp",), (make,), dtype, 0.0))

    def __call__(self, x: Float[Array, "batch embed"]) -> Float[Array, "batch mlp"]:
        """Runs the layers."""
        for index in range(self.depth):
            x = x @ getattr(self, f"kernel{index}")[...] + getattr(self, f"bias{index}")[...]
            if index < self.depth - 1 or not self.linear:
                x = jax.nn.relu(x)
            x = constrain(x, "batch", None)
        return x


def unit(x: Float[Array, "batch embed"]) -> Float[Array, "batch embed"]:
    """Vectors of length 1."""
    return x * jax.lax.rsqrt(jnp.sum(jnp.square(x), -1, keepdims=True) + 1e-12)
