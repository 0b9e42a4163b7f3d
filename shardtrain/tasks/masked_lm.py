"""Predicting hidden tokens, and whether one sentence follows the other: what BERT learns from."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from shardtrain.ops.cross_entropy import cross_entropy
from shardtrain.strategies.stack import Stack
from shardtrain.tasks.base import Batch


@dataclass(frozen=True)
class MaskedLanguageModel:
    """The sum of two cross-entropies in nats, each a mean of its own (arXiv 1810.04805).

    A batch has `tokens`, `parts` and `segments` [batch, length]; `predicted` (the places),
    `targets` and `weights` [batch, places]; with next sentences also `next` (0: it follows, 1: it
    does not) and `next_weights` [batch]. A sample may have any number of hidden tokens, and every
    one of them in the global batch counts the same, as does every pair.
    """

    vocab_size: int
    next_sentence: bool

    @property
    def coefficients(self) -> Mapping[str, float]:
        """The terms and their coefficients."""
        return {"masked_loss": 1.0} | ({"next_loss": 1.0} if self.next_sentence else {})

    @property
    def reported(self) -> Mapping[str, str]:
        """What evaluation reports; `val_loss` is that of hidden tokens alone."""
        masked = {"val_loss": "masked_loss", "val_masked_accuracy": "masked_accuracy"}
        following = {"val_next_loss": "next_loss", "val_next_accuracy": "next_accuracy"}
        return masked | (following if self.next_sentence else {})

    def totals(self, batch: Batch) -> dict[str, jax.Array]:
        """The number of hidden tokens that count, and of pairs."""
        masked = jnp.sum(batch["weights"])
        totals = dict.fromkeys(("masked_loss", "masked_accuracy"), masked)
        if self.next_sentence:
            pairs = jnp.sum(batch["next_weights"])
            totals |= dict.fromkeys(("next_loss", "next_accuracy"), pairs)
        return totals

    def terms(
        self, model: Any, batch: Batch, key: jax.Array | None, stack: Stack
    ) -> dict[str, jax.Array]:
        """Sums over a part of the batch."""
        return self.head(model, model.hidden(batch, key, stack), batch)

    def head(self, model: Any, x: jax.Array, batch: Batch) -> dict[str, jax.Array]:
        """The same sums, from the last layer's output."""
        targets, scores = batch["targets"], model.token_scores(x, batch["predicted"])
        nll, _ = cross_entropy(scores, targets, vocab_size=self.vocab_size)
        weights = batch["weights"].astype(nll.dtype)
        hits = is_best(scores, targets, self.vocab_size).astype(nll.dtype)
        sums = {
            "masked_loss": jnp.sum(nll * weights),
            "masked_accuracy": jnp.sum(hits * weights),
        }
        if not self.next_sentence:
            return sums
        label, scores = batch["next"], model.next_scores(x)
        weights = batch["next_weights"].astype(scores.dtype)
        right = jax.nn.one_hot(label, 2, dtype=scores.dtype)
        nll = -jnp.sum(right * jax.nn.log_softmax(scores), -1)
        hits = is_best(scores, label, 2).astype(scores.dtype)
        return sums | {
            "next_loss": jnp.sum(nll * weights),
            "next_accuracy": jnp.sum(hits * weights),
        }


def is_best(scores: jax.Array, targets: jax.Array, size: int) -> jax.Array:
    """Whether a target has the highest score, of equal ones the first.

    Args:
        scores: [..., classes]; classes from `size` on are padding.
        targets: [...], below `size`.
        size: how many classes there are.
    """
    scores = jax.lax.stop_gradient(scores)
    ids = jax.lax.broadcasted_iota(targets.dtype, scores.shape, scores.ndim - 1)
    targets = targets[..., None]
    own = jnp.sum(jnp.where(ids == targets, scores, 0), -1, keepdims=True)
    before = ((scores > own) | ((scores == own) & (ids < targets))) & (ids < size)
    # What is no number is never right.
    best: jax.Array = ~jnp.any(before, -1) & ~jnp.isnan(own[..., 0])
    return best
