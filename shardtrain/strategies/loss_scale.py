"""Loss scaling: float16 gradients too small to be numbers are made larger, and divided at the end.

Owns: the scale, when it grows and shrinks, and its place in the state. Does not own: what an
overflow moves (nothing; the step sees to that) and who tries its batch again (the loop).
"""

from dataclasses import dataclass
from typing import Any, Final, Protocol

import jax
import jax.numpy as jnp

PyTree = Any

CEILING: Final = 2.0**32
"""The scale grows no further: with gradients of zero nothing else would end it."""


class LossScale(Protocol):
    """What a loss is multiplied by before its gradient is taken."""

    @property
    def retries(self) -> bool:
        """Whether a step may ask for its batch once more."""
        ...

    def init(self) -> PyTree:
        """What of it is in the state."""
        ...

    def scale(self, state: PyTree) -> jax.Array | float:
        """The factor for the next step."""
        ...

    def after(
        self, state: PyTree, finite: jax.Array, allowed: jax.Array
    ) -> tuple[PyTree, jax.Array]:
        """The state after a step.

        Args:
            state: before it.
            finite: whether the gradient was all numbers.
            allowed: whether the step was to move anything: its loss was a number.

        Returns:
            The state, and whether the same batch is to be tried again.
        """
        ...

    def metrics(self, state: PyTree) -> dict[str, jax.Array]:
        """What a row of metrics says of it."""
        ...


@dataclass(frozen=True)
class Unscaled:
    """No scale: for types whose range is that of float32."""

    retries: bool = False

    def init(self) -> PyTree:
        """Nothing."""
        return ()

    def scale(self, state: PyTree) -> float:
        """One."""
        del state
        return 1.0

    def after(
        self, state: PyTree, finite: jax.Array, allowed: jax.Array
    ) -> tuple[PyTree, jax.Array]:
        """Nothing changes."""
        del finite, allowed
        return state, jnp.zeros((), bool)

    def metrics(self, state: PyTree) -> dict[str, jax.Array]:
        """None."""
        del state
        return {}


@dataclass(frozen=True)
class DynamicScale:
    """As large as the gradients allow (Micikevicius et al. 2018, arXiv 1710.03740, section 3.2).

    An overflow halves the scale, and the batch is tried again; `window` steps in a row without one
    double it. All are powers of two where `start` and `floor` are, so that scaling rounds nothing.
    """

    start: float = 2.0**16
    window: int = 1000
    """Steps without an overflow before the scale doubles. 0 = never."""
    hysteresis: int = 1
    """Overflows before the scale halves; the count begins anew when it doubles."""
    floor: float = 1.0
    """Smallest scale. An overflow there is a bad number like any other."""
    retries: bool = True

    def init(self) -> PyTree:
        """The scale, clean steps since it changed, and overflows left until it halves."""
        return {
            "scale": jnp.asarray(self.start, jnp.float32),
            "clean": jnp.zeros((), jnp.int32),
            "left": jnp.asarray(self.hysteresis, jnp.int32),
        }

    def scale(self, state: PyTree) -> jax.Array:
        """The factor for the next step."""
        scale: jax.Array = state["scale"]
        return scale

    def after(
        self, state: PyTree, finite: jax.Array, allowed: jax.Array
    ) -> tuple[PyTree, jax.Array]:
        """The state after a step; see `LossScale`."""
        scale, clean, left = state["scale"], state["clean"], state["left"]
        overflow, good = ~finite & allowed, finite & allowed
        retry = overflow & (scale > self.floor)
        halves = overflow & (left <= 1)
        clean = jnp.where(overflow, 0, clean + good.astype(clean.dtype))
        doubles = good & (clean == self.window)
        scale = jnp.where(halves, jnp.maximum(scale / 2, self.floor), scale)
        scale = jnp.where(doubles, jnp.minimum(scale * 2, CEILING), scale)
        left = jnp.where(overflow, jnp.maximum(left - 1, 1), left)
        left = jnp.where(doubles, self.hysteresis, left)
        return {"scale": scale, "clean": jnp.where(doubles, 0, clean), "left": left}, retry

    def metrics(self, state: PyTree) -> dict[str, jax.Array]:
        """`loss_scale`, that of the next step."""
        return {"loss_scale": state["scale"]}
