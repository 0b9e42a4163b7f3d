"""The optimizers: optax's own results leaf by leaf, each layer on its own; what decays; dtypes."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from fault_programs import STYLES, program
from optax.contrib import muon

from shardtrain.optim.config import OptimizerConfig
from shardtrain.optim.optimizers import OPTIMIZERS, is_matrix, make_transform
from shardtrain.optim.sweep import Whole
from shardtrain.optim.update import Optimizer
from shardtrain.sharding.mesh import make_mesh
from shardtrain.sharding.placement import Placement
from shardtrain.sharding.rules import compute_table, stored_table
from shardtrain.strategies.precision import policy

RATE, DECAY, STEPS = 0.1, 0.1, 3
LAYERED = {
    # a stacked leaf of each kind: matrix, its bias, norm scale, and one large enough to be factored
    "layers": {
        "up": ((2, 6, 4), ("layers", "embed", "mlp")),
        "down": ((2, 4, 6), ("layers", "mlp", "embed")),
        "wide": ((2, 128, 130), ("layers", "embed", "mlp")),
        "up_bias": ((2, 4), ("layers", "mlp")),
        "scale": ((2, 6), ("layers", "embed")),
    },
    "embedding": ((9, 6), ("vocab", "embed")),
    "norm": ((6,), ("embed",)),
}


def is_leaf(x: Any) -> bool:
    return isinstance(x, tuple)


NAMES = jax.tree.map(lambda leaf: leaf[1], LAYERED, is_leaf=is_leaf)
SHAPES = jax.tree.map(
    lambda leaf: jax.ShapeDtypeStruct(leaf[0], jnp.float32), LAYERED, is_leaf=is_leaf
)


def values(seed: int, size: float = 1.0) -> Any:
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda s: size * rng.standard_normal(s.shape, np.float32), SHAPES)


GRADS = [values(10 + step, 0.1) for step in range(STEPS)]


def section(name: str, **changes: Any) -> OptimizerConfig:
    return OptimizerConfig(name=name, learning_rate=RATE, weight_decay=DECAY, **changes)


def optimizer(config: OptimizerConfig, names: Any, shapes: Any) -> Optimizer:
    table = compute_table()
    placement = Placement(
        mesh=make_mesh(data=1, devices=jax.devices()[:1]),
        compute=table,
        stored=stored_table(table),
        zero=0,
        names=names,
        shapes=shapes,
    )
    return Optimizer(
        sweep=Whole(make_transform(config, names)),
        schedule=lambda update: jnp.float32(config.learning_rate),
        clip_norm=0.0,
        policy=policy("float32"),
        placement=placement,
    )


def ours(name: str, params: Any, grads: list[Any], names: Any) -> Any:
    """The parameters after some updates."""
    shapes = jax.tree.map(lambda p: jax.ShapeDtypeStruct(p.shape, p.dtype), params)
    update = optimizer(section(name), names, shapes)
    state, step = update.init(params), jax.jit(update.update)
    for number, grad in enumerate(grads):
        params, state, _ = step(grad, state, params, jnp.int32(number + 1), jax.random.key(0))
    return jax.device_get(params)


def unstacked(tree: Any) -> dict[str, Any]:
    """Every layer's leaf as a leaf of its own."""
    layers = {f"{k} {i}": x[i] for k, x in tree["layers"].items() for i in range(2)}
    return {**layers, "embedding": tree["embedding"], "norm": tree["norm"]}


MASK = {
    name: name.split()[0] in ("up", "down", "wide", "embedding") for name in unstacked(GRADS[0])
}
HIDDEN = {name: name.split()[0] in ("up", "down", "wide") for name in MASK}


