"""Precision: which dtype each tree of the state has. Nothing else asks for a dtype."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from shardtrain.errors import ConfigError

PyTree = Any


@dataclass(frozen=True)
class Policy:
    """The dtypes of a run.

    `params` rest and compute in `compute`. Where that is narrower than `master`, the optimizer
    holds a copy in `master`, from which they are cast anew after each update; the moments are
    `master` too. Gradients have the parameters' dtype, and `accumulate` while several microbatches
    are added up.
    """

    name: str
    compute: Any
    master: Any
    accumulate: Any

    @property
    def is_narrow(self) -> bool:
        """Whether gradients leave the range of its numbers, unless the loss is scaled."""
        return bool(jnp.dtype(self.compute) == jnp.float16)

    @property
    def has_master(self) -> bool:
        """Whether the optimizer keeps a wider copy of the parameters."""
        return bool(jnp.dtype(self.compute) != jnp.dtype(self.master))

    def gradient_dtype(self, *, summed: bool) -> Any:
        """The dtype in which a step's whole gradient exists; `summed`: added up of several."""
        return self.accumulate if summed else self.compute


POLICIES = {
    "float32": Policy("float32", jnp.float32, jnp.float32, jnp.float32),
    "bfloat16": Policy("bfloat16", jnp.bfloat16, jnp.float32, jnp.float32),
    "float16": Policy("float16", jnp.float16, jnp.float32, jnp.float32),
    "float64": Policy("float64", jnp.float64, jnp.float64, jnp.float64),
}
"""One row a policy."""


def policy(name: str) -> Policy:
    """The policy of that name.

    Raises:
        ConfigError: unknown name, or float64 without 64-bit types.
    """
    if name not in POLICIES:
        raise ConfigError(
            "unknown precision", where="train.precision", value=name, allowed=", ".join(POLICIES)
        )
    if name == "float64" and jax.dtypes.canonicalize_dtype(jnp.float64) != jnp.float64:
        raise ConfigError(
            "64-bit types are off",
            where="train.precision",
            value=name,
            cure="set JAX_ENABLE_X64=1 (`shardtrain verify` does so itself)",
        )
    return POLICIES[name]


def cast(tree: PyTree, dtype: Any) -> PyTree:
    """Casts the floating leaves of a tree."""
    return jax.tree.map(
        lambda x: x.astype(dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x, tree
    )
