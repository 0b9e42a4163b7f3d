"""Files of what rests on a disk: what is read is what was written, and nothing is left behind."""

import errno
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest

from shardtrain.config import load_config
from shardtrain.errors import ConfigError
from shardtrain.sharding import disk_files
from shardtrain.sharding.disk import Disk, Rows, require_disk
from shardtrain.sharding.disk_files import PAGE, Block, DiskFiles, Group, measure
from shardtrain.sharding.mesh import make_mesh

GROUP = Group("state", 5, (Block("a", (3, 7), "float32"), Block("b", (11,), "bfloat16")))


def values(row: int, turn: int = 0) -> list[Any]:
    drawn = np.random.default_rng((row, turn))
    return [
        drawn.standard_normal(block.shape).astype(jax.numpy.dtype(block.dtype))
        for block in GROUP.blocks
    ]


def test_blocks_begin_at_pages() -> None:
    assert GROUP.nbytes == 2 * PAGE
    assert [GROUP.block(path)[1] for path in ("a", "b")] == [0, PAGE]


@pytest.mark.parametrize("direct", [True, False])
def test_rows_are_what_was_written_in_whatever_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, direct: bool
) -> None:
    """Forwards, backwards and across, with reads ahead and writes behind."""
    if not direct:
        monkeypatch.setattr(disk_files, "can_be_direct", lambda _: False)
    monkeypatch.setattr(disk_files, "_CALL", PAGE)  # a row takes several calls
    files = DiskFiles(tmp_path)
    for row in range(GROUP.rows):
        assert files.write(GROUP, 0, row, values(row)) == 1
    order = [*range(5), *reversed(range(5)), 3, 1, 4, 0, 2]
    for row in order:
        for found, wanted in zip(files.read(GROUP, 0, row, 1), values(row), strict=True):
            np.testing.assert_array_equal(found, wanted)
    for row in range(GROUP.rows):  # as an update does: the next one is read before this is written
        files.read(GROUP, 0, row, 1)
        files.read(GROUP, 0, min(row + 1, 4), 1)
        assert files.write(GROUP, 0, row, values(row, 1)) == 2
    for row in order:
        np.testing.assert_array_equal(files.read(GROUP, 0, row, 2)[1], values(row, 1)[1])
    files.close()
    assert list(tmp_path.iterdir()) == []


def test_what_devices_write_at_the_same_time_is_all_counted(tmp_path: Path) -> None:
    files, often, row = DiskFiles(tmp_path), 200, values(0)

    def write(device: int) -> None:
        for _ in range(often):
            files.write(GROUP, device, 0, row)

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(4) as devices:
            list(devices.map(write, range(4)))
    finally:
        sys.setswitchinterval(before)
    assert files.written_bytes == 4 * often * GROUP.nbytes
    files.close()


def test_another_version_is_an_error(tmp_path: Path) -> None:
    """A program that would read what it has not written ends; it never goes on with other bits."""
    files = DiskFiles(tmp_path)
    files.write(GROUP, 0, 2, values(2))
    with pytest.raises(RuntimeError, match="row 2 of state is at version 1, not 0"):
        files.read(GROUP, 0, 2, 0)
    files.close()


def test_whole_tensors_come_and_go(tmp_path: Path) -> None:
    files = DiskFiles(tmp_path)
    for row in range(GROUP.rows):
        files.write(GROUP, 1, row, values(row))
    files.read(GROUP, 1, 0, 1)  # and one is read ahead
    for row, found in enumerate(files.load(GROUP, 1, "b", 1)):
        np.testing.assert_array_equal(found, values(row)[1])
    with pytest.raises(RuntimeError, match="row 0 of state is at version 1, not 2"):
        files.load(GROUP, 1, "b", 2)
    files.store(GROUP, 1, "a", [values(row, 7)[0] for row in range(GROUP.rows)])
    a, b = files.read(GROUP, 1, 4, 0)
    np.testing.assert_array_equal(a, values(4, 7)[0])
    np.testing.assert_array_equal(b, values(4)[1])
    files.close()


def test_a_folder_of_a_process_that_is_gone_is_deleted(tmp_path: Path) -> None:
    """What a killed run has left makes room for the next one; what is in use stays."""
    code = (
        "import os, sys, pathlib; from shardtrain.sharding.disk_files import own_folder; "
        "(own_folder(pathlib.Path(sys.argv[1])) / 'state.0.rows').write_bytes(b'x'); "
        "os.kill(os.getpid(), 9)"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=False)
    (left,) = tmp_path.iterdir()
    mine = disk_files.own_folder(tmp_path)
    assert not left.exists()
    other = disk_files.own_folder(tmp_path)
    assert mine.exists()
    assert mine != other


def test_a_disk_is_measured(tmp_path: Path) -> None:
    speed = measure(tmp_path, size=1 << 20, piece=1 << 18)
    assert speed.read > 0
    assert speed.write > 0
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_is_too_small_or_no_folder_is_refused_at_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    mesh = make_mesh(devices=jax.devices()[:1])
    whole = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    leaf = jax.ShapeDtypeStruct((4, 8), np.float32, sharding=whole)
    rows = Rows("state", DiskFiles(tmp_path), mesh, {"a": leaf})
    assert Disk(rows).begin().read > 0
    monkeypatch.setattr(disk_files, "_reserve", full)
    rows = Rows("state", DiskFiles(tmp_path), mesh, {"a": leaf})
    with pytest.raises(ConfigError, match="No space left on device; 1 devices with 16,384 bytes"):
        Disk(rows).begin()
    (tmp_path / "file").touch()
    rows = Rows("state", DiskFiles(tmp_path / "file" / "x"), mesh, {"a": leaf})
    with pytest.raises(ConfigError, match="cannot be made or written") as caught:
        Disk(rows).begin()
    assert "larger" not in caught.value.cure


def test_devices_that_cannot_are_refused() -> None:
    device: Any = SimpleNamespace(platform="tpu")
    with pytest.raises(ConfigError, match='"disk" with GPUs and CPUs'):
        require_disk([device])
    require_disk(jax.devices())


def test_the_host_updates_nothing_that_is_on_a_disk() -> None:
    with pytest.raises(ConfigError, match="only what rests there"):
        load_config("quickstart", {"offload.optimizer": "disk", "offload.update": "host"})
