"""The dtype that sums are held in. Owns that one choice."""

from typing import Any

import jax.numpy as jnp


def sum_dtype(dtype: Any) -> Any:
    """At least 32 bits: float32 for 16-bit types, otherwise the type itself.

    Example:
        >>> sum_dtype(jnp.bfloat16)
        dtype('float32')
    """
    dtype = jnp.dtype(dtype)
    return jnp.dtype(jnp.float32) if dtype.itemsize < 4 else dtype