def own_alias(name: str) -> optax.GradientTransformation:
    """The optimizer as optax names it, on leaves that are not stacked."""
    decay = optax.add_decayed_weights(DECAY, MASK)
    config = section(name)
    match name:
        case "adamw":
            return optax.adamw(
                RATE, config.beta1, config.beta2, 1e-8, weight_decay=DECAY, mask=MASK
            )
        case "adam":
            return optax.chain(decay, optax.adam(RATE, config.beta1, config.beta2, 1e-8))
        case "sgd":
            return optax.chain(decay, optax.sgd(RATE, config.momentum))
        case "lion":
            return optax.lion(RATE, config.beta1, config.beta2, weight_decay=DECAY, mask=MASK)
        case "lamb":
            return optax.chain(
                optax.scale_by_adam(config.beta1, config.beta2, 1e-8),
                decay,
                optax.masked(optax.scale_by_trust_ratio(), MASK),
                optax.scale(-RATE),
            )
        case "adafactor":
            return optax.adafactor(RATE, weight_decay_rate=RATE * DECAY, weight_decay_mask=MASK)
    # the alias would give its own Adam half Nesterov's momentum
    halves = {
        True: muon(RATE, beta=config.momentum, consistent_rms=0.2),
        False: optax.adam(RATE, config.beta1, config.beta2, 1e-8),
    }
    return optax.chain(
        optax.partition(halves, HIDDEN), optax.add_decayed_weights(-RATE * DECAY, MASK)
    )


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_stack_is_its_layers_each_as_optax_has_it(name) -> None:
    """Three updates of stacked leaves equal those of optax's own alias on the layers one by one."""
    params = values(0)
    got = unstacked(ours(name, params, GRADS, NAMES))
    want, transform = unstacked(params), own_alias(name)
    with jax.numpy_dtype_promotion("standard"):
        state, update = transform.init(want), jax.jit(transform.update)
        for grad in GRADS:
            updates, state = update(unstacked(grad), state, want)
            want = jax.device_get(optax.apply_updates(want, updates))
    for leaf in want:
        bound = 2e-5 if name == "muon" else 2e-6
        np.testing.assert_allclose(got[leaf], want[leaf], rtol=bound, atol=bound, err_msg=leaf)


def test_formulas_of_the_papers() -> None:
    """Two updates of one entry of a matrix, written out."""
    b1, b2, eps = 0.9, 0.95, 1e-8
    p0, g = 0.7, (0.3, -0.2)
    names, shape = {"w": ("embed", "mlp")}, (1, 1)
    grads = [{"w": np.full(shape, x, np.float32)} for x in g]

    def after(name: str) -> float:
        return float(ours(name, {"w": np.full(shape, p0, np.float32)}, grads, names)["w"][0, 0])

    p, m, v = p0, 0.0, 0.0
    for t in (1, 2):
        m, v = b1 * m + (1 - b1) * g[t - 1], b2 * v + (1 - b2) * g[t - 1] ** 2
        p -= RATE * (m / (1 - b1**t) / (np.sqrt(v / (1 - b2**t)) + eps) + DECAY * p)
    assert after("adamw") == pytest.approx(p, rel=1e-6)
    p, m, v = p0, 0.0, 0.0
    for t in (1, 2):
        d = g[t - 1] + DECAY * p
        m, v = b1 * m + (1 - b1) * d, b2 * v + (1 - b2) * d**2
        p -= RATE * m / (1 - b1**t) / (np.sqrt(v / (1 - b2**t)) + eps)
    assert after("adam") == pytest.approx(p, rel=1e-6)
    p, m = p0, 0.0
    for t in (1, 2):
        m = 0.9 * m + g[t - 1] + DECAY * p
        p -= RATE * m
    assert after("sgd") == pytest.approx(p, rel=1e-6)
    p, m = p0, 0.0
    for t in (1, 2):
        sign = np.sign(b1 * m + (1 - b1) * g[t - 1])
        m = b2 * m + (1 - b2) * g[t - 1]
        p -= RATE * (sign + DECAY * p)
    assert after("lion") == pytest.approx(p, rel=1e-6)
    p, m, v = p0, 0.0, 0.0
    for t in (1, 2):
        m, v = b1 * m + (1 - b1) * g[t - 1], b2 * v + (1 - b2) * g[t - 1] ** 2
        d = m / (1 - b1**t) / (np.sqrt(v / (1 - b2**t)) + eps) + DECAY * p
        p -= RATE * abs(p) / abs(d) * d
    assert after("lamb") == pytest.approx(p, rel=1e-6)


def test_muon_makes_each_hidden_matrix_orthogonal() -> None:
    """Singular values are 0.2 sqrt(max(rows, columns)), within Newton-Schulz's slack."""
    config = section("muon").model_copy(update={"weight_decay": 0.0})
    transform = make_transform(config, NAMES)
    params = values(0)
    with jax.numpy_dtype_promotion("standard"):
        got = jax.jit(transform.update)(GRADS[0], transform.init(params), params)[0]
    for name in ("up", "down"):
        for layer in np.asarray(got["layers"][name]):
            singular = np.linalg.svd(layer, compute_uv=False) / (0.2 * np.sqrt(6))
            assert np.all((singular > 0.6) & (singular < 1.3)), singular
    # the embedding is AdamW's: its first update is the sign of the gradient
    np.testing.assert_allclose(got["embedding"], np.sign(GRADS[0]["embedding"]), rtol=1e-4)


