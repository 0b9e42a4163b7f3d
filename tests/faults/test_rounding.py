"""Stochastic rounding: right on average, and the same bits however a leaf rests."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fault_programs import program, stub
from test_precision import Entry, Told, told

from shardtrain.models.transformer import constant
from shardtrain.optim.rounding import stochastic
from shardtrain.sharding.placement import leaves_by_path

MIX = "bfloat16,master=bfloat16,moments=bfloat16,rounding=stochastic"


def test_over_all_bits_the_mean_is_the_number() -> None:
    """Not near it: over the 65,536 words that 16 bits can be, each of them once."""
    x = jnp.asarray([1 + 2.0**-9, -3.00123, 1e-30, 0.1, 65504.5, -0.0, 2.0**-120], jnp.float32)
    bits = jnp.broadcast_to(jnp.arange(2**16, dtype=jnp.uint16)[:, None], (2**16, len(x)))
    rounded = np.asarray(jax.jit(stochastic)(jnp.broadcast_to(x, bits.shape), bits), np.float64)
    np.testing.assert_array_equal(rounded.mean(0), np.asarray(x, np.float64))
    assert all(len(np.unique(column)) <= 2 for column in rounded.T)


def test_what_is_no_number_stays_none() -> None:
    x = jnp.asarray([jnp.inf, -jnp.inf, jnp.nan], jnp.float32)
    for bits in (0, 2**16 - 1):
        rounded = stochastic(x, jnp.full(3, bits, jnp.uint16))
        np.testing.assert_array_equal(np.asarray(rounded, np.float32), np.asarray(x))


def updated(layout: dict[str, Any], steps: int = 2) -> dict[str, np.ndarray]:
    """Parameters and moments after updates with gradients that every layout is given."""
    keys = {"train.precision": MIX, "optimizer.name": "adamw", "optimizer.clip_norm": 0.0}
    of = program({**keys, "model.num_layers": 4, **layout})
    shapes = of.abstract_saved.params
    draw = np.random.default_rng(0)
    grads = [
        jax.tree.map(lambda s: draw.normal(size=s.shape).astype(jnp.bfloat16), shapes)
        for _ in range(steps)
    ]

    @jax.jit
    def run(state: Any, grads: Any) -> Any:
        grads = of.in_stack_order(grads)
        key = jax.random.fold_in(state.key, state.step)
        params, opt_state, _ = of.optimizer.update(
            grads, state.opt_state, state.params, state.step + 1, key
        )
        return state.replace(params=params, opt_state=opt_state, step=state.step + 1)

    state = of.init()
    for grad in grads:
        state = jax.device_put(run(state, grad), of.shardings)
    saved = jax.device_get(of.saved.save(state))
    return dict(leaves_by_path({"params": saved.params, "opt_state": saved.opt_state}))


@pytest.fixture(scope="module")
def on_one_device() -> dict[str, np.ndarray]:
    return updated({})


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param({"mesh.data": 4, "sharding.zero": 1}, marks=pytest.mark.campaign),
        pytest.param(
            {"mesh.data": 2, "mesh.tensor": 2, "sharding.zero": 3}, marks=pytest.mark.campaign
        ),
        pytest.param(
            {"mesh.pipeline": 2, "mesh.data": 2, "sharding.zero": 1, "train.microbatches": 2},
            marks=pytest.mark.campaign,
        ),
        pytest.param(
            {
                "mesh.pipeline": 2,
                "pipeline.schedule": "interleaved",
                "pipeline.virtual_stages": 2,
                "train.microbatches": 2,
            },
            marks=pytest.mark.campaign,
        ),
        pytest.param(
            {"mesh.data": 2, "sharding.zero": 1, "offload.optimizer": "host"},
            marks=pytest.mark.campaign,
        ),
        {
            "mesh.pipeline": 2,
            "train.microbatches": 2,
            "pipeline.layout": "E1,3H",
            "offload.optimizer": "host",
        },
    ],
    ids=lambda layout: ",".join(map(str, layout.values())),
)
def test_bits_are_equal_on_every_mesh(
    layout: dict[str, Any], on_one_device: dict[str, np.ndarray]
) -> None:
    """Split, permuted, padded, or layer by layer from the host: each entry is rounded alike."""
    want, found = on_one_device, updated(layout)
    for path, leaf in want.items():
        np.testing.assert_array_equal(found[path], leaf, err_msg=path)


def test_steps_and_entries_are_rounded_apart() -> None:
    """Equal entries with equal gradients part, and do so anew in each step."""
    of = stub(Entry, Told(), precision=MIX, optimizer={"learning_rate": 1e-3})
    seen = [np.asarray(told(of, [1.0] * n).params["w"], np.float32) for n in (1, 8, 40)]
    assert len({w.tobytes() for w in seen}) == 3
    assert len(np.unique(seen[-1])) > 1


class Wide(Entry):
    """The same with 4,096 entries, to see their mean."""

    def __init__(self, dtype: Any) -> None:
        self.w = constant(("embed", "mlp"), (64, 64), dtype, 1.0)


def test_o14_small_updates_add_up_without_a_master() -> None:
    """O-14: 1,000 updates of -1e-3 from 1 end at 0 on average; to the nearest they stay at 1."""
    plain = {"learning_rate": 1e-3}
    near = stub(Wide, Told(), precision="bfloat16,master=bfloat16", optimizer=plain)
    kept = told(near, [1.0] * 200)
    np.testing.assert_array_equal(np.asarray(kept.params["w"], np.float32), 1)
    moved = told(stub(Wide, Told(), precision=MIX, optimizer=plain), [1.0] * 1000)
    assert not jax.tree.leaves(moved.opt_state.get("master", ()))
    np.testing.assert_allclose(np.asarray(moved.params["w"], np.float64).mean(), 0, atol=3e-3)


def test_o14_a_narrow_second_moment_decays_by_chance() -> None:
    """O-14: 3.677e-4 on average; to the nearest it stays at 9.995e-4."""
    adam = {"name": "adamw", "beta2": 0.999, "learning_rate": 1e-6}
    rows = [1.0] + [0.0] * 1000

    def nu(precision: str) -> np.ndarray:
        state = told(stub(Wide, Told(), precision=precision, optimizer=adam), rows)
        (found,) = [leaf for path, leaf in leaves_by_path(state.opt_state) if "nu" in path]
        assert found.dtype == jnp.bfloat16
        return np.asarray(found, np.float64)

    chance = nu("bfloat16,moments=bfloat16,rounding=stochastic")
    np.testing.assert_allclose(chance.mean(), 3.677e-4, rtol=0.01)
    np.testing.assert_allclose(nu("bfloat16,moments=bfloat16"), 9.995e-4, rtol=2e-3)
