"""State on the host: the same run bit for bit, and on the device for its own update only (O-22)."""

from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from shardtrain.checkpoint.checkpointer import Checkpointer
from shardtrain.config import load_config
from shardtrain.config_effects import ineffective_settings
from shardtrain.errors import ConfigError
from shardtrain.run import Run
from shardtrain.sharding.placement import leaves_by_path
from shardtrain.sharding.tiers import HOST, Tiers, require_host_memory
from shardtrain.strategies.config import all_on_device
from tests.layouts.away import make_run, stepper
from tests.rows import shortened

ON_HOST = {"offload.optimizer": "host", "offload.master": "host"}
LAYOUTS: dict[str, dict[str, Any]] = {
    "zero 1, 4 microbatches, clipped": {
        "sharding.zero": 1,
        "train.microbatches": 4,
        "optimizer.clip_norm": 0.1,
    },
    "pipeline 2, zero 1, bfloat16": {
        "mesh.pipeline": 2,
        "sharding.zero": 1,
        "train.microbatches": 2,
        "train.precision": "bfloat16",
    },
}
MORE: dict[str, dict[str, Any]] = {
    "zero 0, clipped": {"sharding.zero": 0, "optimizer.clip_norm": 0.1},
    "half of it, zero 2": {
        "sharding.zero": 2,
        "train.precision": "bfloat16",
        "offload.fraction": 0.5,
    },
    "zero 2, bfloat16": {"sharding.zero": 2, "train.precision": "bfloat16"},
    "zero 3, tensor 2, 4 microbatches, float16": {
        "sharding.zero": 3,
        "mesh.tensor": 2,
        "train.microbatches": 4,
        "train.precision": "float16",
    },
    "pipeline 2, 6 layers, interleaved": {
        "mesh.pipeline": 2,
        "model.num_layers": 6,
        "pipeline.schedule": "interleaved",
        "pipeline.virtual_stages": 2,
        "train.microbatches": 2,
    },
    "masters only": {"train.precision": "bfloat16", "offload.optimizer": "device"},
}
SHORT = "pipeline 2, zero 1, bfloat16"
"""The others are in the marked run."""


ALL_ON_HOST = ON_HOST | {"offload.parameters": "host", "model.layer_loop": "scan"}
ON_DEVICE = {key: "device" for key in ALL_ON_HOST if key.startswith("offload.")}
PARAMETERS: dict[str, dict[str, Any]] = {
    "zero 3, 4 microbatches, clipped": {
        "sharding.zero": 3,
        "train.microbatches": 4,
        "train.precision": "bfloat16",
        "optimizer.clip_norm": 0.1,
    },
}
MORE_PARAMETERS: dict[str, dict[str, Any]] = {
    "pipeline 2, tensor 2, zero 3": {
        "mesh.pipeline": 2,
        "mesh.tensor": 2,
        "sharding.zero": 3,
        "train.microbatches": 2,
        "train.precision": "bfloat16",
    },
    "parameters only, zero 1, 4 microbatches": {
        "offload.optimizer": "device",
        "sharding.zero": 1,
        "train.microbatches": 4,
    },
    "zero 0, remat full": {"train.remat": "full", "train.precision": "bfloat16"},
    "zero 2": {"sharding.zero": 2, "train.remat": "mlp", "model.dropout": 0.1},
    "zero 1, context 2": {"sharding.zero": 1, "mesh.context": 2},
    "pipeline 2, 6 layers, interleaved": MORE["pipeline 2, 6 layers, interleaved"],
    "half of it": {"offload.fraction": 0.5},
}
KEPT = ("input:host", "attention,mlp:host,input:host")
"""What is kept for the backward, and where."""


def run_steps(run: Run, steps: int, *, quick: bool = False) -> Any:
    return stepper(run, quick=quick)(run.init(), 0, steps)


def kinds(state: Any) -> dict[str, str]:
    return {
        path: leaf.sharding.memory_kind
        for path, leaf in leaves_by_path(state.opt_state)
        if leaf.ndim
    }


