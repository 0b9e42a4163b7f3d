"""The optimizers by name, each a chain of optax transformations that gives a direction.

The step goes against the direction by the learning rate, which `update` applies; so does it clip,
before any of this. Which leaves are decayed or orthogonalised is read off the logical names of
their axes.
"""

from collections.abc import Callable
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import optax
from optax.contrib import MuonDimensionNumbers, scale_by_muon

from shardtrain.optim.config import OptimizerConfig

PyTree = Any
Names = tuple[str | None, ...]
Transform: TypeAlias = optax.GradientTransformation


def is_matrix(names: Names) -> bool:
    """Whether a leaf is a matrix or an embedding, and so is decayed: `embed` and another axis.

    So is either half of a change of low rank.
    A stacked norm scale is [layers, embed] and a stacked bias [layers, mlp]: their number of dims
    would not tell.
    """
    if "rank" in names:
        return True
    return "embed" in names and any(name not in ("embed", "layers") for name in names)


def is_hidden_matrix(names: Names) -> bool:
    """Whether Muon takes a leaf: a matrix of the stack, and no half of a change of low rank."""
    return is_matrix(names) and "layers" in names and "rank" not in names


def _map_names(function: Callable[[Names], Any], names: PyTree) -> PyTree:
    return jax.tree.map(function, names, is_leaf=lambda x: isinstance(x, tuple))


def _decay(config: OptimizerConfig, names: PyTree) -> Transform:
    return optax.add_decayed_weights(config.weight_decay, mask=_map_names(is_matrix, names))


def _scale_by_adam(config: OptimizerConfig) -> Transform:
    return optax.scale_by_adam(config.beta1, config.beta2, config.epsilon)


def _adamw(config: OptimizerConfig, names: PyTree) -> Transform:
    return optax.chain(_scale_by_adam(config), _decay(config, names))


def _adam(config: OptimizerConfig, names: PyTree) -> Transform:
    """The original Adam: decay is a part of the gradient."""
    return optax.chain(_decay(config, names), _scale_by_adam(config))


def _sgd(config: OptimizerConfig, names: PyTree) -> Transform:
    return optax.chain(_decay(config, names), optax.trace(config.momentum, config.nesterov))


def _lion(config: OptimizerConfig, names: PyTree) -> Transform:
    return optax.chain(optax.scale_by_lion(config.beta1, config.beta2), _decay(config, names))


def _adafactor(config: OptimizerConfig, names: PyTree) -> Transform:
    """Shazeer and Stern 2018 (arXiv 1804.04235), each layer of the stack on its own."""
    one = optax.chain(
        optax.scale_by_factored_rms(),
        optax.clip_by_block_rms(1.0),
        optax.scale_by_param_block_rms(),
    )
    return optax.chain(per_layer(one, names), _decay(config, names))


def _muon(config: OptimizerConfig, names: PyTree) -> Transform:
    """Orthogonalised momentum (Jordan 2024) at AdamW's scale (Liu et al., arXiv 2502.16982)."""
    dims = _map_names(lambda n: _matrix_dims(n) if is_hidden_matrix(n) else None, names)
    labels = _map_names(lambda n: "muon" if is_hidden_matrix(n) else "adamw", names)

    def at_adam_scale(updates: PyTree, _params: PyTree) -> PyTree:
        def scale(u: jax.Array, n: Names) -> Any:
            spec = _matrix_dims(n)
            rows, columns = (
                jnp.prod(jnp.array([u.shape[i] for i in axes]))
                for axes in (spec.reduction_axis, spec.output_axis)
            )
            return u * (0.2 * jnp.sqrt(jnp.maximum(rows, columns).astype(u.dtype)))

        return jax.tree.map(
            lambda u, n: u if isinstance(u, optax.MaskedNode) else scale(u, n),
            updates,
            names,
            is_leaf=lambda x: isinstance(x, optax.MaskedNode),
        )

    def dims_of(updates: PyTree) -> PyTree:
        return jax.tree.map(
            lambda u, d: u if isinstance(u, optax.MaskedNode) else d,
            updates,
            dims,
            is_leaf=lambda x: isinstance(x, optax.MaskedNode),
        )

    muon = optax.chain(
        scale_by_muon(beta=config.momentum, weight_dimension_numbers=dims_of),
        optax.stateless(at_adam_scale),
    )
    parts = {"muon": muon, "adamw": _scale_by_adam(config)}
    return optax.chain(optax.partition(parts, labels), _decay(config, names))


