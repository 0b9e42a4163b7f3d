"""Two programs on the same batches: how far apart are loss, gradients and updated parameters?

This is promise 1 of the project, as a command and as the test suite's grid: every layout is the
same run as one device. It takes programs and batches, and reads no config.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from shardtrain.sharding.disk import loaded
from shardtrain.sharding.placement import leaves_by_path
from shardtrain.train.build import Program
from shardtrain.train.state import TrainState

PyTree = Any
Batch = Mapping[str, jax.Array]

BOUNDS = {"float64": 1e-9, "float32": 1e-5}
"""Largest difference that is rounding, by precision."""
FLOOR = 1e-3
"""Part of the largest entry of all leaves below which a leaf's own size does not count.

What should be zero (the gradient of a key's bias) is rounding only, and has no scale of its own."""


@dataclass(frozen=True)
class Subject:
    """A program with the batches it reads."""

    program: Program
    batch_at: Callable[[int], Batch]

    def in_model_order(self, tree: PyTree) -> PyTree:
        """Parameters or gradients on the host, with the layers as the model has them."""
        return self.program.in_model_order(jax.device_get(tree))

    def kept(self, state: TrainState) -> PyTree:
        """What a state keeps beside its parameters, on the host and in model order."""
        return jax.device_get(self.program.saved.save(state).model_state)

    def parameters(self, state: TrainState, params: PyTree) -> PyTree:
        """Parameters on the host and in model order.

        Args:
            state: any state of the program.
            params: as they rest.
        """
        saved = self.program.saved.save(state.replace(params=params)).params
        return jax.tree.map(lambda leaf: jax.device_get(loaded(leaf)), saved)

    def take(self, state: TrainState, of: "Subject") -> TrainState:
        """Another subject's state, put where this one keeps it."""
        return transfer(of.program.saved.save(state), self.program)


@dataclass(frozen=True)
class Comparison:
    """The largest differences over all steps, relative."""

    steps: int
    bound: float
    loss: float
    gradients: dict[str, float]
    """By parameter."""
    parameters: dict[str, float]
    """By parameter, after the update."""
    kept: dict[str, float]
    """By what is kept beside the parameters, such as statistics of batch norm, after the step."""

    @property
    def worst(self) -> float:
        """The largest of all."""
        found = (*self.gradients.values(), *self.parameters.values(), *self.kept.values())
        return max(self.loss, *found)

    @property
    def equal(self) -> bool:
        """Whether all is within the bound. A NaN is not."""
        return self.worst <= self.bound


def compare(subject: Subject, reference: Subject, *, steps: int, bound: float) -> Comparison:
    """Runs both from the reference's initial state on the same batches.

    Losses, gradients, updated parameters and what is kept beside them are compared at each step.
    Where `bound` is float32's, both begin each step from the reference's state and the parameters
    are those that both make of the reference's gradient: an adaptive optimizer turns the rounding
    of a zero gradient into a whole step, so that free-running float32 trajectories of one and the
    same program would part.

    Args:
        subject: the layout in question.
        reference: what it should equal.
        steps: updates.
        bound: the largest difference allowed.

    Returns:
        The differences: of the loss relative to it, of a leaf relative to the larger of its own
            largest entry and `FLOOR` times the largest of all leaves.
    """
    free = bound <= BOUNDS["float64"]
    truth = reference.program.init()
    state = subject.take(truth, reference)
    loss, gradients, parameters, kept = 0.0, {}, {}, {}  # type: ignore[var-annotated]
    for cursor in range(steps):
        if not free:
            state = subject.take(truth, reference)
        wanted, metrics, right = reference.program.step_with_gradients(
            truth, reference.batch_at(cursor)
        )
        new, found, grads = subject.program.step_with_gradients(state, subject.batch_at(cursor))
        right = reference.in_model_order(right)
        if free:
            params = new.params
        else:
            # Taken again: what of it is on a disk has gone on with the step.
            params = subject.program.update_with(subject.take(truth, reference), right)
        loss = _worse(loss, relative(found["loss"], metrics["loss"]))
        _merge(gradients, differences(subject.in_model_order(grads), right))
        _merge(
            parameters,
            differences(
                subject.parameters(new, params), reference.parameters(wanted, wanted.params)
            ),
        )
        _merge(kept, differences(subject.kept(new), reference.kept(wanted)))
        truth, state = wanted, new
    return Comparison(steps, bound, loss, gradients, parameters, kept)


def transfer(state: TrainState, program: Program) -> TrainState:
    """A state in model order put where a program keeps it, bit for bit."""

    def move(leaf: Any, sharding: Any) -> Any:
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            bits = jnp.asarray(np.asarray(jax.random.key_data(leaf)))
            return jax.device_put(jax.random.wrap_key_data(bits), sharding)
        return jax.device_put(np.asarray(loaded(leaf)), sharding)

    saved = jax.tree.map(lambda leaf: leaf.sharding, program.abstract_saved)
    return program.saved.rest(jax.tree.map(move, state, saved))


def differences(found: PyTree, wanted: PyTree) -> dict[str, float]:
    """The relative difference of each leaf, by path."""
    right = {path: _wide(leaf) for path, leaf in leaves_by_path(wanted)}
    floor = FLOOR * max(
        (float(np.abs(leaf).max(initial=0)) for leaf in right.values()), default=0.0
    )
    result = {}
    for path, leaf in leaves_by_path(found):
        scale = max(float(np.abs(right[path]).max(initial=0)), floor)
        distance = float(np.abs(_wide(leaf) - right[path]).max(initial=0))
        result[path] = distance / scale if scale else distance
    return result


def relative(found: Any, wanted: Any) -> float:
    """The relative difference of two numbers."""
    distance = abs(float(found) - float(wanted))
    return distance / abs(float(wanted)) if wanted else distance


def _wide(leaf: Any) -> np.ndarray:
    return np.asarray(leaf).astype(np.float64)


def _merge(total: dict[str, float], more: dict[str, float]) -> None:
    for path, value in more.items():
        total[path] = _worse(total.get(path, 0.0), value)


def _worse(a: float, b: float) -> float:
    """The larger; NaN if either is."""
    return a if b <= a else b
