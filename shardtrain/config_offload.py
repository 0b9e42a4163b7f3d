"""What is wrong with an offload together with recomputation and precision.

Owns: the checks of `[offload]` that other sections have a part in. Does not own: what its keys do
(`sharding.tiers`).
"""

from shardtrain.errors import ConfigError
from shardtrain.strategies.config import OffloadConfig, TrainConfig, host_names
from shardtrain.strategies.precision_words import WHERE, words_of


def offload_faults(offload: OffloadConfig, train: TrainConfig) -> list[ConfigError]:
    """Why there is no such offload.

    Args:
        offload: its section.
        train: its section; a precision that is none is somebody else's fault.
    """
    faults: list[ConfigError] = []
    if host_names(train.remat) and offload.parameters != "device":
        faults.append(
            ConfigError(
                f'offload.parameters="{offload.parameters}" makes the same layers by a backward of '
                "its own; keep what is kept on the device, or the parameters",
                where=f'train.remat="{train.remat}"',
            )
        )
    words = words_of(train.precision)
    if words is None:
        return faults
    if offload.parameters != "device" and (
        words.params != words.compute or words.products == "fp8_delayed"
    ):
        faults.append(
            ConfigError(
                f"layers that come from the {offload.parameters} are computed in the type that "
                'they rest in, and hand on no scales; use "bfloat16", or "fp8" for its products',
                where=f'offload.parameters="{offload.parameters}", {WHERE}',
                value=train.precision,
            )
        )
    there = offload.optimizer == "host" and (offload.master == "host" or not words.has_master)
    if offload.update == "host" and not (there and offload.fraction == 1):
        faults.append(
            ConfigError(
                "the host can update only what rests there",
                where='offload.update="host"',
                cure='offload.optimizer="host", in mixed precision offload.master="host" too, and '
                "offload.fraction=1",
            )
        )
    if offload.update == "host" and words.rounding == "stochastic":
        faults.append(
            ConfigError(
                "the bits that rounding by chance takes are drawn on the device",
                where=f'offload.update="host", {WHERE}',
                value=train.precision,
                cure='offload.update="device", or rounding=nearest',
            )
        )
    return faults
