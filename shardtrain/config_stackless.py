"""What cannot be about a model that is no stack of equal layers, found before anything is compiled.

Owns: the checks that all such models share. Does not own: those of each (`config_images`,
`config_recommenders`).
"""

from collections.abc import Iterator, Mapping

from shardtrain.errors import ConfigError
from shardtrain.plan.layout import Degrees
from shardtrain.sharding.config import ShardingConfig
from shardtrain.strategies.config import TrainConfig


def stackless_faults(
    kind: str,
    without: Mapping[str, str],
    train: TrainConfig,
    sharding: ShardingConfig,
    degrees: Degrees,
) -> Iterator[ConfigError]:
    """Return what such a model has no use for.

    Args:
        kind: `model.type`.
        without: Mesh axes that it cannot use, and why.
        train: How a step is computed.
        sharding: Its section.
        degrees: Degree of each mesh axis; -1 where it is still open.

    Returns:
        One error per fault.
    """
    for axis, reason in without.items():
        if degrees[axis] > 1:
            yield ConfigError(
                f'model.type="{kind}" cannot use it: {reason}; use 1, and mesh.data or '
                "mesh.replica instead",
                where=f"mesh.{axis}={degrees[axis]}",
            )
    if sharding.sequence_parallel:
        yield ConfigError(
            f'model.type="{kind}" has no sequences; leave it out',
            where="sharding.sequence_parallel=True",
        )
    if train.remat != "none":
        yield ConfigError(
            f'model.type="{kind}" has no stack of layers to compute again; use "none"',
            where=f'train.remat="{train.remat}"',
        )
    for key, chosen in (("overlap", train.overlap), ("audit", train.audit)):
        if chosen:
            yield ConfigError(
                "it is there for language models alone; leave it out", where=f"train.{key}=True"
            )
