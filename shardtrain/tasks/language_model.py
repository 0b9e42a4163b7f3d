"""Next-token prediction."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from shardtrain.ops.chunked_loss import chunked_cross_entropy
from shardtrain.ops.cross_entropy import cross_entropy
from shardtrain.strategies.stack import Stack
from shardtrain.tasks.base import Batch
from shardtrain.tasks.config import LanguageModelConfig


@dataclass(frozen=True)
class LanguageModel:
    """Cross-entropy of the next token in nats; PaLM's z-loss (arXiv 2204.02311) is a choice."""

    config: LanguageModelConfig
    vocab_size: int

    @property
    def coefficients(self) -> Mapping[str, float]:
        """The terms and their coefficients."""
        z_loss = {"z_loss": self.config.z_loss} if self.config.z_loss else {}
        return {"nll": 1.0, **z_loss}

    @property
    def reported(self) -> Mapping[str, str]:
        """Cross-entropy, in nats a token."""
        return {"val_loss": "nll"}

    def totals(self, batch: Batch) -> dict[str, jax.Array]:
        """The number of targets that count."""
        weight = jnp.sum(batch["weights"])
        return dict.fromkeys(self.coefficients, weight)

    def terms(
        self, model: Any, batch: Batch, key: jax.Array | None, stack: Stack
    ) -> dict[str, jax.Array]:
        """Sums over the targets of a part of the batch."""
        if self.config.loss_chunks > 1:
            return self.head(model, model.hidden(batch, key, stack), batch)
        return self._sums(self._of_scores(model(batch, key, stack), batch), batch)

    def head(self, model: Any, x: jax.Array, batch: Batch) -> dict[str, jax.Array]:
        """The same sums, from the last layer's output."""
        chunks, targets = self.config.loss_chunks, batch["targets"]
        if chunks == 1:
            return self._sums(self._of_scores(model.logits(x), batch), batch)
        last, table = model.scored(x)
        size = self.vocab_size
        losses = chunked_cross_entropy(last, table, targets, vocab_size=size, chunks=chunks)
        return self._sums(losses, batch)

    def _of_scores(self, scores: jax.Array, batch: Batch) -> tuple[jax.Array, jax.Array]:
        return cross_entropy(scores, batch["targets"], vocab_size=self.vocab_size)

    def _sums(self, losses: tuple[jax.Array, jax.Array], batch: Batch) -> dict[str, jax.Array]:
        nll, log_z = losses
        weights = batch["weights"].astype(nll.dtype)
        sums = {"nll": jnp.sum(nll * weights)}
        if self.config.z_loss:
            sums["z_loss"] = jnp.sum(jnp.square(log_z) * weights)
        return sums