def _lamb(config: OptimizerConfig, names: PyTree) -> Transform:
    """AdamW's direction at each matrix's own size (You et al. 2020, arXiv 1904.00962).

    A layer of the stack is a matrix by itself. What has no decay, norms and biases, is not scaled:
    so does the authors' own code.
    """

    def scale(update: jax.Array, param: jax.Array, own: Names) -> jax.Array:
        if not is_matrix(own):
            return update
        dims = tuple(range(own[0] == "layers", update.ndim))
        weight, step = (
            jnp.sqrt(jnp.sum(jnp.square(x), dims, keepdims=True)) for x in (param, update)
        )
        trust = jnp.where((weight > 0) & (step > 0), weight / step, 1)
        return update * trust.astype(update.dtype)

    def trusted(updates: PyTree, params: PyTree) -> PyTree:
        return jax.tree.map(scale, updates, params, names)

    return optax.chain(_scale_by_adam(config), _decay(config, names), optax.stateless(trusted))


def _matrix_dims(names: Names) -> MuonDimensionNumbers:
    """Which axes of a weight are summed over and which are made; `layers` and `gate` are apart."""
    embed = names.index("embed")
    rest = tuple(i for i, n in enumerate(names) if n not in ("embed", "layers", "gate"))
    reads_embed = embed < min(rest)
    return MuonDimensionNumbers(
        reduction_axis=(embed,) if reads_embed else rest,
        output_axis=rest if reads_embed else (embed,),
    )


def per_layer(one: Transform, names: PyTree) -> Transform:
    """Runs a transformation on each layer of the stacked leaves by itself, on others as usual."""
    stacked = _map_names(lambda n: bool(n) and n[0] == "layers", names)

    def pick(tree: PyTree, want: bool) -> PyTree:
        return jax.tree.map(lambda x, s: x if s == want else None, tree, stacked)

    def merge(a: PyTree, b: PyTree) -> PyTree:
        none = lambda x: x is None  # noqa: E731
        return jax.tree.map(lambda x, y: y if x is None else x, a, b, is_leaf=none)

    def init(params: PyTree) -> PyTree:
        layers = pick(params, True)
        return {
            "layers": jax.vmap(one.init)(layers) if jax.tree.leaves(layers) else (),
            "others": one.init(pick(params, False)),
        }

    def update(updates: PyTree, state: PyTree, params: PyTree = None) -> tuple[PyTree, PyTree]:
        others, kept = one.update(pick(updates, False), state["others"], pick(params, False))
        layers, stack = pick(updates, True), state["layers"]
        if jax.tree.leaves(layers):
            layers, stack = jax.vmap(one.update)(layers, stack, pick(params, True))
        return merge(layers, others), {"layers": stack, "others": kept}

    return optax.GradientTransformation(init, update)


OPTIMIZERS: dict[str, Callable[[OptimizerConfig, PyTree], Transform]] = {
    "adamw": _adamw,
    "adam": _adam,
    "sgd": _sgd,
    "lion": _lion,
    "adafactor": _adafactor,
    "muon": _muon,
    "lamb": _lamb,
}
"""One row an optimizer: (config, names of the parameters' axes) -> transformation."""


def make_transform(config: OptimizerConfig, names: PyTree) -> Transform:
    """The transformation of that name.

    Args:
        config: the `[optimizer]` section.
        names: a tuple of axis names for every parameter.
    """
    return OPTIMIZERS[config.name](config, names)
