"""Checkpoints: complete or absent, safe from the loop, on any mesh (O-32 to O-37, O-40)."""

import asyncio
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from shardtrain.checkpoint import arrays, folder
from shardtrain.checkpoint.checkpointer import Checkpointer
from shardtrain.errors import CheckpointError


def make_mesh(data, replica, tensor):
    devices = jax.devices()[: data * replica * tensor]
    return jax.make_mesh(
        (data, replica, tensor),
        ("data", "replica", "tensor"),
        axis_types=(jax.sharding.AxisType.Auto,) * 3,
        devices=devices,
    )


def make_state(mesh, seed=0):
    """Everything that a train state may hold, spread over a mesh in several ways."""

    def put(value, *spec):
        return jax.device_put(value, NamedSharding(mesh, P(*spec)))

    draw = np.random.default_rng(seed).standard_normal
    params = {
        "embedding": put(jnp.float32(draw((16, 8))), ("data", "replica"), "tensor"),
        "layers": {"w": put(jnp.bfloat16(draw((3, 8, 4))), None, "tensor", "data")},
        "bias": put(jnp.float32(draw(7))),
    }
    tx = optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.masked(optax.adamw(1e-3), {"embedding": True, "layers": {"w": False}, "bias": True}),
    )
    return {
        "step": put(jnp.int32(seed)),
        "params": params,
        "opt_state": tx.init(params),
        "key": put(jax.random.key(seed)),
        "keys": put(jax.random.split(jax.random.key(seed, impl="rbg"), 4), "data"),
        "host": draw(5),
        "nothing": put(jnp.zeros((0, 3), jnp.float32)),
        "absent": None,
    }


def abstract_of(tree, mesh=None):
    def one(leaf):
        sharding = getattr(leaf, "sharding", None)
        if mesh is not None and sharding is not None:
            sharding = NamedSharding(mesh, getattr(sharding, "spec", P()))
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    return jax.tree.map(one, tree)


def bits(leaf):
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    return np.asarray(leaf)


def assert_same_bits(got, want):
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert a.dtype == b.dtype
        assert bits(a).shape == bits(b).shape
        assert bits(a).tobytes() == bits(b).tobytes()


class Wrapped:
    """The real writer, with something in its way."""

    def __init__(self, finish):
        self._inner = arrays.Writer()
        self._finish = finish

    def start(self, path, leaves):
        self._inner.start(path, leaves)

    def finish(self):
        self._inner.finish()
        self._finish()

    def close(self):
        self._inner.close()


@pytest.fixture
def small():
    return {"w": jnp.arange(8.0), "n": np.arange(3)}


# -- what is stored


def test_a_whole_state_comes_back_bit_for_bit(tmp_path):
    state = make_state(make_mesh(2, 2, 2))
    metadata = {"config": {"model": {"num_layers": 2}}, "cursor": 7}
    with Checkpointer(tmp_path / "checkpoints", 2) as checkpointer:
        assert checkpointer.latest() is None
        assert not (tmp_path / "checkpoints").exists()
        checkpointer.save(3, state, metadata)
        checkpointer.wait()
        (saved,) = checkpointer.poll()
        assert checkpointer.poll() == []
        restored = checkpointer.restore(3, abstract_of(state))
        assert checkpointer.metadata(3) == metadata
        record = checkpointer.record(3)
    assert saved.step == 3
    assert saved.num_bytes == record.num_bytes == arrays.tree_bytes(state)
    assert 0 < saved.blocked_seconds <= saved.total_seconds
    assert_same_bits(restored, state)
    for got, want in zip(jax.tree.leaves(restored), jax.tree.leaves(state), strict=True):
        assert type(got) is type(want)
        if isinstance(want, jax.Array):
            assert got.sharding == want.sharding
    assert restored["opt_state"][1].inner_state[0].mu["embedding"].shape == (16, 8)
    assert {"python", "jax", "orbax-checkpoint"} <= record.versions.keys()
    assert record.leaves["params/layers/w"] == folder.LeafRecord((3, 8, 4), "bfloat16")
    assert record.leaves["keys"] == folder.LeafRecord((4,), "key<rbg>")


