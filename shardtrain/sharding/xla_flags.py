"""XLA's flags that make collectives travel while products are made, on NVIDIA GPUs.

Owns: which flags, their values, and what each is for. Does not own: when they are set (`devices`
for a run, `plan.compiling` for a target). Importing this file never imports jax.

Every flag is known to the oldest and the newest jax that is tested; a test asks both, as an unknown
one ends the process. Their effect is a test on programs compiled for H100s (`tests/aot`).
"""

import os
from collections.abc import Mapping
from typing import Final

ALWAYS: Final[Mapping[str, str]] = {
    # One collective may begin while another is under way; by default each waits for the one before.
    "--xla_gpu_experimental_parallel_collective_overlap_limit": "4",
}
"""Flag to value, for every run."""

OVERLAP: Final[Mapping[str, str]] = {
    # A loop over layers sends one turn's gradients, or fetches its weights, in the next turn or the
    # one before; else each collective begins and ends in its own turn. It takes memory: XLA writes
    # one turn out beside the loop.
    "--xla_gpu_enable_pipelined_all_reduce": "true",
    "--xla_gpu_enable_pipelined_reduce_scatter": "true",
    "--xla_gpu_enable_pipelined_all_gather": "true",
}
"""Those of `train.overlap` besides."""


def missing_flags(*, overlap: bool, given: str | None = None) -> list[str]:
    """Return the flags that are not given yet, as words for XLA_FLAGS; a user's own value stands.

    Args:
        overlap: `train.overlap`.
        given: The value of XLA_FLAGS; None = that of this process.
    """
    words = (os.environ.get("XLA_FLAGS", "") if given is None else given).split()
    names = {word.split("=")[0] for word in words}
    wanted = {**ALWAYS, **(OVERLAP if overlap else {})}
    return [f"{name}={value}" for name, value in wanted.items() if name not in names]