@pytest.mark.parametrize("layout", shortened(LAYOUTS | MORE, SHORT.__eq__))
def test_o22_parameters_are_equal_bit_for_bit(tmp_path: Path, layout: str) -> None:
    """O-22: after 10 steps all leaves of the state are those of a run without offload."""
    keys = (LAYOUTS | MORE)[layout]
    quick = layout == SHORT
    there = keys | {"offload.optimizer": "device"}
    plain = run_steps(make_run(tmp_path, **there), 10, quick=quick)
    state = run_steps(make_run(tmp_path, **ON_HOST | keys), 10, quick=quick)
    for (path, ours), (_, theirs) in zip(
        leaves_by_path(state.params) + leaves_by_path(state.opt_state),
        leaves_by_path(plain.params) + leaves_by_path(plain.opt_state),
        strict=True,
    ):
        np.testing.assert_array_equal(ours, theirs, err_msg=path)
    found = kinds(state)
    if layout == "masters only":
        assert {p.split("/")[0] for p, kind in found.items() if kind == HOST} == {"master"}
    elif layout == "half of it, zero 2":
        leaves = dict(leaves_by_path(state.opt_state))
        held = sum(leaves[p].nbytes for p, kind in found.items() if kind == HOST)
        assert 0.5 <= held / sum(leaf.nbytes for leaf in leaves.values()) < 0.75
    else:
        assert set(found.values()) == {HOST}
    assert all(leaf.sharding.memory_kind != HOST for leaf in jax.tree.leaves(state.params))


def assert_equal(ours: Any, theirs: Any) -> None:
    """Parameters and the optimizer's state of two runs are equal bit for bit."""
    for (path, one), (_, other) in zip(
        leaves_by_path((ours.params, ours.opt_state)),
        leaves_by_path((theirs.params, theirs.opt_state)),
        strict=True,
    ):
        np.testing.assert_array_equal(one, other, err_msg=path)


@pytest.mark.parametrize(
    "layout",
    [*PARAMETERS, *(pytest.param(more, marks=pytest.mark.campaign) for more in MORE_PARAMETERS)],
)
def test_parameters_on_the_host_change_nothing(tmp_path: Path, layout: str) -> None:
    """Each layer comes for its forward and again for its backward; 10 steps are the same."""
    keys = (PARAMETERS | MORE_PARAMETERS)[layout]
    quick = layout in PARAMETERS
    plain = run_steps(make_run(tmp_path, **ALL_ON_HOST | keys | ON_DEVICE), 10, quick=quick)
    state = run_steps(make_run(tmp_path, **ALL_ON_HOST | keys), 10, quick=quick)
    assert_equal(state, plain)
    places = {leaf.sharding.memory_kind for leaf in jax.tree.leaves(state.params["layers"])}
    assert places == ({HOST, "device"} if layout == "half of it" else {HOST})
    assert all(x.sharding.memory_kind != HOST for x in jax.tree.leaves(state.params["embedding"]))


BY_HOST: dict[str, dict[str, Any]] = {
    "zero 1, bfloat16, clipped": {
        "sharding.zero": 1,
        "train.precision": "bfloat16",
        "optimizer.clip_norm": 0.1,
    },
    "zero 0, clipped": MORE["zero 0, clipped"],
    **LAYOUTS,
    **PARAMETERS,
}


@pytest.mark.parametrize("layout", shortened(BY_HOST, PARAMETERS.__contains__))
def test_the_host_computes_the_update(tmp_path: Path, layout: str) -> None:
    """Masters and moments do not move; the host's arithmetic may round otherwise."""
    quick = layout in PARAMETERS
    keys = (ALL_ON_HOST if quick else ON_HOST) | BY_HOST[layout]
    theirs, ours = (
        run_steps(make_run(tmp_path, **keys, **{"offload.update": update}), 10, quick=quick)
        for update in ("device", "host")
    )
    for (path, one), (_, other) in zip(
        leaves_by_path((ours.params, ours.opt_state)),
        leaves_by_path((theirs.params, theirs.opt_state)),
        strict=True,
    ):
        one, other = (np.asarray(leaf, np.float64) for leaf in (one, other))
        np.testing.assert_allclose(one, other, rtol=1e-6, atol=1e-6, err_msg=path)
    assert set(kinds(ours).values()) == {HOST}


@pytest.mark.parametrize(
    "keys",
    [
        {},
        {"offload.optimizer": "host", "train.precision": "bfloat16"},
        {"offload.optimizer": "host", "offload.fraction": 0.5},
    ],
)
def test_the_host_updates_only_what_it_has(keys: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="the host can update only what rests there"):
        load_config("quickstart", keys | {"offload.update": "host"})


@pytest.mark.parametrize(
    "layout",
    [
        {"sharding.zero": 3, "train.precision": "bfloat16"},
        pytest.param(MORE_PARAMETERS["pipeline 2, tensor 2, zero 3"], marks=pytest.mark.campaign),
    ],
)
def test_parameters_on_the_host_evaluate_and_generate(
    tmp_path: Path, layout: dict[str, Any]
) -> None:
    keys = layout | {"model.layer_loop": "scan"}
    texts = []
    for more in ({}, {"offload.parameters": "host"}):
        run = make_run(tmp_path, **keys | more)
        state = run.init()
        texts.append((run.evaluate(state), run.generate(state, "all work", tokens=8)))
    assert texts[0] == texts[1]