@pytest.mark.parametrize("shape", [(2, 1, 2), (1, 2, 1), (1, 1, 1), (1, 1, 8)])
def test_restores_on_other_meshes(tmp_path, shape):  # O-40
    state = make_state(make_mesh(2, 2, 2))
    with Checkpointer(tmp_path, 1) as checkpointer:
        checkpointer.save(1, state, {})
        checkpointer.wait()
        target = abstract_of(state, make_mesh(*shape))
        restored = checkpointer.restore(1, target)
        on_host = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), state["params"])
        host = checkpointer.restore(1, {"params": on_host}, subset=True)
        everything = checkpointer.restore_host(1)
    assert_same_bits(restored, state)
    assert restored["params"]["embedding"].sharding == target["params"]["embedding"].sharding
    assert all(type(leaf) is np.ndarray for leaf in jax.tree.leaves((host, everything)))
    assert_same_bits(host["params"], state["params"])
    assert everything["opt_state"]["1"]["inner_state"]["0"]["mu"]["embedding"].shape == (16, 8)
    assert len(jax.tree.leaves(everything)) == len(jax.tree.leaves(state))
    assert everything["key"].tobytes() == bits(state["key"]).tobytes()


def test_another_process_with_one_device_reads_it(tmp_path):  # O-40
    state = make_state(make_mesh(2, 2, 2))
    with Checkpointer(tmp_path, 1) as checkpointer:
        checkpointer.save(1, {"params": state["params"], "key": state["key"]}, {"a": [1, "b"]})
    script = """
        import sys
        from shardtrain.checkpoint import folder
        from pathlib import Path
        path = Path(sys.argv[1])
        record = folder.read_record(path, 1)
        assert record.metadata == {"a": [1, "b"]} and folder.complete_steps(path) == [1]
        assert record.leaves["params/embedding"] == folder.LeafRecord((16, 8), "float32")
        assert "jax" not in sys.modules

        import jax, numpy as np
        from shardtrain.checkpoint.checkpointer import Checkpointer
        (device,) = jax.devices()
        here = jax.sharding.SingleDeviceSharding(device)
        want = {
            "params": {"embedding": jax.ShapeDtypeStruct((16, 8), np.float32, sharding=here)},
            "key": jax.ShapeDtypeStruct((), jax.random.key(0).dtype, sharding=here),
        }
        got = Checkpointer(path, 1).restore(1, want, subset=True)
        print(np.asarray(got["params"]["embedding"]).tobytes().hex())
        print(jax.random.bits(got["key"]))
    """
    lines = child(script, tmp_path).communicate(timeout=60)[0].split()
    assert bytes.fromhex(lines[0]) == bits(state["params"]["embedding"]).tobytes()
    assert int(lines[1]) == int(jax.random.bits(state["key"]))


