"""Model FLOPs utilisation: what a step needs against what the devices could do.

Owns the convention: forward plus twice that for the backward, recomputation not counted (that would
be hardware FLOPs), over the dense peak of the chip at the run's precision (Chowdhery et al. 2022,
arXiv 2204.02311). A chip that is not in the table (`shardtrain/sharding/chips.py`) has no
percentage rather than a wrong one.
"""

from collections.abc import Mapping
from typing import Final

import jax

from shardtrain.sharding.chips import KNOWN_KINDS
from shardtrain.strategies.precision_words import parse_precision

PEAK_FLOPS: Final[Mapping[str, Mapping[str, float]]] = {
    kind: chip.flops for kind, chip in KNOWN_KINDS.items() if chip.flops
}
"""Dense FLOP/s by precision, by `device_kind`. float32 on NVIDIA is the rate without TF32."""


def peak_flops(device: jax.Device, precision: str) -> float | None:
    """Dense FLOP/s of one device at a precision, or None for a chip that is not known."""
    return PEAK_FLOPS.get(device.device_kind, {}).get(parse_precision(precision).kind)


def utilisation(flops_per_second: float, devices: list[jax.Device], precision: str) -> float | None:
    """Model FLOPs utilisation, in [0, 1], or None for an unknown chip.

    Args:
        flops_per_second: of the whole run, by the model's own count.
        devices: all devices of the run.
        precision: `train.precision`.
    """
    peak = peak_flops(devices[0], precision)
    return None if peak is None else flops_per_second / (peak * len(devices))