def test_muon_sees_a_projection_of_heads_as_one_matrix() -> None:
    """Queries, keys and values are embed x the rest, the way out is rest x embed; the two halves
    of a gated MLP are two matrices."""
    names = {
        "qkv": ("layers", "embed", "kv_heads", "group", "head_dim"),
        "out": ("layers", "kv_heads", "group", "head_dim", "embed"),
        "gate": ("layers", "embed", "gate", "mlp"),
    }
    shapes = {"qkv": (2, 8, 2, 3, 4), "out": (2, 2, 3, 4, 8), "gate": (2, 8, 2, 24)}
    rng = np.random.default_rng(0)
    grads = {name: rng.standard_normal(shape, np.float32) for name, shape in shapes.items()}
    transform = make_transform(section("muon"), names)
    zeros = jax.tree.map(np.zeros_like, grads)
    with jax.numpy_dtype_promotion("standard"):
        got = jax.jit(transform.update)(grads, transform.init(zeros), zeros)[0]
    got = jax.device_get(got)
    matrices = [got["qkv"][0].reshape(8, 24), got["qkv"][1].reshape(8, 24)]
    matrices += [got["out"][0].reshape(24, 8), got["gate"][0, :, 0], got["gate"][1, :, 1]]
    for matrix in matrices:
        singular = np.linalg.svd(matrix, compute_uv=False) / (0.2 * np.sqrt(24))
        assert np.all((singular > 0.6) & (singular < 1.3)), singular


# -- decay


def kinds(of: Any) -> dict[str, bool]:
    """Every parameter's path, and whether it is a matrix or an embedding."""
    leaves = jax.tree.leaves_with_path(of.placement.names, is_leaf=is_leaf)
    return {
        jax.tree_util.keystr(path, simple=True, separator="/"): is_matrix(names)
        for path, names in leaves
    }


@pytest.mark.parametrize("style", STYLES)
def test_o10_what_decays(style) -> None:
    """O-10: matrices and embeddings do; scales and biases, stacked or not, do not."""
    decayed = kinds(program(STYLES[style]))
    one_dim = {name for name in decayed if name.endswith(("scale", "bias"))}
    assert {name for name, matrix in decayed.items() if not matrix} == one_dim
    for name in ("embedding", "layers/attention/qkv", "layers/attention/out", "layers/mlp/down"):
        assert decayed[name]
    assert "layers/attention_norm/scale" in one_dim


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_o10_decay_alone(name) -> None:
    """O-10: no gradient, rate 0.1, decay 0.1, one step: kernels x 0.99, scales and biases x 1."""
    params = values(0)
    zeros = jax.tree.map(np.zeros_like, params)
    after = ours(name, params, [zeros], NAMES)
    decayed = {"up", "down", "wide", "embedding"}
    for (path, new), old in zip(
        jax.tree.leaves_with_path(after), jax.tree.leaves(params), strict=True
    ):
        leaf = path[-1].key
        if leaf not in decayed:
            np.testing.assert_array_equal(new, old, err_msg=leaf)
        elif (
            name == "adam"
        ):  # its decay is a part of the gradient, so the first step is that's sign
            sign = DECAY * old / (np.abs(DECAY * old) + 1e-8)
            np.testing.assert_allclose(new, old - RATE * sign, rtol=1e-5, atol=1e-6)
        elif name == "lamb":  # a step of decay alone is as long as the matrix, whatever the decay
            np.testing.assert_allclose(new, (1 - RATE) * old, rtol=1e-5, err_msg=leaf)
        else:
            np.testing.assert_allclose(new, 0.99 * old, rtol=1e-6, err_msg=leaf)


# -- dtypes


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_o14_moments_and_master_are_float32(name) -> None:
    """O-14: with bfloat16 parameters every float of the optimizer's state is float32."""
    shapes = program({"optimizer.name": name, "train.precision": "bfloat16"}).shapes
    assert {leaf.dtype for leaf in jax.tree.leaves(shapes.params)} == {jnp.dtype(jnp.bfloat16)}
    floats = [
        leaf.dtype
        for leaf in jax.tree.leaves(shapes.opt_state)
        if jnp.issubdtype(leaf.dtype, jnp.floating)
    ]
    assert set(floats) == {jnp.dtype(jnp.float32)}
    masters = jax.tree.leaves(shapes.opt_state["master"])
    assert [m.shape for m in masters] == [p.shape for p in jax.tree.leaves(shapes.params)]
