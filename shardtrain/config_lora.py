"""What is wrong with adapters together with precision and audits.

Owns: the checks of `[lora]` that other sections have a part in. Does not own: what LoRA does
(`models.lora`).
"""

from shardtrain.errors import ConfigError
from shardtrain.models.config import LoraConfig
from shardtrain.strategies.config import TrainConfig
from shardtrain.strategies.precision_words import words_of


def lora_faults(lora: LoraConfig, train: TrainConfig) -> list[ConfigError]:
    """Why there are no such adapters.

    Args:
        lora: its section.
        train: its section.
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
    return faults
