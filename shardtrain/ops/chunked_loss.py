"""The head and its cross-entropy, some positions at a time: scores of all are never there.

Owns: the loop over chunks of positions, forward and backward, and the sums over it. The backward
makes the scores of a chunk again, which costs a product more than keeping them.
Does not own: the loss of a position and its gradient (`cross_entropy`), and the product (`dense`).

Each device cuts the positions that it has itself; what it sums up of the table's gradient leaves as
one sum a shard, added up outside, as in `embedding`.
"""

import contextlib
import math
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int

from shardtrain.ops import cross_entropy as whole
from shardtrain.ops.dense import dense
from shardtrain.ops.sums import sum_dtype
from shardtrain.sharding.rules import Active, current, manual_over

Pair = tuple[jax.Array, jax.Array]


def chunked_cross_entropy(
    x: Float[Array, "batch length embed"],
    table: Float[Array, "vocab embed"],
    targets: Int[Array, "batch length"],
    *,
    vocab_size: int,
    chunks: int,
) -> tuple[Float[Array, "batch length"], Float[Array, "batch length"]]:
    """`cross_entropy` of the scores `x @ table.T`.

    Args:
        x: activations.
        table: one row a token; rows from `vocab_size` on are padding.
        targets: token ids below `vocab_size`.
        vocab_size: number of real tokens.
        chunks: parts that the positions of each device are cut into; the last may be smaller, and
            where there are too few positions there are fewer parts.

    Returns:
        (nll, log_z), both in at least 32 bits.
    """
    return _loss(Static(current(), vocab_size, chunks), x, table, targets)


class Static(NamedTuple):
    """What is fixed when the code is traced."""

    active: Active | None
    vocab_size: int
    chunks: int

    @property
    def alone(self) -> bool:
        """Whether one device has it all."""
        return self.active is None or self.active.alone

    @property
    def axes(self) -> tuple[str, ...]:
        """Mesh axes that split the vocabulary."""
        return () if self.active is None else self.active.axes("vocab")

    def of_chunk(self, table: jax.Array, axes: tuple[str, ...]) -> whole.Static:
        """The same for the loss of one chunk."""
        active = self.active
        rows = len(table) * (math.prod(active.mesh.shape[a] for a in axes) if active else 1)
        wide = sum_dtype(table.dtype)
        return whole.Static(active, self.vocab_size, self.vocab_size < rows, wide, False)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _loss(static: Static, x: jax.Array, table: jax.Array, targets: jax.Array) -> Pair:
    return _forward(static, x, table, targets)[0]


Saved = tuple[jax.Array, jax.Array, jax.Array, jax.Array]
"""The three operands, and the log of each softmax's denominator."""


def _forward(
    static: Static, x: jax.Array, table: jax.Array, targets: jax.Array
) -> tuple[Pair, Saved]:
    run, active = partial(_local_loss, static), static.active
    if active is not None and not static.alone:
        rows = active.spec("batch", "length")
        run = jax.shard_map(
            run,
            mesh=active.context_mesh,
            axis_names=active.free,
            in_specs=(active.spec("batch", "length", None), active.spec("vocab", None), rows),
            out_specs=(rows, rows),
            check_vma=False,
        )
    nll, log_z = run(x, table, targets)
    return (nll, log_z), (x, table, targets, log_z)


def _backward(static: Static, saved: Saved, g: Pair) -> tuple[jax.Array, jax.Array, None]:
    run, active = partial(_local_gradients, static), static.active
    if active is not None and not static.alone:
        rows = active.spec("batch", "length")
        activations, weights = active.spec("batch", "length", None), active.spec("vocab", None)
        shards = (*active.axes("batch"), *active.axes("length"))
        run = jax.shard_map(
            run,
            mesh=active.context_mesh,
            axis_names=active.free,
            in_specs=(activations, weights, rows, rows, rows, rows),
            out_specs=(activations, PartitionSpec(shards or None, *weights)),
            check_vma=False,
        )
    dx, parts = run(*saved, *g)
    # Narrow before the backward goes on, or XLA would keep the wide sum until all else is done.
    dx, parts = lax.optimization_barrier((dx, parts))
    # A product, and in the gradient's dtype: see `embedding`.
    ones = jnp.ones(parts.shape[0], parts.dtype)
    precision = jax.lax.Precision.HIGHEST
    return dx, jnp.einsum("s,sve->ve", ones, parts, precision=precision), None


