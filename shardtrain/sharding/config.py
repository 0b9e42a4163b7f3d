"""The `[mesh]` and `[sharding]` sections.

Owns: the keys, their types and their defaults. Does not own: any check that needs another section
or a device (those are in `shardtrain.config`), nor what the values do.
"""

from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

_SECTION = ConfigDict(
    frozen=True,
    extra="forbid",
    strict=True,
    allow_inf_nan=False,
    use_attribute_docstrings=True,
)


def _not_zero(value: int) -> int:
    if value == 0:
        raise ValueError("must be -1 (all devices that are left) or at least 1")
    return value


class MeshConfig(BaseModel):
    """Degrees of the device mesh; their product is the number of devices. 1 turns an axis off."""

    model_config = _SECTION

    pipeline: int = Field(1, ge=1)
    """Stages that the layers are split into. 1 = no pipeline."""
    replica: int = Field(1, ge=1)
    """Whole copies of the sharded state (hybrid sharding). 1 = one copy."""
    data: Annotated[int, AfterValidator(_not_zero)] = Field(-1, ge=-1)
    """Shards of the batch, and of the state under ZeRO. -1 = all devices that are left."""
    context: int = Field(1, ge=1)
    """Shards of the sequence. 1 = whole sequences."""
    tensor: int = Field(1, ge=1)
    """Shards of heads, MLP width and vocabulary. 1 = whole layers."""


class ShardingConfig(BaseModel):
    """Where parameters, gradients and optimizer state rest."""

    model_config = _SECTION

    zero: int = Field(0, ge=0, le=3)
    """ZeRO stage: 0 nothing split, 1 optimizer state, 2 and gradients, 3 and parameters."""
    sequence_parallel: bool = False
    """Split activations between the blocks over `tensor` too. False = each holds all of them."""
    rules: dict[str, str | list[str] | None] = Field(default_factory=dict)
    """Rows that replace those of the sharding table: logical axis = mesh axis, a list of them, or
    "" for none. Empty = the table as it is."""
