"""Finding the item that a user has taken."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from shardtrain.ops.sums import sum_dtype
from shardtrain.sharding.rules import constrain
from shardtrain.strategies.parts import GATHERED
from shardtrain.strategies.stack import Stack
from shardtrain.tasks.base import Batch
from shardtrain.tasks.config import RetrievalConfig
from shardtrain.tasks.ranking import Gathered, recall


@dataclass(frozen=True)
class Retrieval:
    """Cross-entropy of a user's own item among those of the whole microbatch.

    The microbatch is the global one, so that all meshes compute the same; a row counts where its
    label is 1. Other rows with the same item are no negatives of it. Evaluation also ranks the own
    item among all items of the table; of equal ones the lower id goes before. A batch is as
    `click.Click` has it.
    """

    config: RetrievalConfig
    num_items: int
    parts: int
    """The number of items that are worked on is a multiple of it."""

    @property
    def coefficients(self) -> Mapping[str, float]:
        """The terms and their coefficients."""
        return {"nll": 1.0}

    @property
    def reported(self) -> Mapping[str, str]:
        """What evaluation reports besides `ranked`."""
        return {"val_loss": "nll"}

    def totals(self, batch: Batch) -> dict[str, jax.Array]:
        """The number of rows with label 1 that count."""
        return {"nll": jnp.sum(self._counts(batch))}

    def terms(
        self, model: Any, batch: Batch, key: jax.Array | None, stack: Stack
    ) -> dict[str, Any]:
        """Sums over a part of the batch; see `tasks.base.Task`."""
        del stack
        user, item = model(batch["dense"], batch["ids"])
        wide = sum_dtype(user.dtype)
        own, counts = batch["ids"][:, -1], self._counts(batch)
        others = constrain(item, None, None)  # each device's users meet everybody's items
        scores = (user @ others.T).astype(wide) / self.config.temperature
        same = own[:, None] == own[None, :]
        diagonal = jnp.arange(own.shape[0])
        itself = diagonal[:, None] == diagonal[None, :]
        meets = itself | (~same & (counts > 0)[None, :])
        scores = jnp.where(meets, scores, -jnp.inf)
        right = jnp.sum(jnp.where(itself, scores, 0), -1)
        nll = jax.nn.logsumexp(scores, -1) - right
        found: dict[str, Any] = {"nll": jnp.sum(nll * counts.astype(wide))}
        if key is not None or not self.config.recall:
            return found
        rank = self._rank(model, user, own)
        return {**found, GATHERED: {"rank": rank, "weights": counts}}

    def ranked(self, gathered: Gathered) -> dict[str, float]:
        """`val_recall`, at `task.recall`."""
        ranks = gathered["rank"][gathered["weights"] > 0]
        return {"val_recall": recall(ranks, self.config.recall)}

    @staticmethod
    def _counts(batch: Batch) -> jax.Array:
        return batch["weights"] * batch["label"].astype(batch["weights"].dtype)

    def _rank(self, model: Any, user: jax.Array, own: jax.Array) -> jax.Array:
        """How many items go before each user's own."""
        number = -(-self.num_items // self.parts) * self.parts
        items = jnp.arange(number, dtype=own.dtype)
        vectors = model.items(jnp.minimum(items, self.num_items - 1))
        scores = user @ constrain(vectors, None, None).T
        mine = jnp.sum(jnp.where(items == own[:, None], scores, 0), -1, keepdims=True)
        before = (scores > mine) | ((scores == mine) & (items < own[:, None]))
        rank: jax.Array = jnp.sum(before & (items < self.num_items), -1)
        return jnp.where(jnp.isnan(mine[:, 0]), number, rank)
