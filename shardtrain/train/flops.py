"""Model FLOPs utilisation: what a step needs against what the devices could do.

Owns the convention: forward plus twice that for the backward, recomputation not counted (that would
be hardware FLOPs), over the dense peak of the chip at the run's precision (Chowdhery et al. 2022,
arXiv 2204.02311). A chip that is not in the table has no percentage rather than a wrong one.
"""

import jax

PEAK_FLOPS: dict[str, dict[str, float]] = {
    # device_kind: dense FLOP/s by precision, from NVIDIA's datasheets (no sparsity) and Google's
    # TPU system pages. float32 on NVIDIA is the rate without TF32.
    "NVIDIA A100-SXM4-40GB": {"bfloat16": 312e12, "float32": 19.5e12, "float64": 9.7e12},
    "NVIDIA A100-SXM4-80GB": {"bfloat16": 312e12, "float32": 19.5e12, "float64": 9.7e12},
    "NVIDIA H100 80GB HBM3": {"bfloat16": 989.4e12, "float32": 66.9e12, "float64": 33.5e12},
    "NVIDIA H200": {"bfloat16": 989.4e12, "float32": 66.9e12, "float64": 33.5e12},
    "NVIDIA B200": {"bfloat16": 2250e12, "float32": 75e12, "float64": 37e12},
    "TPU v4": {"bfloat16": 275e12},
    "TPU v5 lite": {"bfloat16": 197e12},
    "TPU v5p": {"bfloat16": 459e12},
    "TPU v6 lite": {"bfloat16": 918e12},
}


def peak_flops(device: jax.Device, precision: str) -> float | None:
    """Dense FLOP/s of one device at a precision, or None for a chip that is not known."""
    return PEAK_FLOPS.get(device.device_kind, {}).get(precision)


def utilisation(flops_per_second: float, devices: list[jax.Device], precision: str) -> float | None:
    """Model FLOPs utilisation, in [0, 1], or None for an unknown chip.

    Args:
        flops_per_second: of the whole run, by the model's own count.
        devices: all devices of the run.
        precision: `train.precision`.
    """
    peak = peak_flops(devices[0], precision)
    return None if peak is None else flops_per_second / (peak * len(devices))
