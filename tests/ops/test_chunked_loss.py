"""The loss in chunks of positions against the loss of all scores: values, gradients, bytes."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding

from shardtrain.ops.chunked_loss import chunked_cross_entropy
from shardtrain.ops.cross_entropy import cross_entropy
from shardtrain.ops.dense import dense
from shardtrain.sharding.mesh import make_mesh
from shardtrain.sharding.rules import compute_table, constrain, mapped_over, use_rules

TABLE = compute_table()
BATCH, LENGTH, EMBED = 4, 16, 6


@pytest.fixture(autouse=True)
def wide_types():
    with jax.enable_x64(True):
        yield


def inputs(vocab=13, padded=16, dtype=np.float64, length=LENGTH):
    rng = np.random.default_rng(0)
    x = rng.standard_normal((BATCH, length, EMBED))
    table = 2 * rng.standard_normal((padded, EMBED))
    targets = rng.integers(0, vocab, (BATCH, length))
    g = [rng.standard_normal((BATCH, length)) for _ in "ab"]
    return (
        jnp.asarray(x, dtype),
        jnp.asarray(table, dtype),
        jnp.asarray(targets, jnp.int32),
        *map(jnp.asarray, g),
    )


def losses(x, table, targets, vocab_size, chunks):
    if chunks:
        return chunked_cross_entropy(x, table, targets, vocab_size=vocab_size, chunks=chunks)
    scores = constrain(dense(x, table, transposed=True, wide=True), "batch", "length", "vocab")
    return cross_entropy(scores, targets, vocab_size=vocab_size)


@partial(jax.jit, static_argnums=(5, 6, 7))
def value_and_gradients(x, table, targets, g_nll, g_log_z, chunks, vocab_size=13, of=None):
    del of  # jax remembers what it traced under which rules by this
    run = partial(losses, targets=targets, vocab_size=vocab_size, chunks=chunks)
    out, back = jax.vjp(run, x, table)
    return *out, *back((g_nll.astype(out[0].dtype), g_log_z.astype(out[1].dtype)))


def assert_near(got, want, bound):
    for a, b in zip(got, want, strict=True):
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        assert np.abs(a - b).max() <= bound * np.abs(b).max()


@pytest.mark.parametrize("chunks", [1, 4, 7, 16])
@pytest.mark.parametrize("vocab", [13, 16])
def test_on_one_device(chunks, vocab):
    args = inputs(vocab)
    want = value_and_gradients(*args, 0, vocab)
    assert_near(value_and_gradients(*args, chunks, vocab), want, 1e-12)


@pytest.mark.parametrize("chunks", [1, 4, 7])
@pytest.mark.parametrize(
    "degrees",
    [
        {"tensor": 1, "data": 4},
        {"tensor": 2, "data": 2, "context": 2},
        {"tensor": 4, "data": 2},
    ],
    ids=lambda degrees: f"tp{degrees['tensor']}",
)
def test_on_a_mesh(degrees, chunks):
    args = inputs()
    want = value_and_gradients(*args, 0)
    mesh = make_mesh(**degrees, devices=jax.devices()[: int(np.prod(list(degrees.values())))])
    with use_rules(TABLE, mesh) as active:
        names = [("batch", "length", None), ("vocab", None), *[("batch", "length")] * 3]
        args = [
            jax.device_put(a, NamedSharding(mesh, active.spec(*n)))
            for a, n in zip(args, names, strict=True)
        ]
        got = value_and_gradients(*args, chunks, 13, str(degrees))
    assert_near(got, want, 1e-12)


@pytest.mark.parametrize("chunks", [4, 7])
def test_inside_a_map_over_data_shards(chunks):
    """As in accumulation: the table's gradient is a sum for each."""
    x, table, *rest = inputs()
    want = value_and_gradients(x, table, *rest, 0)
    cut = partial(jax.tree.map, lambda a: a.reshape(2, -1, *a.shape[1:]))
    with use_rules(TABLE, make_mesh(context=2, data=2, tensor=2)), mapped_over("replica", "data"):

        def one(x, rest):
            return value_and_gradients(x, table, *rest, chunks, 13, "mapped")

        *whole, dtable = jax.jit(jax.vmap(one, spmd_axis_name=("data",)))(cut(x), cut(rest))
    got = [a.reshape(BATCH, *a.shape[2:]) for a in whole]
    assert_near([*got, dtable.sum(0)], want, 1e-12)


@pytest.mark.parametrize(("dtype", "bound"), [(np.float32, 1e-5), (jnp.bfloat16, 3e-2)])
def test_narrow_types(dtype, bound):
    args = inputs(dtype=dtype)
    want = value_and_gradients(*(a.astype(np.float64) for a in args[:2]), *args[2:], 0)
    got = value_and_gradients(*args, 4)
    assert (got[0].dtype, got[2].dtype, got[3].dtype) == (np.float32, dtype, dtype)
    assert_near(got, want, bound)


def test_peak_bytes_fall_with_the_chunks():
    """Scores of 4096 positions and 4096 tokens are 64 MiB, several times over."""
    shapes = [(1, 4096, 16), (4096, 16), (1, 4096)]
    types = [np.float32, np.float32, np.int32]
    args = [jax.ShapeDtypeStruct(s, t) for s, t in zip(shapes, types, strict=True)]

    def peak(chunks: int) -> int:
        def run(x, table, targets):
            return sum(a.sum() for a in losses(x, table, targets, 4096, chunks))

        compiled = jax.jit(jax.grad(run, argnums=(0, 1))).lower(*args).compile()
        return int(compiled.memory_analysis().temp_size_in_bytes)

    whole, four, sixteen = peak(0), peak(4), peak(16)
    assert whole >= 2**26
    assert four <= 0.55 * whole
    assert sixteen <= 0.3 * four + 2**21
