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
    every_minutes: float = Field(0.0, ge=0)
    """Minutes between two checkpoints, by the clock of process 0. 0 = the clock does not matter."""
    keep: int = Field(2, ge=1)
    """Complete checkpoints kept, newest first. The one before the newest always stays too."""
    keep_every: int = Field(0, ge=0)
    """Checkpoints at multiples of so many steps stay for good. 0 = none."""
    keep_hours: float = Field(0.0, ge=0)
    """One checkpoint in so many hours stays for good. 0 = none."""
    keep_best: int = Field(0, ge=0)
    """So many checkpoints with the lowest validation loss stay. 0 = none."""
