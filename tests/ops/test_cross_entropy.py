"""Cross-entropy: values and gradients, padded vocabulary, a vocabulary split over a mesh."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from shardtrain.ops.cross_entropy import cross_entropy
from shardtrain.ops.sums import sum_dtype
from shardtrain.sharding.mesh import make_mesh
from shardtrain.sharding.rules import compute_table, mapped_over, use_rules

TABLE = compute_table()


@pytest.fixture(autouse=True)
def wide_types():
    with jax.enable_x64(True):
        yield


def inputs(vocab=11, padded=None, batch=8, length=3, dtype=np.float64, seed=0):
    rng = np.random.default_rng(seed)
    logits = jnp.asarray(3 * rng.standard_normal((batch, length, padded or vocab)), dtype)
    targets = jnp.asarray(rng.integers(0, vocab, (batch, length)), jnp.int32)
    return logits, targets, *(jnp.asarray(rng.standard_normal((batch, length))) for _ in "ab")


def naive(logits, targets, g_nll, g_log_z, vocab_size):
    logits, targets = np.asarray(logits, np.float64), np.asarray(targets)
    real = logits[..., :vocab_size]
    log_z = np.log(np.exp(real).sum(-1))
    nll = log_z - np.take_along_axis(real, targets[..., None], -1)[..., 0]
    softmax = np.zeros_like(logits)
    softmax[..., :vocab_size] = np.exp(real - log_z[..., None])
    onehot = np.arange(logits.shape[-1]) == targets[..., None]
    g_nll, g_log_z = np.asarray(g_nll)[..., None], np.asarray(g_log_z)[..., None]
    return nll, log_z, softmax * (g_nll + g_log_z) - onehot * g_nll


@partial(jax.jit, static_argnums=4)
def value_and_gradient(logits, targets, g_nll, g_log_z, vocab_size):
    out, back = jax.vjp(lambda x: cross_entropy(x, targets, vocab_size=vocab_size), logits)
    return *out, *back((g_nll.astype(out[0].dtype), g_log_z.astype(out[1].dtype)))


def assert_near(got, want, bound):
    for a, b in zip(got, want, strict=True):
        assert np.abs(np.asarray(a, np.float64) - b).max() <= bound * np.abs(b).max()


@pytest.mark.parametrize(("vocab", "padded"), [(11, None), (1, None), (101, 104), (5, 8)])
@pytest.mark.parametrize(
    ("dtype", "bound"), [(np.float64, 1e-12), (np.float32, 2e-6), (jnp.bfloat16, 1e-2)]
)
def test_value_and_gradient(vocab, padded, dtype, bound):
    args = inputs(vocab, padded, dtype=dtype)
    got = value_and_gradient(*args, vocab)
    assert got[2].dtype == dtype
    assert got[0].dtype == sum_dtype(dtype)
    want = naive(*args, vocab)
    assert_near(got[1:], want[1:], bound)
    assert np.abs(np.asarray(got[0], np.float64) - want[0]).max() <= bound * np.abs(want[1]).max()


@pytest.mark.parametrize("huge", [1e4, -1e4])
def test_padding_has_no_mass_and_no_gradient(huge):
    """O-18: vocabulary 101 in 104 rows; whatever stands in the padding changes nothing."""
    logits, targets, *g = inputs(101, 104)
    padded = jnp.arange(104) >= 101
    other = jnp.where(padded, huge, logits)
    first = value_and_gradient(logits, targets, *g, 101)
    second = value_and_gradient(other, targets, *g, 101)
    bare = value_and_gradient(logits[..., :101], targets, *g, 101)
    assert not np.any(np.asarray(first[2])[..., 101:])
    for a, b in zip(first, second, strict=True):
        np.testing.assert_array_equal(a, b)
    np.testing.assert_allclose(first[0], bare[0], rtol=1e-14)


def test_large_logits_stay_finite():
    logits, targets, *g = inputs()
    got = value_and_gradient(logits * 1e4, targets, *g, 11)
    assert all(np.isfinite(a).all() for a in got)


@pytest.mark.parametrize("transform", ["vmap", "scan", "checkpoint"])
def test_under_transforms(transform):
    logits, targets, *g = inputs(101, 104)

    def f(logits, targets):
        if transform == "vmap":
            one = lambda x, t: cross_entropy(x[None], t[None], vocab_size=101)  # noqa: E731
            return [a[:, 0] for a in jax.vmap(one)(logits, targets)]
        if transform == "scan":
            body = lambda c, row: (c, cross_entropy(row[0][None], row[1][None], vocab_size=101))  # noqa: E731
            return [a[:, 0] for a in jax.lax.scan(body, 0, (logits, targets))[1]]
        return list(
            jax.checkpoint(lambda x, t: cross_entropy(x, t, vocab_size=101))(logits, targets)
        )

    def run(logits, targets, g_nll, g_log_z):
        out, back = jax.vjp(lambda x: f(x, targets), logits)
        return *out, *back([g_nll, g_log_z])

    got = jax.jit(run)(logits, targets, *g)
    assert_near(got, naive(logits, targets, *g, 101), 1e-12)


@pytest.mark.parametrize(("data", "tensor"), [(8, 1), (4, 2), (1, 8)])
def test_split_vocabulary(data, tensor):
    mesh = make_mesh(data=data, tensor=tensor)
    logits, targets, *g = inputs(101, 104)
    want = naive(logits, targets, *g, 101)
    with use_rules(TABLE, mesh) as active:
        whole = NamedSharding(mesh, active.spec("batch", "length", "vocab"))
        got = value_and_gradient(jax.device_put(logits, whole), targets, *g, 101)
    assert_near(got, want, 1e-12)
    assert got[2].sharding.spec == whole.spec


@pytest.mark.parametrize("tensor", [1, 2])
def test_inside_unreduced_sums(tensor):
    """Inside `vmap(spmd_axis_name=...)` the data axes are taken; the op maps over the others."""
    data = 8 // tensor
    mesh = make_mesh(data=data, tensor=tensor)
    logits, targets, *g = inputs(101, 104, batch=2 * data)
    want = naive(logits, targets, *g, 101)

    def run(logits, targets, g_nll, g_log_z):
        parts = [
            jax.lax.with_sharding_constraint(
                a.reshape(data, 2, *a.shape[1:]), NamedSharding(mesh, PartitionSpec("data"))
            )
            for a in (logits, targets, g_nll, g_log_z)
        ]
        with mapped_over("replica", "data"):
            out = jax.vmap(lambda *a: value_and_gradient(*a, 101), spmd_axis_name=("data",))(*parts)
        return [a.reshape(-1, *a.shape[2:]) for a in out]

    with use_rules(TABLE, mesh):
        got = jax.jit(run)(logits, targets, *g)
    assert_near(got, want, 1e-12)
