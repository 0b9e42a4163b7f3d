"""Settings of every test: 8 virtual CPU devices, strict dtypes, caches that all workers share.

They are environment variables, set before jax is imported, so that processes which tests start have
them too.
"""

import gc
import importlib.metadata
import os
from pathlib import Path

import pytest
from hypothesis import settings

DEVICES = 8
collect_ignore_glob = ["*/conftest.py"]  # two of one name are no modules to look for examples in
# the machine is shared, so time is no fault; and a test that passed passes again
settings.register_profile("shardtrain", deadline=None, derandomize=True)
settings.load_profile("shardtrain")


def _quick_flags() -> list[str]:
    """The older way to make kernels compiles in a third of the time; newer versions lack it."""
    old = importlib.metadata.version("jaxlib").startswith("0.10.")
    return ["--xla_cpu_use_fusion_emitters=false"] if old else []


def pytest_configure(config: pytest.Config) -> None:
    # Traces are many small objects without cycles: looking for some takes a tenth of the time.
    gc.freeze()
    gc.set_threshold(100_000, 20, 50)
    expression = str(config.getoption("markexpr")).replace("not gpu", "")
    if "gpu" not in expression:
        os.environ["JAX_PLATFORMS"] = "cpu"
    # Without LLVM's optimizations programs compile in half the time, and tests are all compiling;
    # without its costly passes and in one piece, in four fifths of that. Kernels for GPUs are
    # assembled without optimization too: no figure reads them.
    flags = (
        f"--xla_force_host_platform_device_count={DEVICES}",
        "--xla_backend_optimization_level=0",
        "--xla_llvm_disable_expensive_passes=true",
        "--xla_cpu_parallel_codegen_split_count=1",
        "--xla_gpu_disable_gpuasm_optimizations=true",
        *_quick_flags(),
    )
    for flag in flags:
        if flag not in os.environ.get("XLA_FLAGS", ""):
            os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flag}".strip()
    python_path = [str(config.rootpath), os.environ.get("PYTHONPATH", "")]
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, python_path))
    os.environ["JAX_NUMPY_DTYPE_PROMOTION"] = "strict"
    cache = Path(config.rootpath) / ".pytest_cache"
    os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(cache / "jax"))
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.2")
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")
    os.environ.setdefault("SHARDTRAIN_CACHE", str(cache / "data"))
