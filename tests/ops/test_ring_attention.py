"""Ring and Ulysses against the attention of one device: values, gradients, and bytes."""

from functools import partial
from itertools import product
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding

from shardtrain.ops import blockwise
from shardtrain.ops.attention import attention
from shardtrain.ops.dropout import sample_keys, thinning
from shardtrain.ops.position import rotary
from shardtrain.sharding.mesh import make_mesh
from shardtrain.sharding.rules import Active, compute_table, mapped_over, use_rules
from shardtrain.strategies.zigzag import make_zigzag
from tests.rows import shortened

TABLE = compute_table()
BATCH, LENGTH, KV_HEADS, GROUP, HEAD_DIM = 4, 48, 4, 2, 6
KINDS = ("causal", "packed", "alibi", "rope", "thinned", "all")


@pytest.fixture(autouse=True)
def wide_types(monkeypatch):
    """Also blocks small enough for several to fit into a device's positions."""
    monkeypatch.setattr(blockwise, "CPU_BLOCK", 3)
    with jax.enable_x64(True):
        yield


def inputs(kv_heads=KV_HEADS, group=GROUP, length=LENGTH, dtype=np.float64):
    rng = np.random.default_rng(0)
    wide, narrow = (BATCH, length, kv_heads, group, HEAD_DIM), (BATCH, length, kv_heads, HEAD_DIM)
    return [jnp.asarray(rng.standard_normal(s), dtype) for s in (wide, narrow, narrow, wide)]


def options(kind: str, kv_heads=KV_HEADS, group=GROUP, length=LENGTH) -> dict[str, Any]:
    """What else a kind of attention reads: documents, slopes, positions."""
    rng = np.random.default_rng(1)
    starts = rng.random((BATCH, length)) < 0.1
    found: dict[str, Any] = {}
    if kind in ("packed", "all"):
        found["segments"] = jnp.asarray(np.cumsum(starts, 1), jnp.int32)
    if kind in ("alibi", "all"):
        slopes = np.linspace(0.05, 0.9, kv_heads * group).reshape(kv_heads, group)
        found["alibi"] = jnp.asarray(slopes)
    if kind in ("thinned", "all"):
        keys = sample_keys(jax.random.key(0), jnp.arange(BATCH, dtype=jnp.uint32))
        found["thinning"] = thinning(0.3, keys, 0, 2, (kv_heads, group))
    if kind in ("rope", "all"):
        places = np.arange(length)
        inside = places - np.maximum.accumulate(np.where(starts, places, 0), axis=1)
        found["positions"] = jnp.asarray(inside, jnp.int32)
    return found


def attend(q, k, v, *, implementation, positions=None, **read):
    """Attention with rotations, if there are positions."""
    if positions is not None:
        q = rotary(q, positions, 100.0)
        k = rotary(k[..., None, :], positions, 100.0)[..., 0, :]
    return attention(q, k, v, implementation=implementation, **read)


def value_and_gradients(q, k, v, g, implementation="xla", **read):
    run = partial(attend, implementation=implementation, **read)
    out, back = jax.vjp(run, q, k, v)
    return out, *back(g)


