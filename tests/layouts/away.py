"""Runs whose state may rest away from the device, and their steps as users compile them."""

import importlib.metadata
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

from shardtrain.config import load_config
from shardtrain.run import Run, build


def make_run(folder: Path, name: str = "adamw", **overrides: Any) -> Run:
    """A small transformer on four devices."""
    text = folder / "text.txt"
    text.write_text("all work and no play makes jack a dull boy\n" * 100)
    sections = {
        "run": {"steps": 12, "cpu_devices": 8, "dir": str(folder / "run")},
        "model": {"num_layers": 2, "embed_dim": 16, "num_heads": 4},
        "data": {"path": str(text), "sequence_length": 16, "batch_size": 16},
        "optimizer": {"name": name, "learning_rate": 1e-2},
    }
    return build(load_config(sections, overrides), devices=jax.devices()[:4])


def compiled(run: Run, *, quick: bool = False) -> Any:
    """The step as users compile it, or with the tests' own options, in a third of the time.

    Those round differently from kernel to kernel, according to what is fused: not every pair of
    programs has equal bits with them. The pairs of the default run have.
    """
    if quick:
        return run.step
    options: dict[str, Any] = {
        "xla_backend_optimization_level": 3,
        "xla_llvm_disable_expensive_passes": False,
    }
    if importlib.metadata.version("jaxlib").startswith("0.10."):
        options["xla_cpu_use_fusion_emitters"] = True
    lowered = run.program.step.lower(run.program.abstract_state, run.batch_at(0))
    return lowered.compile(compiler_options=options)


def stepper(run: Run, *, quick: bool = False) -> Callable[[Any, int, int], Any]:
    """(state, first, last) -> the state after these batches."""
    step = compiled(run, quick=quick)

    def steps(state: Any, first: int, last: int) -> Any:
        for cursor in range(first, last):
            state, _ = step(state, run.batch_at(cursor))
        return state

    return steps
