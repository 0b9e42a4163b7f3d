"""Telling the class of an image."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from shardtrain.ops.sums import sum_dtype
from shardtrain.strategies.stack import Stack
from shardtrain.tasks.base import Batch
from shardtrain.tasks.config import ImageClassificationConfig


@dataclass(frozen=True)
class ImageClassification:
    """Cross-entropy of the class in nats, and whether it is the likeliest, or among the first five.

    A batch has `image` [batch, height, width, channels] uint8, `label` [batch] int32 and `weights`
    [batch]; with mixup also `other`, the label of the image that was mixed in, and `share` [batch],
    the part that is the image's own.
    """

    config: ImageClassificationConfig
    num_classes: int
    mean: tuple[float, ...]
    """What is taken off each channel of values from 0 to 1."""
    deviation: tuple[float, ...]
    """What each channel is divided by then."""

    @property
    def coefficients(self) -> Mapping[str, float]:
        """The terms and their coefficients."""
        return {"nll": 1.0}

    @property
    def reported(self) -> Mapping[str, str]:
        """What evaluation reports; the cross-entropy is without smoothing there."""
        return {"val_loss": "nll", "val_top1": "top1", "val_top5": "top5"}

    def totals(self, batch: Batch) -> dict[str, jax.Array]:
        """The number of images that count."""
        return dict.fromkeys(("nll", "top1", "top5"), jnp.sum(batch["weights"]))

    def terms(
        self, model: Any, batch: Batch, key: jax.Array | None, stack: Stack
    ) -> dict[str, jax.Array]:
        """Sums over the images of a part of the batch."""
        del stack
        training = key is not None
        scores = model(self._normalised(batch["image"], model.head[...].dtype), training)
        scores = scores.astype(sum_dtype(scores.dtype))
        targets = self._targets(batch, scores.dtype, self.config.label_smoothing * training)
        nll = -jnp.sum(targets * jax.nn.log_softmax(scores), -1)
        rank = self._rank(scores, batch["label"])
        weights = batch["weights"].astype(scores.dtype)
        return {
            "nll": jnp.sum(nll * weights),
            "top1": jnp.sum(weights * (rank < 1).astype(weights.dtype)),
            "top5": jnp.sum(weights * (rank < 5).astype(weights.dtype)),
        }

    def _normalised(self, image: jax.Array, dtype: Any) -> jax.Array:
        wide = sum_dtype(dtype)
        mean, deviation = jnp.array(self.mean, wide), jnp.array(self.deviation, wide)
        normal: jax.Array = (image.astype(wide) / 255 - mean) / deviation
        return normal.astype(dtype)

    def _targets(self, batch: Batch, dtype: Any, smoothing: float) -> jax.Array:
        """The wanted distribution over classes, [batch, classes]."""
        size = self.num_classes
        targets = jax.nn.one_hot(batch["label"], size, dtype=dtype)
        if "share" in batch:
            share = batch["share"].astype(dtype)[:, None]
            other = jax.nn.one_hot(batch["other"], size, dtype=dtype)
            targets = share * targets + (1 - share) * other
        return (1 - smoothing) * targets + smoothing / size

    @staticmethod
    def _rank(scores: jax.Array, label: jax.Array) -> jax.Array:
        """How many classes are likelier than the right one, [batch]; of equal ones the lower."""
        places = jnp.arange(scores.shape[-1], dtype=label.dtype)
        own = jnp.sum(jnp.where(places == label[:, None], scores, 0), -1, keepdims=True)
        before = (scores > own) | ((scores == own) & (places < label[:, None]))
        # What is no number is never right.
        rank: jax.Array = jnp.where(jnp.isnan(own[:, 0]), scores.shape[-1], jnp.sum(before, -1))
        return rank
