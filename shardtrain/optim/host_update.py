"""The update computed where its state rests: on the host's processor.

Owns: the one call that does it, and the copies around it. Gradients go to the host and new
parameters come back; masters and moments do not move (ZeRO-Offload: Ren et al. 2021, arXiv
2101.06840).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import optax
from jax.experimental import compute_on

from shardtrain.optim.sweep import Advance, First, Numbers
from shardtrain.sharding.placement import Placement

PyTree = Any


@dataclass(frozen=True, eq=False)
class OnHost:
    """Updates all leaves at once on the host (a `Sweep`)."""

    transform: optax.GradientTransformation
    placement: Placement
    on_device: bool = False

    def init(self, master: PyTree) -> PyTree:
        """The transformation's state for all parameters."""
        return self.transform.init(master)

    def first(self, make: First, master: PyTree) -> PyTree:
        """The state before the first update; see `Sweep`."""
        return make(self.init, master)

    def __call__(
        self, advance: Advance, numbers: Numbers, grads: PyTree, state: PyTree, params: PyTree
    ) -> tuple[PyTree, PyTree]:
        """Updates every leaf; see `Sweep`."""

        def update(*args: PyTree) -> tuple[PyTree, PyTree]:
            numbers, grads, state, params = args
            return advance(self.transform, numbers, grads, state, params, None)

        new_params, new_state = on_host(update, numbers, grads, state, params)
        places = self.placement.optimizer_state(jax.eval_shape(lambda: state))
        new_params = jax.tree.map(
            lambda x, place, away: x if away else jax.device_put(x, place),
            new_params,
            self.placement.optimizer,
            self.placement.away,
        )
        return new_params, jax.tree.map(jax.device_put, new_state, places)


def on_host(function: Callable[..., Any], *args: Any) -> Any:
    """Runs a function of arrays on the host's processor; its results are in the host's memory."""
    # jax 0.12 has by this name what jax 0.10 calls `compute_on2`.
    compute: Any = getattr(compute_on, "compute_on2", None) or compute_on.compute_on
    host = jax.memory.Space.Host
    args = jax.tree.map(lambda x: jax.device_put(x, host), args)
    outputs = jax.tree.map(lambda _: host, jax.eval_shape(function, *args))
    run = compute(function, compute_type="device_host", out_memory_spaces=outputs)
    return run(*args)
