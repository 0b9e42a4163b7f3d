"""Gradients of large tables: the rows that a batch has used, and their numbers.

Owns: what such a gradient is, and which parameters have one. Does not own: how it is made
(`ops.tables`) and what an optimizer makes of it (`optim.tables`).
"""

from dataclasses import dataclass
from typing import Any, Final

import jax
import jax.numpy as jnp

from shardtrain.sharding.placement import Names, names_by_path, path_name

PyTree = Any

TABLE_AXES: Final = frozenset({"rows", "tables", "columns"})
"""A parameter with one of these axes is a table whose gradient is a `RowGradient`."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class RowGradient:
    """The gradient of a table [rows, width], as each device that holds a part of it needs it."""

    ids: jax.Array
    """[blocks, number]: rows of that block of the table in rising order, each once; what is not
    below the block's rows stands for none."""
    rows: jax.Array
    """[blocks, number, width]: the gradient of each; zero for those that stand for none."""

    def dense(self, num_rows: int) -> jax.Array:
        """The gradient of the whole table.

        Args:
            num_rows: of the table.
        """
        blocks, _, width = self.rows.shape
        size = num_rows // blocks
        zeros = jnp.zeros((blocks, size, width), self.rows.dtype)
        filled = jax.vmap(lambda z, i, r: z.at[i].add(r, mode="drop"))(zeros, self.ids, self.rows)
        whole: jax.Array = filled.reshape(num_rows, width)
        return whole


def is_table(names: Names) -> bool:
    """Whether a parameter of these axes has a `RowGradient`."""
    return bool(TABLE_AXES.intersection(names))


def table_paths(names: PyTree) -> frozenset[str]:
    """The paths of all parameters that have one.

    Args:
        names: a tuple of axis names for every parameter.
    """
    return frozenset(path for path, axes in names_by_path(names).items() if is_table(axes))


def apart(tree: PyTree, paths: frozenset[str]) -> tuple[PyTree, dict[str, Any]]:
    """A tree of nested dicts without some leaves, and those leaves by their paths.

    Args:
        tree: parameters, or what is like them.
        paths: of the leaves.
    """
    taken: dict[str, Any] = {}

    def without(node: PyTree, above: tuple[str, ...]) -> PyTree:
        rest = {}
        for name, child in node.items():
            path = "/".join((*above, name))
            if path in paths:
                taken[path] = child
            elif isinstance(child, dict):
                rest[name] = without(child, (*above, name))
            else:
                rest[name] = child
        return rest

    return without(tree, ()), taken


def together_again(tree: PyTree, taken: dict[str, Any]) -> PyTree:
    """The tree that `apart` was given.

    Args:
        tree: without the leaves.
        taken: they, by path.
    """
    whole = dict(tree.items())
    for path, leaf in taken.items():
        *parents, last = path.split("/")
        node = whole
        for parent in parents:
            node[parent] = dict(node.get(parent, {}))
            node = node[parent]
        node[last] = leaf
    return whole


def is_row_gradient(node: Any) -> bool:
    """Whether a node of a tree is one, and so is no further looked into."""
    return isinstance(node, RowGradient)


def densified(grads: PyTree, params: PyTree) -> PyTree:
    """Gradients in which those of tables are whole; for comparisons.

    Args:
        grads: of all parameters.
        params: they, for their shapes.
    """
    shapes = {path_name(path): leaf.shape for path, leaf in jax.tree.leaves_with_path(params)}
    return jax.tree.map_with_path(
        lambda path, g: g.dense(shapes[path_name(path)][0]) if is_row_gradient(g) else g,
        grads,
        is_leaf=is_row_gradient,
    )
