"""The linear op: values and gradients in every phrasing, under every transform, on a mesh."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from shardtrain.ops import dense as module
from shardtrain.ops.dense import Phrasing, dense
from shardtrain.sharding.mesh import make_mesh
from shardtrain.sharding.rules import compute_table, use_rules

PHRASINGS = [Phrasing(False, False), Phrasing(True, False), Phrasing(True, True)]
SHAPES = [((5,), (40,)), ((40,), (2, 3)), ((2, 3, 1), (4, 2))]


@pytest.fixture(autouse=True)
def wide_types():
    with jax.enable_x64(True):
        yield


@pytest.fixture(params=PHRASINGS, ids=str)
def phrased(request, monkeypatch):
    monkeypatch.setattr(module, "phrasing", lambda: request.param)
    return request.param


def inputs(inner, out, dtype=np.float64, batch=3, length=5, seed=0):
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((batch, length, *inner))
    w = rng.standard_normal((*inner, *out))
    bias = rng.standard_normal(out)
    g = rng.standard_normal((batch, length, *out))
    return [jnp.asarray(a, dtype) for a in (x, w, bias, g)]


def naive(x, w, bias, g, contract):
    """Product and gradients in float64 NumPy."""
    x, w, bias, g = (np.asarray(a, np.float64) for a in (x, w, bias, g))
    y = np.tensordot(x, w, contract) + bias
    out = tuple(range(2, g.ndim))
    dx = np.tensordot(g, w, (out, tuple(range(contract, w.ndim))))
    return y, dx, np.tensordot(x, g, ((0, 1), (0, 1))), g.sum((0, 1))


@partial(jax.jit, static_argnames=("contract", "transposed"))
def _run(x, w, bias, g, *, contract, transposed):
    options = {"contract": contract, "transposed": transposed}
    y, back = jax.vjp(lambda x, w, bias: dense(x, w, bias=bias, **options), x, w, bias)
    return y, *back(g)


def value_and_gradients(x, w, bias, g, contract, transposed=False):
    """Of the op; a weight kept as [*out, *in] is turned around before and its gradient after."""
    order = [*range(contract, w.ndim), *range(contract)]
    w = w.transpose(order) if transposed else w
    y, dx, dw, db = _run(x, w, bias, g, contract=contract, transposed=transposed)
    back = [*range(w.ndim - contract, w.ndim), *range(w.ndim - contract)]
    return y, dx, dw.transpose(back) if transposed else dw, db


def assert_near(got, want, bound):
    for a, b in zip(got, want, strict=True):
        a = np.asarray(a, np.float64)
        assert a.shape == b.shape
        assert np.abs(a - b).max() <= bound * np.abs(b).max()


@pytest.fixture(autouse=True)
def fresh():
    """A phrasing is no argument of the jitted helper."""
    _run.clear_cache()


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(("inner", "out"), SHAPES)
@pytest.mark.parametrize(("dtype", "bound"), [(np.float64, 1e-12), (jnp.bfloat16, 5e-3)])
@pytest.mark.usefixtures("phrased")
def test_value_and_gradients(inner, out, dtype, bound, transposed):
    args = inputs(inner, out, dtype)
    got = value_and_gradients(*args, len(inner), transposed)
    assert all(a.dtype == dtype for a in got)
    assert_near(got, naive(*args, len(inner)), bound)


def test_without_bias_and_mixed_dtypes():
    x, w, _, g = inputs((5,), (7,))
    x, g = x.astype(jnp.bfloat16), g.astype(jnp.bfloat16)
    y, back = jax.vjp(dense, x, w.astype(jnp.float32))
    dx, dw = back(g)
    assert (y.dtype, dx.dtype, dw.dtype) == (jnp.bfloat16, jnp.bfloat16, jnp.float32)


def test_sums_are_wider_than_16_bits(phrased):
    """4097 ones: adding in bfloat16 would stop at 256."""
    ones = jnp.ones((1, 4097, 1), jnp.bfloat16)
    w = jnp.ones((1, 1), jnp.bfloat16)
    _, back = jax.vjp(lambda w, b: dense(ones, w, bias=b), w, jnp.zeros(1, jnp.bfloat16))
    assert [float(a.ravel()[0]) for a in back(ones)] == [4096.0, 4096.0]
    assert float(dense(ones.reshape(1, 1, -1), jnp.ones((4097, 1), jnp.bfloat16))[0, 0, 0]) == 4096


@pytest.mark.usefixtures("phrased")
def test_wide_results_are_not_rounded():
    args = inputs((5,), (7,), jnp.bfloat16)
    want = naive(*args, 1)
    y, back = jax.vjp(lambda *a: dense(a[0], a[1], bias=a[2], wide=True), *args[:3])
    assert y.dtype == jnp.float32
    assert_near([y], want[:1], 1e-6)
    grads = back(args[3].astype(jnp.float32))
    assert all(a.dtype == jnp.bfloat16 for a in grads)
    assert_near(grads, want[1:], 5e-3)


@pytest.mark.parametrize("transform", ["vmap", "scan", "checkpoint"])
@pytest.mark.usefixtures("phrased")
def test_under_transforms(transform):
    x, w, bias, g = inputs((2, 3), (4,), batch=2)
    want = naive(x, w, bias, g, 2)

    def loss(x, w, bias):
        if transform == "vmap":
            y = jax.vmap(lambda x: dense(x[None], w, contract=2, bias=bias)[0])(x)
        elif transform == "scan":
            y = jax.lax.scan(lambda c, x: (c, dense(x[None], w, contract=2, bias=bias)[0]), 0.0, x)[
                1
            ]
        else:
            policy = jax.checkpoint_policies.dots_with_no_batch_dims_saveable
            y = jax.checkpoint(lambda *a: dense(a[0], a[1], contract=2, bias=a[2]), policy=policy)(
                x, w, bias
            )
        return (y * g).sum(), y

    (_, y), grads = jax.jit(jax.value_and_grad(loss, (0, 1, 2), has_aux=True))(x, w, bias)
    assert_near((y, *grads), want, 1e-12)


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize(
    ("x_axes", "w_axes", "contract"),
    [
        (("batch", "length", None), (None, "kv_heads", "group", "head_dim"), 1),
        (
            ("batch", "length", "kv_heads", "group", "head_dim"),
            ("kv_heads", "group", None, None),
            3,
        ),
    ],
)
@pytest.mark.parametrize(("dtype", "bound"), [(np.float64, 1e-12), (jnp.bfloat16, 1e-2)])
def test_on_a_mesh(sequence_parallel, x_axes, w_axes, contract, dtype, bound):
    mesh = make_mesh(data=4, tensor=2)
    inner, out = ((6,), (2, 3, 4)) if contract == 1 else ((2, 3, 4), (6,))
    args = inputs(inner, out, dtype, batch=8)
    want = naive(*args, contract)
    with use_rules(compute_table(sequence_parallel=sequence_parallel), mesh) as active:
        x = jax.device_put(args[0], NamedSharding(mesh, active.spec(*x_axes)))
        w = jax.device_put(args[1], NamedSharding(mesh, active.spec(*w_axes[: args[1].ndim])))
        got = value_and_gradients(x, w, args[2], args[3], contract)
    assert_near(got, want, bound)
    if contract == 1 and not sequence_parallel:
        assert got[2].sharding.spec == PartitionSpec(None, "tensor")
