"""State on a disk: the same run bit for bit, saved and restored, and not in memory (O-22)."""

import weakref
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from shardtrain.checkpoint import arrays
from shardtrain.checkpoint.checkpointer import Checkpointer
from shardtrain.run import Run
from shardtrain.run_state import base_digest, restore_state, save_base
from shardtrain.sharding.disk import loaded
from shardtrain.sharding.placement import leaves_by_path
from shardtrain.sharding.tiers import HOST
from shardtrain.train.begin import in_turn
from shardtrain.train.rundir import BASE
from tests.layouts.away import make_run, stepper
from tests.rows import shortened

ON_DISK = {"offload.optimizer": "disk", "offload.master": "disk"}
WITH_PARAMETERS = {"offload.parameters": "disk", "model.layer_loop": "scan"}
STATE_HERE = {"offload.optimizer": "device", "offload.master": "device"}
LORA = {**WITH_PARAMETERS, "lora.rank": 3, "lora.targets": "qkv,out,up,down"}
LAYOUTS: dict[str, dict[str, Any]] = {
    "pipeline 2, zero 1, clipped": {
        "mesh.pipeline": 2,
        "sharding.zero": 1,
        "train.microbatches": 2,
        "optimizer.clip_norm": 0.1,
    },
    "zero 3, 4 microbatches, bfloat16, clipped, parameters": {
        **WITH_PARAMETERS,
        "sharding.zero": 3,
        "train.microbatches": 4,
        "train.precision": "bfloat16",
        "optimizer.clip_norm": 0.1,
    },
}
MORE: dict[str, dict[str, Any]] = {
    "zero 1, clipped": {"sharding.zero": 1, "optimizer.clip_norm": 0.1},
    "lora, zero 3, 2 microbatches, bfloat16, clipped": {
        **LORA,
        "sharding.zero": 3,
        "train.microbatches": 2,
        "train.precision": "bfloat16",
        "optimizer.clip_norm": 0.1,
    },
    "lora, pipeline 2, zero 1, the base alone": {
        **LORA,
        **STATE_HERE,
        "mesh.pipeline": 2,
        "sharding.zero": 1,
        "train.microbatches": 2,
    },
    "pipeline 2, 6 layers, interleaved, bfloat16": {
        "mesh.pipeline": 2,
        "model.num_layers": 6,
        "sharding.zero": 1,
        "pipeline.schedule": "interleaved",
        "pipeline.virtual_stages": 2,
        "train.microbatches": 2,
        "train.precision": "bfloat16",
    },
    "zero 0, lion": {"sharding.zero": 0, "optimizer.name": "lion"},
    "zero 2, tensor 2, float16": {
        "sharding.zero": 2,
        "mesh.tensor": 2,
        "train.precision": "float16",
    },
    "masters on the host": {
        "train.precision": "bfloat16",
        "offload.master": "host",
        "sharding.zero": 1,
    },
    "zero 1, 4 microbatches, parameters alone": {
        **WITH_PARAMETERS,
        **STATE_HERE,
        "sharding.zero": 1,
        "train.microbatches": 4,
    },
    "pipeline 2, tensor 2, zero 3, parameters": {
        **WITH_PARAMETERS,
        "mesh.pipeline": 2,
        "mesh.tensor": 2,
        "sharding.zero": 3,
        "train.microbatches": 2,
        "train.precision": "bfloat16",
    },
    "half of it": {"train.precision": "bfloat16", "offload.fraction": 0.5},
    "lamb": {"optimizer.name": "lamb", "sharding.zero": 1},
    "lora, zero 0, the base alone": {**LORA, **STATE_HERE, "sharding.zero": 0},
    "lora, zero 1, 4 microbatches, full remat": {
        **LORA,
        "sharding.zero": 1,
        "train.microbatches": 4,
        "train.remat": "full",
    },
    "lora, zero 2, tensor 2, half of it": {
        **LORA,
        **STATE_HERE,
        "sharding.zero": 2,
        "mesh.tensor": 2,
        "offload.fraction": 0.5,
    },
    "lora, pipeline 2, 6 layers, interleaved, bfloat16": {
        **LORA,
        "mesh.pipeline": 2,
        "model.num_layers": 6,
        "sharding.zero": 3,
        "pipeline.schedule": "interleaved",
        "pipeline.virtual_stages": 2,
        "train.microbatches": 2,
        "train.precision": "bfloat16",
    },
}
SHORT = "zero 3, 4 microbatches, bfloat16, clipped, parameters"
"""The others are in the marked run."""
OTHER_KERNELS = {"masters on the host": 1e-6, "lora, zero 1, 4 microbatches, full remat": 1e-4}
"""XLA:CPU fuses another part of the update, or of a layer, into one kernel there, whose last bit
differs: in float64 the layers by 1e-16. What begins at zero, as LoRA's second matrix, is all Adam's
quotients of them."""


