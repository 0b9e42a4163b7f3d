"""The `[train]` section: how the step is computed.

Owns: the keys, their types and their defaults. Does not own: the wrappers they choose.
"""

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

SAVEABLE = ("qkv", "attention", "attention_out", "mlp", "mlp_out")
"""The tensors of a block that `remat` can keep by name."""


class TrainConfig(BaseModel):
    """How one step is computed. No choice here changes what is computed, but `precision`."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        strict=True,
        allow_inf_nan=False,
        use_attribute_docstrings=True,
    )

    microbatches: int = Field(1, ge=1)
    """Parts that the global batch is worked off in, one after another. 1 = all at once."""
    remat: str = "none"
    """What the backward pass computes again: "none", "full" (the whole layer), "dots" (all but
    matrix products), or the tensors to keep, by name: "attention,mlp"."""
    precision: Literal["float32", "bfloat16", "float64"] = "float32"
    """Number type of the computation. With bfloat16 the optimizer keeps float32 masters; float64
    is for checks on CPU devices."""

    @field_validator("remat")
    @classmethod
    def _remat_names(cls, value: str) -> str:
        if value in ("none", "full", "dots"):
            return value
        names = [name.strip() for name in value.split(",")]
        if not set(names) <= set(SAVEABLE):
            kept = ", ".join(SAVEABLE)
            raise ValueError(f'must be "none", "full", "dots", or names among {kept}')
        return ",".join(names)
