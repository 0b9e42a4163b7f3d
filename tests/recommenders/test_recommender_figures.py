"""Figures of an evaluation: equal on every layout, also where the last batch is not full (O-41)."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from recommenders import Case, program_of

from shardtrain.data.interactions import Interactions, Shards, record, split
from shardtrain.run import evaluate_on
from shardtrain.tasks.config import RetrievalConfig
from shardtrain.tasks.ranking import auc

DP8 = (("data", 8),)
SIZES = [40, 24, 5, 31, 17, 9]


def interactions(count: int) -> Interactions:
    random = np.random.default_rng(count)
    made = np.zeros(count, record(2, len(SIZES)))
    for field, size in enumerate(SIZES):
        made["ids"][:, field] = random.integers(0, size, count)
    made["dense"] = random.standard_normal((count, 2))
    made["label"] = random.integers(0, 2, count)
    return Interactions(Shards([made]), split(count, 0.0, shuffle=True)[0], 24)


def figures(case: Case, count: int) -> dict[str, float]:
    program = program_of(case)
    found = evaluate_on(program, interactions(count), program.init())
    return {name: total / max(weight, 1.0) for name, (total, weight) in found.items()}


@pytest.mark.parametrize(
    "case",
    [Case(DP8, placement="rows", zero=3), Case(DP8, placement="columns", model="two_tower")],
    ids=str,
)
def test_uneven_tails_change_nothing(case: Case) -> None:
    """22 of 24, exactly 24, some devices without any, and a tail after full batches."""
    with jax.enable_x64(True):
        for count in (22, 24, 2, 100):
            ours, alone = figures(case, count), figures(case.on_one_device(), count)
            assert set(ours) == {"val_loss", "val_recall" if case.model != "dlrm" else "val_auc"}
            for name, value in alone.items():
                assert ours[name] == pytest.approx(value, abs=1e-12, nan_ok=True), (count, name)


def test_the_auc_is_that_of_all_interactions_and_not_a_mean_of_batches() -> None:
    case = Case(DP8, placement="rows", zero=3)
    with jax.enable_x64(True):
        program, data = program_of(case), interactions(100)
        state = program.init()
        model = jax.jit(
            lambda params, batch: program.parts.sums(params, None, {}, batch, None, None)
        )
        every = data.source.take(np.arange(100))
        batch = {name: every[name] for name in ("ids", "dense", "label")}
        batch["weights"] = np.ones(100, np.float32)
        params = jax.device_get(state.params)
        scores = np.asarray(model(params, batch)["gathered"]["score"])
        assert figures(case, 100)["val_auc"] == auc(scores, every["label"])


def test_recall_counts_the_items_that_go_before() -> None:
    """Against a plain matrix of users and all items, at every number of first items."""
    case = Case(DP8, placement="columns", model="two_tower")
    with jax.enable_x64(True):
        program, data = program_of(case), interactions(100)
        params = jax.device_get(program.init().params)
        model = nnx.merge(program.graph, jax.tree.map(jnp.asarray, params))
        every = data.source.take(np.arange(100))
        own = every["ids"][:, -1]
        user, item = model(jnp.asarray(every["dense"]), jnp.asarray(every["ids"]))
        items = np.asarray(model.items(jnp.arange(9, dtype=jnp.int32)))
        np.testing.assert_allclose(items[own], item, rtol=1e-12)
        scores = np.asarray(user) @ items.T
        ranks = (scores > scores[np.arange(100), own][:, None]).sum(1)
        for among in (1, 3, 8):
            task = dataclasses.replace(program.task, config=RetrievalConfig(recall=among))
            found = evaluate_on(dataclasses.replace(program, task=task), data, program.init())
            wanted = np.mean(ranks[every["label"] > 0] < among)
            assert found["val_recall"] == (pytest.approx(wanted, abs=1e-15), 1.0)
            assert 0 < wanted < 1