def test_a_target_that_does_not_fit_is_refused(tmp_path):  # O-40
    saved = {"a": jnp.zeros((4, 2)), "b": jnp.zeros(3, jnp.int32), "k": jax.random.key(0)}
    with Checkpointer(tmp_path, 1) as checkpointer:
        checkpointer.save(1, saved, {})
        checkpointer.wait()
        where = f"{tmp_path}/1: the checkpoint does not fit this run"
        for change, line in {
            ("a", (6, 2), jnp.float32): "a: saved float32[4, 2], wanted float32[6, 2]",
            ("a", (2, 2), jnp.float32): "a: saved float32[4, 2], wanted float32[2, 2]",
            ("a", (4, 2), jnp.bfloat16): "a: saved float32[4, 2], wanted bfloat16[4, 2]",
            ("c", (1,), jnp.float32): "c: not in the checkpoint, wanted float32[1]",
            ("k", (2,), jnp.uint32): "k: saved key<threefry2x32>[], wanted uint32[2]",
        }.items():
            name, shape, dtype = change
            want = abstract_of(saved) | {name: jax.ShapeDtypeStruct(shape, dtype)}
            for subset in (False, True):
                with pytest.raises(CheckpointError) as caught:
                    checkpointer.restore(1, want, subset=subset)
                assert str(caught.value).splitlines()[0] == where
                assert line in str(caught.value)
        want = abstract_of(saved)
        del want["b"]
        with pytest.raises(CheckpointError, match=r"b: saved int32\[3\], not wanted"):
            checkpointer.restore(1, want)
        assert_same_bits(checkpointer.restore(1, want, subset=True)["a"], saved["a"])
        many = {f"x{i}": jax.ShapeDtypeStruct((1,), jnp.float32) for i in range(20)}
        with pytest.raises(CheckpointError, match="and 12 more"):
            checkpointer.restore(1, many, subset=True)


def test_stock_orbax_reads_the_arrays(tmp_path, small):
    with Checkpointer(tmp_path, 1) as checkpointer:
        checkpointer.save(5, small, {})
    assert ocp.utils.checkpoint_steps(tmp_path) == [5]
    with ocp.StandardCheckpointer() as stock:
        restored = stock.restore(tmp_path / "5" / "state")
    assert_same_bits(restored["w"], np.arange(8, dtype=np.float32))


def test_missing_damaged_and_newer_steps_are_refused(tmp_path, small):
    with Checkpointer(tmp_path, 3) as checkpointer:
        # One leaf: of several reads that fail, TensorStore reports some to a closed event loop.
        one = {"w": small["w"]}
        for step in (1, 2, 3):
            checkpointer.save(step, one, {})
        checkpointer.wait()
        with pytest.raises(CheckpointError) as caught:
            checkpointer.metadata(9)
        assert str(caught.value) == (
            f"{tmp_path}: step 9 is not there\n  allowed: complete steps: 1, 2, 3"
        )
        path = tmp_path / "3" / folder.RECORD
        path.write_text(path.read_text().replace('"format_version": 2', '"format_version": 3'))
        with pytest.raises(CheckpointError, match="written by a newer shardtrain"):
            checkpointer.restore(3, abstract_of(one))
        path.write_text("{")
        with pytest.raises(CheckpointError, match="the record of this step is damaged"):
            checkpointer.metadata(3)
        for data in (tmp_path / "2" / "state").rglob("*"):
            if data.is_file() and data.parent.name == "d":
                data.write_bytes(data.read_bytes()[:-20])
        with pytest.raises(CheckpointError) as caught:
            checkpointer.restore(2, abstract_of(one))
        assert "step 2 cannot be read" in str(caught.value)
        assert_same_bits(checkpointer.restore(1, abstract_of(one))["w"], one["w"])


def test_what_json_cannot_hold_is_refused_before_anything_is_written(tmp_path, small):
    with Checkpointer(tmp_path, 1) as checkpointer:
        for wrong in (object(), float("nan")):
            with pytest.raises((TypeError, ValueError)):
                checkpointer.save(1, small, {"config": wrong})
        with pytest.raises(TypeError, match=r"name: expected an array, got str"):
            checkpointer.save(1, {"name": "x"}, {})
        assert list(tmp_path.iterdir()) == []
        checkpointer.save(1, small, {})
        checkpointer.wait()
        with pytest.raises(CheckpointError, match="step 1 is there already"):
            checkpointer.save(1, small, {})
        assert checkpointer.steps() == [1]


# -- the loop and the writer


