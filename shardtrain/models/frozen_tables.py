"""Fine-tuning a recommender around its tables: they rest, all else is trained.

Owns: which parameters those are. Does not own: the tables (`models.tables`).
"""

from dataclasses import dataclass
from typing import Any

from shardtrain.models.lora import Create
from shardtrain.models.tables import TABLES
from shardtrain.sharding.frozen import joined

PyTree = Any


@dataclass(frozen=True)
class FrozenTables:
    """All parameters but the tables are trained (a `models.lora.Training`)."""

    def model(self, create: Create) -> Create:
        """The model as it is."""
        return create

    def split(self, params: PyTree) -> tuple[PyTree, PyTree]:
        """The rest, and the tables."""
        return {k: v for k, v in params.items() if k != TABLES}, {TABLES: params[TABLES]}

    def weights(self, params: PyTree, frozen: PyTree) -> PyTree:
        """All parameters."""
        return joined(params, frozen)

    def begin(self, weights: PyTree, params: PyTree) -> tuple[PyTree, PyTree]:
        """The weights, apart."""
        del params
        return self.split(weights)
