"""How tokens are weighted: by themselves, never by the part of the batch they came in."""

import jax
import numpy as np
import pytest
from fault_programs import (
    LENGTH,
    Next,
    TwoLosses,
    assert_trees_near,
    gradients,
    initial,
    program,
    put,
    stub,
    text,
)

from shardtrain.config import load_config
from shardtrain.data.language import LanguageData
from shardtrain.errors import ConfigError
from shardtrain.tasks.config import LanguageModelConfig
from shardtrain.tasks.language_model import LanguageModel


def ragged(rows: int = 2) -> dict[str, np.ndarray]:
    """A row with one target that costs 4, a row with three that cost 1; the rest does not count."""
    weights = np.zeros((rows, 3), np.float32)
    weights[0, 1] = 1
    weights[1] = 1
    tokens = np.zeros((rows, 3), np.int32)
    tokens[0] = 1
    tokens[2:] = 1
    sample = np.arange(rows, dtype=np.uint32)
    return {"tokens": tokens, "targets": 0 * tokens, "weights": weights, "sample": sample}


def slope(cost: float) -> float:
    """The derivative of the cost by the parameter: score x sigmoid(score)."""
    score = np.log(np.expm1(cost))
    return score / (1 + np.exp(-score))


@pytest.mark.parametrize(
    ("mesh", "microbatches", "zero", "rows"),
    [
        ({}, 1, 0, 2),
        ({}, 2, 0, 2),
        ({"data": 2}, 1, 0, 2),
        ({"data": 2}, 2, 0, 4),  # one data shard and one microbatch have nothing that counts
        ({"data": 2}, 2, 2, 4),
        ({"replica": 2, "data": 2}, 1, 3, 4),
        ({"replica": 2, "data": 2}, 2, 0, 8),
        ({"replica": 2, "data": 2}, 2, 2, 8),
        ({"data": 8}, 1, 1, 8),
    ],
    ids=str,
)
def test_o01_a_token_weighs_the_same_everywhere(mesh, microbatches, zero, rows) -> None:
    """O-01: costs [4] and [1, 1, 1] have mean 1.75; the mean of means would be 2.5."""
    of = stub(TwoLosses, mesh=mesh, microbatches=microbatches, zero=zero)
    metrics, grads = gradients(of, None, ragged(rows))
    assert metrics["loss"] == pytest.approx(1.75, rel=1e-6)
    assert metrics["nll"] == pytest.approx(1.75, rel=1e-6)
    right = (slope(4) + 3 * slope(1)) / 4
    np.testing.assert_allclose(grads["scale"], right, rtol=1e-6)


def test_o01_every_term_of_the_loss_is_weighted_alike() -> None:
    """O-01: with z-loss c the loss is 1.75 + c (16 + 1 + 1 + 1) / 4."""
    task = LanguageModel(LanguageModelConfig(z_loss=0.5), 2)
    of = stub(TwoLosses, task, mesh={"data": 2}, microbatches=2)
    metrics, _ = gradients(of, None, ragged(4))
    assert metrics["loss"] == pytest.approx(1.75 + 0.5 * 19 / 4, rel=1e-6)
    assert metrics["z_loss"] == pytest.approx(19 / 4, rel=1e-6)


def test_o01_a_step_without_any_target_moves_nothing() -> None:
    """O-01: no weight at all is no division by zero."""
    of = stub(TwoLosses, mesh={"data": 2}, microbatches=2)
    batch = ragged(4) | {"weights": np.zeros((4, 3), np.float32)}
    metrics, grads = gradients(of, None, batch)
    assert all(np.isfinite(value) for value in metrics.values()), metrics
    assert not np.any(grads["scale"])


# -- the transformer


def uneven(rows: int = 8) -> dict[str, np.ndarray]:
    """Rows of which 0 to all targets count; of the first two, a microbatch, none."""
    batch = text(rows)
    counts = np.array([0, 0, 1, 16, 3, 9, 16, 2])[:rows, None]
    batch["weights"] = (np.arange(LENGTH) < counts).astype(np.float32)
    return batch


