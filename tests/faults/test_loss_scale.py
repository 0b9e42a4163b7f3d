"""float16: the scale shrinks and grows as it should, and an overflow anywhere moves nothing."""

import argparse
import inspect
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from fault_programs import BATCH, LENGTH, program, put, text

from shardtrain.config import load_config
from shardtrain.errors import ConfigError
from shardtrain.sharding.mesh import make_mesh
from shardtrain.strategies.loss_scale import CEILING, DynamicScale
from shardtrain.train.functional import make_train_step

ADAM = {"optimizer.name": "adamw", "optimizer.learning_rate": 5e-3}


def scales(scaling: DynamicScale, overflows: str) -> list[tuple[float, bool]]:
    """(scale, retry) after each step; "x" is an overflow, "." none, "n" a loss that is NaN."""
    state, found = scaling.init(), []
    for flag in overflows:
        finite, allowed = jnp.asarray(flag == "."), jnp.asarray(flag != "n")
        state, retry = scaling.after(state, finite, allowed)
        found.append((float(state["scale"]), bool(retry)))
    return found


def test_o15_three_overflows_halve_the_scale_three_times() -> None:
    """O-15: from 2^16 the sequence is 32768, 16384, 8192."""
    assert scales(DynamicScale(), "xxx") == [(32768, True), (16384, True), (8192, True)]


def test_o15_it_doubles_after_exactly_the_window_of_clean_steps() -> None:
    found = [scale for scale, _ in scales(DynamicScale(start=8, window=3), "..x......")]
    assert found == [8, 8, 4, 4, 4, 8, 8, 8, 16]


def test_o15_hysteresis_spends_overflows_before_the_scale_halves() -> None:
    scaling = DynamicScale(start=8, window=2, hysteresis=3)
    assert [scale for scale, _ in scales(scaling, "xxxx..xxx")] == [8, 8, 4, 2, 2, 4, 4, 4, 2]


def test_o15_at_the_floor_there_is_no_other_try() -> None:
    """O-15: at scale 1 the run skipped every step without stopping."""
    assert scales(DynamicScale(start=4), "xxx") == [(2, True), (1, True), (1, False)]


def test_a_loss_that_is_no_number_is_no_overflow() -> None:
    """A smaller scale would not help; the poisoned batch is for the guard."""
    assert scales(DynamicScale(start=4, window=2), ".n.") == [(4, False), (4, False), (8, False)]


def test_the_scale_has_a_ceiling() -> None:
    assert scales(DynamicScale(start=CEILING, window=1), ".") == [(CEILING, False)]


def loss(params: Any, batch: Any, keys: Any) -> Any:
    """Its gradient is the batch."""
    return jnp.mean(params["w"].astype(jnp.float32) @ batch["x"].T)


@pytest.mark.parametrize("zero", [0, 1, 3])
def test_o15_an_overflow_on_one_shard_moves_nothing_on_any(zero: int) -> None:
    """O-15: sample 5 of 8 shards is too large for float16 until the scale is 2^11."""
    step = make_train_step(
        loss,
        optax.adam(0.1),
        {"w": jnp.ones(8)},
        make_mesh(data=8),
        zero=zero,
        precision="float16",
        loss_scale=DynamicScale(start=2.0**14, window=2),
    )
    batch = {"x": jnp.ones((8, 8)).at[5, 3].set(200)}
    state = step.init({"w": jnp.ones(8)})
    fresh = jax.device_get((state.params, state.opt_state))
    for scale in (2.0**13, 2.0**12, 2.0**11):
        state, metrics = step(state, batch)
        assert np.isfinite(metrics["loss"])
        assert np.isinf(metrics["grad_norm"])
        assert bool(metrics["retry"])
        assert float(metrics["loss_scale"]) == scale
        assert (int(state.step), int(state.cursor), int(state.skipped)) == (0, 0, 0)
        jax.tree.map(
            np.testing.assert_array_equal, fresh, jax.device_get((state.params, state.opt_state))
        )
    state, metrics = step(state, batch)
    assert not bool(metrics["retry"])
    np.testing.assert_allclose(
        metrics["grad_norm"], np.sqrt(7 + (207 / 8) ** 2), rtol=1e-3
    )  # without the scale
    assert (int(state.step), int(state.cursor), int(state.skipped)) == (1, 1, 0)
    np.testing.assert_allclose(state.opt_state["master"]["w"], np.full(8, 0.9), rtol=1e-5)


