"""A recommender on every layout is the same run as on one device."""

import jax
import numpy as np
import pytest
from recommenders import Case, subject

from shardtrain.verify.compare import BOUNDS, Comparison, compare
from tests.rows import shortened

DP8 = (("data", 8),)
DP24 = (("replica", 2), ("data", 4))
CASES = [
    Case(DP8, placement="rows", zero=3, microbatches=2),
    Case(DP24, placement="columns", zero=1),
    Case(DP8, placement="tables", zero=2),
    Case(DP8, placement="auto", model="two_tower"),
]
MORE = [
    Case(DP8, placement="rows"),
    Case(DP8, placement="columns", zero=3, microbatches=2),
    Case(DP24, placement="tables", zero=3, microbatches=4),
    Case(DP24, placement="rows", zero=1, table_optimizer="sgd"),
    Case(DP8, placement="tables", model="two_tower", zero=3, microbatches=2),
    Case(DP8, placement="columns", model="two_tower"),
    Case(DP8, placement="columns", clip=0.0),
    Case(DP8, placement="rows", freeze=True, zero=3),
]
SINGLE = [Case(DP8, placement=kind, zero=3, precision="float32") for kind in ("rows", "columns")]


def difference(case: Case) -> Comparison:
    with jax.enable_x64(case.precision == "float64"):
        bound = BOUNDS[case.precision]
        return compare(subject(case), subject(case.on_one_device()), steps=2, bound=bound)


@pytest.mark.parametrize(
    "case", shortened(CASES, lambda case: case.placement in ("rows", "auto")), ids=str
)
def test_layout_equals_one_device(case: Case) -> None:
    """Loss, gradients and updated parameters, those of tables too."""
    result = difference(case)
    assert result.equal, result
    assert [path for path in result.gradients if path.startswith("banks/")]
    with jax.enable_x64(True):
        ours, alone = cells_after_a_step(case), cells_after_a_step(case.on_one_device())
    assert all(cells.any() for cells in jax.tree.leaves(alone))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-15), ours, alone)


def cells_after_a_step(case: Case) -> dict:
    """The sums of squares of row-wise Adagrad; both begin with the same parameters."""
    mine, alone = subject(case), subject(case.on_one_device())
    state = mine.take(alone.program.init(), alone)
    state = mine.program.step_with_gradients(state, mine.batch_at(0))[0]
    return jax.device_get(state.opt_state["transform"]["tables"])


@pytest.mark.campaign
@pytest.mark.parametrize("case", [*MORE, *SINGLE], ids=str)
def test_more_layouts_equal_one_device(case: Case) -> None:
    result = difference(case)
    assert result.equal, result