def whole(run: Run, state: Any) -> dict[str, Any]:
    """All of a state, in model order."""
    saved = run.program.saved.save(state)
    return {
        path: jax.device_get(loaded(leaf))
        for path, leaf in leaves_by_path((saved.params, saved.opt_state, saved.frozen))
    }


def save(checkpoints: Checkpointer, run: Run, state: Any) -> None:
    """A step as a run saves it: what is frozen lies beside the steps."""
    save_base(checkpoints, state, run.program)
    saved = run.program.saved.save(state).replace(frozen=())
    checkpoints.save(6, saved, {BASE: base_digest(checkpoints)})
    checkpoints.wait()


def evaluated(run: Run, state: Any) -> float:
    sums, _ = run.program.evaluate(state.params, run.batch_at(0), state.model_state, state.frozen)
    return float(sum(sums.values()))


def assert_equal(ours: dict[str, Any], theirs: dict[str, Any], most: float = 0.0) -> None:
    """Equal bit for bit, or as far apart as `most` times the largest entry."""
    assert ours.keys() == theirs.keys()
    for path, leaf in ours.items():
        mine, other = np.asarray(leaf, np.float64), np.asarray(theirs[path], np.float64)
        assert np.abs(mine - other).max() <= most * np.abs(other).max(), path


@pytest.mark.parametrize("layout", shortened(LAYOUTS | MORE, SHORT.__eq__))
def test_o22_a_disk_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, layout: str
) -> None:
    """O-22: ten steps with a save and a restore after six, here and without a disk, are equal."""
    monkeypatch.setattr(arrays, "SMALL", 1 << 10)  # so that some leaves are saved by themselves
    keys = ON_DISK | (LAYOUTS | MORE)[layout]
    here = {
        key: "device" for key in keys if key.startswith("offload.") and key != "offload.fraction"
    }
    plain, run = make_run(tmp_path, **keys | here), make_run(tmp_path, **keys)
    most = OTHER_KERNELS.get(layout, 0.0)
    on_device, on_disk = (stepper(one, quick=layout == SHORT) for one in (plain, run))
    plain_folder, disk_folder = (tmp_path / name / "checkpoints" for name in ("plain", "disk"))
    with Checkpointer(plain_folder) as by_plain, Checkpointer(disk_folder) as by_disk:
        six = on_device(plain.init(), 0, 6)
        save(by_plain, plain, six)
        ours = on_disk(run.init(), 0, 6)
        assert_equal(whole(run, ours), whole(plain, six), most)
        assert evaluated(run, ours) == pytest.approx(evaluated(plain, six), rel=1e-6)
        save(by_disk, run, ours)
        wanted = whole(plain, on_device(six, 6, 10))

        disk = run.program.disk
        files, masters = disk.all[0].files, run.program.policy.has_master
        before = files.written_bytes
        assert_equal(whole(run, on_disk(ours, 6, 10)), wanted, most)
        traffic = disk.traffic(run.program.layout.microbatches, masters=masters)
        assert files.written_bytes - before == 4 * run.mesh.size * traffic[1]
        # Each goes on from the other's checkpoint.
        back = restore_state(by_plain, 6, run.program)
        assert_equal(whole(run, on_disk(back, 6, 10)), wanted, most)
        back = restore_state(by_disk, 6, plain.program)
        assert_equal(whole(plain, on_device(back, 6, 10)), wanted, most)
    there, shapes = run.program.disk.by_path, run.program.shapes
    state = leaves_by_path((shapes.params, shapes.opt_state, shapes.frozen))
    for path, leaf in state:
        assert (leaf.shape == ()) >= (path[2:] in there), path
    sizes = {p: leaf.size for p, leaf in leaves_by_path(plain.program.shapes.opt_state)}
    gone = sum(size for path, size in sizes.items() if path in there)
    if keys["offload.optimizer"] == "device":
        assert not gone
    elif layout == "half of it":
        assert 0.5 <= gone / sum(sizes.values()) < 0.75
    elif layout in LAYOUTS:
        assert gone == sum(size for size in sizes.values() if size > 1)
    on_disk = {path for path in there if path.startswith("layers/")}
    assert bool(on_disk) == ("offload.parameters" in keys)
    assert {path for path in on_disk if "lora" in path} == set()