def flat(tree: Any) -> np.ndarray:
    return np.concatenate([np.ravel(leaf).astype(np.float64) for leaf in jax.tree.leaves(tree)])


@pytest.mark.parametrize(
    "precision", ["float16", pytest.param("bfloat16", marks=pytest.mark.campaign)]
)
@pytest.mark.parametrize(
    "layout",
    [
        {"mesh.data": 4, "sharding.zero": 0},
        pytest.param(
            {"mesh.data": 4, "sharding.zero": 1, "train.microbatches": 2, "data.batch_size": 8},
            marks=pytest.mark.campaign,
        ),
        pytest.param({"mesh.data": 4, "sharding.zero": 2}, marks=pytest.mark.campaign),
        {"mesh.data": 2, "mesh.tensor": 2, "sharding.zero": 3},
        {"mesh.data": 2, "mesh.pipeline": 2, "train.microbatches": 2},
    ],
    ids=str,
)
def test_the_first_step_points_where_float32_does(precision: str, layout: dict[str, Any]) -> None:
    """Directions agree to a cosine of 0.999; only float16 has a scale in its state."""
    rows = text(layout.get("data.batch_size", 4))
    wide = program({"data.batch_size": len(rows["tokens"])})
    of = program(layout | {"train.precision": precision})
    state = of.init()
    scale = {"scale", "clean", "left"} if precision == "float16" else set()
    assert set(state.loss_scale) == scale
    _, metrics, right = wide.step_with_gradients(wide.init(), put(wide, rows))
    _, found, grads = of.step_with_gradients(state, put(of, rows))
    np.testing.assert_allclose(found["loss"], metrics["loss"], rtol=2e-3)
    np.testing.assert_allclose(found["grad_norm"], metrics["grad_norm"], rtol=2e-2)
    ours, theirs = flat(of.in_model_order(grads)), flat(right)
    assert ours @ theirs / np.linalg.norm(ours) / np.linalg.norm(theirs) > 0.999


def prose(number: int) -> dict[str, np.ndarray]:
    """A batch of real text, another one each time."""
    characters = np.frombuffer(inspect.getsource(argparse).encode("ascii"), np.uint8)
    starts = np.random.default_rng(number).integers(0, len(characters) - LENGTH - 1, BATCH)
    rows = characters[starts[:, None] + np.arange(LENGTH + 1)].astype(np.int32)
    return text() | {"tokens": rows[:, :-1], "targets": rows[:, 1:]}


def test_three_hundred_steps_follow_float32() -> None:
    """The loss stays within 1 % of that of float32, with overflows on the way."""
    curves = []
    for precision in ("float32", "float16"):
        keys = {"train.precision": precision, "train.loss_scale_window": 50, "run.steps": 300}
        of = program(keys | ADAM | {"mesh.data": 2, "sharding.zero": 1}, vocab_size=128)
        state, losses, overflows = of.init(), [], 0
        while len(losses) < 300:
            state, metrics = of.step(state, put(of, prose(len(losses))))
            if metrics["retry"]:
                overflows += 1
            else:
                losses.append(metrics["loss"])
        curves.append(np.asarray(jax.device_get(losses)))
        assert int(state.step) == int(state.cursor) == 300
    assert overflows > 0, "the scale grew until it was too large"
    assert curves[0][-20:].mean() < 0.7 * curves[0][0]
    windows = [curve.reshape(-1, 20).mean(1) for curve in curves]
    np.testing.assert_allclose(windows[1], windows[0], rtol=1e-2)


def test_a_start_below_the_floor_is_refused(tmp_path: Path) -> None:
    keys = {"train.loss_scale": 2.0, "train.loss_scale_floor": 4.0}
    with pytest.raises(ConfigError, match=r"train.loss_scale=2: train.loss_scale_floor=4 is more"):
        load_config("quickstart", keys)
