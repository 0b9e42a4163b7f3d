"""Rounding: how what an update has computed comes to rest in fewer bits.

Owns: both ways, and the random bits of one of them. Does not own: what rests in fewer bits
(`strategies.precision`), and when it is rounded (`update`).

To the nearest number, a change of less than half a unit in the last place is lost, every step
anew: bfloat16 has 8 bits, so 1 + 0.001 stays 1. Rounded up or down by chance, in proportion to how
near each is, it is right on average (Gupta et al. 2015, arXiv 1502.02551; for bfloat16 weights
without a wider copy, Zamirai et al. 2020, arXiv 2010.06192).
"""

import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, Protocol

import jax
import jax.numpy as jnp

from shardtrain.sharding.placement import leaves_by_path, path_name

PyTree = Any
ROUNDING: Final = 2**32 - 1
"""Folded into a step's key, for random bits that no sample's dropout has."""


class Rounding(Protocol):
    """How leaves come to rest."""

    def __call__(self, tree: PyTree, like: PyTree, key: jax.Array, rows: Any) -> PyTree:
        """Rounds every leaf of a tree to the dtype of its like.

        Args:
            tree: what an update has computed.
            like: the same before it, as it rests.
            key: the step's.
            rows: which rows of the stack the stacked leaves have; None = all.
        """
        ...


@dataclass(frozen=True)
class Nearest:
    """To the nearest number."""

    def __call__(self, tree: PyTree, like: PyTree, key: jax.Array, rows: Any) -> PyTree:
        """Rounds every leaf; see `Rounding`."""
        del key, rows
        return jax.tree.map(lambda x, old: x.astype(old.dtype), tree, like)


@dataclass(frozen=True, eq=False)
class Stochastic:
    """Up or down by chance; a leaf that is not narrowed stays as it is.

    The bits of an entry depend on the step's key, its leaf, its layer in the model and its place in
    that: on every mesh, at every ZeRO stage and from the host's memory they are the same.
    """

    layers: tuple[int, ...] = ()
    """The layer in the model that each row of the stack is; empty = as the model is."""
    stacked: Callable[[], frozenset[str]] = frozenset
    """Paths of the leaves that hold one entry a layer."""

    def __call__(self, tree: PyTree, like: PyTree, key: jax.Array, rows: Any) -> PyTree:
        """Rounds every leaf; see `Rounding`."""
        keys = self._keys(jax.random.fold_in(key, ROUNDING), tree, like, rows)

        def narrow(path: tuple[Any, ...], x: jax.Array, old: jax.Array) -> jax.Array:
            if not _is_narrowed(x, old):
                return x.astype(old.dtype)
            own = keys[path_name(path)]
            if own.ndim == 0:
                return stochastic(x, jax.random.bits(own, x.shape, jnp.uint16))
            bits = jax.vmap(lambda k: jax.random.bits(k, x.shape[1:], jnp.uint16))(own)
            return stochastic(x, bits)

        return jax.tree.map_with_path(narrow, tree, like)

    def _keys(self, key: jax.Array, tree: PyTree, like: PyTree, rows: Any) -> dict[str, jax.Array]:
        """A key for each leaf that is narrowed; of one that holds layers, [layer].

        Made together: one by one, they are two fifths of what it takes to compile an update.
        """
        pairs = zip(leaves_by_path(tree), leaves_by_path(like), strict=True)
        leaves = {name: x for (name, x), (_, old) in pairs if _is_narrowed(x, old)}
        if not leaves:
            return {}
        fold = jax.random.fold_in
        sums = jnp.asarray([zlib.crc32(name.encode()) for name in leaves], jnp.uint32)
        keys = dict(zip(leaves, jax.vmap(fold, (None, 0))(key, sums), strict=True))
        stacked = self.stacked()
        of_layers = [name for name in leaves if name in stacked]
        if of_layers:
            (count,) = {leaves[name].shape[0] for name in of_layers}
            places = jnp.arange(count) if rows is None else rows
            layers = jnp.asarray(self.layers)[places] if self.layers else places
            each = jax.vmap(jax.vmap(fold, (None, 0)), (0, None))(
                jnp.stack([keys[name] for name in of_layers]), layers.astype(jnp.uint32)
            )
            keys |= dict(zip(of_layers, each, strict=True))
        return keys


def _is_narrowed(x: jax.Array, old: jax.Array) -> bool:
    return x.dtype != old.dtype and old.dtype == jnp.bfloat16


def stochastic(x: jax.Array, bits: jax.Array) -> jax.Array:
    """float32 to bfloat16, away from zero as often as the cut-off part is of a unit in the last.

    Args:
        x: any numbers; what is no finite one stays what it is.
        bits: 16 random ones an entry.

    Example:
        >>> x = jnp.full(3, 1 + 2.0**-8, jnp.float32)  # half-way between two numbers
        >>> stochastic(x, jnp.asarray([0, 2**15, 2**16 - 1], jnp.uint16)).astype(jnp.float32)
        Array([1.       , 1.0078125, 1.0078125], dtype=float32)
    """
    words = jax.lax.bitcast_convert_type(x.astype(jnp.float32), jnp.uint32)
    raised = (words + bits.astype(jnp.uint32)) >> 16
    rounded = jax.lax.bitcast_convert_type(raised.astype(jnp.uint16), jnp.bfloat16)
    return jnp.where(jnp.isfinite(x), rounded, x.astype(jnp.bfloat16))
