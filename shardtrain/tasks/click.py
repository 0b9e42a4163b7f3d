"""Telling how likely a click is."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from shardtrain.ops.sums import sum_dtype
from shardtrain.strategies.parts import GATHERED
from shardtrain.strategies.stack import Stack
from shardtrain.tasks.base import Batch
from shardtrain.tasks.ranking import Gathered, auc


@dataclass(frozen=True)
class Click:
    """The log loss of label 0 or 1, in nats, and the area under the ROC curve.

    A batch has `ids` [batch, fields] int32, `dense` [batch, features], `label` [batch] and
    `weights` [batch].
    """

    @property
    def coefficients(self) -> Mapping[str, float]:
        """The terms and their coefficients."""
        return {"log_loss": 1.0}

    @property
    def reported(self) -> Mapping[str, str]:
        """What evaluation reports besides `ranked`."""
        return {"val_loss": "log_loss"}

    def totals(self, batch: Batch) -> dict[str, jax.Array]:
        """The number of interactions that count."""
        return {"log_loss": jnp.sum(batch["weights"])}

    def terms(
        self, model: Any, batch: Batch, key: jax.Array | None, stack: Stack
    ) -> dict[str, Any]:
        """Sums over a part of the batch; see `tasks.base.Task`."""
        del stack
        scores = model(batch["dense"], batch["ids"])
        scores = scores.astype(sum_dtype(scores.dtype))
        label = batch["label"].astype(scores.dtype)
        # log(1 + exp(score)) - label x score, without an overflow.
        loss = jax.nn.softplus(scores) - label * scores
        found = {"log_loss": jnp.sum(loss * batch["weights"].astype(scores.dtype))}
        if key is not None:
            return found
        kept = {"score": scores, "label": batch["label"], "weights": batch["weights"]}
        return {**found, GATHERED: kept}

    def ranked(self, gathered: Gathered) -> dict[str, float]:
        """`val_auc`."""
        there = gathered["weights"] > 0
        return {"val_auc": auc(gathered["score"][there], gathered["label"][there])}
