"""The matrix product of activations with a weight; every linear map of every model goes through it.

Owns: the phrasing of the product and of its two gradients. XLA lowers what is mathematically one
product in very different ways: on CPU an activation with two leading dims is copied before every
weight gradient, and a 16-bit product is fast only as 16 x 16 -> 32 bit with a left operand that is
contracted on its last dim.
Does not own: where operands lie; it never moves data and calls no `shard_map`.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from shardtrain.sharding.rules import current

Dims = tuple[int, ...]


class Phrasing(NamedTuple):
    """How products are written for the devices that the traced code will run on."""

    flatten: bool
    """Merge [batch, length] into one dim around the product."""
    widen: bool
    """Ask 16-bit products for 32-bit results and transpose left operands by a gather (for CPU)."""


def phrasing() -> Phrasing:
    """Chooses by the platform of the active mesh, or of the default device outside of rules."""
    active = current()
    if active is None:
        cpu = jax.default_backend() == "cpu"
        return Phrasing(flatten=cpu, widen=cpu)
    cpu = active.platform == "cpu"
    length = active.is_sharded("length") or active.is_sharded("residual_length")
    return Phrasing(flatten=cpu and not length, widen=cpu and active.mesh.size == 1)


def dense(
    x: Float[Array, "batch length ..."],
    w: Float[Array, "..."],
    *,
    contract: int = 1,
    bias: Float[Array, "..."] | None = None,
) -> Float[Array, "batch length ..."]:
    """Multiplies activations by a weight: `y[b, t, *out] = x[b, t, *in] w[*in, *out] + bias[*out]`.

    Args:
        x: activations [batch, length, *in].
        w: the weight [*in, *out]; its dims are not merged, so each may be split over devices.
        contract: number of dims of `in`.
        bias: added to the product, [*out].

    Returns:
        [batch, length, *out] in the dtype of `x`; sums are held in at least 32 bits.

    Example:
        >>> dense(jnp.ones((1, 2, 3)), jnp.ones((3, 4)), bias=jnp.ones(4)).shape
        (1, 2, 4)
    """
    assert x.shape[2:] == w.shape[:contract], (x.shape, w.shape, contract)
    how = phrasing()
    lead = x.shape[:2]
    if how.flatten:
        x = x.reshape(-1, *x.shape[2:])
    y = _dense(how.widen and x.dtype.itemsize == 2, contract, x, w, bias)
    return y.reshape(*lead, *y.shape[1:]) if how.flatten else y


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _dense(
    widen: bool, contract: int, x: jax.Array, w: jax.Array, bias: jax.Array | None
) -> jax.Array:
    wide = jnp.float32 if widen else None
    inner = tuple(range(x.ndim - contract, x.ndim))
    y = _dot(x, w, inner, tuple(range(contract)), wide)
    if bias is not None:
        y = y + bias.astype(y.dtype)
    return y.astype(x.dtype)


Residuals = tuple[jax.Array, jax.Array, jax.Array | None]


def _forward(
    widen: bool, contract: int, x: jax.Array, w: jax.Array, bias: jax.Array | None
) -> tuple[jax.Array, Residuals]:
    return _dense(widen, contract, x, w, bias), (x, w, bias)


def _backward(
    widen: bool, contract: int, residuals: Residuals, g: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    x, w, bias = residuals
    lead = tuple(range(x.ndim - contract))
    out = tuple(range(len(lead), g.ndim))
    wide = jnp.float32 if widen else None
    dx = _dot(g, w, out, tuple(range(contract, w.ndim)), wide).astype(x.dtype)
    dw = _weight_gradient(widen, x, g, lead).astype(w.dtype)
    if bias is None:
        return dx, dw, None
    sums = g.astype(jnp.promote_types(g.dtype, jnp.float32)).sum(lead)
    return dx, dw, sums.astype(bias.dtype)


_dense.defvjp(_forward, _backward)


def _weight_gradient(widen: bool, x: jax.Array, g: jax.Array, lead: Dims) -> jax.Array:
    """`dw[*in, *out] = sum over lead of x[*lead, *in] * g[*lead, *out]`."""
    if not widen or len(lead) > 1:
        return _dot(x, g, lead, lead, None)
    columns = transposed(x.reshape(x.shape[0], -1))
    dw = _dot(columns, g, (1,), (0,), jnp.float32)
    return dw.reshape(*x.shape[1:], *g.shape[1:])


def transposed(x: jax.Array) -> jax.Array:
    """`x.T` as an array of its own: XLA cannot fold a gather into the product that reads it."""
    rows = jnp.arange(x.shape[1])
    return x.T.at[rows].get(mode="promise_in_bounds", unique_indices=True)


def _dot(x: jax.Array, y: jax.Array, over_x: Dims, over_y: Dims, result: Any) -> jax.Array:
    return lax.dot_general(x, y, ((over_x, over_y), ((), ())), preferred_element_type=result)
