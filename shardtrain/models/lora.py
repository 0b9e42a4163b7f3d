"""LoRA: a frozen weight and a change of low rank that is trained (Hu et al., arXiv 2106.09685).

Owns: which weights of a model are changed, the change's first values, and which parameters are
trained. Does not own: the product with a changed weight (`ops.dense`) and where anything rests
(`sharding.placement`): adapters have names for their axes like all parameters.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Protocol

import jax
import jax.numpy as jnp
from flax import nnx

from shardtrain.errors import ConfigError
from shardtrain.ops.dense import LowRank
from shardtrain.ops.sums import sum_dtype

PyTree = Any
Create = Callable[[Any, nnx.Rngs], nnx.Module]
"""(dtype, rngs) -> model."""

BASE: Final = "base"
"""The frozen weight, beside its change."""
DOWN: Final = "lora_a"
"""The change's first matrix [*in, rank]."""
UP: Final = "lora_b"
"""The second one [rank, *out]; it starts at zero."""


@dataclass(frozen=True)
class Matrix:
    """How a model uses one of its weights in `ops.dense.dense`."""

    contract: int = 1
    """Dims that the product sums over."""
    transposed: bool = False
    """Whether those are the last ones and not the first."""

    def dims(self, values: tuple[Any, ...]) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        """What belongs to the dims of `in`, and to those of `out`."""
        first = len(values) - self.contract if self.transposed else 0
        inner = values[first : first + self.contract]
        return inner, values[:first] + values[first + self.contract :]


class Training(Protocol):
    """Which parameters of a model are trained."""

    def model(self, create: Create) -> Create:
        """What makes the model that is trained, of what makes the model."""
        ...

    def split(self, params: PyTree) -> tuple[PyTree, PyTree]:
        """A tree of all parameters as those that are trained, and those that are frozen."""
        ...

    def weights(self, params: PyTree, frozen: PyTree) -> PyTree:
        """Of the two trees, what the model without any change has, by its own paths."""
        ...

    def begin(self, weights: PyTree, params: PyTree) -> tuple[PyTree, PyTree]:
        """The two trees of given weights.

        Args:
            weights: as `weights` gives them.
            params: first values of what is trained.
        """
        ...


@dataclass(frozen=True)
class Everything:
    """All parameters are trained."""

    def model(self, create: Create) -> Create:
        """The model as it is."""
        return create

    def split(self, params: PyTree) -> tuple[PyTree, PyTree]:
        """All, and nothing."""
        return params, ()

    def weights(self, params: PyTree, frozen: PyTree) -> PyTree:
        """All parameters."""
        del frozen
        return params

    def begin(self, weights: PyTree, params: PyTree) -> tuple[PyTree, PyTree]:
        """The weights, and nothing."""
        del params
        return weights, ()


@dataclass(frozen=True)
class Lora:
    """Adapters are trained; the model itself is frozen."""

    rank: int
    alpha: float
    """The change is `alpha / rank` times the product of its two matrices."""
    matrices: Mapping[str, Matrix]
    """Path of each weight that is changed, within a layer, and how it is used."""

    @property
    def scale(self) -> float:
        """What the product of the two matrices is multiplied by."""
        return self.alpha / self.rank

    def model(self, create: Create) -> Create:
        """The model with changes of its weights."""

        def adapted(dtype: Any, rngs: nnx.Rngs) -> nnx.Module:
            model: Any = create(dtype, rngs)
            for path, matrix in self.matrices.items():
                *parents, name = path.split("/")
                holder = model.layers
                for parent in parents:
                    holder = getattr(holder, parent)
                changed = Changed(getattr(holder, name), matrix, self.rank, self.scale, rngs)
                setattr(holder, name, changed)
            return model  # type: ignore[no-any-return]

        return adapted

    def split(self, params: PyTree) -> tuple[PyTree, PyTree]:
        """The adapters, and all else."""
        return _kept(params, adapters=True), _kept(params, adapters=False)

    def weights(self, params: PyTree, frozen: PyTree) -> PyTree:
        """The frozen weights; the change is not in them (`merge` makes the sum)."""
        del params
        return _plain(frozen)

    def begin(self, weights: PyTree, params: PyTree) -> tuple[PyTree, PyTree]:
        """First values of the adapters, and the weights."""
        wanted = {f"layers/{path}" for path in self.matrices}
        return params, _with_base(weights, wanted)


