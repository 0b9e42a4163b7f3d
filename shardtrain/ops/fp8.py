"""fp8: tensors as 8-bit numbers and a scale, and which layer's products are made of them.

Owns: how a tensor is scaled and rounded, and what the layer that is being traced says about its
products. Does not own: the products (`dense`), and which layers are in fp8 (`train.step` asks a
`LayersInFp8`).

Operands are e4m3 (4 significant bits, up to 448), gradients e5m2 (3 bits, up to 57,344), as in
Micikevicius et al. 2022 (arXiv 2209.05433). A scale is a power of two, so that it rounds nothing
itself: two layouts whose scales differ still round each entry alike, but for entries 2**14 times
smaller than the largest. It is that of the largest entry on all devices.
"""

import contextlib
import contextvars
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from shardtrain.sharding.mesh import DATA_AXES
from shardtrain.sharding.rules import MAPPED, current

E4M3: Final = jnp.float8_e4m3fn
"""Of activations and weights."""
E5M2: Final = jnp.float8_e5m2
"""Of gradients, which span more."""
_TOP: Final = {E4M3: 8, E5M2: 15}
"""Exponent of two below which the largest entry comes to lie: half of what there is, about."""


class Scaled(NamedTuple):
    """A tensor as `values` x `scale`."""

    values: jax.Array
    """In e4m3 or e5m2."""
    scale: jax.Array
    """A power of two, float32."""


def scaled(
    x: jax.Array, dtype: Any, largest: jax.Array, earlier: jax.Array | None = None
) -> Scaled:
    """A tensor in 8 bits, its largest entry scaled into the upper half of their range.

    What is no number stays none: it is not for a product to hide it.

    Args:
        x: any floats.
        dtype: `E4M3` or `E5M2`.
        largest: its own largest entry, from `largest_of`.
        earlier: what is taken for that instead, if it is more than zero; what is larger is cut off.

    Example:
        >>> x = scaled(jnp.asarray([3.0, 0.26]), E4M3, jnp.float32(3.0))
        >>> x.values.astype(jnp.float32) * x.scale
        Array([3.  , 0.25], dtype=float32)
    """
    by = largest if earlier is None else jnp.where(earlier > 0, earlier, largest)
    # `by` is in [2**e, 2**(e + 1)).
    e = (lax.bitcast_convert_type(by, jnp.int32) >> 23) - 127
    shift = jnp.clip(_TOP[dtype] - 1 - e, -126, 126)
    shift = jnp.where((by > 0) & jnp.isfinite(by), shift, 0)
    values, scale = x.astype(jnp.float32) * _power(shift), _power(-shift)
    if earlier is not None:
        top = float(jnp.finfo(dtype).max)  # type: ignore[no-untyped-call]
        values = lax.clamp(-top, values, top)
        # An infinite entry was cut off too.
        scale = jnp.where(jnp.isfinite(largest), scale, jnp.nan)
    return Scaled(values.astype(dtype), scale)


def largest_of(x: jax.Array) -> jax.Array:
    """The size of a tensor's largest entry, over all devices that share it."""
    largest = jnp.max(jnp.abs(x)).astype(jnp.float32)
    active = current()
    if active is not None and active.mapped:
        largest = lax.pmax(largest, MAPPED)
    if active is not None and active.manual >= set(DATA_AXES):
        largest = lax.pmax(largest, DATA_AXES)
    return largest


def _power(k: jax.Array) -> jax.Array:
    """2**k for -127 < k < 128."""
    power: jax.Array = lax.bitcast_convert_type((k + 127) << 23, jnp.float32)
    return power


# -- which layer

Used = jax.Array | None
"""Whether a layer's products are in fp8, where that depends on the layer; None = they are."""


@dataclass
class Layer:
    """What the layer that is being traced says about its products, one after another."""

    used: Used
    earlier: jax.Array | None
    """[products, 3]: the largest entries that earlier steps have seen of each product's activation,
    weight and gradient; None = each tensor is scaled by its own."""
    made: int = 0
    """Products so far."""

    def next(self) -> tuple[Used, jax.Array | None]:
        """What holds for the next product."""
        self.made += 1
        if self.earlier is None:
            return self.used, None
        assert self.made <= len(self.earlier), "a layer makes a product with each matrix once"
        return self.used, self.earlier[self.made - 1]


_LAYER: contextvars.ContextVar[Layer | None] = contextvars.ContextVar("fp8", default=None)


def current_layer() -> Layer | None:
    """What is said about products here; None = they are as their operands are."""
    return _LAYER.get()


@contextlib.contextmanager
def _in_force(layer: Layer) -> Iterator[None]:
    token = _LAYER.set(layer)
    try:
        yield
    finally:
        _LAYER.reset(token)


@dataclass(frozen=True)
class LayersInFp8:
    """Wraps a function of a layer so that its products are in fp8; embedding and head never are."""

    num_layers: int
    first: int = 0
    """Layers at the beginning that are not."""
    last: int = 0
    """Layers at the end that are not."""

    def __call__(
        self, layer: Callable[..., Any], earlier: jax.Array | None = None
    ) -> Callable[..., Any]:
        """Wraps (layer or its parameters, index, ...) -> x.

        Args:
            layer: what is wrapped.
            earlier: [layers, products, 3], or of this layer alone, see `Layer`. Its gradient is
                what is seen in this step.
        """

        def run(what: Any, index: jax.Array, *others: Any) -> Any:
            own = earlier
            if earlier is not None and earlier.ndim == 3:
                own = lax.dynamic_index_in_dim(earlier, index, 0, False)
            with _in_force(Layer(self._used(index), own)):
                return layer(what, index, *others)

        return run

    def _used(self, index: jax.Array) -> Used:
        if not (self.first or self.last):
            return None
        return (index >= self.first) & (index < self.num_layers - self.last)


def either(used: Used, narrow: Callable[[], Any], wide: Callable[[], Any]) -> Any:
    """One of two results; of a layer that is known only when it runs, only one is computed."""
    return narrow() if used is None else lax.cond(used, narrow, wide)