def test_values_are_those_of_the_saved_step(tmp_path, monkeypatch):  # O-35
    from orbax.checkpoint._src.serialization import jax_array_handlers, type_handlers

    begun = threading.Event()

    def slowed(write):
        async def wait_and_write(*args, **kwargs):
            begun.set()
            await asyncio.sleep(0.5)
            return await write(*args, **kwargs)

        return wait_and_write

    name = "_async_serialize_replica_slices"
    monkeypatch.setattr(jax_array_handlers, name, slowed(getattr(jax_array_handlers, name)))
    handler = type_handlers.NumpyHandler
    monkeypatch.setattr(handler, "_background_serialize", slowed(handler._background_serialize))

    mesh = make_mesh(2, 2, 2)
    device = NamedSharding(mesh, P("data", "tensor"))
    pinned = NamedSharding(mesh, P("data"), memory_kind="pinned_host")
    state = {
        "device": jax.device_put(jnp.arange(4096.0).reshape(64, 64), device),
        "whole": jax.device_put(jnp.arange(5.0), NamedSharding(mesh, P())),
        "pinned": jax.device_put(jnp.arange(4096.0), pinned),
    }
    update = jax.jit(
        lambda s: jax.tree.map(lambda x: x * 2 + 1, s),
        donate_argnums=0,
        out_shardings=jax.tree.map(lambda x: x.sharding, state),
    )
    host = np.arange(5.0)
    copy = {name: np.array(value) for name, value in (state | {"host": host}).items()}
    with Checkpointer(tmp_path, 1) as checkpointer:
        checkpointer.save(1, state | {"host": host}, {})
        for _ in range(3):
            state = update(state)
            host += 1
        jax.block_until_ready(state)
        assert begun.wait(5)
        assert checkpointer.steps() == []  # so the three steps were done before a byte was written
        checkpointer.wait()
        assert_same_bits(checkpointer.restore_host(1), copy)


def test_a_failed_save_is_seen_and_older_steps_stay(tmp_path, small):  # O-32
    calls = []

    def fail_at_two():
        calls.append(1)
        if len(calls) == 2:
            raise OSError(5, "Input/output error")

    checkpointer = Checkpointer(tmp_path, 1, writer=Wrapped(fail_at_two))
    checkpointer.save(1, small, {})
    checkpointer.save(2, small, {})
    with pytest.raises(CheckpointError) as caught:
        checkpointer.save(3, small, {})
    assert str(caught.value).splitlines() == [
        f"{tmp_path}: step 2 was not saved",
        "  value: OSError: [Errno 5] Input/output error",
        "  to do: free some space or repair the folder, then run again; "
        "the run goes on from step 1",
    ]
    assert isinstance(caught.value.__cause__, OSError)
    assert checkpointer.steps() == [1]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["1"]
    # raised once; a loop that goes on can save again
    checkpointer.save(3, small, {})
    checkpointer.close()
    assert checkpointer.steps() == [1, 3], "the one before the newest stays, whatever keep says"


@pytest.mark.parametrize("how", ["wait", "close", "poll"])
def test_the_last_save_cannot_fail_unseen(tmp_path, small, how):  # O-32
    def fail():
        raise RuntimeError("broken")

    checkpointer = Checkpointer(tmp_path, 1, writer=Wrapped(fail))
    checkpointer.save(1, small, {})
    while checkpointer._thread.is_alive():
        time.sleep(0.01)
    with pytest.raises(CheckpointError, match="step 1 was not saved"):
        getattr(checkpointer, how)()
    checkpointer.close()
    assert checkpointer.latest() is None


def test_a_program_that_just_ends_says_that_its_save_failed(tmp_path):  # O-32
    script = """
        import sys, time
        from shardtrain.checkpoint.checkpointer import Checkpointer

        class Failing:
            def start(self, path, leaves):
                pass

            def finish(self):
                time.sleep(0.2)
                raise OSError(28, "No space left on device")

        sys.stderr = sys.stdout
        Checkpointer(sys.argv[1], 1, writer=Failing()).save(1, {}, {})
    """
    out = child(script, tmp_path).communicate(timeout=60)[0]
    assert "step 1 was not saved\n  value: OSError: [Errno 28] No space left on device" in out
    assert list(tmp_path.iterdir()) == []


