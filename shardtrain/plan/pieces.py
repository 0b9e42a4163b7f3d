"""The pieces of a model as one device runs them, traced for one sample: layer, ends.

Owns: which shapes one device sees, and what a layer's forward keeps for its backward there. Does
not own: what is added up over layers and microbatches (`memory`, `cost`).

The planner has no formula for activations: it traces the run's own functions, with the heads, the
columns and the tokens that one device has.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Var

from shardtrain.data.language import blank_batch
from shardtrain.plan.work import Work, trace, work_of
from shardtrain.sharding.frozen import joined
from shardtrain.sharding.placement import LAYERS
from shardtrain.sharding.rules import one_of_many
from shardtrain.strategies.layer_vjp import LayerVjp
from shardtrain.strategies.parts import Cut
from shardtrain.strategies.remat import remat
from shardtrain.train.build import Program

PyTree = Any


@dataclass(frozen=True)
class Layer:
    """One layer on one device, for one sample."""

    forward: Work
    backward: Work
    """What the remat policy computes again counted in."""
    kept: int
    """Bytes that a forward keeps for its backward, its input counted in."""
    pending: int
    """Bytes that a backward leaves for its weight part, in schedules that split it."""
    weight_share: float
    """Part of the backward's FLOPs that is in the weight part."""


@dataclass(frozen=True)
class Pieces:
    """A model on one device, for one sample."""

    layer: Layer
    embed: Work
    """Forward and backward."""
    embed_sums: float
    """Bytes of the embedding's peak that are the same for any number of samples: its gradient."""
    head: Work
    """The loss and its gradient."""
    head_weights: int
    """Bytes of the weights that it reads."""
    head_sums: float
    """Bytes of the head's peak that are the same for any number of samples: sums over chunks."""
    activation: int
    """Bytes of the residual stream, which stages send to each other."""
    whole_activation: int
    """Bytes of it where its positions are not split."""
    logits: int
    """Bytes of the scores of all its tokens, or of those of one chunk of the loss."""


@dataclass(frozen=True)
class Shapes:
    """What one device sees of a sample."""

    length: int
    """Positions that it has."""
    context: int
    """Devices that share a sequence; inside attention they send each other keys and values."""
    tensor: int
    """Degree that heads, columns and vocabulary are divided by; the program is one part's."""
    sequence_parallel: bool
    separate_documents: bool
    dropout: bool
    platform: str
    split: bool
    """Whether the schedule has weight gradients of their own."""


def trace_pieces(program: Program, shapes: Shapes, policy: str) -> Pieces:
    """Traces the pieces of a model on one device.

    Args:
        program: of the model's part that one device of a tensor group has, on an abstract mesh.
        shapes: what the device sees.
        policy: `train.remat`.

    Returns:
        The pieces. Nothing is compiled and no array is made.
    """
    cut = program.parts.cut
    assert cut is not None
    residual = shapes.length // (shapes.tensor if shapes.sequence_parallel else 1)
    sizes = {"length": shapes.length, "residual_length": residual}
    with one_of_many(shapes.platform, sizes, {"context": shapes.context}):
        placement, dtype = program.placement, program.policy.compute
        trained, frozen = (
            jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, dtype), tree)
            for tree in (placement.shapes, placement.frozen_shapes)
        )
        return _traced(cut, trained, frozen, shapes, policy)


