"""The machine that a run finds itself on, as far as it costs speed and the user can change it.

Owns: which allocator serves this process, and the words for it and for accelerators that jax does
not use; whether the compile cache was of use. Does not own: what is done about it; nothing here
changes anything.
"""

import glob
import importlib.util
import os
import platform
import re
from pathlib import Path

import jax

from shardtrain.sharding.devices import PLUGINS, accelerators

ALLOCATORS = ("jemalloc", "tcmalloc", "mimalloc")
"""Allocators that keep their pages; found by name among the loaded libraries."""

JEMALLOC_OPTIONS = "dirty_decay_ms:-1,muzzy_decay_ms:-1,thp:always,narenas:1,oversize_threshold:0"
"""Keep every page, in one arena. Measured in docs/benchmarks.md."""

_CURES = {
    "NVIDIA": "pip install 'shardtrain[cuda]'",
    "AMD": "install jax for ROCm",
    "TPU": "pip install 'jax[tpu]'",
}


class CacheUse:
    """Whether programs come from jax's compile cache while this is open; a context manager."""

    def __init__(self) -> None:
        self._hits, self._misses = 0, 0

    def __enter__(self) -> "CacheUse":
        jax.monitoring.register_event_listener(self._count)
        return self

    def __exit__(self, *_: object) -> None:
        jax.monitoring.unregister_event_listener(self._count)

    @property
    def all(self) -> bool:
        """Whether there was a program, and none had to be compiled."""
        return self._hits > 0 and self._misses == 0

    def _count(self, event: str, **_: str | int) -> None:
        self._hits += event == "/jax/compilation_cache/cache_hits"
        self._misses += event == "/jax/compilation_cache/cache_misses"


def warnings(*, brief: bool = False) -> list[str]:
    """What is worth telling before a run: one text each, with what to do about it.

    Cheap: a look at a few files; jax must have its devices already.

    Args:
        brief: a short line about the allocator, which every start says; `doctor` has the rest.
    """
    if jax.default_backend() != "cpu":
        return []
    return [text for text in (_unused_accelerator(), _slow_allocator(brief)) if text]


def allocator() -> str:
    """The allocator of this process: one of `ALLOCATORS`, or "system"."""
    try:
        loaded = Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return "system"
    found = re.search("|".join(f"/lib{name}" for name in ALLOCATORS), loaded)
    return found[0].removeprefix("/lib") if found else "system"


def jemalloc_library() -> str | None:
    """The name of the jemalloc library that the loader finds, if there is one."""
    folders = ("/usr/lib", "/usr/lib/*-linux-gnu", "/usr/lib64", "/usr/local/lib", "/lib64")
    found = [path for folder in folders for path in glob.glob(f"{folder}/libjemalloc.so.*")]
    return Path(found[0]).name if found else None


def _unused_accelerator() -> str | None:
    """For a process that runs on the CPU."""
    for maker in accelerators():
        what = "this machine has " + ("a TPU" if maker == "TPU" else f"an {maker} GPU")
        if os.environ.get("JAX_PLATFORMS", "").split(",")[0] == "cpu":
            return f"{what}, and JAX_PLATFORMS=cpu keeps jax off it"
        if maker == "NVIDIA" and os.environ.get("CUDA_VISIBLE_DEVICES", "all") in ("", "-1"):
            return f"{what}, and CUDA_VISIBLE_DEVICES hides it"
        if not any(map(importlib.util.find_spec, PLUGINS[maker])):
            return f"{what}, and this jax is for CPUs only: {_CURES[maker]}"
        return f"{what} that jax could not use: see whether its driver works and is new enough"
    return None


def _slow_allocator(brief: bool) -> str | None:
    """For a process that runs on the CPU."""
    if platform.system() != "Linux" or allocator() != "system":
        return None
    if brief:
        return "the system's allocator costs about 20 % on a CPU; `shardtrain doctor` has the cure"
    library = jemalloc_library()
    get = "" if library else "install jemalloc (apt install libjemalloc2) and "
    preload = f"LD_PRELOAD={library or 'libjemalloc.so.2'} MALLOC_CONF={JEMALLOC_OPTIONS}"
    return (
        "the system's allocator gives memory back after every step, which costs about 20 % on a "
        f"CPU: {get}start with {preload}"
    )
