"""Batch norm: values, gradients, and statistics over devices (O-21)."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from shardtrain.ops.batch_norm import batch_norm, normalise
from shardtrain.sharding.mesh import make_mesh
from shardtrain.sharding.rules import compute_table, use_rules


def column(*values: float) -> jax.Array:
    return jnp.array(values, jnp.float32).reshape(-1, 1, 1, 1)


def statistics(x: jax.Array, *, data: int, per_replica: bool) -> tuple[float, float]:
    mesh = make_mesh(data=data, devices=jax.devices()[:data])

    @jax.jit
    def run(x: jax.Array) -> tuple[jax.Array, jax.Array]:
        with use_rules(compute_table(), mesh):
            return batch_norm(x, jnp.ones(1), jnp.zeros(1), epsilon=0.0, per_replica=per_replica)[1]

    spec = jax.sharding.PartitionSpec("data")
    mean, variance = run(jax.device_put(x, jax.sharding.NamedSharding(mesh, spec)))
    return float(mean[0]), float(variance[0])


@pytest.mark.smoke312
@pytest.mark.parametrize("data", [1, 2, 4])
def test_statistics_are_those_of_the_global_batch(data: int) -> None:  # O-21
    """Shards [0, 0] and [2, 4]: the mean of their own variances would be 0.5."""
    assert statistics(column(0, 0, 2, 4), data=data, per_replica=False) == (1.5, 2.75)


def test_per_replica_has_those_of_each_device() -> None:
    assert statistics(column(0, 0, 2, 4), data=2, per_replica=True) == (1.5, 0.5)
    assert statistics(column(0, 0, 2, 4), data=4, per_replica=True) == (1.5, 0.0)


def test_values_and_gradients_are_the_textbook_ones() -> None:
    random = np.random.default_rng(0)
    x = jnp.asarray(random.normal(3.0, 2.0, (6, 4, 5, 3)), jnp.float32)
    scale, bias = (jnp.asarray(random.normal(size=3), jnp.float32) for _ in range(2))
    weight = jnp.asarray(random.normal(size=x.shape), jnp.float32)

    def ours(x: jax.Array, scale: jax.Array, bias: jax.Array) -> jax.Array:
        return jnp.sum(batch_norm(x, scale, bias, epsilon=1e-5)[0] * weight)

    def plain(x: jax.Array, scale: jax.Array, bias: jax.Array) -> jax.Array:
        mean, variance = x.mean((0, 1, 2)), x.var((0, 1, 2))
        return jnp.sum(((x - mean) / jnp.sqrt(variance + 1e-5) * scale + bias) * weight)

    assert float(ours(x, scale, bias)) == pytest.approx(float(plain(x, scale, bias)), rel=1e-4)
    found, wanted = (jax.grad(f, argnums=(0, 1, 2))(x, scale, bias) for f in (ours, plain))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-4), found, wanted)


def test_large_means_lose_no_digits() -> None:
    x = column(10000.0, 10001.0, 10002.0, 10003.0)
    _, (mean, variance) = batch_norm(x, jnp.ones(1), jnp.zeros(1), epsilon=0.0)
    assert (float(mean[0]), float(variance[0])) == (10001.5, 1.25)


def test_half_precision_keeps_wide_statistics() -> None:
    x = column(0, 0, 2, 4).astype(jnp.bfloat16)
    ones, zeros = jnp.ones(1, jnp.bfloat16), jnp.zeros(1, jnp.bfloat16)
    y, found = batch_norm(x, ones, zeros, epsilon=0.0)
    assert (y.dtype, found[1].dtype) == (jnp.bfloat16, jnp.float32)
    same = normalise(x, ones, zeros, found, epsilon=0.0)
    np.testing.assert_array_equal(np.asarray(y, np.float32), np.asarray(same, np.float32))