@pytest.mark.parametrize(
    ("layout", "kept"),
    [
        ({"sharding.zero": 3}, KEPT[1]),
        pytest.param({"sharding.zero": 3}, KEPT[0], marks=pytest.mark.campaign),
        *(
            pytest.param(layout, kept, marks=pytest.mark.campaign)
            for kept in KEPT
            for layout in (
                {"train.microbatches": 4, "train.precision": "bfloat16"},
                {"mesh.tensor": 2, "sharding.sequence_parallel": True},
            )
        ),
    ],
)
def test_activations_on_the_host_change_nothing(
    tmp_path: Path, layout: dict[str, Any], kept: str
) -> None:
    """The backward reads what the forward has kept, wherever that was meanwhile."""
    keys = layout | {"model.layer_loop": "scan"}
    ours, theirs = (
        run_steps(make_run(tmp_path, **keys, **{"train.remat": policy}), 3, quick=True)
        for policy in (kept, all_on_device(kept))
    )
    assert_equal(ours, theirs)


@pytest.mark.parametrize(
    "name",
    ["lamb"]
    + [
        pytest.param(each, marks=pytest.mark.campaign)
        for each in ("adafactor", "muon", "sgd", "lion")
    ],
)
def test_other_optimizers_see_each_layer_alone(tmp_path: Path, name: str) -> None:
    """Those that work on whole matrices add up in another order; they agree to rounding."""
    wide = {"train.precision": "float64", "optimizer.clip_norm": 1.0}
    with jax.enable_x64(True):
        plain, state = (
            run_steps(make_run(tmp_path, name, **wide, **keys), 3, quick=True)
            for keys in ({}, ON_HOST)
        )
    for (path, ours), (_, theirs) in zip(
        leaves_by_path(state.params), leaves_by_path(plain.params), strict=True
    ):
        np.testing.assert_allclose(ours, theirs, rtol=1e-9, atol=1e-9, err_msg=path)


def test_a_checkpoint_goes_between_host_and_device(tmp_path: Path) -> None:
    """Saved from the host and restored to it, to the device, and back: the same 12 steps."""
    keys = ALL_ON_HOST | PARAMETERS["zero 3, 4 microbatches, clipped"]
    offloaded, plain = make_run(tmp_path, **keys), make_run(tmp_path, **keys | ON_DEVICE)
    on_host, here = stepper(offloaded, quick=True), stepper(plain, quick=True)
    want = here(plain.init(), 0, 12)
    with Checkpointer(tmp_path / "saved", keep=2) as checkpoints:
        checkpoints.save(4, on_host(offloaded.init(), 0, 4), {})
        checkpoints.wait()
        for run, steps in ((offloaded, on_host), (plain, here)):
            state = checkpoints.restore(4, run.program.abstract_saved)
            assert (HOST in kinds(state).values()) == (run is offloaded)
            state = steps(state, 4, 12)
            jax.tree.map(np.testing.assert_array_equal, state.params, want.params)


def test_the_largest_go_first() -> None:
    leaves = [("transform/mu/a", 10), ("transform/mu/b", 60), ("master/b", 60), ("master/c", 30)]
    on_host = Tiers(moments="host", master="disk")
    assert on_host.state_in("host", leaves) == {"transform/mu/a", "transform/mu/b"}
    assert on_host.state_in("disk", leaves) == {"master/b", "master/c"}
    assert Tiers(moments="host", fraction=0.5).state_in("host", leaves) == {"transform/mu/b"}
    assert Tiers(parameters="host").state_in("host", leaves) == frozenset()
    layers = [("layers/a", 10), ("layers/b", 60), ("layers/c", 30)]
    away = Tiers(parameters="host", fraction=0.8)
    assert away.layers_in("host", layers) == {"layers/b", "layers/c"}
    assert away.layers_in("disk", layers) == on_host.layers_in("host", layers) == frozenset()


def test_devices_without_host_memory_are_refused() -> None:
    class Gpu:
        process_index = 0
        device_kind = "Some GPU"

        def addressable_memories(self) -> list[Any]:
            return []

    with pytest.raises(ConfigError, match="Some GPU has no host memory that jax can use"):
        require_host_memory([Gpu()])  # type: ignore[list-item]
    require_host_memory(jax.devices())


def test_masters_that_are_not_there_are_told() -> None:
    config = load_config("quickstart", {"offload.master": "host", "offload.fraction": 0.5})
    told = ineffective_settings(config)
    assert any(line.startswith("offload.fraction=0.5 has no effect") for line in told)
    assert 'offload.master=host has no effect: train.precision="float32" has no masters' in told
