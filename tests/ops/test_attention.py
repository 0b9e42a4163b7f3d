"""Attention: values and gradients against NumPy, documents kept apart, transforms, a mesh."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding

from shardtrain.ops import attention as module
from shardtrain.ops.attention import attention, split_groups
from shardtrain.ops.dense import Phrasing
from shardtrain.ops.dropout import mask_of, sample_keys, thinned, thinning
from shardtrain.sharding.mesh import make_mesh
from shardtrain.sharding.rules import compute_table, one_of_many, use_rules


@pytest.fixture(autouse=True)
def wide_types():
    with jax.enable_x64(True):
        yield


@pytest.fixture(params=[Phrasing(False, False), Phrasing(True, True)], ids=["whole", "blocks"])
def phrased(request, monkeypatch):
    """Both ways of cutting the work, with blocks small enough for several to fit."""
    monkeypatch.setattr(module, "phrasing", lambda: request.param)
    monkeypatch.setattr(module, "BLOCK", 4)
    return request.param


def inputs(length=9, batch=2, kv_heads=2, group=3, head_dim=5, dtype=np.float64, seed=0):
    rng = np.random.default_rng(seed)
    wide = (batch, length, kv_heads, group, head_dim)
    narrow = (batch, length, kv_heads, head_dim)
    return [jnp.asarray(rng.standard_normal(s), dtype) for s in (wide, narrow, narrow, wide)]


def documents(length, batch=2):
    """Three documents a row, cut at other places in each row."""
    rng = np.random.default_rng(1)
    cuts = np.sort(rng.integers(0, length + 1, (batch, 2)), 1)
    return jnp.asarray((np.arange(length)[None, :, None] >= cuts[:, None]).sum(-1), jnp.int32)


def slopes(kv_heads=2, group=3):
    return jnp.asarray(np.linspace(0.1, 0.9, kv_heads * group).reshape(kv_heads, group))


def thin(rate=0.3, batch=2, kv_heads=2, group=3):
    """Dropout of the attention weights of a layer."""
    keys = sample_keys(jax.random.key(5), jnp.arange(batch, dtype=jnp.uint32))
    return thinning(rate, keys, 1, 2, (kv_heads, group))


def whole_factors(thinning, length):
    """What it multiplies all weights by: [batch, kv_heads, group, length, length]."""
    at = jnp.arange(length)
    shape = (*thinning.words.shape[:3], length, length)
    mask = mask_of(thinning, at[None, None, :, None], at[None, None, None], shape)
    return np.asarray(thinned(jnp.ones(shape), mask))


def naive(q, k, v, g, segments=None, alibi=None, thinning=None, causal=True):
    """The definition and its gradient, whole matrices, float64 NumPy."""
    q, k, v, g = (np.asarray(a, np.float64) for a in (q, k, v, g))
    length, scale = q.shape[1], q.shape[-1] ** -0.5
    scores = np.einsum("btngh,bsnh->bngts", q, k) * scale
    at = np.arange(length)
    if alibi is not None:
        scores -= np.asarray(alibi)[:, :, None, None] * np.abs(at[:, None] - at)
    seen = np.ones((q.shape[0], length, length), bool)
    if causal:
        seen &= at[:, None] >= at
    if segments is not None:
        segments = np.asarray(segments)
        seen &= segments[:, :, None] == segments[:, None, :]
    scores = np.where(seen[:, None, None], scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    kept = 1.0 if thinning is None else whole_factors(thinning, length)
    dweights = np.einsum("btngh,bsnh->bngts", g, v) * kept
    slope = weights * (dweights - (weights * dweights).sum(-1, keepdims=True)) * scale
    weights = weights * kept
    return (
        np.einsum("bngts,bsnh->btngh", weights, v),
        np.einsum("bngts,bsnh->btngh", slope, k),
        np.einsum("bngts,btngh->bsnh", slope, q),
        np.einsum("bngts,btngh->bsnh", weights, g),
    )


@partial(jax.jit, static_argnums=0)
def _run(f, q, k, v, g):
    out, back = jax.vjp(f, q, k, v)
    return out, *back(g)


def value_and_gradients(f, q, k, v, g):
    """A new function each time: a phrasing is no argument of the jitted helper."""
    return _run(partial(f), q, k, v, g)


def assert_near(got, want, bound):
    # Relative to a thousandth of the largest where the true gradient is zero (one position).
    floor = 1e-3 * max(np.abs(np.asarray(b, np.float64)).max() for b in want)
    for a, b in zip(got, want, strict=True):
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        assert np.abs(a - b).max() <= bound * max(np.abs(b).max(), floor)


@pytest.mark.parametrize(
    ("kind", "length"),
    [
        ("plain", 1),
        ("plain", 8),
        ("plain", 9),
        ("documents", 9),
        ("alibi", 8),
        ("both", 9),
        ("bidirectional", 9),
        ("thinned", 9),
        ("thinned both ways", 9),
    ],
)
@pytest.mark.usefixtures("phrased")
def test_value_and_gradients(kind, length):
    q, k, v, g = inputs(length)
    options = {}
    if kind in ("documents", "both"):
        options["segments"] = documents(length)
    if kind in ("alibi", "both"):
        options["alibi"] = slopes()
    if kind in ("bidirectional", "thinned both ways"):
        options["causal"] = False
    if "thinned" in kind:
        options["thinning"] = thin()
    got = value_and_gradients(lambda *a: attention(*a, **options), q, k, v, g)
    assert_near(got, naive(q, k, v, g, **options), 1e-12)


@pytest.mark.parametrize(("kv_heads", "group"), [(1, 1), (3, 1), (1, 4), (2, 2)])
@pytest.mark.usefixtures("phrased")
def test_groups_of_query_heads(kv_heads, group):
    args = inputs(6, kv_heads=kv_heads, group=group)
    got = value_and_gradients(attention, *args)
    assert_near(got, naive(*args), 1e-12)


@pytest.mark.parametrize(("dtype", "bound"), [(np.float32, 2e-6), (jnp.bfloat16, 2e-2)])
@pytest.mark.parametrize("single", [False, True])
@pytest.mark.usefixtures("phrased")
def test_narrow_types(dtype, bound, single):
    """Also with one of everything: XLA then sees plain matrices and folds transposes into them."""
    one = {"batch": 1, "kv_heads": 1, "group": 1} if single else {}
    args, drops = inputs(9, dtype=dtype, **one), thin(**one)
    got = value_and_gradients(partial(attention, thinning=drops), *args)
    assert all(a.dtype == dtype for a in got)
    assert_near(got, naive(*args, thinning=drops), bound)


def test_what_is_dropped():
    """As many as asked for; others in each sample, head, layer; the rest keeps the sum."""
    kept = whole_factors(thin(0.25), 200)
    assert set(np.unique(kept)) == {0.0, 4 / 3}
    assert abs((kept == 0).mean() - 0.25) < 2e-3
    assert abs(kept.mean() - 1) < 3e-3
    masks = kept.reshape(-1, 200 * 200) == 0
    together = (masks[:, None] & masks[None]).mean(-1)
    np.fill_diagonal(together, 1 / 16)
    assert np.abs(together - 1 / 16).max() < 0.01
    # No query or key has its own chance, nor are neighbours alike.
    assert np.abs((kept == 0).mean((0, 1, 2, 3)) - 0.25).max() < 0.06
    near = (kept[..., 1:] == 0) & (kept[..., :-1] == 0)
    assert abs(near.mean() - 1 / 16) < 2e-3
    keys = sample_keys(jax.random.key(5), jnp.arange(2, dtype=jnp.uint32))
    other = whole_factors(thinning(0.25, keys, 2, 2, (2, 3)), 200)
    assert abs(((kept == 0) & (other == 0)).mean() - 1 / 16) < 2e-3
    assert thinning(0.0, keys, 2, 2, (2, 3)) is None
    assert thinning(0.25, None, 2, 2, (2, 3)) is None


@pytest.mark.usefixtures("phrased")
def test_documents_do_not_see_each_other():
    """O-25: altering document 1 changes nothing in document 2, to the bit."""
    q, k, v, g = inputs(9)
    segments = jnp.asarray(np.arange(9) >= 5, jnp.int32)[None].repeat(2, 0)
    first = slice(0, 5)

    def f(q, k, v):
        return attention(q, k, v, segments=segments)

    def run(q, k, v):
        return value_and_gradients(f, q, k, v, g)

    before = run(q, k, v)
    after = run(*(a.at[:, first].multiply(-3.0) for a in (q, k, v)))
    for a, b in zip(before, after, strict=True):
        np.testing.assert_array_equal(a[:, 5:], b[:, 5:])
        assert not np.array_equal(a[:, first], b[:, first])


def test_split_groups():
    x = jnp.asarray(np.random.default_rng(0).standard_normal((2, 3, 2, 5, 4)))
    parts, back = jax.vjp(split_groups, x)
    for part, want in zip(parts, (x[..., :3, :], x[..., 3, :], x[..., 4, :]), strict=True):
        np.testing.assert_array_equal(part, want)
    np.testing.assert_array_equal(back(parts)[0], x)


@pytest.mark.parametrize("transform", ["vmap", "scan", "checkpoint"])
@pytest.mark.usefixtures("phrased")
def test_under_transforms(transform):
    q, k, v, g = inputs(9)
    segments = documents(9)

    def one(q, k, v, segments):
        return attention(q[None], k[None], v[None], segments=segments[None], alibi=slopes())[0]

    def f(q, k, v):
        if transform == "vmap":
            return jax.vmap(one)(q, k, v, segments)
        if transform == "scan":
            return jax.lax.scan(lambda c, row: (c, one(*row)), 0, (q, k, v, segments))[1]
        whole = jax.checkpoint(lambda *a: attention(*a, segments=segments, alibi=slopes()))
        return whole(q, k, v)

    got = value_and_gradients(f, q, k, v, g)
    assert_near(got, naive(q, k, v, g, segments, slopes()), 1e-12)


@pytest.mark.parametrize(("dtype", "bound"), [(np.float64, 1e-12), (jnp.bfloat16, 2e-2)])
def test_on_a_mesh(dtype, bound, monkeypatch):
    monkeypatch.setattr(module, "BLOCK", 4)
    mesh = make_mesh(data=4, tensor=2)
    q, k, v, g = inputs(9, batch=8, dtype=dtype)
    segments = documents(9, 8)
    want = naive(q, k, v, g, segments)
    with use_rules(compute_table(), mesh) as active:
        wide = NamedSharding(mesh, active.spec("batch", "length", "kv_heads", None, None))
        narrow = NamedSharding(mesh, active.spec("batch", "length", "kv_heads", None))
        placed = [jax.device_put(a, wide if a.ndim == 5 else narrow) for a in (q, k, v, g)]
        run = jax.jit(
            lambda *a: value_and_gradients(lambda *b: attention(*b, segments=segments), *a)
        )
        got = run(*placed)
        text = run.lower(*placed).compile().as_text()
    assert_near(got, want, bound)
    assert "all-gather" not in text
    assert "all-reduce" not in text


@pytest.mark.parametrize(("platform", "hoisted"), [("cuda", False), ("cpu", True)])
def test_no_mask_is_made_before_the_layers_and_kept(platform: str, hoisted: bool) -> None:
    """It would be as large as the scores. On a CPU rows are cut into blocks, and it is."""
    length, heads = 64, 2
    q = jax.ShapeDtypeStruct((1, length, heads, 1, 8), jnp.bfloat16)
    segments = jax.ShapeDtypeStruct((1, length), jnp.int32)

    def loss(x: jax.Array, segments: jax.Array) -> jax.Array:
        def layer(x: jax.Array, _: None) -> tuple[jax.Array, None]:
            k = x[..., 0, :]
            return attention(x, k, k, segments=segments, alibi=jnp.ones((heads, 1))), None

        return jax.lax.scan(layer, x, None, length=3)[0].astype(jnp.float32).sum()

    with one_of_many(platform, {"length": length}):
        jaxpr = jax.make_jaxpr(jax.grad(loss))(q, segments)
    outside = [v.aval.size for e in jaxpr.eqns if e.primitive.name != "scan" for v in e.outvars]
    assert (max(outside) >= heads * length**2) == hoisted