class Changed(nnx.Module):
    """A stacked weight and its change, where a model has a parameter: `[...]` is for `dense`."""

    def __init__(
        self, weight: nnx.Param[jax.Array], matrix: Matrix, rank: int, scale: float, rngs: nnx.Rngs
    ) -> None:
        """Draws the change.

        Args:
            weight: [layers, *in, *out], or [layers, *out, *in], with names of its axes.
            matrix: which of the two.
            rank: inner width of the change.
            scale: of the change.
            rngs: the stream `params` is used.
        """
        layers, *dims = weight.shape
        stack, *names = weight.get_metadata("out_sharding")
        (inner, outer), (inner_names, outer_names) = map(matrix.dims, (tuple(dims), tuple(names)))
        # The paper draws A from a Gaussian; this width keeps the size of its product with x.
        normal = nnx.initializers.normal(math.prod(inner) ** -0.5)
        down = nnx.with_partitioning(normal, (stack, *inner_names, "rank"))
        key = rngs.params()
        zeros = nnx.initializers.zeros_init()
        up = nnx.with_partitioning(zeros, (stack, "rank", *outer_names))
        self.base = weight
        self.lora_a = nnx.Param(down(key, (layers, *inner, rank), weight.dtype))
        self.lora_b = nnx.Param(up(key, (layers, rank, *outer), weight.dtype))
        self.scale = scale

    def __getitem__(self, _index: Any) -> LowRank:
        """The weight of one layer, as the product takes it."""
        return LowRank(self.base[...], self.lora_a[...], self.lora_b[...], self.scale)


def merge(
    weight: jax.Array, down: jax.Array, up: jax.Array, matrix: Matrix, scale: float
) -> jax.Array:
    """All layers' weight with its change in it, `W + scale A B`, summed in 32 bits at least.

    Args:
        weight: [layers, *in, *out], or transposed.
        down: [layers, *in, rank].
        up: [layers, rank, *out].
        matrix: how the weight is used.
        scale: of the change.
    """
    wide = sum_dtype(weight.dtype)

    def one(w: jax.Array, a: jax.Array, b: jax.Array) -> jax.Array:
        change = jnp.tensordot(a.astype(wide), b.astype(wide), 1)  # [*in, *out]
        if matrix.transposed:
            change = change.transpose(*range(matrix.contract, change.ndim), *range(matrix.contract))
        return (w.astype(wide) + jnp.asarray(scale, wide) * change).astype(w.dtype)

    merged: jax.Array = jax.vmap(one)(weight, down, up)
    return merged


def choose_matrices(targets: str, matrices: Mapping[str, Matrix]) -> dict[str, Matrix]:
    """The weights that `lora.targets` names.

    Args:
        targets: names, comma-separated.
        matrices: those of the model, by path within a layer.

    Raises:
        ConfigError: an unknown name.
    """
    by_name = {path.rpartition("/")[2]: path for path in matrices}
    names = [name.strip() for name in targets.split(",")]
    for name in names:
        if name not in by_name:
            raise ConfigError(
                "there is no such weight",
                where="lora.targets",
                value=name or targets,
                allowed=", ".join(by_name),
            )
    return {by_name[name]: matrices[by_name[name]] for name in names}


# -- trees of nested dicts


def _plain(tree: PyTree) -> PyTree:
    """A tree with the base in place of every changed weight."""
    if not isinstance(tree, Mapping):
        return tree
    return tree[BASE] if BASE in tree else {name: _plain(part) for name, part in tree.items()}


def _kept(tree: PyTree, *, adapters: bool) -> PyTree:
    """A tree with the adapters only, or without them; empty parts are gone."""
    if not isinstance(tree, Mapping):
        return tree
    parts = {
        name: _kept(part, adapters=adapters)
        for name, part in tree.items()
        if isinstance(part, Mapping) or (name in (DOWN, UP)) == adapters
    }
    return {name: part for name, part in parts.items() if not isinstance(part, Mapping) or part}


def _with_base(tree: PyTree, changed: set[str], path: str = "") -> PyTree:
    """A plain tree with the leaves at some paths as the base of a change."""
    if path in changed:
        return {BASE: tree}
    if not isinstance(tree, Mapping):
        return tree
    return {
        name: _with_base(part, changed, f"{path}/{name}".lstrip("/")) for name, part in tree.items()
    }
