"""The update: clip by the global norm, run the transformation, move the parameters.

Owns master weights and the arithmetic of an update. Does not own: how it goes through the leaves
(`sweep`), all at once or layer by layer from the host's memory.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax

from shardtrain.ops.sums import sum_dtype
from shardtrain.optim.rounding import Nearest, Rounding
from shardtrain.optim.schedules import Schedule
from shardtrain.optim.sweep import Advance, Numbers, Sweep
from shardtrain.sharding.placement import (
    Placement,
    leaves_by_path,
    owner_of,
    path_name,
)
from shardtrain.sharding.row_gradient import is_row_gradient
from shardtrain.sharding.tiers import MASTER
from shardtrain.strategies.precision import Policy, cast

PyTree = Any


@dataclass(frozen=True)
class Optimizer:
    """An optax transformation with clipping, a schedule, master weights and a placement."""

    sweep: Sweep
    schedule: Schedule
    clip_norm: float
    policy: Policy
    placement: Placement
    rounding: Rounding = Nearest()  # noqa: RUF009  # frozen
    """How what rests in fewer bits than it is updated in comes to them."""

    def init(self, master: PyTree) -> PyTree:
        """The state for parameters in the master dtype, whole."""
        return self._state(self.sweep.init, master)

    def first(self, master: PyTree) -> PyTree:
        """The same state as it rests."""
        return self.sweep.first(self._state, master)

    def _state(self, init: Callable[[PyTree], PyTree], master: PyTree) -> PyTree:
        moments = init(cast(master, self.policy.wide))
        state = {"transform": self._narrow(moments, dict(leaves_by_path(master)))}
        return {**state, MASTER: master} if self.policy.has_master else state

    def _narrow(self, moments: PyTree, params: dict[str, Any]) -> PyTree:
        """Those with an entry for each of a parameter, as they rest; factors and counts as made."""

        def at_rest(path: tuple[Any, ...], leaf: jax.Array) -> jax.Array:
            owner = owner_of(path_name(path), params)
            is_moment = owner and params[owner].shape == leaf.shape
            return cast(leaf, self.policy.moments) if is_moment else leaf

        return jax.tree.map_with_path(at_rest, moments)

    def masters(self, state: PyTree, params: PyTree) -> PyTree:
        """The parameters in the master dtype.

        Args:
            state: as from `init`.
            params: the parameters, in the compute dtype.
        """
        return state[MASTER] if self.policy.has_master else params

    def update(
        self,
        grads: PyTree,
        state: PyTree,
        params: PyTree,
        update: jax.Array,
        key: jax.Array,
        allowed: jax.Array | bool = True,
        scale: jax.Array | float = 1.0,
    ) -> tuple[PyTree, PyTree, dict[str, jax.Array]]:
        """One update; or none, where the gradient is no finite number.

        Args:
            grads: the whole step's gradient, in any dtype, resting like the optimizer's state.
            state: as from `init`.
            params: the parameters, as they rest.
            update: the number of this update, the first being 1.
            key: the step's, for random bits.
            allowed: whether anything may move.
            scale: what the loss was multiplied by; `grad_norm` is without it.

        Returns:
            New parameters, new state, and `grad_norm`, `learning_rate`, `moved` (whether anything
            has) and `finite` [leaf] (which leaves of the gradient are all numbers).
        """
        norm, finite = global_norm(grads)
        norm = norm / scale
        moved = jnp.isfinite(norm) & allowed

        rate = self.schedule(update)
        factor = self.clip_norm / jnp.maximum(norm, self.clip_norm) if self.clip_norm else 1.0
        factor = factor / scale
        params, state = self.sweep(self._advance(key), (factor, rate, moved), grads, state, params)
        params = self.placement.constrain_here(params, self.placement.params)
        numbers = {"grad_norm": norm, "learning_rate": rate, "moved": moved, "finite": finite}
        return params, state, numbers

    def _advance(self, key: jax.Array) -> Advance:
        """The arithmetic of one update, for any part of the leaves."""
        wide = self.policy.wide
        places = dict(leaves_by_path(self.placement.optimizer))

        def at_rest(tree: PyTree) -> PyTree:
            """Some parameters, or layers of them, where their optimizer state rests."""
            if not self.sweep.on_device:
                return tree
            return jax.tree.map_with_path(
                lambda path, x: jax.lax.with_sharding_constraint(x, places[path_name(path)]), tree
            )

        def advance(
            transform: optax.GradientTransformation,
            numbers: Numbers,
            grads: PyTree,
            state: PyTree,
            params: PyTree,
            rows: Any,
        ) -> tuple[PyTree, PyTree]:
            factor, rate, moved = numbers

            def hold(new: jax.Array, old: jax.Array) -> jax.Array:
                # Chosen and not multiplied: zero times infinity is no number.
                return jnp.where(moved, new, old)

            # Scaled here and not inside the transformation: the norm is that of all leaves.
            grads = jax.tree.map(lambda g: widened(g, wide) * jnp.asarray(factor, wide), grads)
            master = state[MASTER] if self.policy.has_master else at_rest(params)
            old = {"transform": state["transform"]}
            before, moments = (widened_tree(tree, wide) for tree in (master, old))
            # optax itself counts on mixed dtypes being promoted; ours do not.
            with jax.numpy_dtype_promotion("standard"):
                direction, inner = transform.update(grads, moments["transform"], before)
            new = jax.tree.map(lambda p, d: p - rate.astype(wide) * d, before, direction)
            # Chosen where the state rests, before parameters spread: nothing more is held or sent.
            new = at_rest(jax.tree.map(hold, self.rounding(new, master, key, rows), master))
            inner = self.rounding({"transform": inner}, old, key, rows)
            state = jax.tree.map(hold, inner, old)
            if self.policy.has_master:
                state[MASTER] = new
            # Cast where it rests, then spread: half the bytes travel.
            return at_rest(cast(new, self.policy.params)), state

        return advance


def widened(x: jax.Array, dtype: Any) -> jax.Array:
    """Entries as another type, with the value that their own type has.

    XLA may leave a rounding out between two wider operations (`xla_allow_excess_precision`); then
    the update would depend on whether a gradient was fused with its use or written down before.
    """
    wide = x.astype(dtype)
    if jnp.dtype(x.dtype).itemsize >= jnp.dtype(dtype).itemsize:
        return wide
    own = jnp.finfo(x.dtype)  # type: ignore[no-untyped-call]
    rounded: jax.Array = jax.lax.reduce_precision(wide, own.nexp, own.nmant)
    return rounded


def widened_tree(tree: PyTree, dtype: Any) -> PyTree:
    """The floating leaves of a tree as a type of at least as many bits; see `widened`."""
    return jax.tree.map(
        lambda x: widened(x, dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x, tree
    )


def global_norm(tree: PyTree) -> tuple[jax.Array, jax.Array]:
    """The Euclidean norm of all leaves together, each entry counted once on any mesh.

    Of a table's gradient its rows count, in which ids that occur more than once are summed already.

    Returns:
        The norm, and for each leaf whether its own is a number.
    """

    def square(x: jax.Array) -> jax.Array:
        return jnp.sum(jnp.square(widened(x, sum_dtype(x.dtype))))

    leaves = jax.tree.leaves(tree, is_leaf=is_row_gradient)
    squares = [square(x.rows if is_row_gradient(x) else x) for x in leaves]
    return jnp.sqrt(sum(squares)), jnp.stack([jnp.isfinite(s) for s in squares])
