"""What traced functions cost: products, bytes moved, bytes held."""

import jax
import jax.numpy as jnp
import pytest

from shardtrain.plan.work import Product, trace, work_of

F32 = jnp.float32


def shape(*dims: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(dims, F32)


def test_a_product_has_its_sizes_and_bytes() -> None:
    work = work_of(trace(jnp.matmul, shape(8, 32), shape(32, 16)))
    assert work.products == (Product(1, 8, 32, 16, "float32"),)
    assert work.flops == 2 * 8 * 32 * 16
    assert work.product_bytes == 4 * (8 * 32 + 32 * 16 + 8 * 16)
    assert work.other_bytes == 0


def test_a_batch_of_products_counts_each() -> None:
    work = work_of(
        trace(lambda x, y: jnp.einsum("bij,bjk->bik", x, y), shape(3, 4, 5), shape(3, 5, 6))
    )
    assert work.products == (Product(3, 4, 5, 6, "float32"),)


def test_elementwise_work_is_done_by_what_reads_it() -> None:
    """`exp(x) + 1` summed over rows reads x once and writes the sums: nothing between."""
    work = work_of(trace(lambda x: jnp.sum(jnp.exp(x) + 1.0, axis=1), shape(64, 128)))
    assert work.other_bytes == 4 * (64 * 128 + 64)
    assert work.peak == 0


def test_an_operand_of_a_product_is_written_first() -> None:
    work = work_of(trace(lambda x, w: jnp.tanh(x) @ w, shape(8, 32), shape(32, 16)))
    assert work.other_bytes == 4 * 2 * 8 * 32
    assert work.peak == 4 * 8 * 32


def test_another_form_of_an_operand_is_no_second_array() -> None:
    work = work_of(trace(lambda x, w: x.T @ w, shape(32, 8), shape(32, 16)))
    assert (work.other_bytes, work.peak) == (0, 0)


def test_what_a_barrier_ties_together_is_read_apart() -> None:
    def function(x: jax.Array, at: jax.Array, table: jax.Array) -> jax.Array:
        x, at = jax.lax.optimization_barrier((jnp.exp(x), at))
        return x.sum() + table[at].sum()  # the rows are found without x

    def plain(x: jax.Array, at: jax.Array, table: jax.Array) -> jax.Array:
        return jnp.exp(x).sum() + table[at].sum()

    shapes = shape(64, 128), jax.ShapeDtypeStruct((4,), jnp.int32), shape(16, 8)
    assert work_of(trace(function, *shapes)) == work_of(trace(plain, *shapes))


def test_a_sum_that_a_loop_carries_is_held_once() -> None:
    def function(total: jax.Array, xs: jax.Array) -> jax.Array:
        return jax.lax.scan(lambda total, x: (total + x.T @ x, None), total, xs)[0]

    work = work_of(trace(function, shape(16, 16), shape(4, 8, 16)))
    assert work.peak == 4 * 16 * 16  # the product; the sum is the result


def test_what_is_read_last_is_held_till_then() -> None:
    def function(x: jax.Array, w: jax.Array) -> jax.Array:
        first = x @ w
        second = first @ w
        return second + first  # the first is held beside the second

    work = work_of(trace(function, shape(16, 16), shape(16, 16)))
    assert work.peak == 4 * 2 * 16 * 16


@pytest.mark.parametrize("factor", [1, 4])
def test_more_samples_are_more_work(factor: int) -> None:
    def function(x: jax.Array, w: jax.Array) -> jax.Array:
        return jnp.tanh(x @ w) @ w

    one = work_of(trace(function, shape(8, 32), shape(32, 32)))
    many = work_of(trace(function, shape(8 * factor, 32), shape(32, 32)))
    assert one.times(factor).flops == many.flops
    assert one.times(factor).peak == many.peak
