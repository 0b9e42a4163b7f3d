"""What a run keeps beside its parameters: running statistics, and an average of the parameters.

Owns: how each of them begins, moves on after an update, and is used in evaluation. Does not own:
where they rest (`placement`), and what a model observes (it says so itself, in its variables).

`TrainState.model_state` is a tree with a part for each row that a run has, and `()` without any.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Protocol

import jax
import jax.numpy as jnp

PyTree = Any

STATISTICS: Final = "statistics"
"""The part that holds the model's own variables, such as those of batch norm."""
EMA: Final = "ema"
"""The part that holds an average of parameters and statistics."""
COUNT: Final = "count"
"""How many observations were added up."""


def observation(variables: PyTree) -> PyTree:
    """What one microbatch has seen, so that sums of several can be averaged.

    Args:
        variables: the model's, after a forward pass in training; empty where it has none.
    """
    return {STATISTICS: variables, COUNT: jnp.ones(())} if variables else {}


@dataclass(frozen=True)
class After:
    """What is known after an update."""

    params: PyTree
    """The new parameters, in the master dtype."""
    observed: PyTree
    """The step's `observation`s, added up."""
    update: jax.Array
    """The number of the update, the first being 1."""
    model_state: Mapping[str, PyTree]
    """The parts that have moved on already."""


class Part(Protocol):
    """One part of the state: pure functions."""

    def init(self, params: PyTree, variables: PyTree) -> PyTree:
        """As it begins.

        Args:
            params: initial ones, in the master dtype.
            variables: the model's own.
        """
        ...

    def after(self, state: PyTree, now: After) -> PyTree:
        """As it is after an update; the caller holds it back where nothing may move."""
        ...


@dataclass(frozen=True)
class RunningStatistics:
    """An exponential average of what each step has observed."""

    momentum: float

    def init(self, params: PyTree, variables: PyTree) -> PyTree:
        """The model's own initial values."""
        del params
        return variables

    def after(self, state: PyTree, now: After) -> PyTree:
        """Momentum x old + (1 - momentum) x the mean over the step's microbatches."""
        count = now.observed[COUNT]
        return jax.tree.map(
            lambda old, seen: _between(old, seen / count.astype(seen.dtype), self.momentum),
            state,
            now.observed[STATISTICS],
        )


@dataclass(frozen=True)
class Average:
    """An exponential average of parameters and statistics, for evaluation."""

    decay: float

    def init(self, params: PyTree, variables: PyTree) -> PyTree:
        """The parameters themselves."""
        return {"params": params, STATISTICS: variables}

    def after(self, state: PyTree, now: After) -> PyTree:
        """Decay x old + (1 - decay) x new.

        The decay of update k is no more than (1 + k) / (10 + k), so that initial values are soon
        forgotten (as in TensorFlow's ExponentialMovingAverage).
        """
        update = now.update.astype(jnp.float32)
        decay = jnp.minimum(self.decay, (1 + update) / (10 + update))
        new = {"params": now.params, STATISTICS: now.model_state.get(STATISTICS, {})}
        return jax.tree.map(lambda old, x: _between(old, x, decay), state, new)


def _between(old: jax.Array, new: jax.Array, share: jax.Array | float) -> jax.Array:
    part = jnp.asarray(share, old.dtype)
    return part * old + (1 - part) * new.astype(old.dtype)


@dataclass(frozen=True)
class Kept:
    """All parts of a run; none by default."""

    parts: tuple[tuple[str, Part], ...] = ()
    """By name, in the order in which they move on."""

    def init(self, params: PyTree, variables: PyTree) -> PyTree:
        """The state before the first update; the arguments are those of `Part.init`."""
        return {name: part.init(params, variables) for name, part in self.parts} or ()

    def after(
        self, state: PyTree, params: PyTree, observed: PyTree, update: jax.Array, moved: jax.Array
    ) -> PyTree:
        """The state after a step.

        Args:
            state: before it.
            params: in the master dtype, after the update.
            observed: see `After`.
            update: the number of the update.
            moved: whether there was one; a batch that was left out leaves no trace.
        """
        new: dict[str, PyTree] = {}
        for name, part in self.parts:
            found = part.after(state[name], After(params, observed, update, new))
            new[name] = jax.tree.map(
                # Chosen and not multiplied: zero times infinity is no number.
                lambda fresh, old: jnp.where(moved, fresh, old),
                found,
                state[name],
            )
        return new or ()


def together(*states: PyTree) -> PyTree:
    """The parts of several states as one; nothing without any."""
    return {name: part for state in states if state for name, part in state.items()} or ()


def variables_of(model_state: PyTree) -> PyTree:
    """The model's own variables, for training."""
    return dict(model_state).get(STATISTICS, {})


def for_evaluation(params: PyTree, model_state: PyTree) -> tuple[PyTree, PyTree]:
    """Parameters and variables to evaluate with: averages, where there are any.

    Args:
        params: those of training, in the compute dtype.
        model_state: of the state.
    """
    if EMA not in model_state:
        return params, variables_of(model_state)
    average = model_state[EMA]
    cast = jax.tree.map(lambda mean, p: mean.astype(p.dtype), average["params"], params)
    return cast, average[STATISTICS]
