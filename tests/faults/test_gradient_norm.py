"""The global norm and clipping: every entry counts once on every mesh; all devices clip alike."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fault_programs import initial, program, put, state_of, stub, text
from flax import nnx

from shardtrain.models.transformer import constant
from shardtrain.strategies.pipeline import Pipeline
from shardtrain.strategies.schedules.kinds import make_schedule
from shardtrain.strategies.schedules.layout import balance

LAYOUTS = [
    ({}, 0, 1),
    ({"tensor": 2}, 0, 1),
    ({"data": 2}, 0, 2),
    ({"data": 4, "tensor": 2}, 1, 1),
    ({"data": 4, "tensor": 2}, 1, 2),
    ({"replica": 2, "data": 2, "tensor": 2}, 2, 1),
    ({"replica": 2, "data": 2, "tensor": 2}, 0, 2),
    ({"replica": 2, "data": 2, "tensor": 2}, 3, 2),
    ({"replica": 8}, 1, 1),
    ({"data": 8}, 3, 1),
]


class Leaves(nnx.Module):
    """One leaf split over `tensor`, one that ZeRO splits, one that is whole everywhere."""

    def __init__(self, dtype: Any) -> None:
        self.split = constant(("head_dim", "mlp"), (3, 8), dtype, 0.0)
        self.stored = constant(("embed",), (8,), dtype, 0.0)
        self.whole = constant(("head_dim",), (3,), dtype, 0.0)


@dataclass(frozen=True)
class Slopes:
    """A task whose gradient is known: 3 and 4 in the two halves of `split`, 12 over the two others.

    Samples differ, but their mean slope is 1, so each is needed and none counts twice.
    """

    coefficients: ClassVar = {"slope": 1.0}
    reported: ClassVar = {"val_loss": "slope"}

    def totals(self, batch: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
        return {"slope": jnp.sum(batch["weights"])}

    def terms(self, model: Any, batch: Any, key: Any, stack: Any) -> dict[str, jax.Array]:
        value = 3 * model.split[...][0, 0] + 4 * model.split[...][0, 7]
        value += np.sqrt(144 - 25).astype(np.float32) * model.whole[...][0]
        value += 3 * model.stored[...][0] + 4 * model.stored[...][7]
        return {"slope": jnp.sum(batch["slope"] * batch["weights"]) * value}


class Layer(nnx.Module):
    """A number that is added, times a factor of its own."""

    def __init__(self, dtype: Any) -> None:
        self.number = constant(("head_dim",), (1,), dtype, 0.0)

    def __call__(self, x: jax.Array, index: jax.Array, context: Any) -> jax.Array:
        return x + self.number[...] * jnp.where(index == 0, 3, 4).astype(x.dtype)


class Layered(nnx.Module):
    """Two layers, one a stage, and a leaf that both ends of the model use."""

    def __init__(self, dtype: Any) -> None:
        @nnx.vmap(transform_metadata={nnx.PARTITION_NAME: "layers"}, axis_size=2)
        def stack() -> Layer:
            return Layer(dtype)

        self.layers = stack()
        self.whole = constant(("embed",), (1,), dtype, 0.0)

    def context(self, batch: Any, key: Any) -> dict[str, jax.Array]:
        return {}

    def embed(self, batch: Any, context: Any) -> jax.Array:
        return jnp.broadcast_to(5 * self.whole[...], (*batch["slope"].shape, 1))


@dataclass(frozen=True)
class LayeredSlopes(Slopes):
    """Slopes of 3 and 4 on two stages, and of 5 + 7 on a leaf of both ends."""

    def head(self, model: Any, x: jax.Array, batch: Any) -> dict[str, jax.Array]:
        value = x[..., 0] + 7 * model.whole[...]
        return {"slope": jnp.sum(batch["slope"] * batch["weights"] * value)}


def slopes() -> dict[str, np.ndarray]:
    slope = np.linspace(0, 2, 16, dtype=np.float32)[:, None]
    return {"slope": slope, "weights": np.ones((16, 1), np.float32)}


@pytest.mark.parametrize(("mesh", "zero", "microbatches"), LAYOUTS, ids=str)
def test_o05_every_entry_counts_once(mesh, zero, microbatches) -> None:
    """O-05: 3, 4 and 12 are 13 on every mesh; a clip at 6.5 scales everything by 0.5."""
    of = stub(
        Leaves,
        Slopes(),
        mesh=mesh,
        zero=zero,
        microbatches=microbatches,
        optimizer={"clip_norm": 6.5},
    )
    state, metrics, grads = of.step_with_gradients(of.init(), put(of, slopes()))
    assert float(metrics["grad_norm"]) == pytest.approx(13.0, rel=1e-6)
    moved = jax.tree.map(lambda p: -np.asarray(p), state.params)
    jax.tree.map(
        lambda m, g: np.testing.assert_allclose(m, 0.5 * np.asarray(g), rtol=3e-7, atol=0),
        moved,
        grads,
    )
    assert moved["split"][0, 0] == pytest.approx(1.5, rel=1e-6)
    assert moved["split"][0, 7] == pytest.approx(2.0, rel=1e-6)


@pytest.mark.parametrize(("mesh", "zero", "microbatches"), LAYOUTS[::3], ids=str)
def test_o05_gradients_set_by_hand(mesh, zero, microbatches) -> None:
    """O-05: the update alone, on gradients that rest where the layout puts them."""
    of = stub(Leaves, Slopes(), mesh=mesh, zero=zero, optimizer={"clip_norm": 6.5})
    split = np.zeros((3, 8), np.float32)
    split[0, 0], split[0, 7] = 3, 4
    by_hand = {
        "split": split,
        "stored": np.zeros(8, np.float32),
        "whole": np.array([12, 0, 0], np.float32),
    }
    grads = jax.device_put(by_hand, of.placement.optimizer)
    zeros = jax.tree.map(np.zeros_like, by_hand)
    params = jax.device_put(zeros, of.placement.params)
    update = jax.jit(of.optimizer.update)
    new, _, norms = update(grads, of.optimizer.init(zeros), params, jnp.int32(1), jax.random.key(0))
    assert float(norms["grad_norm"]) == 13.0
    jax.tree.map(lambda p, g: np.testing.assert_array_equal(np.asarray(p), -0.5 * g), new, by_hand)


def test_o05_a_norm_below_the_limit_changes_nothing() -> None:
    """O-05: clipping is no rescaling to the limit."""
    of = stub(Leaves, Slopes(), optimizer={"clip_norm": 14.0})
    state, _, _ = of.step_with_gradients(of.init(), put(of, slopes()))
    assert float(-state.params["split"][0, 7]) == pytest.approx(4.0, rel=1e-6)


def test_o05_the_norm_of_bfloat16_gradients_is_summed_wider() -> None:
    """O-05: 65536 entries of 1 have norm 256; a sum in bfloat16 would stop at 256 = 16 squared."""
    from shardtrain.optim.update import global_norm

    assert float(global_norm({"a": jnp.ones((256, 256), jnp.bfloat16)})[0]) == 256.0


# -- the transformer

CLIPPED = {"model.num_layers": 1, "optimizer.clip_norm": 0.05, "optimizer.momentum": 0.9}


def copies(x: jax.Array) -> list[list[np.ndarray]]:
    """The shards of an array, those of one place together."""
    places: dict[str, list[np.ndarray]] = {}
    for shard in x.addressable_shards:
        places.setdefault(str(shard.index), []).append(np.asarray(shard.data))
    return list(places.values())


def test_o06_replicas_stay_equal_to_the_bit() -> None:
    """O-06: after 20 clipped steps all copies of every leaf have the same bits."""
    layout = {"mesh.data": 2, "mesh.tensor": 2, "sharding.sequence_parallel": True}
    of = program(CLIPPED | layout)
    state = state_of(of, initial(CLIPPED))
    for step in range(20):
        state, metrics = of.step(state, put(of, text(seed=step)))
        assert metrics["grad_norm"] > 0.05
    several = 0
    for path, leaf in jax.tree.leaves_with_path((state.params, state.opt_state)):
        for same in copies(leaf):
            several += len(same) > 1
            for other in same[1:]:
                assert same[0].tobytes() == other.tobytes(), jax.tree_util.keystr(path)
    assert several > 20


@pytest.mark.parametrize("zero", range(4))
def test_o05_a_stage_counts_its_own_and_both_ends_once(zero) -> None:
    """O-05: 3 and 4 on two stages, 12 from both ends: 13 again."""
    of = stub(
        Layered,
        LayeredSlopes(),
        mesh={"pipeline": 2, "data": 2},
        zero=zero,
        optimizer={"clip_norm": 6.5},
        runner=Pipeline(make_schedule("1f1b", 2, 4), balance(2, 2)),
    )
    _, metrics, grads = of.step_with_gradients(of.init(), put(of, slopes()))
    assert float(metrics["grad_norm"]) == pytest.approx(13.0, rel=1e-6)
    assert np.ravel(grads["layers"]["number"]).tolist() == pytest.approx([3.0, 4.0])
    assert np.ravel(grads["whole"]).tolist() == pytest.approx([12.0])
