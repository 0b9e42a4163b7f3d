"""Precision: which dtype each tree of the state has. Nothing else asks for a dtype."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from shardtrain.errors import ConfigError
from shardtrain.strategies.precision_words import WHERE, Words, parse_precision

PyTree = Any


@dataclass(frozen=True)
class Policy:
    """The dtypes of a run; `precision_words.Words` says what each part is.

    Where `params` is narrower than `master`, the optimizer holds a copy in `master`, from which
    they are cast anew after each update. Where it is wider than `compute`, they are cast before
    they are used. Gradients are made in `compute`, and are `accumulate` while several microbatches
    are added up. An update is computed in `wide`, whatever rests narrower.
    """

    name: str
    """As `train.precision` says it."""
    words: Words
    params: Any
    compute: Any
    reduce: Any
    """None = as gradients are made."""
    accumulate: Any
    master: Any
    moments: Any

    @property
    def wide(self) -> Any:
        """The dtype that an update is computed in."""
        return self.master if jnp.dtype(self.master).itemsize > 2 else jnp.dtype(jnp.float32)

    @property
    def stochastic(self) -> bool:
        """Whether what rests in fewer bits than it is updated in is rounded by chance."""
        return self.words.rounding == "stochastic"

    @property
    def is_narrow(self) -> bool:
        """Whether gradients leave the range of its numbers, unless the loss is scaled."""
        return bool(jnp.dtype(self.compute) == jnp.float16)

    @property
    def has_master(self) -> bool:
        """Whether the optimizer keeps a wider copy of the parameters."""
        return self.words.has_master

    @property
    def reduces_wider(self) -> bool:
        """Whether gradients cross the network in more bits than they are made in."""
        made = jnp.dtype(self.compute).itemsize
        return self.reduce is not None and bool(jnp.dtype(self.reduce).itemsize > made)

    def gradient_dtype(self, *, summed: bool) -> Any:
        """The dtype in which a step's whole gradient exists; `summed`: added up of several."""
        return self.accumulate if summed else self.compute

    def reduce_dtype(self, *, summed: bool) -> Any:
        """The dtype in which it crosses the network between data shards."""
        return self.gradient_dtype(summed=summed) if self.reduce is None else self.reduce


def policy(name: str) -> Policy:
    """The policy of that name or of those parts.

    Raises:
        ConfigError: an unknown one, or float64 without 64-bit types.
    """
    words = parse_precision(name)
    if words.compute == "float64" and jax.dtypes.canonicalize_dtype(jnp.float64) != jnp.float64:
        raise ConfigError(
            "64-bit types are off",
            where=WHERE,
            value=name,
            cure="set JAX_ENABLE_X64=1 (`shardtrain verify` does so itself)",
        )
    return Policy(
        name=name,
        words=words,
        params=jnp.dtype(words.params),
        compute=jnp.dtype(words.compute),
        reduce=jnp.dtype(words.reduce) if words.reduce else None,
        accumulate=jnp.dtype(words.accumulate),
        master=jnp.dtype(words.master),
        moments=jnp.dtype(words.moments),
    )


def cast(tree: PyTree, dtype: Any) -> PyTree:
    """Casts the floating leaves of a tree."""
    return jax.tree.map(
        lambda x: x.astype(dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x, tree
    )


def cast_at_rest(tree: PyTree, dtype: Any, shardings: PyTree) -> PyTree:
    """Casts parameters where they rest, before any gather: fewer bytes travel.

    Args:
        tree: parameters.
        dtype: what they are computed with.
        shardings: where they rest.

    Returns:
        The tree itself where it has that dtype.
    """

    def narrowed(x: jax.Array, there: Any) -> jax.Array:
        if x.dtype == dtype:
            return x
        narrow: jax.Array = jax.lax.with_sharding_constraint(x.astype(dtype), there)
        return narrow

    return jax.tree.map(narrowed, tree, shardings)
