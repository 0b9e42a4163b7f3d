"""An identity whose gradient is written to memory.

Owns: the fence in the residual stream's backward pass. The gradient of the stream is a sum that
grows from layer to layer, and XLA:CPU fuses its terms into every reader: each layer would compute
the sums of all layers above it anew, with a hundred operands in the first. It duplicates no
division, though.
"""

import jax

from shardtrain.ops.platform import platform


@jax.custom_vjp
def stored_gradient(x: jax.Array) -> jax.Array:
    """Returns `x`; its gradient is computed once, in place of once a reader (CPU only)."""
    return x


def _forward(x: jax.Array) -> tuple[jax.Array, None]:
    return x, None


def _backward(_: None, g: jax.Array) -> tuple[jax.Array]:
    if platform() != "cpu" or g.dtype.itemsize == 2:
        return (g,)  # each rounding to 16 bits is written to memory already
    # The divisor is 1, which XLA may not assume: 0 x NaN is not 0.
    return (g / (1 + 0 * g),)


stored_gradient.defvjp(_forward, _backward)