@pytest.mark.parametrize("microbatches", [1, 2, 4])
@pytest.mark.parametrize("data", [1, 2, 4])
def test_o02_accumulation_scales_nothing(data, microbatches) -> None:
    """O-02: nine cells, one global batch: the same loss, norm and gradients in all of them."""
    batch = ragged(16) | {"weights": (np.arange(48) % 5 < 2).astype(np.float32).reshape(16, 3)}
    of = stub(TwoLosses, mesh={"data": data}, microbatches=microbatches)
    metrics, grads = gradients(of, None, batch)
    costly = batch["weights"][batch["tokens"] == 1].sum() / batch["weights"].sum()
    assert metrics["loss"] == pytest.approx(1 + 3 * costly, rel=1e-6)
    right = slope(1) + (slope(4) - slope(1)) * costly
    np.testing.assert_allclose(grads["scale"], right, rtol=1e-6)
    assert metrics["grad_norm"] == pytest.approx(right * 8**0.5, rel=1e-6)


def test_o02_parts_of_a_batch_add_up_to_the_batch() -> None:
    """O-01, O-02: loss, norm and gradients of 4 microbatches on 2 data shards, in float64."""
    with jax.enable_x64(True):
        keys = {"data.batch_size": 8, "train.precision": "float64", "model.num_layers": 1}
        split = program({**keys, "train.microbatches": 4, "mesh.data": 2})
        want, want_grads = gradients(program(keys), initial(keys), uneven())
        got, got_grads = gradients(split, initial(keys), uneven())
    assert got["loss"] == pytest.approx(float(want["loss"]), rel=1e-12)
    assert got["grad_norm"] == pytest.approx(float(want["grad_norm"]), rel=1e-10)
    assert_trees_near(got_grads, want_grads, 1e-10)


def test_o03_a_batch_that_does_not_divide_is_refused() -> None:
    """O-03: there is no short window: 5 rows are not worked off two by two."""
    sections = {
        "run": {"steps": 1},
        "model": {"num_layers": 1, "embed_dim": 16, "num_heads": 2},
        "data": {"sequence_length": 8, "batch_size": 5},
        "train": {"microbatches": 2},
        "optimizer": {"learning_rate": 0.1},
    }
    with pytest.raises(ConfigError, match=r"batch_size=5: not divisible by train\.microbatches=2"):
        load_config(sections)


def test_o03_the_last_batch_of_an_epoch_is_as_full_as_the_others() -> None:
    """O-03: 5 rows of text, 2 a step: two full steps, and the next is full too, of epoch 2."""
    tokens = np.arange(5 * 4 + 1, dtype=np.uint8)
    data = LanguageData(tokens, np.array([0, 21]), 256, sequence_length=4, batch_size=2, seed=3)
    assert data.batches_per_epoch == 2
    for cursor in range(6):
        batch = data.batch_at(cursor)
        assert batch["weights"].sum() == 8
        assert len(set(data.sample_ids(cursor))) == 2


# -- the shift by one


def test_o04_the_next_token_is_the_target() -> None:
    """O-04: a model that knows the successor has no loss, in training and in evaluation."""
    tokens = (np.arange(8 * 4 + 1) % 60).astype(np.uint8)
    data = LanguageData(tokens, np.array([0, 33]), 64, sequence_length=4, batch_size=8)
    task = LanguageModel(LanguageModelConfig(), 64)
    of = stub(lambda dtype: Next(64, dtype), task, mesh={"data": 2}, microbatches=2)
    state = of.init()
    sums, weights = of.evaluate(state.params, put(of, data.batch_at(0)))
    assert float(sums["nll"]) < 1e-6
    assert float(weights["nll"]) == 32
    metrics, _ = gradients(of, None, data.batch_at(0))
    assert metrics["loss"] < 1e-6
    shifted = {**data.batch_at(0)}
    shifted["targets"] = shifted["targets"] + 1
    assert gradients(of, None, shifted)[0]["loss"] > 99


def test_o04_rows_do_not_reach_into_each_other() -> None:
    """O-04: row 1's losses do not depend on row 2, nor a loss on what comes after its target."""
    of = program()
    evaluate = of.evaluate
    params = initial()

    def row(batch: dict[str, np.ndarray], upto: int) -> float:
        weights = np.zeros_like(batch["weights"])
        weights[0, :upto] = 1
        return float(evaluate(params, put(of, batch | {"weights": weights}))[0]["nll"])

    batch, other = text(seed=1), text(seed=2)
    changed = {name: np.concatenate([batch[name][:1], other[name][1:]]) for name in batch}
    assert row(batch, LENGTH) == row(changed, LENGTH)
    later = {name: x.copy() for name, x in batch.items()}
    later["tokens"][0, 8:] = (later["tokens"][0, 8:] + 1) % 32
    assert row(batch, 8) == row(later, 8)
    assert row(batch, LENGTH) != row(later, LENGTH)
