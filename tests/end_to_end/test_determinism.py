"""Two runs of one config give the same bits, and a GPU is asked for such kernels."""

import subprocess
import sys
from pathlib import Path

from jobs import rows, run


def test_two_runs_of_one_config_are_equal(project: Path, straight: Path) -> None:
    said = run(project, "--run.deterministic", "True")
    assert "note: run.deterministic=True has no effect: CPU kernels always are" in said
    assert rows(project) == rows(straight)


def test_gpu_kernels_are_chosen_before_jax_starts(tmp_path: Path) -> None:
    """In a process that believes in an accelerator and has none."""
    code = """
import os, sys
os.environ["XLA_FLAGS"] = "--xla_cpu_enable_fast_math=false"
from shardtrain import cli, ConfigError, prepare_devices
from shardtrain.sharding import devices
devices.accelerator_expected = lambda: True
def ask(_, config):
    cli._devices(config)
    return 0
cli.COMMANDS["train"] = cli.Command(cli.Train, "config", ask)
for value in ("False", "True", "True"):
    assert cli.main(["train", "--run.deterministic", value, "--run.cpu_devices", "8"]) == 0
    print(os.environ["XLA_FLAGS"])
assert "jax" not in sys.modules
import jax
jax.devices()
prepare_devices(8, deterministic=True)
os.environ["XLA_FLAGS"] = ""
try:
    prepare_devices(8, deterministic=True)
except ConfigError as error:
    print(error)
"""
    words = [sys.executable, "-c", code]
    result = subprocess.run(words, capture_output=True, text=True, check=True)
    first, second, third, *refusal = result.stdout.splitlines()
    before = "--xla_cpu_enable_fast_math=false"
    count = "--xla_force_host_platform_device_count=8"
    assert first == f"{before} {count}"
    assert second == third == f"{before} --xla_gpu_deterministic_ops=true {count}"
    assert refusal == [
        "run.deterministic=True: jax has already started here, with kernels that may give other "
        "bits every time",
        "  to do: restart the kernel and call shardtrain.prepare_devices(0, deterministic=True) "
        "before anything that uses jax",
    ]