def _traced(cut: Cut, trained: PyTree, frozen: PyTree, shapes: Shapes, policy: str) -> Pieces:
    params = joined(trained, frozen)
    key = jax.eval_shape(lambda: jax.random.key(0)) if shapes.dropout else None

    def context_of(params: PyTree, batch: PyTree, key: Any) -> PyTree:
        return cut.context(params, batch, key)

    def embedded(params: PyTree, batch: PyTree, context: PyTree) -> PyTree:
        return cut.embed(params, batch, context)

    def inputs(samples: int) -> tuple[PyTree, PyTree, Any]:
        """A batch of so many samples, its context, and its activations."""
        batch = jax.tree.map(
            lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype),
            blank_batch(samples, shapes.length, separate_documents=shapes.separate_documents),
        )
        # Functions of their own: jax remembers shapes by function, and these depend on the rules.
        context = jax.eval_shape(context_of, params, batch, key)
        return batch, context, jax.eval_shape(embedded, params, batch, context)

    one, two = inputs(1), inputs(2)
    _, context, x = one
    weights = tuple(
        jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), layers)
        for layers in (trained[LAYERS], frozen[LAYERS] if frozen else ())
    )
    ends, fixed = (
        {name: part for name, part in dict(tree).items() if name != LAYERS}
        for tree in (trained, frozen)
    )

    def whole(ends: PyTree, fixed: PyTree) -> PyTree:
        return {**joined(ends, fixed), LAYERS: params[LAYERS]}

    def embed(ends: PyTree, fixed: PyTree, batch: PyTree, context: PyTree, g: jax.Array) -> PyTree:
        y, pull = jax.vjp(lambda e: cut.embed(whole(e, fixed), batch, context), ends)
        return y, pull(g)

    def head(ends: PyTree, fixed: PyTree, x: jax.Array, batch: PyTree) -> PyTree:
        def loss(ends: PyTree, x: jax.Array) -> jax.Array:
            return jnp.sum(jnp.stack(jax.tree.leaves(cut.head(whole(ends, fixed), x, batch))))

        return jax.value_and_grad(loss, argnums=(0, 1))(ends, x)

    embeds = [work_of(trace(embed, ends, fixed, *of)) for of in (one, two)]
    heads = [trace(head, ends, fixed, x, batch) for batch, _, x in (one, two)]
    head_works = [work_of(head) for head in heads]
    return Pieces(
        layer=_layer(remat(policy)(cut.layer), weights, x, context, shapes.split),
        embed=embeds[0],
        embed_sums=_fixed_part(embeds),
        head=head_works[0],
        head_weights=_read(heads[0], len(jax.tree.leaves((ends, fixed)))),
        head_sums=_fixed_part(head_works),
        activation=nbytes(x),
        whole_activation=nbytes(x) // x.shape[1] * shapes.length,
        logits=4 * head_works[0].products[0].rows * head_works[0].products[0].columns,
    )


def _layer(
    layer: Callable[..., Any],
    weights: tuple[PyTree, ...],
    x: Any,
    context: PyTree,
    split: bool,
) -> Layer:
    index = jax.ShapeDtypeStruct((), jnp.uint32)
    trained, frozen = weights
    vjp = LayerVjp(layer, trained, index, x, context, frozen=frozen)
    forward = work_of(trace(vjp.forward, weights, index, x, context))
    backward = work_of(trace(vjp.backward, weights, index, vjp.kept, x, context))
    pending, share = 0, 0.0
    if split:
        cut = LayerVjp(layer, trained, index, x, context, split=True, frozen=frozen)
        first = work_of(trace(cut.backward, weights, index, cut.kept, x, context))
        pending, share = sum(map(nbytes, cut.pending)), 1 - first.flops / backward.flops
    return Layer(
        forward=forward,
        backward=backward,
        kept=sum(map(nbytes, vjp.kept)),
        pending=pending,
        weight_share=share,
    )


def _fixed_part(works: Sequence[Work]) -> float:
    """What of a peak is the same for one sample and for two."""
    one, two = works
    return max(2 * one.peak - two.peak, 0.0)


def _read(closed: ClosedJaxpr, first: int) -> int:
    """Bytes of the first inputs of a function, as far as it reads them."""
    used = {v for eqn in closed.jaxpr.eqns for v in eqn.invars if isinstance(v, Var)}
    return sum(nbytes(v.aval) for v in closed.jaxpr.invars[:first] if v in used)


def nbytes(leaf: Any) -> int:
    """Bytes of a shape; a random key is two words."""
    size = math.prod(leaf.shape)
    is_key = jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    return int(size * (8 if is_key else np.dtype(leaf.dtype).itemsize))