def test_retention_is_by_count_and_only_of_ours(tmp_path, small):
    (tmp_path / "notes").mkdir()
    (tmp_path / "2").mkdir()  # somebody's folder that looks like a step
    (tmp_path / "2" / "file").write_text("")
    with Checkpointer(tmp_path, 2) as checkpointer:
        for step in (10, 9, 100, 101):
            checkpointer.save(step, small, {})
            checkpointer.wait()
        assert checkpointer.steps() == [100, 101]
        with pytest.raises(CheckpointError, match="step 2 is there already"):
            checkpointer.save(2, small, {})
    assert sorted(p.name for p in tmp_path.iterdir()) == ["100", "101", "2", "notes"]


def test_there_is_always_a_complete_step(tmp_path, small):  # O-33
    seen = []
    with Checkpointer(tmp_path, 1) as checkpointer:
        checkpointer.save(0, small, {})
        checkpointer.wait()
        done = threading.Event()

        def watch():
            while not done.is_set():
                seen.append(len(folder.complete_steps(tmp_path)))

        watcher = threading.Thread(target=watch)
        watcher.start()
        for step in range(1, 6):
            checkpointer.save(step, small, {})
        checkpointer.wait()
        done.set()
        watcher.join()
    assert checkpointer.steps() == [4, 5]
    assert len(seen) > 100
    assert set(seen) <= {1, 2, 3}


def test_an_old_step_that_cannot_be_deleted_is_said(tmp_path, small, monkeypatch):
    def no_delete(path):
        if Path(path).name.startswith("1"):
            raise OSError(13, "Permission denied")

    checkpointer = Checkpointer(tmp_path, 1)
    for step in (1, 2):
        checkpointer.save(step, small, {})
    checkpointer.wait()
    monkeypatch.setattr(shutil, "rmtree", no_delete)
    checkpointer.save(3, small, {})
    with pytest.raises(CheckpointError, match="step 3 is saved, but an older one cannot be"):
        checkpointer.close()
    assert checkpointer.steps() == [2, 3]
    assert [saved.step for saved in checkpointer.poll()] == [1, 2, 3]
    with pytest.raises(CheckpointError, match="leftovers of an interrupted save cannot be"):
        checkpointer.clean()


# -- kills


def child(script, *args):
    """Start a script with one CPU device; its standard output is a pipe."""
    env = os.environ | {"XLA_FLAGS": "", "JAX_PLATFORMS": "cpu"}
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(script), *map(str, args)],
        stdout=subprocess.PIPE,
        text=True,
        env=env,
    )


SAVE_FOREVER = """
    import sys, time
    import jax, jax.numpy as jnp
    from shardtrain.checkpoint import arrays
    from shardtrain.checkpoint.checkpointer import Checkpointer

    path, keep, slow = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])

    class Slow(arrays.Writer):
        def finish(self):
            time.sleep(slow)
            super().finish()

    checkpointer = Checkpointer(path, keep)
    print("cleaned", *[p.name for p in checkpointer.clean()], flush=True)
    step = checkpointer.latest() or 0
    while True:
        step += 1
        state = {"w": jnp.arange(20_000.0) + step, "key": jax.random.key(step)}
        print("save", step, flush=True)
        checkpointer.save(step, state, {"step": step})
        checkpointer.wait()
        print("done", step, flush=True)
        checkpointer._writer = Slow() if slow else checkpointer._writer
"""


def assert_step_is_whole(checkpointer, step):
    want = {"w": jnp.arange(20_000.0) + step, "key": jax.random.key(step)}
    assert checkpointer.metadata(step) == {"step": step}
    assert_same_bits(checkpointer.restore(step, abstract_of(want)), want)


