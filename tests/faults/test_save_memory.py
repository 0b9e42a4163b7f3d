"""O-38: saving and exporting a state that is split over 8 devices never brings it together."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

MEASURE = """
import json, os, sys, threading, time, tracemalloc
from pathlib import Path
import jax
from shardtrain.commands_interop import export_weights
from shardtrain.config import load_config
from shardtrain.interop import hf_files
from shardtrain.run import build
from shardtrain.training import train

PAGE = os.sysconf("SC_PAGE_SIZE")

class Peak:
    "Most bytes of this process, and on each device, beyond those at the start."

    def __enter__(self):
        self.most, self.most_device, self.done = 0, 0, threading.Event()
        self.begin, self.begin_device = self.resident(), self.device()
        self.thread = threading.Thread(target=self.watch)
        self.thread.start()
        return self

    def resident(self):
        return int(Path("/proc/self/statm").read_text().split()[1]) * PAGE

    def device(self):
        held = {device: {} for device in jax.devices()}
        for array in jax.live_arrays():
            for shard in array.addressable_shards:  # arrays too, of the same bytes
                held[shard.device][shard.data.unsafe_buffer_pointer()] = shard.data.nbytes
        return max(sum(sizes.values()) for sizes in held.values())

    def watch(self):
        while not self.done.wait(0.001):
            self.most = max(self.most, self.resident() - self.begin)

    def look(self):
        self.most_device = max(self.most_device, self.device() - self.begin_device)

    def __exit__(self, *_):
        self.done.set()
        self.thread.join()

folder = Path(sys.argv[1])
(folder / "text.txt").write_text("all work and no play makes jack a dull boy\\n" * 400)
config = load_config({
    "run": {"steps": 1, "cpu_devices": 8, "dir": str(folder / "run")},
    "model": {"num_layers": 6, "embed_dim": 448, "num_heads": 8, "vocab_multiple": 8},
    "data": {"path": str(folder / "text.txt"), "sequence_length": 16, "batch_size": 8},
    "sharding": {"zero": 3},
    "eval": {"steps": 0, "sample_tokens": 0},
    "optimizer": {"learning_rate": 1e-3},
})
from shardtrain.checkpoint.checkpointer import Checkpointer
run = build(config)
train(run)  # its save loads and compiles what is loaded and compiled once
state = run.init()
leaves = jax.tree.leaves(state)
told = {
    "state": sum(leaf.nbytes for leaf in leaves),
    "params": sum(leaf.nbytes for leaf in jax.tree.leaves(state.params)),
    "shard": max(leaf.nbytes for leaf in leaves) // 8,
    "leaf": max(leaf.nbytes for leaf in leaves),
}
with Checkpointer(folder / "saved", keep=1) as checkpoints, Peak() as save:
    checkpoints.save(1, state, {})
    save.look()
    checkpoints.wait()
    save.look()
del state, leaves
hf_files.write_files.__kwdefaults__["file_bytes"] = 1  # a file a tensor
tracemalloc.start()
export_weights(config, out=str(folder / "hf"), dtype="auto", json=False)
held = tracemalloc.get_traced_memory()[1]
told |= {"save": save.most, "save_on_device": save.most_device, "export": held}
print(json.dumps(told))
"""
CONSTANT = 64 * 2**20
"""What libraries load and buffer."""


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("save_memory")
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, str(folder)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert any(Path(folder / "hf").glob("*.safetensors"))
    return json.loads(done.stdout.splitlines()[-1])


def test_o38_a_save_holds_no_more_than_the_shards(measured: Any) -> None:
    """O-38: the host's copy of all devices' shards is the state once (8 times when gathered), and
    a device holds no more than one shard of one tensor more."""
    assert measured["state"] > 150e6
    assert measured["save_on_device"] <= measured["shard"] + 2**20
    assert measured["save"] < 1.5 * measured["state"] + CONSTANT


def test_o38_an_export_goes_leaf_by_leaf(measured: Any) -> None:
    """O-38: twice the largest tensor and a constant, however large the model."""
    bound = 2 * measured["leaf"] + 16 * 2**20
    assert bound < measured["params"], "the whole model would be more"
    assert measured["export"] < bound
