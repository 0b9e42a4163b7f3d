"""The matrix product of activations with a weight; every linear map of every model goes through it.

Owns: the phrasing of the product and of its two gradients. XLA lowers what is mathematically one
product in very different ways: on CPU an activation with two leading dims is copied before every
weight gradient, and a 16-bit product is fast only as 16 x 16 -> 32 bit with a left operand that is
contracted on its last dim.
Does not own: where operands lie; it never moves data and calls no `shard_map`.
"""

import math
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from shardtrain.ops.platform import platform
from shardtrain.ops.sums import sum_dtype
from shardtrain.sharding.rules import constrain, current
from shardtrain.strategies.remat import PRODUCT

Dims = tuple[int, ...]


class Phrasing(NamedTuple):
    """How products are written for the devices that the traced code will run on."""

    flatten: bool
    """Merge [batch, length] into one dim around the product (CPU)."""
    canonical: bool
    """Make all operands matrices, copy left ones so that they are contracted on their last dim, and
    ask 16-bit products for 32-bit results (CPU, one device)."""


@partial(
    jax.tree_util.register_dataclass, data_fields=["base", "down", "up"], meta_fields=["scale"]
)
@dataclass(frozen=True)
class LowRank:
    """A frozen weight and a trained change of low rank: `W + scale A B` (arXiv 2106.09685).

    Its product is made of three, so that no gradient of the weight's size is ever made or reduced,
    and in 16 bits a change smaller than the weight's last bit is not rounded away.
    """

    base: Float[Array, "..."]
    """As `dense` takes a weight."""
    down: Float[Array, "... rank"]
    """A: [*in, rank]."""
    up: Float[Array, "rank ..."]
    """B: [rank, *out]."""
    scale: float


def phrasing() -> Phrasing:
    """Chooses by the platform of the active mesh, or of the default device outside of rules."""
    active = current()
    cpu = platform() == "cpu"
    if active is None:
        return Phrasing(flatten=cpu, canonical=cpu)
    length = active.is_sharded("length") or active.is_sharded("residual_length")
    return Phrasing(flatten=cpu and not length, canonical=cpu and active.alone)


def dense(
    x: Float[Array, "batch length ..."],
    w: Float[Array, "..."] | LowRank,
    *,
    contract: int = 1,
    bias: Float[Array, "..."] | None = None,
    transposed: bool = False,
    wide: bool = False,
    frozen: bool = False,
) -> Float[Array, "batch length ..."]:
    """Multiplies activations by a weight: `y[b, t, *out] = x[b, t, *in] w[*in, *out] + bias[*out]`.

    Args:
        x: activations [batch, length, *in].
        w: the weight [*in, *out]; each dim may be split over devices. Or one with a change of low
            rank; only that has a gradient.
        contract: number of dims of `in`.
        bias: added to the product, [*out].
        transposed: whether `w` is [*out, *in]. A weight with fewer outputs than inputs is best kept
            so: its gradient is 1.25 times as fast on CPU.
        wide: whether to return the sums as they are held, and not rounded to the dtype of `x`.
        frozen: whether the weight has no gradient: then its product is not even written.

    Returns:
        [batch, length, *out] in the dtype of `x`, or of at least 32 bits with `wide`. Sums are held
        in at least 32 bits either way.

    Example:
        >>> dense(jnp.ones((1, 2, 3)), jnp.ones((3, 4)), bias=jnp.ones(4)).shape
        (1, 2, 4)
    """
    if isinstance(w, LowRank):
        product = partial(dense, contract=contract, transposed=transposed, wide=wide)
        y = product(x, w.base, bias=bias, frozen=True)
        narrow = constrain(dense(x, w.down, contract=contract), "batch", "length", "rank")
        return y + dense(narrow * jnp.asarray(w.scale, x.dtype), w.up, wide=wide)
    first = w.ndim - contract if transposed else 0
    assert x.shape[2:] == w.shape[first : first + contract], (x.shape, w.shape, contract)
    how = phrasing()
    shape = *x.shape[:2], *(w.shape[:first] if transposed else w.shape[contract:])
    rows: Dims = x.shape[:2]
    # XLA drops dims of size 1 anew for each product that it finds them in, and then gathers a
    # weight that rests in pieces once for each.
    inner: Dims = tuple(size for size in x.shape[2:] if size > 1) or (1,)
    out: Dims = shape[2:]
    if how.flatten:
        rows = (math.prod(rows),)
    if how.canonical:
        # XLA:CPU copies an operand that is contracted on several dims.
        rows, inner, out = (math.prod(rows),), (math.prod(inner),), (math.prod(out),)
    x = x.reshape(*rows, *inner)
    w = w.reshape(*out, *inner) if transposed else w.reshape(*inner, *out)
    bias = None if bias is None else bias.reshape(out)
    result = sum_dtype(x.dtype) if wide else x.dtype
    widen = how.canonical and x.dtype.itemsize == 2
    y = _dense(Static(widen, len(inner), transposed, result, frozen), x, w, bias).reshape(shape)
    named: jax.Array = checkpoint_name(y, PRODUCT)
    return named