def kill_in_save(directory, delay):
    """Run saves, kill within one after `delay` seconds; return what was reported as cleaned."""
    process = child(SAVE_FOREVER, directory, 2, 0)
    with process.stdout as out:
        cleaned = out.readline().split()[1:]
        for line in out:
            if line.startswith("done"):
                break
        out.readline()
        time.sleep(delay)
        process.send_signal(signal.SIGKILL)
        done = [int(line.split()[1]) for line in out if line.startswith("done")]
        process.wait()
    return cleaned, done


def check_kills(directory, count, seed):
    directory.mkdir()
    (directory / "7.bak").mkdir()
    (directory / "8.orbax-checkpoint-tmp").mkdir()
    draw = random.Random(seed)
    left, reported = [], []
    for _ in range(count):
        cleaned, done = kill_in_save(directory, draw.uniform(0, 0.12))
        reported += cleaned
        assert cleaned == left
        checkpointer = Checkpointer(directory, 2)
        left = [path.name for path in checkpointer.leftovers()]
        found = checkpointer.steps()
        assert found
        assert found[-1] >= max(done, default=0)
        assert len(found) - len(done) <= 3
        for step in found:
            assert_step_is_whole(checkpointer, step)
    # the next run reports, cleans only ours, and writes the same step again
    with Checkpointer(directory, 2) as checkpointer:
        assert [path.name for path in checkpointer.clean()] == left
        again = found[-1] + 1
        state = {"w": jnp.arange(20_000.0) + again, "key": jax.random.key(again)}
        checkpointer.save(again, state, {"step": again})
        checkpointer.wait()
        assert checkpointer.latest() == again
        assert_step_is_whole(checkpointer, again)
    names = {path.name for path in directory.iterdir()}
    assert names == {"7.bak", "8.orbax-checkpoint-tmp", *map(str, checkpointer.steps())}
    return reported + left


def test_killed_at_random_points_of_a_save(tmp_path):  # O-34
    check_kills(tmp_path / "c", 3, seed=1)


@pytest.mark.campaign
def test_killed_at_twenty_random_points_of_a_save(tmp_path):  # O-34
    reported = check_kills(tmp_path / "c", 20, seed=2)
    assert len(reported) >= 5  # so the kills did fall into saves


def test_killed_in_a_slow_save_with_keep_one(tmp_path):  # O-33
    process = child(SAVE_FOREVER, tmp_path, 1, 2)
    with process.stdout as out:
        assert [out.readline().strip() for _ in range(3)] == ["cleaned", "save 1", "done 1"]
        assert out.readline().strip() == "save 2"
        time.sleep(0.4)
        assert folder.complete_steps(tmp_path) == [1]
        process.kill()
        process.wait()
    checkpointer = Checkpointer(tmp_path, 1)
    assert checkpointer.latest() == 1
    assert_step_is_whole(checkpointer, 1)
    assert [path.name for path in checkpointer.leftovers()] == ["2.shardtrain-tmp"]


def test_only_leftovers_is_a_fresh_start(tmp_path, small):  # O-34
    for name in ("5.shardtrain-tmp", "4.shardtrain-deleting"):
        (tmp_path / name / "state").mkdir(parents=True)
        (tmp_path / name / "checkpoint.json").write_text("{}")
    (tmp_path / "6.shardtrain-tmp.old").mkdir()
    (tmp_path / "7.shardtrain-tmp").symlink_to(tmp_path / "6.shardtrain-tmp.old")
    with Checkpointer(tmp_path, 1) as checkpointer:
        assert checkpointer.latest() is None
        checkpointer.save(5, small, {})  # even where nobody has cleaned
        checkpointer.wait()
        assert checkpointer.steps() == [5]
        assert [path.name for path in checkpointer.clean()] == ["4.shardtrain-deleting"]
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "5",
        "6.shardtrain-tmp.old",
        "7.shardtrain-tmp",
    ]


