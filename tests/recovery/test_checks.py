"""Silent faults are found: a copy that differs, a step that does not give the same twice."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from several import several

from shardtrain.errors import PolicyError
from shardtrain.sharding.mesh import make_mesh
from shardtrain.sharding.processes import Alone
from shardtrain.train.checks import Rerun, check_replicas


def copies(wrong: int | None = None) -> jax.Array:
    """[8, 4], split over tensor and copied over data; a bit of one device's copy may be wrong."""
    sharding = NamedSharding(make_mesh(data=4, tensor=2), PartitionSpec("tensor"))
    values = np.arange(32, dtype=np.float32).reshape(8, 4)
    pieces = []
    for device, index in sharding.addressable_devices_indices_map((8, 4)).items():
        piece = values[index].copy()
        if device.id == wrong:
            piece.view(np.uint32)[2, 3] ^= np.uint32(1)
        pieces.append(jax.device_put(piece, device))
    return jax.make_array_from_single_device_arrays((8, 4), sharding, pieces)


def test_equal_copies_are_fine() -> None:
    state = {"a": copies(), "key": jax.random.key(0), "n": jnp.int32(3)}
    check_replicas(state, Alone(), "first")


def test_one_wrong_bit_is_named_with_its_array_and_device() -> None:
    with pytest.raises(PolicyError) as caught:
        check_replicas({"a": copies(), "b": {"c": copies(wrong=5)}}, Alone(), "first")
    assert "b/c: device 5 of 4" in str(caught.value)
    assert "a:" not in str(caught.value)
    assert caught.value.exit_code == 3


def test_copies_in_other_processes_count_too() -> None:
    """Each process says what it has; here one of them says something else of the same piece."""
    import json

    first, second = several(2)
    state = {"a": copies()}
    told = []
    first.barrier = lambda name, seconds: None  # type: ignore[method-assign]
    check_replicas(state, first, "one")
    for path, where, device, digest in json.loads(first.get("one/0") or ""):
        told.append([path, where, device + 8, digest])
    first.set("two/1", json.dumps(told))
    check_replicas(state, first, "two")
    told[0][3] = "0" * 16
    first.set("three/1", json.dumps(told))
    with pytest.raises(PolicyError, match="copies of the state differ"):
        check_replicas(state, first, "three")


def test_a_step_that_does_not_repeat() -> None:
    calls = []

    def step(state, batch):
        calls.append(1)
        drift = 1.0 if len(calls) == 7 else 0.0
        return {"w": state["w"] + batch["x"] + drift}, {"loss": jnp.float32(0)}

    rerun = Rerun(step, every=3)
    state, batch = {"w": jnp.zeros(4)}, {"x": jnp.ones(4)}
    for _ in range(5):
        state, _ = rerun(state, batch)  # type: ignore[assignment,arg-type]
    assert len(calls) == 6, "every third is computed twice"
    assert state["w"][0] == 5
    with pytest.raises(PolicyError, match="a step computed twice gave two results") as caught:
        rerun(state, batch)  # type: ignore[arg-type]
    assert "value: w" in str(caught.value)
