"""A program with state on the host, compiled for GPUs that are not here.

Owns: the one detour that this needs, and all of jax's private names that it takes. Devices of a
described topology have no memories, and jax then drops every memory kind without a word: state
would silently be on the device. So the step is lowered for GPUs on as many virtual CPU devices,
which have memories of the same names, and what was lowered is given to the compiler for the GPUs.
For a program without memory kinds the outcome is the same as without the detour.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np


@dataclass(frozen=True)
class Program:
    """What is read of a compiled program, as `jax.stages.Compiled` has it."""

    executable: Any

    def as_text(self) -> str:
        """Scheduled HLO."""
        text: str = self.executable.hlo_modules()[0].to_string()
        return text

    def memory_analysis(self) -> Any:
        """Bytes on one device by class."""
        return self.executable.get_compiled_memory_stats()


def compile_elsewhere(lowered: jax.stages.Lowered, devices: Sequence[jax.Device]) -> Program:
    """Compiles for devices of a topology what was lowered on virtual ones.

    Args:
        lowered: for their platform, on as many devices in the same order.
        devices: to compile for.
    """
    from jax._src import compiler  # no public way compiles a module for devices it was not made on
    from jaxlib import _jax

    count = len(devices)
    options = compiler.get_compile_options(
        num_replicas=1,
        num_partitions=count,
        device_assignment=np.array(devices, dtype=object).reshape(1, count),
    )
    build = options.executable_build_options
    arguments, results = (jax.tree.leaves(tree) for tree in (lowered.in_avals, lowered.out_info))
    build.allow_spmd_sharding_propagation_to_parameters = [False] * len(arguments)
    build.allow_spmd_sharding_propagation_to_output = [False] * len(results)
    module = lowered.compiler_ir("stablehlo")
    executable = compiler.backend_compile_and_load(
        devices[0].client, module, _jax.DeviceList(tuple(devices)), options, []
    )
    return Program(executable)
