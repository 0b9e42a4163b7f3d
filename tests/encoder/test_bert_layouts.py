"""A BERT on every layout is the same run as on one device."""

import jax
import numpy as np
import pytest
from encoders import BATCH, PLACES, VOCAB, Case, program_of, put, rows, subject

from shardtrain.verify.compare import BOUNDS, Comparison, compare

CASE = Case((("pipeline", 2), ("data", 2), ("tensor", 2)), microbatches=2)
SPLIT = Case((("data", 8),), zero=3, precision="float32")
MORE = [
    Case((("data", 4), ("tensor", 2)), zero=1, microbatches=2),
    Case((("data", 8),)),
    Case((("data", 8),), zero=3),
    Case((("data", 8),), precision="float32"),
    Case((("tensor", 2),), sequence_parallel=True, remat="full"),
    Case((("pipeline", 2), ("data", 2)), zero=2, microbatches=4, optimizer="adamw"),
    Case((("pipeline", 2),), microbatches=2, precision="float32"),
    Case((("data", 2), ("tensor", 2)), zero=2, next_sentence=False),
    Case((("pipeline", 2), ("data", 2)), zero=1, microbatches=2, next_sentence=False),
    Case((("replica", 2), ("data", 2), ("tensor", 2)), zero=3, microbatches=4),
]


def difference(case: Case) -> Comparison:
    with jax.enable_x64(case.precision == "float64"):
        bound = BOUNDS[case.precision]
        return compare(subject(case), subject(case.on_one_device()), steps=2, bound=bound)


def test_layout_equals_one_device() -> None:
    """Loss, gradients and parameters updated by LAMB; padding, ragged hiding, dropout."""
    result = difference(CASE)
    assert result.equal, result


@pytest.mark.campaign
def test_layout_equals_one_device_in_float32() -> None:
    result = difference(SPLIT)
    assert result.equal, result


@pytest.mark.campaign
@pytest.mark.parametrize("case", MORE, ids=str)
def test_more_layouts_equal_one_device(case: Case) -> None:
    result = difference(case)
    assert result.equal, result


def test_each_term_has_its_own_weight() -> None:
    """An evaluation of ragged parts: two denominators, and neither is a mean of means."""
    program = program_of(SPLIT)
    state, batch = program.init(), rows(5)
    sums, weights = program.evaluate(
        state.params, put(program, batch), state.model_state, state.frozen
    )
    masked, pairs = batch["weights"].sum(), batch["next_weights"].sum()
    assert 0 < masked < BATCH * PLACES
    assert 0 < pairs < BATCH
    expected = {"masked_loss": masked, "masked_accuracy": masked}
    expected |= {"next_loss": pairs, "next_accuracy": pairs}
    assert {name: float(weight) for name, weight in weights.items()} == expected
    # An untrained model knows nothing of either.
    assert float(sums["masked_loss"] / masked) == pytest.approx(np.log(VOCAB), abs=0.05)
    assert float(sums["next_loss"] / pairs) == pytest.approx(np.log(2), abs=0.05)


def test_padding_is_never_attended() -> None:
    """Other tokens in the padding, or in a hidden row: not a bit of the sums changes."""
    program = program_of(SPLIT)
    state, batch = program.init(), rows(5)
    other = {name: array.copy() for name, array in batch.items()}
    other["tokens"][batch["segments"] == 0] = VOCAB - 1
    other["parts"][batch["segments"] == 0] = 1
    one, two = (
        program.evaluate(state.params, put(program, b), state.model_state, state.frozen)[0]
        for b in (batch, other)
    )
    assert {n: float(v) for n, v in one.items()} == {n: float(v) for n, v in two.items()}


def test_a_batch_without_anything_hidden_is_no_nan() -> None:
    program = program_of(SPLIT)
    state, batch = program.init(), rows(5)
    batch["weights"][:], batch["next_weights"][:] = 0, 0
    _, metrics, _ = program.step_with_gradients(state, put(program, batch))
    assert float(metrics["loss"]) == 0.0
    assert float(metrics["grad_norm"]) == 0.0