# -- the disk


def test_a_disk_that_is_too_small_is_refused(tmp_path, small, monkeypatch):  # O-37
    with Checkpointer(tmp_path / "c", 2) as checkpointer:
        checkpointer.preflight(1 << 20)
        usage = shutil.disk_usage(tmp_path)._replace(free=10 << 20)
        monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
        checkpointer.preflight(2 << 20)
        with pytest.raises(CheckpointError) as caught:
            checkpointer.preflight(4 << 20)
        assert str(caught.value).splitlines() == [
            f"{tmp_path}/c: the disk is too small for the checkpoints of this run",
            "  value: 10 MiB free; 15 MiB needed: 3 checkpoints of 4 MiB, of which 0 B are there",
            "  to do: free some space, lower checkpoint.keep, or put run.dir on another disk",
        ]
        # what a resumed run has already written needs no new space
        checkpointer.save(1, {"w": np.zeros(6 << 20, np.uint8)}, {})
        checkpointer.wait()
        checkpointer.preflight(4 << 20)


def check_full_disk(directory, fill):
    big = {"w": np.random.default_rng(0).bytes(1 << 20)}
    big = {"w": np.frombuffer(big["w"], np.uint8)}
    ok = {"w": np.arange(10)}
    with Checkpointer(directory, 2) as checkpointer:
        checkpointer.save(1, ok, {})
        checkpointer.wait()
        with fill():
            checkpointer.save(2, big, {})
            with pytest.raises(CheckpointError) as caught:
                checkpointer.wait()
        assert "step 2 was not saved" in str(caught.value)
        assert "the run goes on from step 1" in str(caught.value)
        assert [path.name for path in directory.iterdir()] == ["1"]
        assert_same_bits(checkpointer.restore_host(1), ok)
        checkpointer.save(3, ok, {})
        checkpointer.wait()
        assert checkpointer.steps() == [1, 3]
    return str(caught.value)


class FileSizeLimit:
    """No file may grow over 64 KiB: what the writer gets is a failed write, as on a full disk."""

    def __enter__(self):
        self.old = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (65536, self.old[1]))

    def __exit__(self, *_):
        resource.setrlimit(resource.RLIMIT_FSIZE, self.old)


def test_a_save_that_does_not_fit_fails_loudly(tmp_path):  # O-37
    assert "File too large" in check_full_disk(tmp_path, FileSizeLimit)


@pytest.mark.campaign
def test_a_save_on_a_tiny_file_system_fails_loudly(tmp_path):  # O-37
    mount = ["mount", "-t", "tmpfs", "-o", "size=512k", "tmpfs", str(tmp_path)]
    if os.geteuid() or subprocess.run(mount, check=False).returncode:
        pytest.skip("only root may mount a tmpfs")
    try:
        directory = tmp_path / "c"
        assert "No space left" in check_full_disk(directory, threading.Lock)
        with pytest.raises(CheckpointError, match="the disk is too small"):
            Checkpointer(directory, 2).preflight(1 << 20)
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)


# -- time


def test_the_loop_is_held_up_only_for_the_copy(tmp_path):
    mesh = make_mesh(4, 1, 2)
    sharding = NamedSharding(mesh, P("data", "tensor"))
    state = {f"w{i}": jax.device_put(jnp.zeros((256, 256)), sharding) for i in range(48)}
    with Checkpointer(tmp_path, 2) as checkpointer:
        for step in range(4):
            checkpointer.save(step, state, {})
            checkpointer.wait()
        saved = checkpointer.poll()
    # 25 and 130 ms on two idle cores; wide enough for busy ones
    assert min(s.blocked_seconds for s in saved) < 0.4
    assert min(s.total_seconds for s in saved) < 2.0
    assert json.loads((tmp_path / "3" / folder.RECORD).read_text())["num_bytes"] == 48 * 256 * 1024
