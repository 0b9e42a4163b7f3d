"""What is wrong with a precision: by itself, for a model and an optimizer, or on a mesh.

Owns: the checks of `train.precision` that other sections have a part in. Does not own: its words
(`strategies.precision_words`).
"""

from collections.abc import Mapping

from shardtrain.errors import ConfigError
from shardtrain.models.config import TransformerConfig
from shardtrain.optim.config import WITH_SECOND_MOMENT, OptimizerConfig
from shardtrain.strategies.precision_words import WHERE, decay_fault, parse_precision, words_of


def precision_faults(text: str, optimizer: OptimizerConfig) -> list[ConfigError]:
    """Why there is no such precision, or not for this optimizer.

    Args:
        text: `train.precision`.
        optimizer: its section.
    """
    try:
        words = parse_precision(text)
    except ConfigError as fault:
        return [fault]
    beta2 = optimizer.beta2 if optimizer.name in WITH_SECOND_MOMENT else 0.0
    stuck = decay_fault(words, beta2)
    return [] if stuck is None else [stuck]


def layer_precision_faults(text: str, model: TransformerConfig) -> list[ConfigError]:
    """Why it is not for this model.

    Args:
        text: `train.precision`; one that is none is somebody else's fault.
        model: its section.
    """
    words = words_of(text)
    if words is None:
        return []
    faults: list[ConfigError] = []
    if model.attention == "cudnn" and words.compute not in ("bfloat16", "float16"):
        faults.append(
            ConfigError(
                f'train.precision="{text}" has no such kernel; use "bfloat16" or "float16", '
                'or model.attention="auto"',
                where='model.attention="cudnn"',
            )
        )
    if words.products and words.first + words.last >= model.num_layers:
        faults.append(
            ConfigError(
                f"model.num_layers={model.num_layers} leaves no layer in fp8; "
                "use fewer, or bfloat16",
                where=f"{WHERE}, first={words.first}, last={words.last}",
            )
        )
    return faults


def mesh_precision_faults(text: str, zero: int, degrees: Mapping[str, int]) -> list[ConfigError]:
    """Why there is no such precision on a mesh.

    Args:
        text: `train.precision`, right by itself.
        zero: `sharding.zero`.
        degrees: degree of each mesh axis; -1 where it is still open.
    """
    words = parse_precision(text)
    wider = words.reduce not in ("", words.compute)
    alone = degrees["data"] == degrees["replica"] == 1
    if not wider or zero < 2 or degrees["pipeline"] > 1 or alone:
        return []
    return [
        ConfigError(
            f"sharding.zero={zero} scatters each gradient as it is made, in {words.compute}; "
            f"use sharding.zero=1, or reduce={words.compute}",
            where=f"{WHERE}, reduce={words.reduce}",
        )
    ]
