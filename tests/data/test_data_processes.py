"""Other processes: the same order after a restart, one cache for two, each reads its own rows."""

import json
import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import numpy as np
import pytest

from shardtrain.data.config import DataConfig
from shardtrain.data.language import LanguageData
from shardtrain.data.sources import open_data

_DATA = """
import json, os, sys, time
import numpy as np
from shardtrain.data.config import DataConfig
from shardtrain.data.sources import open_data
"""


def start(program: str, *arguments: object, **environment: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", _DATA + textwrap.dedent(program), *map(str, arguments)],
        env={**os.environ, "PYTHONWARNINGS": "error", **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def result(process: subprocess.Popen[str], timeout: float = 60) -> list[str]:
    out, err = process.communicate(timeout=timeout)
    assert process.returncode == 0, err
    return out.splitlines()


PREPARE = """
from shardtrain.data import prepare
text, cache, delay = sys.argv[1], sys.argv[2], float(sys.argv[3])
write = prepare._write
def slow(*arguments):
    print("building", flush=True)
    time.sleep(delay)
    write(*arguments)
prepare._write = slow
config = DataConfig(path=text, cache=cache, sequence_length=16, batch_size=4)
train, validation, info = open_data(config, say=lambda message: print(message, flush=True))
print(json.dumps([info.digest, [train.digest(c) for c in range(50)]]))
"""


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.jsonl"
    rows = (json.dumps({"text": f"the text of document {i} " * (i % 9 + 1)}) for i in range(300))
    path.write_text("\n".join(rows))
    return path


def test_two_processes_and_one_cache(tmp_path: Path, text: Path) -> None:
    """O-31: one builder is delayed; the other waits for it or builds; both have the same order."""
    cache = tmp_path / "cache"
    slow = start(PREPARE, text, cache, 1.5)
    assert slow.stdout is not None
    assert slow.stdout.readline().startswith("preparing")
    assert slow.stdout.readline() == "building\n"
    quick = start(PREPARE, text, cache, 0)
    one, two = result(slow), result(quick)
    assert one[-1] == two[-1]
    assert "building" not in two
    assert any(line.startswith("waiting for another process") for line in two)
    (folder,) = (cache / "tokens").iterdir()
    assert {path.name for path in folder.iterdir()} == {
        ".lock",
        "train.tokens",
        "validation.tokens",
    }


def test_two_processes_that_cannot_lock_each_other_out(tmp_path: Path, text: Path) -> None:
    """As on a file system without locks: both build, at once, and nothing is torn."""
    unlocked = "from shardtrain.data import cache\ncache._try_lock = lambda handle: True\n"
    both = [start(unlocked + PREPARE, text, tmp_path / "cache", delay) for delay in (0.2, 0.3)]
    one, two = (result(process) for process in both)
    assert one[-1] == two[-1]
    assert "building" in one
    assert "building" in two


def test_two_caches(tmp_path: Path, text: Path) -> None:
    """O-31: node-local disks."""
    both = [start(PREPARE, text, tmp_path / f"cache{i}", 0) for i in range(2)]
    one, two = (result(process) for process in both)
    assert one[-1] == two[-1]


def test_killed_builder_truncated_cache_and_stale_lock(tmp_path: Path, text: Path) -> None:
    """O-31: what a dead process left behind neither blocks nor misleads."""
    cache = tmp_path / "cache"
    killed = start(PREPARE, text, cache, 60)
    assert killed.stdout is not None
    while killed.stdout.readline() != "building\n":
        pass
    killed.send_signal(signal.SIGKILL)
    killed.communicate()
    (folder,) = (cache / "tokens").iterdir()
    assert len(list(folder.glob(".*.tmp"))) == 4
    (folder / ".lock").write_text(f"pid {killed.pid}")
    (folder / "train.tokens").write_bytes(b"SHARDTOK" + bytes(100))
    began = time.monotonic()
    first = result(start(PREPARE, text, cache, 0))
    assert time.monotonic() - began < 30
    assert first[0].startswith("preparing again: ")
    path = folder / "train.tokens"
    os.truncate(path, path.stat().st_size // 2)
    second = result(start(PREPARE, text, cache, 0))
    assert second[0].startswith("preparing again: ")
    assert second[-1] == first[-1]


RESUME = """
import jax
from shardtrain.data.loader import Loader
text, cache, prefetch = sys.argv[1], sys.argv[2], int(sys.argv[3])
config = DataConfig(path=text, cache=cache, sequence_length=16, batch_size=8)
data = open_data(config, seed=3)[0]
epoch = data.batches_per_epoch
here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
for cut in (epoch // 2, epoch, epoch + epoch // 3):
    loader = Loader(data, microbatches=2, place=lambda name, shape: here,
                    start=cut, stop=2 * epoch + 2, prefetch=prefetch)
    tail = []
    for cursor, batch, _ in loader:
        tail.append([cursor, data.digest(cursor), np.asarray(batch["tokens"]).ravel().tolist()])
    print(json.dumps([cut, tail]))
"""


@pytest.mark.parametrize("prefetch", [0, 2])
def test_resume_in_a_new_process(tmp_path: Path, text: Path, prefetch: int) -> None:
    """O-27, O-29: cut in epoch 1, at its end, in epoch 2; nothing repeated, nothing lost."""
    cache = tmp_path / "cache"
    config = DataConfig(path=str(text), cache=str(cache), sequence_length=16, batch_size=8)
    data = open_data(config, seed=3)[0]
    stop = 2 * data.batches_per_epoch + 2
    uncut = [[c, data.digest(c), data.batch_at(c)["tokens"].ravel().tolist()] for c in range(stop)]
    lines = result(start(RESUME, text, cache, prefetch))
    assert len(lines) == 3
    for line in lines:
        cut, tail = json.loads(line)
        assert tail == uncut[cut:]


OWN_ROWS = """
import jax
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from shardtrain.data.language import LanguageData
from shardtrain.data.loader import batch_layout
address, rank = sys.argv[1], int(sys.argv[2])
jax.distributed.initialize(address, num_processes=2, process_id=rank)
mesh = jax.make_mesh((4, 2), ("data", "tensor"), axis_types=(AxisType.Auto,) * 2)
place = lambda name, shape: NamedSharding(mesh, PartitionSpec(None, "data"))
tokens = np.arange(4 * 160 + 1, dtype=np.uint16)
data = LanguageData(tokens, np.array([0, 641]), 60000, sequence_length=4, batch_size=16)
layout = batch_layout(data, 2, place)
batch = layout.put(lambda start, stop: data.rows(7, start, stop))
parts = sorted((str(s.index), s.data.tolist()) for s in batch["sample"].addressable_shards)
jax.distributed.shutdown()
print(json.dumps([layout.ranges, parts]))
"""


def test_each_process_reads_its_own_rows() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    flags = "--xla_force_host_platform_device_count=4"
    both = [
        start(OWN_ROWS, address, rank, XLA_FLAGS=flags, PYTHONWARNINGS="default")
        for rank in range(2)
    ]
    ranges, parts = zip(*(json.loads(result(p)[-1]) for p in both), strict=True)
    assert ranges == ([[0, 4], [8, 12]], [[4, 8], [12, 16]])
    data = LanguageData(
        np.arange(641, dtype=np.uint16), np.array([0, 641]), 60000, sequence_length=4, batch_size=16
    )
    rows = data.batch_at(7)["sample"].reshape(2, 4, 2)
    seen = [shard for process in parts for _, shard in process]
    assert len(seen) == 8
    expected = [rows[:, part].tolist() for part in range(4) for _ in range(2)]
    assert sorted(seen) == sorted(expected)
