"""What this machine can do and what is missing, without the network.

Owns: what is looked at, in sections of plain values, and the advice. Does not own: the facts that a
run looks at too (`shardtrain.train.machine`, `shardtrain.plan.targets`).
"""

import importlib.metadata
import json as json_
import os
import platform
import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import jax
from rich.table import Table

from shardtrain import __version__
from shardtrain.data.cache import cache_folder
from shardtrain.plan.targets import missing_parts
from shardtrain.plan.targets_tpu import missing_tpu_parts
from shardtrain.sharding.devices import accelerators, prepare_devices
from shardtrain.train.machine import allocator, warnings
from shardtrain.train.screen import human_bytes, make_console

Section = dict[str, Any]

PACKAGES: Final = (
    *("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain", "numpy"),
    *("jax-cuda13-plugin", "jax-cuda12-plugin"),
)
EXTRAS: Final[Mapping[str, tuple[str, ...]]] = {
    "cuda": ("jax-cuda13-plugin", "nvidia-cudnn-cu13"),
    "hf": ("tokenizers",),
    "parquet": ("pyarrow",),
    "vision": ("pillow", "scikit-learn"),
    "plan": ("jax-cuda13-plugin", "nvidia-cuda-nvcc"),
    "plan-tpu": ("libtpu",),
    "fp8": ("qwix",),
    "plots": ("matplotlib",),
    "notebooks": ("ipykernel", "nbclient", "nbformat", "matplotlib"),
    "ray": ("ray",),
    "trackers": ("wandb", "mlflow-skinny"),
    "reference": ("torch",),
    "test": ("pytest", "pytest-xdist", "hypothesis", "beartype", "ruff", "mypy"),
}
"""What each extra of the package brings; a test holds it against pyproject.toml."""

LOW_DISK = 10 * 2**30
"""Bytes below which a folder is worth a word."""


def examine() -> dict[str, Section]:
    """Looks at everything.

    Returns:
        Sections of names and values.
    """
    return {
        "versions": _versions(),
        "devices": _devices(),
        "machine": _machine(),
        "folders": _folders(),
        "extras": {name: _missing(packages) for name, packages in EXTRAS.items()},
        "plan": {
            "compiler for absent GPUs": missing_parts(),
            "compiler for absent TPUs": missing_tpu_parts(),
        },
    }


def advice(found: Mapping[str, Section]) -> list[str]:
    """What is worth doing about it, the most useful first.

    Args:
        found: from `examine`.
    """
    texts = []
    devices, folders = found["devices"], found["folders"]
    if devices["error"]:
        texts.append(f"jax finds no devices: {devices['error']}")
    else:
        texts += warnings()
    if not folders["jax compile cache"]:
        texts.append(
            "programs are compiled anew by every process; to keep them, set "
            "JAX_COMPILATION_CACHE_DIR to a folder"
        )
    for name in ("cache", "here"):
        folder = folders[name]
        if not folder["writable"]:
            texts.append(f"{folder['path']} cannot be written")
        elif folder["free"] < LOW_DISK:
            texts.append(f"{folder['path']} has only {human_bytes(folder['free'])} left")
    return texts


def _versions() -> Section:
    installed = {name: _version(name) for name in PACKAGES}
    return {
        "shardtrain": __version__,
        "python": platform.python_version(),
        "system": platform.platform(),
        **{name: version for name, version in installed.items() if version},
    }


def _devices() -> Section:
    prepare_devices(0)
    found: Section = {
        "known to the system": accelerators(),
        "platform": "",
        "kinds": {},
        "memory": None,
        "processes": 1,
        "error": "",
    }
    try:
        devices = jax.devices()
    except RuntimeError as error:  # a plug-in that finds no driver, a platform that is not there
        return found | {"error": str(error).splitlines()[0]}
    kinds = [device.device_kind for device in devices]
    stats = jax.local_devices()[0].memory_stats() or {}
    return found | {
        "platform": devices[0].platform,
        "kinds": {kind: kinds.count(kind) for kind in dict.fromkeys(kinds)},
        "memory": stats.get("bytes_limit"),
        "processes": jax.process_count(),
    }


def _machine() -> Section:
    info, cpu = _read("/proc/meminfo"), _read("/proc/cpuinfo")
    flags = set(_first(r"^flags\s*:(.*)$", cpu).split())
    return {
        "cpu": _first(r"^model name\s*:\s*(.*)$", cpu) or platform.processor(),
        "cores": _cores(),
        "bfloat16 on CPU": "with AMX" if "amx_bf16" in flags else "without AMX, slow",
        "memory": _kib(info, "MemTotal"),
        "memory available": _kib(info, "MemAvailable"),
        "memory limit": _memory_limit(),
        "allocator": allocator(),
    }


def _folders() -> Section:
    return {
        "cache": _folder(cache_folder()),
        "here": _folder(Path.cwd()),
        "jax compile cache": jax.config.values["jax_compilation_cache_dir"] or "",
    }


def _folder(path: Path) -> Section:
    """A folder that may not exist yet: then the nearest one above it tells."""
    there = next(folder for folder in (path, *path.parents) if folder.exists())
    return {
        "path": str(path),
        "free": shutil.disk_usage(there).free,
        "writable": os.access(there, os.W_OK | os.X_OK),
    }


def _missing(packages: tuple[str, ...]) -> list[str]:
    """Those that are not installed."""
    return [name for name in packages if not _version(name)]


def _cores() -> int:
    """Cores that this process may use, by affinity."""
    affinity: Callable[[int], set[int]] | None = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity else os.cpu_count() or 1


def _memory_limit() -> int | None:
    """The limit of this process's control group, if there is one."""
    limits = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")
    for path in limits:
        text = _read(path).strip()
        if text.isdigit() and int(text) < 2**60:
            return int(text)
    return None


def _kib(info: str, name: str) -> int | None:
    number = _first(rf"^{name}:\s*(\d+) kB$", info)
    return int(number) * 1024 if number else None


def _first(pattern: str, text: str) -> str:
    found = re.search(pattern, text, re.MULTILINE)
    return found[1].strip() if found else ""


def _read(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


# -- the command


def doctor_command(*, json: bool) -> int:
    """`shardtrain doctor`: prints what was found, and the advice."""
    found = examine()
    texts = advice(found)
    if json:
        print(json_.dumps({**found, "advice": texts}))
        return 0
    console = make_console(stderr=False)
    for title, section in found.items():
        table = Table(title=title, title_justify="left", show_header=False, box=None)
        for name, value in section.items():
            table.add_row(name, _words(title, name, value))
        console.print(table)
    console.print("[bold]what to do[/bold]")
    for text in texts or ["nothing: all is well"]:
        console.print(f"- {text}", markup=False, soft_wrap=True)
    return 0


def _words(title: str, name: str, value: Any) -> str:
    """A value for the eye."""
    if title in ("extras", "plan"):
        return f"missing: {', '.join(value)}" if value else "there"
    if isinstance(value, dict) and "free" in value:
        state = "" if value["writable"] else ", cannot be written"
        return f"{value['path']} ({human_bytes(value['free'])} free{state})"
    if isinstance(value, dict):
        return ", ".join(f"{count} x {kind}" for kind, count in value.items()) or "none"
    if isinstance(value, int) and "memory" in name:
        return human_bytes(value)
    return "-" if value in (None, "") else str(value)
