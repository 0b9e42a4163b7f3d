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

from shardtrain.ops.fp8 import (
    E4M3,
    E5M2,
    Scaled,
    Used,
    current_layer,
    either,
    largest_of,
    scaled,
)
from shardtrain.ops.platform import platform
from shardtrain.ops.sums import sum_dtype
from shardtrain.sharding.rules import constrain, current
from shardtrain.strategies.model_state import TENSORS
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
    eight = platform() != "cpu"
    static = Static(widen, len(inner), transposed, x.dtype, result, eight, frozen)
    layer = current_layer()
    if layer is None:
        y = _dense(static, x, w, bias)
    else:
        y = _dense_fp8(static, x, w, bias, *layer.next())
    y = y.reshape(shape)
    named: jax.Array = checkpoint_name(y, PRODUCT)
    return named


class Static(NamedTuple):
    """What is fixed when the code is traced."""

    widen: bool
    contract: int
    transposed: bool
    dtype: Any
    """Of the operands, and of their gradients."""
    result: Any
    eight: bool
    """Whether products in fp8 take operands of 8 bits; on CPU they take the same numbers wider."""
    frozen: bool
    """Whether the weight has no gradient."""

    def inner(self, w: jax.Array) -> Dims:
        """Dims of the weight that the product sums over."""
        first = w.ndim - self.contract if self.transposed else 0
        return tuple(range(first, first + self.contract))

    def outer(self, w: jax.Array) -> Dims:
        """Dims of the weight that the product keeps."""
        return tuple(dim for dim in range(w.ndim) if dim not in self.inner(w))


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _dense(static: Static, x: jax.Array, w: jax.Array, bias: jax.Array | None) -> jax.Array:
    return _with_bias(static, _forward_product(static, x, w), bias)


Residuals = tuple[jax.Array, jax.Array, jax.Array | None]


def _forward(
    static: Static, x: jax.Array, w: jax.Array, bias: jax.Array | None
) -> tuple[jax.Array, Residuals]:
    return _dense(static, x, w, bias), (x, w, bias)


def _backward(
    static: Static, residuals: Residuals, g: jax.Array
) -> tuple[jax.Array, jax.Array | None, jax.Array | None]:
    x, w, bias = residuals
    sums = _bias_gradient(g, bias)
    g = g.astype(x.dtype)
    if static.frozen:
        return _input_gradient(static, w, g).astype(x.dtype), None, sums
    dx, dw = _backward_products(static, x, w, g)
    return dx.astype(x.dtype), dw.astype(w.dtype), sums


_dense.defvjp(_forward, _backward)


def _forward_product(static: Static, x: jax.Array, w: jax.Array) -> jax.Array:
    last = tuple(range(x.ndim - static.contract, x.ndim))
    result = jnp.float32 if static.widen else static.result
    return _dot(x, w, last, static.inner(w), result)


def _backward_products(
    static: Static, x: jax.Array, w: jax.Array, g: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """The gradients of both operands."""
    lead = tuple(range(x.ndim - static.contract))
    dx = _input_gradient(static, w, g)
    left, right = (g, x) if static.transposed else (x, g)
    if static.widen:
        return dx, _canonical_gradient(left, right)
    return dx, _dot(left, right, lead, lead, static.dtype)


def _input_gradient(static: Static, w: jax.Array, g: jax.Array) -> jax.Array:
    outer = static.outer(w)
    last = tuple(range(g.ndim - len(outer), g.ndim))
    return _dot(g, w, last, outer, jnp.float32 if static.widen else static.dtype)


def _with_bias(static: Static, y: jax.Array, bias: jax.Array | None) -> jax.Array:
    if bias is not None:
        y = y + jnp.broadcast_to(bias.astype(y.dtype), y.shape)
    return y.astype(static.result)


def _bias_gradient(g: jax.Array, bias: jax.Array | None) -> jax.Array | None:
    if bias is None:
        return None
    lead = tuple(range(g.ndim - bias.ndim))
    return g.astype(sum_dtype(g.dtype)).sum(lead).astype(bias.dtype)


# -- the same in fp8


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _dense_fp8(
    static: Static,
    x: jax.Array,
    w: jax.Array,
    bias: jax.Array | None,
    used: Used,
    earlier: jax.Array | None,
) -> jax.Array:
    return _forward_fp8(static, x, w, bias, used, earlier)[0]


class Kept(NamedTuple):
    """What the backward of a product in fp8 reads."""

    x: jax.Array | Scaled
    """In 8 bits where every layer is in fp8."""
    w: jax.Array
    bias: jax.Array | None
    used: Used
    seen: tuple[jax.Array, jax.Array]
    """The largest entries of `x` and `w`."""
    earlier: jax.Array | None


def _forward_fp8(
    static: Static,
    x: jax.Array,
    w: jax.Array,
    bias: jax.Array | None,
    used: Used,
    earlier: jax.Array | None,
) -> tuple[jax.Array, Kept]:
    seen = largest_of(x), largest_of(w)
    by = _unpacked(earlier)
    kept = scaled(x, E4M3, seen[0], by[0]) if used is None else x

    def narrow() -> jax.Array:
        qx = kept if isinstance(kept, Scaled) else scaled(kept, E4M3, seen[0], by[0])
        qw = scaled(w, E4M3, seen[1], by[1])
        y = _forward_product(static, _operand(static, qx), _operand(static, qw))
        return y * (qx.scale * qw.scale).astype(y.dtype)

    y = either(used, narrow, lambda: _forward_product(static, x, w))
    return _with_bias(static, y, bias), Kept(kept, w, bias, used, seen, earlier)


def _backward_fp8(
    static: Static, kept: Kept, g: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array | None, None, jax.Array | None]:
    x, w, earlier = kept.x, kept.w, kept.earlier
    sums = _bias_gradient(g, kept.bias)
    g = g.astype(static.dtype)
    seen = *kept.seen, largest_of(g)
    by = _unpacked(earlier)

    def narrow() -> tuple[jax.Array, jax.Array]:
        qx = x if isinstance(x, Scaled) else scaled(x, E4M3, seen[0], by[0])
        qw, qg = scaled(w, E4M3, seen[1], by[1]), scaled(g, E5M2, seen[2], by[2])
        operands = (_operand(static, q) for q in (qx, qw, qg))
        dx, dw = _backward_products(static, *operands)
        dx = dx * (qg.scale * qw.scale).astype(dx.dtype)
        return dx, dw * (qg.scale * qx.scale).astype(dw.dtype)

    def wide() -> tuple[jax.Array, jax.Array]:
        assert not isinstance(x, Scaled)
        return _backward_products(static, x, w, g)

    dx, dw = either(kept.used, narrow, wide)
    # Not a gradient: what was seen goes where the state can be made of it (`LargestEntries`).
    of_earlier = None if earlier is None else jnp.stack(seen)
    return dx.astype(static.dtype), dw.astype(w.dtype), sums, None, of_earlier


_dense_fp8.defvjp(_forward_fp8, _backward_fp8)


def _unpacked(earlier: jax.Array | None) -> list[jax.Array | None]:
    """The largest entries of earlier steps: of activation, weight and gradient."""
    return [None] * TENSORS if earlier is None else [earlier[i] for i in range(TENSORS)]


def _operand(static: Static, x: Scaled) -> jax.Array:
    """What a product takes; the scales are powers of two, so the result can be scaled instead."""
    return x.values if static.eight else x.values.astype(static.dtype)


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