class Static(NamedTuple):
    """What is fixed when the code is traced."""

    widen: bool
    contract: int
    transposed: bool
    result: Any
    frozen: bool

    def inner(self, w: jax.Array) -> Dims:
        """Dims of the weight that the product sums over."""
        first = w.ndim - self.contract if self.transposed else 0
        return tuple(range(first, first + self.contract))

    def outer(self, w: jax.Array) -> Dims:
        """Dims of the weight that the product keeps."""
        return tuple(dim for dim in range(w.ndim) if dim not in self.inner(w))


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _dense(static: Static, x: jax.Array, w: jax.Array, bias: jax.Array | None) -> jax.Array:
    last = tuple(range(x.ndim - static.contract, x.ndim))
    y = _dot(x, w, last, static.inner(w), jnp.float32 if static.widen else static.result)
    if bias is not None:
        y = y + jnp.broadcast_to(bias.astype(y.dtype), y.shape)
    return y.astype(static.result)


Residuals = tuple[jax.Array, jax.Array, jax.Array | None]


def _forward(
    static: Static, x: jax.Array, w: jax.Array, bias: jax.Array | None
) -> tuple[jax.Array, Residuals]:
    return _dense(static, x, w, bias), (x, w, bias)


def _backward(
    static: Static, residuals: Residuals, g: jax.Array
) -> tuple[jax.Array, jax.Array | None, jax.Array | None]:
    x, w, bias = residuals
    lead = tuple(range(x.ndim - static.contract))
    last = tuple(range(len(lead), g.ndim))
    sums = None if bias is None else g.astype(sum_dtype(g.dtype)).sum(lead).astype(bias.dtype)
    g = g.astype(x.dtype)
    wide = jnp.float32 if static.widen else None
    dx = _dot(g, w, last, static.outer(w), wide).astype(x.dtype)
    if static.frozen:
        return dx, None, sums
    left, right = (g, x) if static.transposed else (x, g)
    dw = _canonical_gradient(left, right) if static.widen else _dot(left, right, lead, lead, None)
    return dx, dw.astype(w.dtype), sums


_dense.defvjp(_forward, _backward)


def _canonical_gradient(left: jax.Array, right: jax.Array) -> jax.Array:
    """`left.T @ right`, copying what is least."""
    rows, num_left = left.shape
    num_right = right.shape[1]
    if rows * num_left <= (rows + num_left) * num_right:
        return _dot(transposed(left), right, (1,), (0,), jnp.float32)
    return _pinned(_dot(transposed(right), left, (1,), (0,), jnp.float32)).T


def transposed(x: jax.Array) -> jax.Array:
    """Swaps the last two dims for the product that reads the result."""
    return _pinned(x.swapaxes(-1, -2))


def _pinned(x: jax.Array) -> jax.Array:
    """Equal to `x`: a gather of all rows, through which XLA folds no transpose into a product.

    It would make a 16-bit product slow, or one that fails at run time; `optimization_barrier` is
    gone before XLA:CPU folds.
    """
    rows = jnp.arange(x.shape[-2])
    return jnp.take(x, rows, axis=-2, mode="clip", unique_indices=True)


def _dot(x: jax.Array, y: jax.Array, over_x: Dims, over_y: Dims, result: Any) -> jax.Array:
    return lax.dot_general(x, y, ((over_x, over_y), ((), ())), preferred_element_type=result)
