"""The `[task]` section.

Owns: the keys of each task type, their types and their defaults. Does not own: the tasks.
"""

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

_SECTION = ConfigDict(
    frozen=True,
    extra="forbid",
    strict=True,
    allow_inf_nan=False,
    use_attribute_docstrings=True,
)


class LanguageModelConfig(BaseModel):
    """Predict the next token."""

    model_config = _SECTION

    type: Literal["language_model"] = "language_model"
    """Which task this is."""
    z_loss: float = Field(0.0, ge=0.0)
    """Coefficient of the mean squared log of the softmax's denominator. 0 = off."""
    loss_chunks: int = Field(1, ge=1)
    """Parts that a device's positions are cut into for the head and its loss, so that scores of the
    whole vocabulary are there for one part at a time. 1 = all at once; more makes them twice."""


class MaskedLmConfig(BaseModel):
    """Predict hidden tokens, and whether one sentence follows the other."""

    model_config = _SECTION

    type: Literal["masked_lm"] = "masked_lm"
    """Which task this is."""


class ImageClassificationConfig(BaseModel):
    """Tell the class of an image."""

    model_config = _SECTION

    type: Literal["image_classification"] = "image_classification"
    """Which task this is."""
    label_smoothing: float = Field(0.0, ge=0.0, lt=1.0)
    """Part of the target that all classes share alike, in training only. 0 = none."""


class ClickConfig(BaseModel):
    """Tell how likely a click is."""

    model_config = _SECTION

    type: Literal["click"] = "click"
    """Which task this is."""


class RetrievalConfig(BaseModel):
    """Find the item that a user has taken among those that others have."""

    model_config = _SECTION

    type: Literal["retrieval"] = "retrieval"
    """Which task this is."""
    temperature: float = Field(0.1, gt=0.0)
    """What the product of two vectors of length 1 is divided by."""
    recall: int = Field(10, ge=0)
    """Evaluation counts users whose item is among so many of all items. 0 = not at all."""
