"""The `[optimizer]` section.

Owns: the keys, their types and their defaults. Does not own: the optimizers and schedules.
"""

from typing import Final, Literal

from pydantic import BaseModel, ConfigDict, Field

WITH_SECOND_MOMENT: Final = ("adamw", "adam", "muon", "lamb")
"""Those with a mean of squares that `beta2` lets decay (muon: for what is no hidden matrix)."""


class OptimizerConfig(BaseModel):
    """How gradients become updates."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        strict=True,
        allow_inf_nan=False,
        use_attribute_docstrings=True,
    )

    name: Literal["adamw", "adam", "sgd", "lion", "adafactor", "muon", "lamb"] = "adamw"
    """Which optimizer."""
    learning_rate: float = Field(gt=0.0)
    """Peak learning rate."""
    weight_decay: float = Field(0.1, ge=0.0)
    """Decay of matrices and embeddings, times the learning rate. 0 = none."""
    clip_norm: float = Field(1.0, ge=0.0)
    """Largest global norm of the gradient. 0 = no clipping."""
    schedule: Literal["cosine", "linear", "constant", "wsd"] = "cosine"
    """Shape of the learning rate after the warm-up; wsd = stable, then a linear decay."""
    warmup_steps: int = Field(0, ge=0)
    """Steps of linear rise to the peak. 0 = none."""
    final_ratio: float = Field(0.1, ge=0.0, le=1.0)
    """Last learning rate as a part of the peak (not with schedule = "constant")."""
    decay_fraction: float = Field(0.2, gt=0.0, le=1.0)
    """Part of the steps after the warm-up that the decay takes (schedule = "wsd")."""
    beta1: float = Field(0.9, ge=0.0, lt=1.0)
    """Decay rate of the first moment (adamw, adam, lion, lamb, muon's adamw part)."""
    beta2: float = Field(0.95, ge=0.0, lt=1.0)
    """Decay rate of the second moment (adamw, adam, lion, lamb, muon's adamw part)."""
    epsilon: float = Field(1e-8, gt=0.0)
    """Added to the root of the second moment (adamw, adam, lamb, muon's adamw part)."""
    momentum: float = Field(0.9, ge=0.0, lt=1.0)
    """Momentum (sgd, muon)."""
    nesterov: bool = False
    """Whether momentum looks ahead (sgd); muon's always does."""
    reference_batch: int = Field(0, ge=0)
    """Samples a step that `learning_rate` is meant for: it is multiplied by data.batch_size over
    this (Goyal et al. 2017, arXiv 1706.02677). 0 = it is taken as it is."""
    ema_decay: float = Field(0.0, ge=0.0, lt=1.0)
    """Decay of an average of the parameters that evaluation and generation use. 0 = none."""