WHAT: dict[str, dict[str, Any]] = {
    "optimizer": {},
    "master": {"train.precision": "bfloat16"},
    "parameters": {"model.layer_loop": "scan"},
}
WITH: dict[str, dict[str, Any]] = {
    "clip": {"optimizer.clip_norm": 0.1},
    "4 microbatches": {"train.microbatches": 4},
    **{f"zero {zero}": {"sharding.zero": zero} for zero in range(4)},
    "pipeline 2": {"mesh.pipeline": 2, "train.microbatches": 2},
}


@pytest.mark.campaign
@pytest.mark.parametrize("tier", ["host", "disk"])
@pytest.mark.parametrize("setting", WITH)
@pytest.mark.parametrize("part", WHAT)
def test_every_part_in_every_tier_with_everything(
    tmp_path: Path, part: str, setting: str, tier: str
) -> None:
    """Ten steps, killed and resumed after six: the state is that of a run on the device alone."""
    keys = WHAT[part] | WITH[setting]
    plain, run = make_run(tmp_path, **keys), make_run(tmp_path, **keys, **{f"offload.{part}": tier})
    steps = stepper(run)
    with Checkpointer(tmp_path / "checkpoints") as checkpoints:
        checkpoints.save(6, run.program.saved.save(steps(run.init(), 0, 6)), {})
        checkpoints.wait()
        state = steps(restore_state(checkpoints, 6, run.program), 6, 10)
    assert_equal(whole(run, state), whole(plain, stepper(plain)(plain.init(), 0, 10)))


@pytest.mark.parametrize(
    "keys",
    shortened([{"sharding.zero": 0}, {"sharding.zero": 1}, LORA], {"sharding.zero": 0}.__ne__),
)
def test_weights_from_elsewhere_are_never_on_the_device_together(
    tmp_path: Path, keys: dict[str, Any]
) -> None:
    """A run that begins with given weights has the state of one without offload, bit for bit."""
    keys = {"train.precision": "bfloat16", "model.layer_loop": "scan"} | keys
    keys.pop("offload.parameters", None)
    away = {"offload.parameters": "disk", "offload.master": "disk", "offload.optimizer": "host"}
    plain, run = make_run(tmp_path, **keys), make_run(tmp_path, **keys, **away)
    weights = jax.tree.map(
        lambda leaf: np.random.default_rng(leaf.size).standard_normal(leaf.shape, np.float32),
        plain.program.abstract_weights,
    )
    states = []
    for one in (plain, run):
        there = one.program.abstract_weights
        assert {leaf.sharding.memory_kind == HOST for leaf in jax.tree.leaves(there)} == {
            one is run
        }
        given = jax.tree.map(lambda x, leaf: jax.device_put(x, leaf.sharding), weights, there)
        states.append(whole(one, one.program.init_from(given)))
    assert_equal(states[1], states[0])
    paths, read = dict(leaves_by_path(weights)), []

    def one_by_one(path: str, leaf: Any) -> jax.Array:
        gone = [at() is None for before, at in read if before.startswith("layers/")]
        assert all(gone), "two layers' weights are in memory at once"
        weight = jax.device_put(paths[path], leaf.sharding)
        read.append((path, weakref.ref(weight)))
        return weight

    evaluated = run.program.init_from(in_turn(there, one_by_one), evaluates=True)
    assert evaluated.opt_state == ()
    assert {path for path, _ in read} == set(paths)
    assert_equal(
        whole(run, evaluated),
        {path: leaf for path, leaf in states[0].items() if not path.startswith("1/")},
    )
