"""The stack: how equal layers are run one after another. The pipeline is another way to run it."""

from collections.abc import Callable
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh, PartitionSpec

from shardtrain.sharding.mesh import PIPELINE
from shardtrain.strategies.offload import row_of
from shardtrain.strategies.order import LayerOrder, sent_by, stage_numbers
from shardtrain.strategies.remat import Block, remat

PyTree = Any
UNROLL_BELOW = 16
"""On CPU fewer layers than this are unrolled: a scan costs 15 %, and compiling stays short."""


class Stack(Protocol):
    """Runs a stack of layers."""

    def __call__(self, layers: nnx.Module, block: Block, x: PyTree) -> Any:
        """Runs them.

        Args:
            layers: one module whose parameters have a leading `layers` dim.
            block: (layer, index, x) -> x, for one layer.
            x: the residual stream [batch, residual_length, embed], and what goes along with it.
        """
        ...


def make_stack(*, policy: str = "none", loop: str = "scan") -> Stack:
    """The plain stack: a loop over layers, each under a remat policy.

    Args:
        policy: see `remat`.
        loop: "scan" (one compiled body), "peel" (the first layer apart, then a scan) or "unroll".
    """
    wrap = remat(policy)

    def run(layers: nnx.Module, block: Block, x: PyTree) -> Any:
        graph, state = nnx.split(layers)
        params = nnx.to_pure_dict(state)

        def body(x: PyTree, params: PyTree, index: jax.Array) -> PyTree:
            return block(nnx.merge(graph, params), index, x)

        body = wrap(body)
        if loop != "unroll":
            num = jax.tree.leaves(params)[0].shape[0]
            first = 0
            if loop == "peel" and num > 1:
                # In the backward it comes after the loop: what the loop's last turn has to send
                # travels behind its products, and so does the embedding's gradient.
                first = 1
                x = body(x, jax.tree.map(lambda leaf: leaf[0], params), jnp.uint32(0))
                params = jax.tree.map(lambda leaf: leaf[1:], params)
            rows = (params, jnp.arange(first, num, dtype=jnp.uint32))
            return jax.lax.scan(lambda x, row: (body(x, *row), None), x, rows)[0]
        for index, layer in enumerate(unstack(params)):
            x = body(x, layer, jnp.uint32(index))
        return x

    return run


def make_streamed_stack(
    order: LayerOrder, mesh: Mesh, fetched: Callable[[PyTree, Any], PyTree]
) -> Stack:
    """The stack of a pipeline for whoever has no use for one, such as a text that is generated.

    One layer at a time comes to all stages from the one that holds it, so no device ever holds more
    than one layer besides its own.

    Args:
        order: where each layer rests.
        mesh: the devices.
        fetched: brings a layer's parameters to the device of the stage that has it.
    """
    places, stages = jnp.asarray(order.places, jnp.int32), stage_numbers(mesh)

    count = len(order.rows) // mesh.shape[PIPELINE]

    def own(stacked: PyTree, place: jax.Array, stage: jax.Array) -> PyTree:
        rows = jax.tree.map(lambda leaf: row_of(leaf, place % count), stacked)
        is_mine = place // count == stage[0]
        return jax.tree.map(lambda row: sent_by(row, is_mine), fetched(rows, place % count))

    def fetch(stacked: PyTree, place: jax.Array) -> PyTree:
        splits = jax.tree.map(lambda leaf: PartitionSpec(*(PIPELINE,) * min(leaf.ndim, 1)), stacked)
        return jax.shard_map(
            own,
            mesh=mesh,
            axis_names={PIPELINE},
            in_specs=(splits, PartitionSpec(), PartitionSpec(PIPELINE)),
            out_specs=PartitionSpec(),
            check_vma=False,
        )(stacked, place, stages)

    def run(layers: nnx.Module, block: Block, x: PyTree) -> Any:
        graph, state = nnx.split(layers)
        params = nnx.to_pure_dict(state)

        def body(x: PyTree, row: tuple[jax.Array, jax.Array]) -> tuple[PyTree, None]:
            index, place = row
            return block(nnx.merge(graph, fetch(params, place)), index, x), None

        return jax.lax.scan(body, x, (jnp.arange(len(places), dtype=jnp.uint32), places))[0]

    return run


def unstack(tree: PyTree) -> list[PyTree]:
    """Cuts the leading dim of every leaf; its gradient is put together by one concatenation."""
    leaves, treedef = jax.tree.flatten(tree)
    num = leaves[0].shape[0]
    rows = [[part[0] for part in jax.lax.split(leaf, [1] * num, axis=0)] for leaf in leaves]
    return [jax.tree.unflatten(treedef, layer) for layer in zip(*rows, strict=True)]


def choose_loop(loop: str, num_layers: int, platform: str) -> str:
    """Resolves "auto": unrolled on CPU for a shallow stack, else scanned."""
    if loop != "auto":
        return loop
    return "unroll" if platform == "cpu" and num_layers < UNROLL_BELOW else "scan"
