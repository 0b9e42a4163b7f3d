"""What is wrong with adapters together with precision, offload and audits.

Owns: the checks of `[lora]` that other sections have a part in. Does not own: what LoRA does
(`models.lora`).
"""

from shardtrain.errors import ConfigError
from shardtrain.models.config import LoraConfig
from shardtrain.strategies.config import OffloadConfig, TrainConfig
from shardtrain.strategies.precision_words import words_of


def lora_faults(lora: LoraConfig, train: TrainConfig, offload: OffloadConfig) -> list[ConfigError]:
    """Why there are no such adapters.

    Args:
        lora: its section.
        train: its section.
        offload: its section.
    """
    if not lora.rank:
        return []
    where = f"lora.rank={lora.rank}"
    faults: list[ConfigError] = []
    if train.audit:
        faults.append(
            ConfigError(
                f"{where}: promises are those of training all weights",
                where="train.audit=True",
                cure="leave it out",
            )
        )
    words = words_of(train.precision)
    if words is not None and words.products:
        faults.append(
            ConfigError(
                f"{where}: products with a frozen weight and its adapters are not made in fp8",
                where=f'train.precision="{train.precision}"',
                cure='use "bfloat16"',
            )
        )
    if offload.parameters == "disk":
        faults.append(
            ConfigError(
                f"{where}: frozen weights rest on the device or the host",
                where='offload.parameters="disk"',
                allowed='"device" or "host"',
            )
        )
    return faults
