"""BERT: an encoder that reads both ways, and the heads that it is pre-trained with.

Owns what differs from `transformer`: norms after each half of a block, a table of segments, the
head for hidden tokens and the one for the next sentence (Devlin et al. 2018, arXiv 1810.04805).
Attention and MLP are those of `transformer`. It knows axis names, not the mesh, and not the loss.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int, UInt32

from shardtrain.models.config import BertConfig, TransformerConfig
from shardtrain.models.transformer import (
    ACTIVATIONS,
    EMBED_SITE,
    INIT_STDDEV,
    Attention,
    Context,
    Mlp,
    Norm,
    constant,
    normed,
    param,
    residual,
    table,
)
from shardtrain.ops.attention import attention
from shardtrain.ops.dense import dense
from shardtrain.ops.dropout import dropout, sample_keys
from shardtrain.ops.embedding import embedding
from shardtrain.ops.position import default_positions
from shardtrain.sharding.rules import constrain
from shardtrain.strategies.config import INPUT
from shardtrain.strategies.stack import Stack

SEGMENTS = 2
"""The first part of a sample and the second."""
_BOTH_WAYS = partial(attention, causal=False)


class Block(nnx.Module):
    """One layer, post-norm: attention and MLP, each added to its input and then normalised."""

    def __init__(self, config: TransformerConfig, dtype: Any, rngs: nnx.Rngs) -> None:
        self.dropout = config.dropout
        self.attention = Attention(config, dtype, rngs, INIT_STDDEV)
        self.attention_norm = Norm(config, dtype)
        self.mlp = Mlp(config, dtype, rngs, INIT_STDDEV)
        self.mlp_norm = Norm(config, dtype)

    def __call__(
        self,
        x: Float[Array, "batch residual_length embed"],
        index: UInt32[Array, ""],
        context: Context,
    ) -> Float[Array, "batch residual_length embed"]:
        """Runs the layer.

        Args:
            x: the residual stream, normalised.
            index: the layer's place in the model.
            context: segments and dropout keys.
        """
        x = checkpoint_name(x, INPUT)
        h = residual(self.attention(normed(x), index, context), "attention_out")
        x = self.attention_norm(x + dropout(h, self.dropout, context.keys, index, 0))
        h = residual(self.mlp(normed(x)), "mlp_out")
        return self.mlp_norm(x + dropout(h, self.dropout, context.keys, index, 1))


class NextSentence(nnx.Module):
    """What tells from the first position whether the second part follows the first."""

    def __init__(self, embed: int, dtype: Any, rngs: nnx.Rngs) -> None:
        self.pooler = param(rngs, ("features", "embed"), (embed, embed), dtype, INIT_STDDEV)
        self.pooler_bias = constant(("embed",), (embed,), dtype, 0.0)
        self.kernel = param(rngs, ("embed", "classes"), (embed, 2), dtype, INIT_STDDEV)
        self.bias = constant(("classes",), (2,), dtype, 0.0)

    def __call__(self, x: Float[Array, "batch length embed"]) -> Float[Array, "batch classes"]:
        """Scores of "it does" and "it does not", in at least 32 bits."""
        pooled = jnp.tanh(dense(x[:, :1], self.pooler[...], bias=self.pooler_bias[...]))
        wide = dense(pooled, self.kernel[...], wide=True)[:, 0]
        scores: jax.Array = wide + self.bias[...].astype(wide.dtype)
        return scores


class Bert(nnx.Module):
    """Embedding, a stack of blocks, two heads."""

    def __init__(self, config: BertConfig, *, vocab_size: int, dtype: Any, rngs: nnx.Rngs) -> None:
        """Draws the parameters.

        Args:
            config: the `[model]` section.
            vocab_size: tokens that can be predicted; the table is padded to `vocab_multiple`.
            dtype: dtype of the parameters.
            rngs: the stream `params` is used.
        """
        self.config = config
        inner = config.as_transformer
        embed, rows = config.embed_dim, inner.padded_vocab(vocab_size)
        self.embedding = table(rngs, vocab_size, rows, embed, dtype)
        self.positions = param(
            rngs, ("position", "embed"), (config.max_length, embed), dtype, INIT_STDDEV
        )
        self.segments = param(rngs, ("segment", "embed"), (SEGMENTS, embed), dtype, INIT_STDDEV)
        self.embed_norm = Norm(inner, dtype)

        @nnx.split_rngs(splits=config.num_layers)
        @nnx.vmap(transform_metadata={nnx.PARTITION_NAME: "layers"})
        def stack(rngs: nnx.Rngs) -> Block:
            return Block(inner, dtype, rngs)

        self.layers = stack(rngs)
        self.transform = param(rngs, ("features", "embed"), (embed, embed), dtype, INIT_STDDEV)
        self.transform_bias = constant(("embed",), (embed,), dtype, 0.0)
        self.transform_norm = Norm(inner, dtype)
        self.decoder_bias = constant(("vocab",), (rows,), dtype, 0.0)
        self.next = NextSentence(embed, dtype, rngs) if config.next_sentence else None

    def context(self, batch: Mapping[str, jax.Array], key: jax.Array | None) -> Context:
        """What the blocks read, from a batch and the step's dropout key (None: no dropout)."""
        positions = batch.get("positions")
        if positions is None:
            positions = default_positions(batch["tokens"])
        keys = None
        if key is not None and self.config.as_transformer.drops:
            keys = sample_keys(key, batch["sample"])
        return Context(positions, batch["segments"], keys, attend=_BOTH_WAYS)

    def embed(
        self, batch: Mapping[str, jax.Array], context: Context
    ) -> Float[Array, "batch residual_length embed"]:
        """The first layer's input, from the batch's `tokens` and `parts`."""
        x = embedding(self.embedding[...], batch["tokens"])
        x = x + embedding(self.positions[...], context.positions, axis="position")
        x = x + embedding(self.segments[...], batch["parts"], axis="segment")
        x = self.embed_norm(constrain(x, "batch", "residual_length", "embed"))
        return dropout(x, self.config.dropout, context.keys, EMBED_SITE, 0)

    def hidden(
        self, batch: Mapping[str, jax.Array], key: jax.Array | None, stack: Stack
    ) -> Float[Array, "batch residual_length embed"]:
        """Tokens to what comes out of the last layer.

        Args:
            batch: `tokens`, `parts` and `segments`; `sample` and `positions` where they apply.
            key: the step's dropout key, or None.
            stack: how the layers are run.
        """
        context = self.context(batch, key)
        x = self.embed(batch, context)
        return stack(self.layers, lambda layer, index, x: layer(x, index, context), x)  # type: ignore[no-any-return]

    def token_scores(
        self,
        x: Float[Array, "batch residual_length embed"],
        predicted: Int[Array, "batch places"],
    ) -> Float[Array, "batch places vocab"]:
        """Scores of tokens in at least 32 bits; columns past `vocab_size` are padding.

        Args:
            x: what comes out of the last layer.
            predicted: the places, a few of a sample, so that no other is scored.
        """
        h = dense(at_places(normed(x), predicted), self.transform[...])
        h = ACTIVATIONS[self.config.activation](h + self.transform_bias[...])
        h = self.transform_norm(constrain(h, "batch", "length", "embed"))
        scores = dense(h, self.embedding[...], transposed=True, wide=True)
        return constrain(
            scores + self.decoder_bias[...].astype(scores.dtype), "batch", "length", "vocab"
        )

    def next_scores(
        self, x: Float[Array, "batch residual_length embed"]
    ) -> Float[Array, "batch classes"]:
        """Scores of "the second part follows the first" and "it does not"."""
        assert self.next is not None, "no such head: model.next_sentence is off"
        return self.next(normed(x))


def at_places(
    x: Float[Array, "batch length embed"], places: Int[Array, "batch places"]
) -> Float[Array, "batch places embed"]:
    """The activations at some places of each row.

    As a product with one-hot rows: exact, as one term of a sum is not zero; and XLA can split it as
    any product, where it cannot split a gather within the pipeline.
    """
    hot = jax.nn.one_hot(places, x.shape[1], dtype=x.dtype)
    found = jnp.einsum("bpl,ble->bpe", hot, x, precision=jax.lax.Precision.HIGHEST)
    return constrain(found, "batch", "length", "embed")
