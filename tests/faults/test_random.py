"""Randomness: masks belong to samples, initial values to the seed; neither to the mesh."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fault_programs import STYLES, initial, program, put, state_of, text
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from shardtrain.checkpoint.checkpointer import Checkpointer
from shardtrain.models import transformer
from shardtrain.ops.dropout import dropout, sample_keys
from shardtrain.sharding.mesh import make_mesh
from shardtrain.sharding.rules import use_rules
from shardtrain.strategies.stack import make_stack

DROPOUT = {"model.dropout": 0.5}
SITES = ["embedding", "attention 0", "mlp 0", "attention 1", "mlp 1"]


def model_masks(layout: dict[str, Any], step: int) -> np.ndarray:
    """What the whole model keeps in one step: [site, batch, length, embed]."""
    of = program({**DROPOUT, **layout})
    masks: list[jax.Array] = []

    def spy(x: jax.Array, *args: Any) -> jax.Array:
        masks.append(dropout(jnp.ones_like(x), *args))
        return dropout(x, *args)

    def forward(params: Any, batch: Any, key: jax.Array) -> list[jax.Array]:
        masks.clear()
        with use_rules(of.placement.compute, of.placement.mesh):
            nnx.merge(of.graph, params)(batch, key, make_stack(loop=of.layout.runner.loop))
        return masks

    # all rows hold the same tokens, so only the masks can tell them apart
    batch = text()
    batch["tokens"][:] = batch["tokens"][0]
    key = jax.random.fold_in(jax.random.key(7), step)
    params = jax.device_put(initial(DROPOUT), of.shardings.params)
    part = {name: x[0] for name, x in put(of, batch).items()}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(transformer, "dropout", spy)
        kept = jax.jit(forward)(params, part, key)
    assert set(np.unique(kept)) == {0.0, 2.0}
    return np.stack([np.asarray(mask) > 0 for mask in kept])


@pytest.fixture(scope="module")
def masks() -> np.ndarray:
    return model_masks({}, 0)


def assert_independent(a: np.ndarray, b: np.ndarray) -> None:
    """Two fair masks agree in half of their entries, give or take five standard deviations."""
    assert abs((a == b).mean() - 0.5) < 2.5 / a.size**0.5


def test_o07_masks_differ_between_samples(masks) -> None:
    """O-07: no two samples share a mask, so no two data shards do."""
    for site in masks:
        assert abs(site.mean() - 0.5) < 2.5 / site.size**0.5
        for i in range(len(site)):
            for j in range(i):
                assert_independent(site[i], site[j])


def test_o07_masks_differ_between_layers_and_sites(masks) -> None:
    """O-07: five places in two layers, ten pairs."""
    assert len(masks) == len(SITES)
    for i in range(len(masks)):
        for j in range(i):
            assert_independent(masks[i], masks[j])


def test_o07_masks_are_those_of_the_seed_and_the_step(masks) -> None:
    """O-07: the same on a rerun, others in the next step."""
    np.testing.assert_array_equal(model_masks({}, 0), masks)
    assert_independent(model_masks({}, 1), masks)


@pytest.mark.parametrize(
    "layout",
    [
        {"mesh.data": 4},
        {"mesh.data": 2, "mesh.tensor": 2, "sharding.sequence_parallel": True},
        {"mesh.data": 4, "mesh.tensor": 2, "sharding.zero": 3, "model.layer_loop": "unroll"},
    ],
    ids=str,
)
def test_o07_masks_are_the_same_on_every_mesh(masks, layout) -> None:
    """O-07, O-08: four data shards have the masks of one device, not four times one mask."""
    np.testing.assert_array_equal(model_masks(layout, 0), masks)


def test_o07_a_mask_is_that_of_the_sample_wherever_it_is() -> None:
    """O-07: a sample keeps its mask in another row; the rate does not bend with the precision."""
    key, ones = jax.random.key(0), jnp.ones((4, 8, 16))
    straight = dropout(ones, 0.1, sample_keys(key, jnp.arange(4, dtype=jnp.uint32)), 3, 1)
    turned = dropout(ones, 0.1, sample_keys(key, jnp.arange(3, -1, -1).astype(jnp.uint32)), 3, 1)
    np.testing.assert_array_equal(straight[::-1], turned)
    narrow = dropout(
        ones.astype(jnp.bfloat16), 0.1, sample_keys(key, jnp.arange(4, dtype=jnp.uint32)), 3, 1
    )
    np.testing.assert_array_equal(np.asarray(straight) > 0, np.asarray(narrow) > 0)


def test_o07_masks_do_not_depend_on_how_layers_are_run() -> None:
    """O-07: written out or as a loop, the layers drop the same."""
    losses = []
    for loop in ("unroll", "scan"):
        of = program(DROPOUT | {"model.layer_loop": loop})

        def loss(params: Any, batch: Any, of: Any = of) -> jax.Array:
            with use_rules(of.placement.compute, of.placement.mesh):
                model = nnx.merge(of.graph, params)
                return of.task.terms(
                    model, batch, jax.random.key(7), make_stack(loop=of.layout.runner.loop)
                )["nll"]

        part = {name: x[0] for name, x in put(of, text()).items()}
        losses.append(float(jax.jit(loss)(initial(DROPOUT), part)))
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)


# -- initial values

UNEVEN = {"model.embed_dim": 12, "model.head_dim": 4, "model.mlp_dim": 24, **STYLES["llama"]}
MESHES = [
    {"mesh.data": 2, "sharding.zero": 3},
    {"mesh.data": 8, "sharding.zero": 3},
    {"mesh.tensor": 2},
    {"mesh.data": 4, "mesh.tensor": 2, "sharding.zero": 3},
]


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_o08_initial_values_do_not_depend_on_the_mesh(mesh) -> None:
    """O-08: within one unit in the last place; width 12 does not divide by 8 devices."""
    model = {**UNEVEN, "model.vocab_multiple": 4}
    want = initial(model, vocab_size=101)
    got = program({**model, **mesh, "data.batch_size": 8}, vocab_size=101).init()
    jax.tree.map(
        lambda g, w: np.testing.assert_array_max_ulp(np.asarray(g), w, maxulp=1), got.params, want
    )
    drawn = [leaf for leaf in jax.tree.leaves(want) if leaf.ndim > 2]
    assert all(leaf.std() > 0.005 for leaf in drawn)


def test_o08_padding_the_vocabulary_draws_no_other_values() -> None:
    """O-08, O-18: 104 rows begin with the 101 rows without padding; the rest is zero."""
    plain = initial(UNEVEN, vocab_size=101)
    padded = initial({**UNEVEN, "model.vocab_multiple": 4}, vocab_size=101)
    for name in ("embedding", "head"):
        assert padded[name].shape == (104, 12)
        np.testing.assert_array_equal(padded[name][:101], plain[name])
        assert not padded[name][101:].any()


@pytest.mark.parametrize("degree", [1, 2, 4, 8])
def test_o08_random_bits_do_not_depend_on_the_shards(degree) -> None:
    """O-08: 496 rows over 4, 8 and 16 shards once differed from row 62 on."""
    mesh = make_mesh(tensor=degree, data=8 // degree)
    key = jax.random.key(0)
    want = np.asarray(jax.jit(lambda k: jax.random.bits(k, (496, 8)))(key))
    for spec in (PartitionSpec("tensor"), PartitionSpec(("data", "tensor"), None)):
        split = NamedSharding(mesh, spec)
        drawn = jax.jit(lambda k: jax.random.bits(k, (496, 8)), out_shardings=split)(key)
        np.testing.assert_array_equal(np.asarray(drawn), want)


def test_o08_layers_and_leaves_start_apart() -> None:
    """O-08: no two layers and no two leaves share their numbers."""
    leaves = [leaf for leaf in jax.tree.leaves(initial(UNEVEN, vocab_size=101)) if leaf.std() > 0]
    rows = [row.ravel()[:96] for leaf in leaves for row in (leaf if leaf.ndim > 2 else [leaf])]
    rows = [row / row.std() for row in rows]
    assert len(rows) > 8
    for i in range(len(rows)):
        for j in range(i):
            assert abs(np.mean(rows[i] * rows[j])) < 0.5


# -- resume


def test_o09_dropout_is_still_there_after_a_restore(tmp_path) -> None:
    """O-09: the next losses are the uncut run's to the bit, and two keys give two losses."""
    of = program(DROPOUT)
    batches = [put(of, text(seed=seed)) for seed in range(4)]
    state, losses = state_of(of, initial(DROPOUT)), []
    with Checkpointer(tmp_path, keep=1) as checkpoints:
        for step, batch in enumerate(batches):
            if step == 2:
                checkpoints.save(step, state, {})
            state, metrics = of.step(state, batch)
            losses.append(float(metrics["loss"]))
        checkpoints.wait()
        restored = checkpoints.restore(2, of.abstract_state)
    again = []
    for batch in batches[2:]:
        restored, metrics = of.step(restored, batch)
        again.append(float(metrics["loss"]))
    assert again == losses[2:]
    # the step's number is in the mask's key, so the same batch and values give another loss
    twice = []
    for number in (0, 1):
        state = state_of(of, initial(DROPOUT)).replace(step=jnp.int32(number))
        twice.append(float(of.step(jax.device_put(state, of.shardings), batches[0])[1]["loss"]))
    assert twice[0] != twice[1]
    sums, weights = of.evaluate(restored.params, batches[0])
    assert float(sums["nll"] / weights["nll"]) != pytest.approx(again[-1], rel=1e-6)