_loss.defvjp(_forward, _backward)


# -- on one device


def _local_loss(static: Static, x: jax.Array, table: jax.Array, targets: jax.Array) -> Pair:
    cut = _Cut.of(x.shape[1], static.chunks)
    of_chunk = static.of_chunk(table, static.axes)

    def step(_: None, start: jax.Array) -> tuple[None, Pair]:
        part, to = cut.take(x, start), cut.take(targets, start)
        nll, log_z, *_rest = whole.local_loss(of_chunk, static.axes, _scores(part, table), to)
        return None, (nll, log_z)

    with _on_one_device(static):
        nll, log_z = lax.scan(step, None, cut.starts)[1]
    return cut.joined(nll), cut.joined(log_z)


def _local_gradients(
    static: Static,
    x: jax.Array,
    table: jax.Array,
    targets: jax.Array,
    log_z: jax.Array,
    g_nll: jax.Array,
    g_log_z: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """The gradients of `x`, and of `table` with a leading dim of 1."""
    cut, axes = _Cut.of(x.shape[1], static.chunks), static.axes
    of_chunk = static.of_chunk(table, axes)

    def step(total: jax.Array, start: jax.Array) -> tuple[jax.Array, jax.Array]:
        scores, pull = jax.vjp(_scores, cut.take(x, start), table)
        # Padding has no gradient, as `g_nll` and `g_log_z` are zero there.
        rows = (cut.take(a, start) for a in (targets, log_z, g_nll, g_log_z))
        dx, dtable = pull(whole.local_gradient(of_chunk, axes, scores, *rows))
        return total + dtable.astype(total.dtype), dx

    with _on_one_device(static):
        zeros = jnp.zeros(table.shape, sum_dtype(table.dtype))
        total, parts = lax.scan(step, zeros, cut.starts)
    dx = cut.joined(parts)
    return lax.psum(dx, axes) if axes else dx, total.astype(table.dtype)[None]


def _scores(x: jax.Array, table: jax.Array) -> jax.Array:
    return dense(x, table, transposed=True, wide=True)


def _on_one_device(static: Static) -> contextlib.AbstractContextManager[None]:
    """For products within the map, which are one device's."""
    active = static.active
    if active is None or static.alone:
        return contextlib.nullcontext()
    return manual_over(*active.free)


class _Cut(NamedTuple):
    """The positions of one device in equal chunks, of which the last may reach beyond the end."""

    length: int
    size: int
    num: int

    @classmethod
    def of(cls, length: int, chunks: int) -> "_Cut":
        size = -(-length // chunks)
        return cls(length, size, -(-length // size))

    @property
    def starts(self) -> jax.Array:
        return jnp.arange(self.num, dtype=jnp.int32) * self.size

    def take(self, x: jax.Array, start: jax.Array) -> jax.Array:
        """A chunk of [batch, length, ...], filled up with zeros."""
        beyond = self.size * self.num - self.length
        if beyond:
            x = jnp.pad(x, [(0, beyond if dim == 1 else 0) for dim in range(x.ndim)])
        return lax.dynamic_slice_in_dim(x, start, self.size, 1)

    def joined(self, parts: jax.Array) -> jax.Array:
        """[chunks, batch, positions of a chunk, ...] -> [batch, length, ...]."""
        _, batch, _, *rest = parts.shape
        joined = jnp.moveaxis(parts, 0, 1).reshape(batch, -1, *rest)
        return lax.slice_in_dim(joined, 0, self.length, axis=1)
