"""Evaluation: the exact mean over all items, whatever batches and devices they are cut into."""

import numpy as np
import pytest
from fault_programs import TwoLosses, config, stub

from shardtrain.data.language import LanguageData
from shardtrain.run import Run


def run(items: int, *, batch_size: int, devices: int, microbatches: int = 1) -> Run:
    """Items of four targets each; those from the 21st on cost 4, the others 1."""
    tokens = np.zeros(items * 4 + 1, np.uint8)
    tokens[20 * 4 :] = 1
    # targets are all token 0 for the stub, so that the cost is that of the token read
    data = ReadsCost(
        tokens, np.array([0, len(tokens)]), 2, sequence_length=4, batch_size=batch_size
    )
    of = stub(TwoLosses, mesh={"data": devices}, microbatches=microbatches)
    return Run(config({"eval.steps": 100}), of, data, data, None)  # type: ignore[arg-type]


class ReadsCost(LanguageData):
    """Text whose targets are all token 0."""

    def evaluation_rows(self, index: int, start: int, stop: int):
        batch = super().evaluation_rows(index, start, stop)
        return batch | {"targets": np.zeros_like(batch["targets"])}


@pytest.mark.parametrize(
    ("items", "mean"),
    [
        (22, (20 + 2 * 4) / 22),
        (24, (20 + 4 * 4) / 24),  # exactly full: nothing dropped
        (2, 1.0),  # fewer items than devices: some have none
        (49, (20 + 29 * 4) / 49),  # a second and a third batch
    ],
)
@pytest.mark.parametrize(("devices", "microbatches"), [(1, 1), (3, 1), (8, 1), (3, 2)])
def test_o41_uneven_last_batch(items, mean, devices, microbatches) -> None:
    """O-41: 3 devices x 8 and others; padding counted would give (20 + 2 x 4) / 24 for 22 items."""
    made = run(items, batch_size=24, devices=devices, microbatches=microbatches)
    assert made.evaluate(made.init())["val_loss"] == pytest.approx(mean, rel=1e-6)


@pytest.mark.parametrize("batch_size", [2, 6, 22, 30])
def test_o41_the_batch_size_does_not_matter(batch_size) -> None:
    """O-41: one mean of all items, not a mean of the batches' means."""
    made = run(22, batch_size=batch_size, devices=2)
    assert made.evaluate(made.init())["val_loss"] == pytest.approx(28 / 22, rel=1e-6)
