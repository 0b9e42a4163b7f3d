"""What must be asked for before jax starts: virtual CPU devices, deterministic GPU kernels.

Owns: the one place that sets XLA's flags, the words when it is too late for them, and the guess,
made without jax, which accelerators and how many devices a run will find. Does not own: the mesh.
Importing this file never imports jax.
"""

import glob
import importlib.util
import logging
import os
import re
import sys

from shardtrain.errors import ConfigError
from shardtrain.sharding.xla_flags import missing_flags

_DEVICES = "--xla_force_host_platform_device_count"
_DETERMINISTIC = "--xla_gpu_deterministic_ops"
PLUGINS = {
    "NVIDIA": ("jax_cuda13_plugin", "jax_cuda12_plugin"),
    "AMD": ("jax_rocm7_plugin",),
    "TPU": ("libtpu",),
}
"""What jax needs to use an accelerator, by maker."""
_NODES = {
    "NVIDIA": ("/dev/nvidia[0-9]*", "/proc/driver/nvidia/gpus/*", "/dev/nvhost-gpu", "/dev/dxg"),
    "AMD": ("/dev/kfd",),
    "TPU": ("/dev/accel[0-9]*", "/dev/vfio/[0-9]*"),
}
_JAX_LOGGER = "jax._src.xla_bridge"


def accelerators() -> dict[str, int]:
    """Return how many accelerators the system knows, by maker, whether or not jax can use them."""
    counts = {
        maker: max(len(glob.glob(pattern)) for pattern in patterns)
        for maker, patterns in _NODES.items()
    }
    return {maker: count for maker, count in counts.items() if count}


def accelerator_expected() -> bool:
    """Return whether jax will find an accelerator here, as far as can be told without jax."""
    platforms = os.environ.get("JAX_PLATFORMS", "")
    if platforms.split(",")[0] == "cpu":
        return False
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES", "all") in ("", "-1")
    plugins = [plugin for some in PLUGINS.values() for plugin in some]
    return bool(accelerators()) and not hidden and any(map(importlib.util.find_spec, plugins))


def expected_devices(cpu_devices: int) -> int | None:
    """Return how many devices a run will have, before jax is imported.

    Args:
        cpu_devices: Virtual devices that the config asks for, 0 for none.

    Returns:
        The number, or None where only jax can tell.
    """
    if accelerator_expected() or "jax" in sys.modules:
        return None
    if cpu_devices:
        return cpu_devices
    match = re.search(rf"{_DEVICES}=(\d+)", os.environ.get("XLA_FLAGS", ""))
    return int(match[1]) if match else int(os.environ.get("JAX_NUM_CPU_DEVICES", "1"))


def prepare_devices(
    cpu_devices: int, *, deterministic: bool = False, overlap: bool = False
) -> None:
    """See to it that jax will have these devices and kernels.

    Args:
        cpu_devices: Virtual CPU devices if there is no accelerator; 0 leaves all as it is.
        deterministic: On a GPU, only kernels that give the same bits every time.
        overlap: On a GPU, as much communication behind products as can be; `train.overlap`.

    Raises:
        ConfigError: jax has started already, with others.
    """
    if not accelerators():
        logging.getLogger(_JAX_LOGGER).addFilter(_is_no_plugin_error)
    if deterministic and accelerator_expected():
        _require_deterministic()
    if "NVIDIA" in accelerators() and accelerator_expected() and "jax" not in sys.modules:
        flags = missing_flags(overlap=overlap)
        os.environ["XLA_FLAGS"] = " ".join([os.environ.get("XLA_FLAGS", ""), *flags])
    if cpu_devices == 0:
        return
    if "jax" not in sys.modules:
        _set_flag(_DEVICES, str(cpu_devices))
        return
    import jax

    try:
        jax.config.update("jax_num_cpu_devices", cpu_devices)
    except RuntimeError:
        _check_started(cpu_devices)


def _is_no_plugin_error(record: logging.LogRecord) -> bool:
    """Drop the traceback of a plug-in that is only here to compile for machines elsewhere."""
    return "plugin configuration error" not in record.getMessage()


def _require_deterministic() -> None:
    if f"{_DETERMINISTIC}=true" in os.environ.get("XLA_FLAGS", "").split():
        return
    if "jax" in sys.modules and _jax_has_started():
        raise ConfigError(
            "jax has already started here, with kernels that may give other bits every time",
            where="run.deterministic=True",
            cure="restart the kernel and call shardtrain.prepare_devices(0, deterministic=True) "
            "before anything that uses jax",
        )
    _set_flag(_DETERMINISTIC, "true")


def _set_flag(name: str, value: str) -> None:
    others = [f for f in os.environ.get("XLA_FLAGS", "").split() if f.split("=")[0] != name]
    os.environ["XLA_FLAGS"] = " ".join([*others, f"{name}={value}"])


def _jax_has_started() -> bool:
    import jax

    before: int = getattr(jax.config, "jax_num_cpu_devices")  # noqa: B009  # not in its stubs
    try:
        jax.config.update("jax_num_cpu_devices", 2 if before == 1 else 1)  # refused once it has
    except RuntimeError:
        return True
    jax.config.update("jax_num_cpu_devices", before)
    return False


def _check_started(cpu_devices: int) -> None:
    import jax

    devices = jax.devices()
    if devices[0].platform != "cpu" or len(devices) == cpu_devices:
        return
    raise ConfigError(
        f"jax has already started here, with {len(devices)} CPU device"
        + ("s" if len(devices) > 1 else ""),
        where=f"run.cpu_devices={cpu_devices}",
        allowed=f"0 or {len(devices)} in this process",
        cure="in a notebook, restart the kernel and call shardtrain.prepare_devices("
        f"{cpu_devices}) before anything that uses jax; or go on with run.cpu_devices = 0 and a "
        f"mesh for {len(devices)}",
    )
