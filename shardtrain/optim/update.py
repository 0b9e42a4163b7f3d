"""The update: clip by the global norm, run the transformation, move the parameters.

Owns master weights and where the arithmetic rests. It is a strategy of the step, so that other
tiers of memory can bring another one.
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax

from shardtrain.ops.sums import sum_dtype
from shardtrain.optim.schedules import Schedule
from shardtrain.sharding.placement import Placement, constrain_tree
from shardtrain.strategies.precision import Policy, cast

PyTree = Any


@dataclass(frozen=True)
class Optimizer:
    """An optax transformation with clipping, a schedule, master weights and a placement."""

    transform: optax.GradientTransformation
    schedule: Schedule
    clip_norm: float
    policy: Policy
    placement: Placement

    def init(self, master: PyTree) -> PyTree:
        """The state for parameters in the master dtype."""
        state = {"transform": self.transform.init(master)}
        return {**state, "master": master} if self.policy.has_master else state

    def update(
        self,
        grads: PyTree,
        state: PyTree,
        params: PyTree,
        update: jax.Array,
        allowed: jax.Array | bool = True,
        scale: jax.Array | float = 1.0,
    ) -> tuple[PyTree, PyTree, dict[str, jax.Array]]:
        """One update; or none, where the gradient is no finite number.

        Args:
            grads: the whole step's gradient, in any dtype, resting like the optimizer's state.
            state: as from `init`.
            params: the parameters, in the compute dtype.
            update: the number of this update, the first being 1.
            allowed: whether anything may move.
            scale: what the loss was multiplied by; `grad_norm` is without it.

        Returns:
            New parameters, new state, and `grad_norm`, `learning_rate`, `moved` (whether anything
            has) and `finite` [leaf] (which leaves of the gradient are all numbers).
        """
        norm, finite = global_norm(grads)
        norm = norm / scale
        moved = jnp.isfinite(norm) & allowed

        def hold(new: jax.Array, old: jax.Array) -> jax.Array:
            # Chosen and not multiplied: zero times infinity is no number.
            return jnp.where(moved, new, old)

        rate = self.schedule(update)
        factor = self.clip_norm / jnp.maximum(norm, self.clip_norm) if self.clip_norm else 1.0
        factor = factor / scale
        wide = self.policy.master
        at_rest = self.placement.optimizer
        # Scaled here and not inside the transformation: the norm is that of all leaves.
        grads = jax.tree.map(lambda g: g.astype(wide) * jnp.asarray(factor, wide), grads)
        master = state["master"] if self.policy.has_master else constrain_tree(params, at_rest)
        # optax itself counts on mixed dtypes being promoted; ours do not.
        with jax.numpy_dtype_promotion("standard"):
            direction, inner = self.transform.update(grads, state["transform"], master)
        # Chosen where the state rests, before parameters spread: nothing more is held or sent.
        new = jax.tree.map(lambda p, d: hold(p - rate.astype(wide) * d, p), master, direction)
        new = constrain_tree(new, at_rest)
        state = {"transform": jax.tree.map(hold, inner, state["transform"])}
        if self.policy.has_master:
            state["master"] = new
        # Cast where it rests, then spread: half the bytes travel.
        params = constrain_tree(cast(new, self.policy.compute), at_rest)
        params = constrain_tree(params, self.placement.params)
        numbers = {"grad_norm": norm, "learning_rate": rate, "moved": moved, "finite": finite}
        return params, state, numbers


def global_norm(tree: PyTree) -> tuple[jax.Array, jax.Array]:
    """The Euclidean norm of all leaves together, each entry counted once on any mesh.

    Returns:
        The norm, and for each leaf whether its own is a number.
    """

    def square(x: jax.Array) -> jax.Array:
        return jnp.sum(jnp.square(x.astype(sum_dtype(x.dtype))))

    squares = [square(x) for x in jax.tree.leaves(tree)]
    return jnp.sqrt(sum(squares)), jnp.stack([jnp.isfinite(s) for s in squares])
