"""Documents packed into one row are as documents in rows of their own, on every mesh."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest
from fault_programs import LENGTH, STYLES, VOCAB, assert_trees_near, initial, program, put
from flax import nnx

from shardtrain.sharding.rules import use_rules
from shardtrain.strategies.stack import make_stack

FIRST, SECOND = 7, 9
Losses = Callable[[dict[str, np.ndarray]], tuple[np.ndarray, Any]]


def documents(seed: int = 0) -> list[np.ndarray]:
    """Two documents, of which all but the last token are read and all but the first predicted."""
    rng = np.random.default_rng(seed)
    return [rng.integers(0, VOCAB, size + 1).astype(np.int32) for size in (FIRST, SECOND)]


def row(*parts: np.ndarray) -> dict[str, np.ndarray]:
    """One row of these documents, filled up with a document that does not count."""
    found = {"segments": [], "positions": [], "tokens": [], "targets": [], "weights": []}
    rest = LENGTH - sum(len(part) - 1 for part in parts)
    for number, part in enumerate([*parts, np.zeros(rest + 1, np.int32)]):
        size = len(part) - 1
        counts = np.full(size, number < len(parts), np.float32)
        found["tokens"].append(part[:-1])
        found["targets"].append(part[1:])
        found["weights"].append(counts)
        found["segments"].append(np.full(size, number, np.int32))
        found["positions"].append(np.arange(size, dtype=np.int32))
    return {name: np.concatenate(x) for name, x in found.items()}


def batch(*rows: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    stacked = {name: np.stack([row[name] for row in rows]) for name in rows[0]}
    return stacked | {"sample": np.arange(len(rows), dtype=np.uint32)}


@pytest.fixture(scope="module", params=STYLES)
def style(request) -> str:
    return request.param


@pytest.fixture(
    scope="module",
    params=[{}, {"mesh.data": 2, "mesh.tensor": 2, "sharding.sequence_parallel": True}],
    ids=["one device", "data 2 x tensor 2"],
)
def losses(request, style) -> Losses:
    """(batch) -> (the loss of every target, the gradient of their sum), compiled once."""
    keys = {**STYLES[style], "data.batch_size": 2}
    of = program({**keys, **request.param})
    params = initial(STYLES[style])

    @jax.jit
    def both(params: Any, batch: Any) -> Any:
        batch = {name: x[0] for name, x in batch.items()}

        def total(params: Any, weights: jax.Array) -> jax.Array:
            with use_rules(of.placement.compute, of.placement.mesh):
                model = nnx.merge(of.graph, params)
                stack = make_stack(loop=of.layout.runner.loop)
                parts = of.task.terms(model, {**batch, "weights": weights}, None, stack)
            return parts["nll"]

        # the sum is linear in the weights, so its slope by a weight is that target's loss
        return jax.grad(total, argnums=(1, 0))(params, batch["weights"])

    placed = jax.device_put(params, of.shardings.params)
    return lambda rows: jax.device_get(both(placed, put(of, rows)))


def test_o25_packed_documents_are_as_rows_of_their_own(losses) -> None:
    """O-25: per-token losses and gradients agree within 1e-5."""
    one, two = documents()
    packed, packed_grads = losses(batch(row(one, two), row()))
    apart, apart_grads = losses(batch(row(one), row(two)))
    np.testing.assert_allclose(packed[0, :FIRST], apart[0, :FIRST], rtol=1e-5)
    np.testing.assert_allclose(packed[0, FIRST:], apart[1, :SECOND], rtol=1e-5)
    assert_trees_near(packed_grads, apart_grads, 1e-5)


def test_o25_a_document_does_not_see_the_one_before(losses) -> None:
    """O-25: altering document 1 changes no loss in document 2; without segments it does."""
    one, two = documents()
    altered = (one + 1) % VOCAB
    rows = [batch(row(first, two), row(two)) for first in (one, altered)]
    before, after = (losses(x)[0] for x in rows)
    np.testing.assert_array_equal(before[0, FIRST:], after[0, FIRST:])
    assert np.all(before[0, :FIRST] != after[0, :FIRST])
    joined = [x | {"segments": np.zeros_like(x["segments"])} for x in rows]
    before, after = (losses(x)[0] for x in joined)
    assert np.any(before[0, FIRST:] != after[0, FIRST:])
