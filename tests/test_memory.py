"""Bytes on one device: the formulas of ZeRO, the report, and the arrays that a run really makes."""

from collections import Counter
from pathlib import Path
from typing import Any

import jax
import pytest

from shardtrain.config import load_config
from shardtrain.run import Run, build

N = 8
FORMULAS = {
    # stage: (parameters, gradients, optimizer state) as shares of their whole
    0: (1, 1, 1),
    1: (1, 1, 1 / N),
    2: (1, 1 / N, 1 / N),
    3: (1 / N, 1 / N, 1 / N),
}
"""Rajbhandari et al. 2020 (arXiv 1910.02054), figure 1."""
WIDTHS = {
    # bytes a parameter of: parameters, gradients, moments and master weights of Adam
    "float32": (4, 4, 8),
    "bfloat16": (2, 2, 12),
}
COUNTERS = 16
"""Room for an optimizer's counts of its steps."""


def make_run(folder: Path, **overrides: Any) -> Run:
    """A small transformer of which every tensor divides by the devices."""
    text = folder / "text.txt"
    text.write_text("all work and no play makes jack a dull boy\n" * 100)
    sections = {
        "run": {"steps": 2},
        "model": {"num_layers": 2, "embed_dim": 64, "num_heads": 8},
        "data": {"path": str(text), "sequence_length": 16, "batch_size": 8},
        "optimizer": {"learning_rate": 1e-3},
    }
    return build(load_config(sections, overrides))


def count(run: Run) -> int:
    return sum(leaf.size for leaf in jax.tree.leaves(run.program.shapes.params))


def bytes_by_device(tree: Any) -> set[int]:
    """What the devices hold of arrays; one number where all hold the same."""
    held: Counter[jax.Device] = Counter()
    for array in jax.tree.leaves(tree):
        for shard in array.addressable_shards:
            held[shard.device] += shard.data.nbytes
    assert len(held) == N
    return set(held.values())


@pytest.mark.parametrize("precision", WIDTHS)
@pytest.mark.parametrize("zero", FORMULAS)
def test_the_formulas_of_zero(tmp_path: Path, zero: int, precision: str) -> None:
    run = make_run(tmp_path, **{"sharding.zero": zero, "train.precision": precision})
    whole = [width * count(run) for width in WIDTHS[precision]]
    parameters, gradients, optimizer = (
        size * share for size, share in zip(whole, FORMULAS[zero], strict=True)
    )
    report = run.report
    assert (report.parameters, report.gradients) == (parameters, gradients)
    assert optimizer <= report.optimizer <= optimizer + COUNTERS
    assert all(row.note == "" or row.note.startswith("split") for row in report.rows)
    state = run.init()
    assert bytes_by_device(state.params) == {report.parameters}
    assert bytes_by_device(state.opt_state) == {report.optimizer}
    assert report.state == report.parameters + report.optimizer


@pytest.mark.parametrize(
    ("zero", "total"),
    [(0, 16), (1, 4 + 12 / N), (2, 2 + 14 / N), (3, 16 / N)],
)
def test_sixteen_bytes_a_parameter_in_mixed_precision(
    tmp_path: Path, zero: int, total: float
) -> None:
    run = make_run(tmp_path, **{"sharding.zero": zero, "train.precision": "bfloat16"})
    report = run.report
    held = report.parameters + report.gradients + report.optimizer
    assert 0 <= held - total * count(run) <= COUNTERS


LAYOUTS: dict[str, dict[str, Any]] = {
    "tensor": {"mesh.tensor": 2, "sharding.zero": 1},
    "tensor, whole": {"mesh.tensor": 4, "sharding.zero": 3},
    "hybrid": {"mesh.replica": 2, "sharding.zero": 3},
    "microbatches": {"train.microbatches": 2, "sharding.zero": 2, "data.batch_size": 16},
    "untied": {"model.tied": False, "sharding.zero": 1},
    "odd sizes": {"model.embed_dim": 36, "model.num_heads": 6, "sharding.zero": 3},
    "factored moments": {"optimizer.name": "adafactor", "sharding.zero": 1},
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_report_is_what_the_arrays_take(tmp_path: Path, name: str) -> None:
    run = make_run(tmp_path, **LAYOUTS[name], **{"train.precision": "bfloat16"})
    state, report = run.init(), run.report
    assert bytes_by_device(state.params) == {report.parameters}
    assert bytes_by_device(state.opt_state) == {report.optimizer}
    assert sum(row.parameters for row in report.rows) == report.parameters
    if name == "odd sizes":
        assert any(row.note for row in report.rows)


def test_gradients_of_several_microbatches_are_added_up_in_float32(tmp_path: Path) -> None:
    overrides = {"train.precision": "bfloat16", "sharding.zero": 2}
    one = make_run(tmp_path, **overrides)
    two = make_run(tmp_path, **overrides, **{"train.microbatches": 2, "data.batch_size": 16})
    assert two.report.gradients == 2 * one.report.gradients


def test_tensor_parallel_shares_out_what_it_splits(tmp_path: Path) -> None:
    """Norm scales and the biases after a reduction stay whole; all else is halved."""
    whole = make_run(tmp_path).report
    halved = make_run(tmp_path, **{"mesh.tensor": 2}).report
    for before, after in zip(whole.rows, halved.rows, strict=True):
        split = bool({"heads", "kv_heads", "mlp", "vocab"} & set(before.names))
        assert after.parameters == before.parameters // (2 if split else 1), before.path