def in_zigzag(trees, mesh):
    """Arrays [batch, length, ...] in the order of a ring."""
    num, length = 2 * mesh.shape["context"], LENGTH
    chunks = np.arange(length).reshape(num, -1)
    order = np.concatenate([chunks[[i, num - 1 - i]].ravel() for i in range(num // 2)])
    return jax.tree.map(
        lambda x: x[:, order] if x.shape[1] == length else x,
        trees,
    )


def placed(trees, active: Active):
    names = {
        5: ("batch", "length", "kv_heads", None, None),
        4: ("batch", "length", "kv_heads", None),
    }

    def put(x):
        axes = names.get(x.ndim) or (
            ("batch", "length") if x.shape[1] == LENGTH else ("kv_heads", None)
        )
        if x.dtype == np.uint32:
            axes = ("batch", "kv_heads", None, None)
        return jax.device_put(x, NamedSharding(active.mesh, active.spec(*axes)))

    return jax.tree.map(put, trees)


def assert_near(got, want, bound=1e-12):
    for a, b in zip(got, want, strict=True):
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        assert np.abs(a - b).max() <= bound * np.abs(b).max()


MESHES = {"c2": {"context": 2, "data": 4}, "c4 t2": {"context": 4, "tensor": 2}}


SHORT = {("c2", "all"), *(("c4 t2", kind) for kind in KINDS if kind != "all")}


@pytest.mark.parametrize(("mesh", "kind"), shortened(product(MESHES, KINDS), SHORT.__contains__))
@pytest.mark.parametrize("way", ["ring", "ulysses"])
def test_equals_one_device(way, mesh, kind):
    degrees = {"data": 1} | MESHES[mesh]
    kv_heads = degrees["context"] * degrees.get("tensor", 1)
    args, read = inputs(kv_heads), options(kind, kv_heads)
    want = jax.jit(value_and_gradients)(*args, **read)
    devices = make_mesh(**degrees)
    order = partial(in_zigzag, mesh=devices) if way == "ring" else lambda trees: trees
    with use_rules(TABLE, devices) as active:
        run = jax.jit(partial(value_and_gradients, implementation=way))
        got = run(*placed(order(args), active), **placed(order(read), active))
    assert_near(got, order(list(want)))


@pytest.mark.parametrize("implementation", ["ring", "ulysses"])
@pytest.mark.parametrize("length", [1, 7])
def test_one_device_goes_tile_by_tile(implementation, length):
    args, read = inputs(length=length), options("all", length=length)
    run = jax.jit(partial(value_and_gradients, implementation=implementation))
    assert_near(run(*args, **read), jax.jit(value_and_gradients)(*args, **read))


@pytest.mark.parametrize(("dtype", "bound"), [(np.float32, 1e-5), (jnp.bfloat16, 3e-2)])
def test_narrow_types(dtype, bound):
    args, read = inputs(dtype=dtype), options("all")
    want = jax.jit(value_and_gradients)(*(a.astype(np.float64) for a in args), **read)
    devices = make_mesh(context=2, data=2, tensor=2)
    order = partial(in_zigzag, mesh=devices)
    with use_rules(TABLE, devices) as active:
        run = jax.jit(partial(value_and_gradients, implementation="ring"))
        got = run(*placed(order(args), active), **placed(order(read), active))
    assert all(a.dtype == dtype for a in got)
    assert_near(got, order(list(want)), bound)


@pytest.mark.parametrize("way", ["ring", "ulysses"])
def test_inside_a_map_over_data_shards(way):
    """As in accumulation: no spec may name the axes that a vmap runs over."""
    args, read = inputs(), options("packed")
    want = jax.jit(value_and_gradients)(*args, **read)
    devices = make_mesh(context=2, data=2, tensor=2)
    order = partial(in_zigzag, mesh=devices) if way == "ring" else lambda trees: trees
    cut = partial(jax.tree.map, lambda x: x.reshape(2, -1, *x.shape[1:]))
    with use_rules(TABLE, devices), mapped_over("replica", "data"):

        def one(args, read):
            return value_and_gradients(*args, implementation=way, **read)

        run = jax.jit(jax.vmap(one, spmd_axis_name=("data",)))
        got = run(cut(order(args)), cut(order(read)))
    assert_near([a.reshape(-1, *a.shape[2:]) for a in got], order(list(want)))


def test_zigzag():
    """Every position is there once, with its tokens; the work of all devices is the same."""
    mesh = make_mesh(context=4, data=2)
    tokens = np.arange(2 * 4 * LENGTH, dtype=np.int32).reshape(2, 4, LENGTH)
    batch = {"tokens": tokens, "sample": np.zeros((2, 4), np.uint32)}
    got = jax.jit(make_zigzag(TABLE, mesh))(batch)
    places = np.asarray(got["places"])
    chunk = LENGTH // 8
    assert places[0, 0, ::chunk].tolist() == [chunk * c for c in (0, 7, 1, 6, 2, 5, 3, 4)]
    np.testing.assert_array_equal(np.take_along_axis(tokens, places, 2), got["tokens"])
    assert got["sample"].shape == (2, 4)


def temporary_bytes(way: str, context: int, length: int) -> int:
    shapes = [(1, length, 8, 1, 8), (1, length, 8, 8), (1, length, 8, 8), (1, length, 8, 1, 8)]
    mesh = make_mesh(context=context, data=1, devices=jax.devices()[:context])
    with use_rules(TABLE, mesh) as active:
        wide = active.spec("batch", "length", None, None, None)
        args = [
            jax.ShapeDtypeStruct(
                s, np.float32, sharding=NamedSharding(mesh, jax.P(*wide[: len(s)]))
            )
            for s in shapes
        ]
        run = jax.jit(partial(value_and_gradients, implementation=way))
        return int(run.lower(*args).compile().memory_analysis().temp_size_in_bytes)


@pytest.mark.parametrize(
    ("way", "most"), [("ring", (0.85, 0.55, 0.3)), ("ulysses", (0.62, 0.3, 0.16))]
)
def test_temporary_bytes_fall_with_the_degree(way, most, monkeypatch):
    """A ring has buffers for what travels, which one device has not: twice its part of the rest."""
    monkeypatch.setattr(blockwise, "CPU_BLOCK", 32)
    one, *others = (temporary_bytes(way, context, 2**13) for context in (1, 2, 4, 8))
    for part, bound in zip(others, most, strict=True):
        assert part < bound * one


@pytest.mark.parametrize("way", ["ring", "ulysses"])
def test_no_masks_are_kept(way, monkeypatch):
    """Documents are the same in every layer, and masks of all tiles are of size length^2."""
    monkeypatch.setattr(blockwise, "CPU_BLOCK", 64)

    def temporary(length: int) -> int:
        def loss(x, segments):
            def layer(x, _):
                k = x[..., 0, :]
                return attention(x, k, k, segments=segments, implementation=way), None

            return jax.lax.scan(jax.checkpoint(layer), x, None, length=3)[0].sum()

        x = jax.ShapeDtypeStruct((1, length, 2, 1, 4), np.float32)
        segments = jax.ShapeDtypeStruct((1, length), np.int32)
        compiled = jax.jit(jax.grad(loss)).lower(x, segments).compile()
        return int(compiled.memory_analysis().temp_size_in_bytes)

    assert temporary(4096) < 2.2 * temporary(2048)
