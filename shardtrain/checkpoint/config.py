"""The `[checkpoint]` section.

Owns: the keys, their types and their defaults. Does not own: saving and restoring.
"""

from pydantic import BaseModel, ConfigDict, Field


class CheckpointConfig(BaseModel):
    """When the state is saved."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        strict=True,
        allow_inf_nan=False,
        use_attribute_docstrings=True,
    )

    every: int = Field(0, ge=0)
    """Steps between two checkpoints. 0 = only at the end."""
    keep: int = Field(2, ge=1)
    """Complete checkpoints kept, newest first."""
