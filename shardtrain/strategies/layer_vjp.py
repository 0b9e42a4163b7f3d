"""One layer's forward and backward as two functions, with plain arrays kept between them.

Owns: what is kept from one to the other, and what is found again instead. Does not own: where what
is kept lies (`stage`), and what the remat policy of the layer is (`remat`).

Weights, the layer's index and the context (positions, documents, keys) are there again when the
backward comes, so they are never kept; nor is what is computed from weights alone, such as a cast
or another shape: under every policy that is done again. Of what is the same in several forms, one
is kept.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax

from shardtrain.sharding.frozen import joined
from shardtrain.strategies import traced

PyTree = Any
Arrays = list[jax.Array]
Layer = Callable[[PyTree, jax.Array, jax.Array, PyTree], jax.Array]
"""(weights, index, x, context) -> y."""
Weights = tuple[PyTree, PyTree]
"""One layer's parameters: those that are trained, and the others, which have no gradient."""


@dataclass(eq=False)
class LayerVjp:
    """A layer cut into forward, backward and, if asked for, the gradient of its matrices."""

    layer: Layer
    weights: PyTree
    """Shapes of one layer's parameters that have a gradient."""
    index: Any
    """Shape of its index."""
    x: Any
    """Shape of its input and output."""
    context: PyTree
    """Shapes of what it reads besides."""
    trains: bool = True
    """Whether there is a backward at all; without, nothing is kept."""
    split: bool = False
    """Whether gradients of matrices are a function of their own, for later."""
    frozen: PyTree = ()
    """Shapes of the layer's parameters that have no gradient."""

    kept: list[Any] = field(init=False, default_factory=list)
    """Shapes of what a forward keeps for its backward."""
    pending: list[Any] = field(init=False, default_factory=list)
    """Shapes of what a backward leaves for `late_gradients`."""
    early: list[int] = field(init=False)
    """Leaves of `weights` whose gradients the backward makes."""
    late: list[int] = field(init=False, default_factory=list)
    """Those of `late_gradients`."""

    def __post_init__(self) -> None:
        """Traces the layer once, for shapes."""
        self.early = list(range(len(jax.tree.leaves(self.weights))))
        if self.trains:
            self._find_kept()
            if self.split:
                self._cut()

    # -- the functions

    def forward(
        self, weights: Weights, index: jax.Array, x: jax.Array, context: PyTree
    ) -> tuple[jax.Array, Arrays]:
        """The layer's output, and what is kept for its backward."""
        if not self.trains:
            return self.layer(joined(*weights), index, x, context), []
        known = jax.tree.leaves((weights, index, context))
        y, *kept = self._forward(*known, x)
        return y, kept

    def backward(
        self,
        weights: Weights,
        index: jax.Array,
        kept: Sequence[jax.Array],
        g: jax.Array,
        context: PyTree,
    ) -> tuple[Arrays, jax.Array, Arrays]:
        """Gradients of the `early` weights and of the input, and what is pending for the others."""
        known = jax.tree.leaves((weights, index, context))
        if not self.split:
            gradients, gx = self._backward(known, kept, g)
            return gradients, gx, []
        gx, *rest = self._first(*known, *kept, g)
        return rest[: len(self.early)], gx, rest[len(self.early) :]

    def late_gradients(
        self,
        weights: Weights,
        index: jax.Array,
        kept: Sequence[jax.Array],
        pending: Sequence[jax.Array],
        context: PyTree,
    ) -> Arrays:
        """Gradients of the `late` weights."""
        known = jax.tree.leaves((weights, index, context))
        return list(self._second(*known, *kept, *pending))

    # -- tracing

    @property
    def _known_weights(self) -> Weights:
        """Shapes of all of the layer's parameters."""
        return self.weights, self.frozen

    def _find_kept(self) -> None:
        """Sorts what the backward function holds: what is there again, and what must be kept."""
        known = (self._known_weights, self.index, self.context)

        def pull(known: PyTree, x: jax.Array) -> tuple[jax.Array, Arrays]:
            (trained, frozen), index, context = known

            def layer(trained: PyTree, x: jax.Array) -> jax.Array:
                return self.layer(joined(trained, frozen), index, x, context)

            y, pull = jax.vjp(layer, trained, x)
            leaves, self._treedef = jax.tree.flatten(pull)
            return y, leaves

        closed = traced.inline(jax.make_jaxpr(pull)(known, self.x))
        y, *leaves = closed.jaxpr.outvars
        num_known, num_weights = (
            len(jax.tree.leaves(tree)) for tree in (known, self._known_weights)
        )
        inputs = closed.jaxpr.invars
        changing = traced.needing(closed, range(num_weights, len(inputs)))
        sources = traced.sources(closed, (v for v in leaves if traced.is_one_of(v, changing)))
        kept = [v for v in dict.fromkeys(sources) if v not in inputs[:num_known]]
        self.kept = [traced.shape_of(v) for v in kept]
        self._forward = traced.part(closed, inputs, [y, *kept])
        self._held = traced.part(closed, [*inputs[:num_known], *kept], leaves)

    def _backward(
        self, known: Sequence[jax.Array], kept: Sequence[jax.Array], g: jax.Array
    ) -> tuple[Arrays, jax.Array]:
        """Gradients of all weights and of the input."""
        pull = jax.tree.unflatten(self._treedef, self._held(*known, *kept))
        gradients, gx = pull(g)
        return jax.tree.leaves(gradients), gx

    def _cut(self) -> None:
        """Cuts the backward: what the input's gradient needs, and products that can wait."""
        known = jax.tree.leaves((self._known_weights, self.index, self.context))
        num_known, num_kept = len(known), len(self.kept)

        def backward(*args: jax.Array) -> tuple[jax.Array, ...]:
            known, kept, g = args[:num_known], args[num_known:-1], args[-1]
            gradients, gx = self._backward(known, kept, g)
            return (gx, *gradients)

        closed = traced.inline(jax.make_jaxpr(backward)(*known, *self.kept, self.x))
        lasting = closed.jaxpr.invars[: num_known + num_kept]  # all but the output's gradient
        every = [1 + i for i in self.early]
        moved, self._first, self._second, pending = traced.split_products(
            closed, lasting, [0], every
        )
        self.late = [i - 1 for i in moved]
        self.early = [i for i in self.early if i not in self.late]
        self.pending = pending
