"""The `[mesh]` and `[sharding]` sections.

Owns: the keys, their types and their defaults, and how `data = -1` is resolved. Does not own: any
check that needs another section (those are in `shardtrain.plan.layout`), nor what the values do.
"""

import math
from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, field_validator

from shardtrain.errors import ShardingError

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

    def degrees(self, num_devices: int) -> dict[str, int]:
        """Return the degree of every axis, slowest links first, with `data = -1` resolved.

        Args:
            num_devices: Devices that the mesh must use, all of them.

        Returns:
            Axis name to degree; the product is `num_devices`.

        Raises:
            ShardingError: No such mesh uses exactly that many devices.
        """
        sizes: dict[str, int] = {name: getattr(self, name) for name in type(self).model_fields}
        others = math.prod(size for name, size in sizes.items() if name != "data")
        devices = f"{num_devices} device" + ("s" if num_devices != 1 else "")
        verb = "are" if num_devices != 1 else "is"
        if num_devices % others == 0 and self.data in (-1, num_devices // others):
            return sizes | {"data": num_devices // others}
        fault, below = f"{others} does not divide {devices}", num_devices // others * others
        counts = " or ".join(str(count) for count in (below, below + others) if count)
        if self.data != -1:
            fault = f"the product is {others * self.data}, but there {verb} {devices}"
            counts = str(others * self.data)
        raise ShardingError(
            fault,
            where="mesh",
            value=" x ".join(f"{name} {size}" for name, size in sizes.items() if size != 1),
            allowed=f"degrees whose product is {num_devices}; data = -1 takes what is left",
            cure=f"change a degree, or run.cpu_devices ({counts} would do) on a machine without "
            "an accelerator",
        )


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

    @field_validator("rules")
    @classmethod
    def _no_axis(
        cls, rules: dict[str, str | list[str] | None]
    ) -> dict[str, str | list[str] | None]:
        return {axis: row or "" for axis, row in rules.items()}  # one way to write "none"
