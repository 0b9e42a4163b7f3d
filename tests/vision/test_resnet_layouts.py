"""A residual network on every layout is the same run as on one device."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from networks import Case, program_of, put, rows, subject

from shardtrain import commands
from shardtrain.config import load_config
from shardtrain.errors import ConfigError
from shardtrain.verify.compare import BOUNDS, Comparison, compare
from tests.rows import shortened

DP8 = (("data", 8),)
# One image a device: where XLA would partition a mapped gradient wrongly.
SHORT = Case(DP8, zero=1, microbatches=2, statistics="microbatch")
CASES = [Case(DP8), SHORT]
MORE = [
    Case(DP8, zero=1),
    Case((("replica", 2), ("data", 4)), zero=3),
    Case(DP8, zero=2, microbatches=2, statistics="microbatch"),
    Case(DP8, zero=1, precision="float32"),
]


def difference(case: Case) -> Comparison:
    with jax.enable_x64(case.precision == "float64"):
        bound = BOUNDS[case.precision]
        return compare(subject(case), subject(case.on_one_device()), steps=2, bound=bound)


@pytest.mark.parametrize("case", shortened(CASES, SHORT.__eq__), ids=str)
def test_layout_equals_one_device(case: Case) -> None:
    """Loss, gradients, updated parameters, statistics of batch norm and averages."""
    result = difference(case)
    assert result.equal, result
    assert {path.split("/")[0] for path in result.kept} == {"statistics", "ema"}


@pytest.mark.campaign
@pytest.mark.parametrize("case", MORE, ids=str)
def test_more_layouts_equal_one_device(case: Case) -> None:
    result = difference(case)
    assert result.equal, result


@pytest.mark.campaign
def test_layout_equals_one_device_in_float32() -> None:
    result = difference(Case(DP8, zero=3, precision="float32"))
    assert result.equal, result


@pytest.mark.campaign
def test_per_replica_is_another_run_on_every_mesh() -> None:
    """As with DistributedDataParallel: 8 devices normalise by 2 images each."""
    result = difference(Case(DP8, statistics="per_replica"))
    assert result.loss > 1e-3
    assert min(result.kept[p] for p in result.kept if p.endswith("variance")) > 1e-3
    with pytest.raises(ConfigError, match="each mesh is another run then"):
        commands.verify(load_config(Case(DP8, statistics="per_replica").sections()))


def test_a_batch_that_is_skipped_leaves_no_trace() -> None:
    """A weight that is no number: parameters, statistics and averages stay, the cursor moves."""
    program = program_of(Case(DP8, zero=3, precision="float32"))
    state, batch = program.init(), rows(0)
    before = jax.device_get((state.params, state.model_state))
    batch["weights"][3] = np.nan
    state, metrics, _ = program.step_with_gradients(state, put(program, batch))
    assert not metrics["moved"]
    assert (int(state.step), int(state.cursor)) == (0, 1)
    jax.tree.map(
        np.testing.assert_array_equal, before, jax.device_get((state.params, state.model_state))
    )


def test_statistics_and_averages_move_once_a_step() -> None:
    program = program_of(Case(DP8, zero=3, precision="float32"))
    old = program.init()
    first = jax.device_get(old.model_state)
    state, _, _ = program.step_with_gradients(old, put(program, rows(0)))
    now, params = jax.device_get((state.model_state, state.params))
    # The stem's statistics are those of what its convolution makes.
    image = jnp.asarray(rows(0)["image"], jnp.float32) / 255
    task = program.task
    normal = (image - jnp.array(task.mean)) / jnp.array(task.deviation)
    kernel = jax.device_get(old.params)["stem"]["kernel"]
    made = jax.lax.conv_general_dilated(
        normal, kernel, (1, 1), ((1, 1), (1, 1)), dimension_numbers=("NHWC", "HWIO", "NHWC")
    )
    found = now["statistics"]["stem_norm"]
    np.testing.assert_allclose(found["mean"], 0.1 * made.mean((0, 1, 2)), rtol=1e-3, atol=1e-5)
    np.testing.assert_allclose(found["variance"], 0.9 + 0.1 * made.var((0, 1, 2)), rtol=1e-3)
    decay = 2 / 11  # of the first update: less than the 0.9 that was asked for
    jax.tree.map(
        lambda mean, was, new: np.testing.assert_allclose(
            mean, decay * was + (1 - decay) * new, rtol=1e-5, atol=1e-6
        ),
        now["ema"]["params"],
        first["ema"]["params"],
        params,
    )
