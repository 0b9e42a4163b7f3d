"""DLRM (Naumov et al. 2019, arXiv 1906.00091), and a model of two towers for retrieval.

Owns: their arithmetic. Does not own: the tables' exchange, and the losses (`tasks`).
"""

from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

from shardtrain.models.config import DlrmConfig, TwoTowerConfig
from shardtrain.models.mlp import Mlp, unit
from shardtrain.models.table_layout import TableLayout, lay_out
from shardtrain.models.tables import Tables


def layout_of(config: DlrmConfig | TwoTowerConfig) -> TableLayout:
    """Which table of a model is split in which way.

    Args:
        config: the `[model]` section.
    """
    return lay_out(
        config.table_sizes,
        config.embed_dim,
        placement=config.placement,
        dense_rows=config.dense_rows,
        parts=config.table_parts,
    )


class Dlrm(nnx.Module):
    """How likely a click is: dense features through a bottom, all pairs of vectors, a top."""

    def __init__(self, config: DlrmConfig, dtype: Any, rngs: nnx.Rngs) -> None:
        """Draws the parameters.

        Args:
            config: the `[model]` section.
            dtype: dtype of the parameters.
            rngs: the stream `params` is used.
        """
        width, vectors = config.embed_dim, len(config.table_sizes) + 1
        self.banks = Tables(layout_of(config), dtype, rngs)
        self.bottom = Mlp((config.num_dense, *config.bottom, width), dtype, rngs, linear=False)
        pairs = vectors * (vectors - 1) // 2
        self.top = Mlp((width + pairs, *config.top, 1), dtype, rngs)

    def __call__(
        self, dense: Float[Array, "batch features"], ids: Int[Array, "batch fields"]
    ) -> Float[Array, " batch"]:
        """The log of the odds of a click."""
        bottom = self.bottom(dense.astype(self.bottom.dtype))
        vectors = jnp.concatenate([bottom[:, None], self.banks(ids)], 1)
        products = jnp.einsum("bie,bje->bij", vectors, vectors)
        first, second = np.tril_indices(vectors.shape[1], -1)
        pairs = products[:, first, second]
        return self.top(jnp.concatenate([bottom, pairs], 1))[:, 0]


class TwoTower(nnx.Module):
    """A vector for what asks and one for the item, of length 1 (Yi et al. 2019, RecSys).

    The last field is the item; all others, and dense features, are of the user and the moment.
    """

    def __init__(self, config: TwoTowerConfig, dtype: Any, rngs: nnx.Rngs) -> None:
        """Draws the parameters; the arguments are those of `Dlrm`."""
        width, users = config.embed_dim, len(config.table_sizes) - 1
        self.banks = Tables(layout_of(config), dtype, rngs)
        self.user = Mlp((users * width + config.num_dense, *config.tower), dtype, rngs)
        self.item = Mlp((width, *config.tower), dtype, rngs)

    def __call__(
        self, dense: Float[Array, "batch features"], ids: Int[Array, "batch fields"]
    ) -> tuple[Float[Array, "batch embed"], Float[Array, "batch embed"]]:
        """Vectors of users and of items."""
        rows = self.banks(ids)
        asks = rows[:, :-1].reshape(rows.shape[0], -1)
        user = jnp.concatenate([asks, dense.astype(asks.dtype)], 1)
        return unit(self.user(user)), unit(self.item(rows[:, -1]))

    def items(self, ids: Int[Array, " batch"]) -> Float[Array, "batch embed"]:
        """Vectors of items alone."""
        return unit(self.item(self.banks.field(ids, len(self.banks.layout.sizes) - 1)))
