"""One decoder-only transformer; GPT-2, Llama and BLOOM are choices of its config.

Owns parameters, their logical names and the arithmetic of a block. It knows axis names, not the
mesh, and neither the loss nor how its layers are run one after another.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int, Key, UInt32

from shardtrain.models.config import GATED, TransformerConfig
from shardtrain.models.lora import Matrix
from shardtrain.ops.activation import gelu, gelu_tanh
from shardtrain.ops.attention import attention, split_groups
from shardtrain.ops.dense import dense
from shardtrain.ops.dropout import Thinning, dropout, sample_keys, thinning
from shardtrain.ops.embedding import embedding
from shardtrain.ops.norm import layer_norm, rms_norm
from shardtrain.ops.position import (
    alibi_slopes,
    default_positions,
    llama3_frequencies,
    rotary,
    rotary_frequencies,
)
from shardtrain.ops.sums import sum_dtype
from shardtrain.sharding.rules import constrain, constrain_in_steps
from shardtrain.strategies.config import INPUT
from shardtrain.strategies.stack import Stack

INIT_STDDEV = 0.02
EMBED_SITE = 2**31
"""The embedding's place among the layers, for dropout."""
WEIGHTS_SITE = 2
"""The place of attention weights among the dropouts of a layer, after the two of its halves."""

ACTIVATIONS: Mapping[str, Callable[[jax.Array], jax.Array]] = {
    "gelu": gelu,
    "gelu_tanh": gelu_tanh,
    "relu": jax.nn.relu,
    "silu": jax.nn.silu,
    "swiglu": jax.nn.silu,
    "geglu": gelu_tanh,
}


MATRICES: Mapping[str, Matrix] = {
    "attention/qkv": Matrix(),
    "attention/out": Matrix(contract=3),
    "mlp/up": Matrix(),
    "mlp/down": Matrix(transposed=True),
}
"""The matrices of a layer, which LoRA may change, by path; each goes through `dense`."""


class Attend(Protocol):
    """How queries meet keys and values; see `shardtrain.ops.attention.attention`."""

    def __call__(
        self,
        q: Float[Array, "batch length kv_heads group head_dim"],
        k: Float[Array, "batch length kv_heads head_dim"],
        v: Float[Array, "batch length kv_heads head_dim"],
        *,
        segments: Int[Array, "batch length"] | None,
        alibi: Float[Array, "kv_heads group"] | None,
        thinning: Thinning | None,
        implementation: str,
    ) -> Float[Array, "batch length kv_heads group head_dim"]:
        """Mixes values for each query."""
        ...


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["positions", "segments", "keys", "places"],
    meta_fields=["attend"],
)
@dataclass(frozen=True)
class Context:
    """What every block of one forward pass reads besides the residual stream."""

    positions: Int[Array, "batch length"]
    segments: Int[Array, "batch length"] | None
    keys: Key[Array, " batch"] | None
    """One dropout key a sample; None when evaluating."""
    places: Int[Array, "batch length"] | None = None
    """Where each position is in its sequence; None = in order."""
    attend: Attend = attention
    """Within the batch; generation puts a cache here."""


def param(
    rngs: nnx.Rngs, names: tuple[str, ...], shape: tuple[int, ...], dtype: Any, stddev: float
) -> nnx.Param[jax.Array]:
    """A parameter drawn from a normal distribution, with the names of its axes."""
    init = nnx.with_partitioning(nnx.initializers.normal(stddev), names)
    return nnx.Param(init(rngs.params(), shape, dtype))


def constant(names: tuple[str, ...], shape: tuple[int, ...], dtype: Any, value: float) -> Any:
    """A parameter that starts as a constant."""
    init = nnx.with_partitioning(nnx.initializers.constant(value), names)
    return nnx.Param(init(jax.random.key(0), shape, dtype))


class Norm(nnx.Module):
    """A layernorm or rmsnorm over `embed`."""

    def __init__(self, config: TransformerConfig, dtype: Any) -> None:
        self.kind = config.norm
        self.epsilon = config.norm_epsilon
        self.scale = constant(("embed",), (config.embed_dim,), dtype, 1.0)
        has_bias = config.norm == "layernorm" and config.norm_bias
        self.bias = constant(("embed",), (config.embed_dim,), dtype, 0.0) if has_bias else None

    def __call__(self, x: Float[Array, "batch length embed"]) -> Float[Array, "batch length embed"]:
        """Normalises each position."""
        if self.kind == "rmsnorm":
            return rms_norm(x, self.scale[...], epsilon=self.epsilon)
        return layer_norm(x, self.scale[...], value(self.bias), epsilon=self.epsilon)


class Attention(nnx.Module):
    """Grouped-query self-attention (Ainslie et al. 2023, arXiv 2305.13245).

    It is causal unless the context has another way to attend.
    One matrix makes queries, keys and values: [embed, kv_heads, group, head_dim], where a group is
    the query heads of one key/value head, then that key, then that value. Splitting kv_heads over
    `tensor` keeps each group together.
    """

    def __init__(
        self, config: TransformerConfig, dtype: Any, rngs: nnx.Rngs, out_stddev: float
    ) -> None:
        embed, kv, size = config.embed_dim, config.kv_heads, config.head_size
        queries = config.num_heads // kv
        names = ("kv_heads", "group", "head_dim")
        self.config = config
        self.qkv = param(
            rngs, ("embed", *names), (embed, kv, queries + 2, size), dtype, INIT_STDDEV
        )
        self.out = param(rngs, (*names, "embed"), (kv, queries, size, embed), dtype, out_stddev)
        has_bias = config.bias
        shape = (kv, queries + 2, size)
        self.qkv_bias = constant(names, shape, dtype, 0.0) if has_bias else None
        self.out_bias = constant(("embed",), (embed,), dtype, 0.0) if has_bias else None

    def __call__(
        self, x: Float[Array, "batch length embed"], index: UInt32[Array, ""], context: Context
    ) -> Float[Array, "batch length embed"]:
        """Lets each position read those before it in its document.

        Args:
            x: the residual stream, normalised.
            index: the layer's place in the model.
            context: positions, segments and dropout keys.
        """
        config = self.config
        qkv = dense(x, self.qkv[...], bias=value(self.qkv_bias))
        qkv = constrain(qkv, "batch", "length", "kv_heads", "group", "head_dim")
        qkv = checkpoint_name(qkv, "qkv")
        q, k, v = split_groups(qkv)
        slopes = None
        if config.position == "rope":
            frequencies = rope_frequencies(config)
            q = rotary(q, context.positions, frequencies)
            k = rotary(k[..., None, :], context.positions, frequencies)[..., 0, :]
        elif config.position == "alibi":
            wide = sum_dtype(q.dtype)
            slopes = jnp.asarray(alibi_slopes(config.num_heads), wide)
            slopes = slopes.reshape(config.kv_heads, -1)
        heads = (config.kv_heads, config.num_heads // config.kv_heads)
        out = context.attend(
            q,
            k,
            v,
            segments=context.segments,
            alibi=slopes,
            thinning=thinning(config.attention_dropout, context.keys, index, WEIGHTS_SITE, heads),
            implementation=config.attention,
        )
        out = constrain(out, "batch", "length", "kv_heads", "group", "head_dim")
        out = checkpoint_name(out, "attention")
        return dense(out, self.out[...], contract=3, bias=value(self.out_bias))


class Mlp(nnx.Module):
    """The feed-forward half of a block; swiglu and geglu are gated (Shazeer, arXiv 2002.05202)."""

    def __init__(
        self, config: TransformerConfig, dtype: Any, rngs: nnx.Rngs, out_stddev: float
    ) -> None:
        embed, hidden = config.embed_dim, config.mlp_size
        gated = config.activation in GATED
        names = ("gate", "mlp") if gated else ("mlp",)
        shape = (2, hidden) if gated else (hidden,)
        self.activation = config.activation
        self.up = param(rngs, ("embed", *names), (embed, *shape), dtype, INIT_STDDEV)
        self.down = param(rngs, ("embed", "mlp"), (embed, hidden), dtype, out_stddev)
        self.up_bias = constant(names, shape, dtype, 0.0) if config.bias else None
        self.down_bias = constant(("embed",), (embed,), dtype, 0.0) if config.bias else None

    def __call__(self, x: Float[Array, "batch length embed"]) -> Float[Array, "batch length embed"]:
        """Maps each position by itself."""
        activate = ACTIVATIONS[self.activation]
        h = dense(x, self.up[...], bias=value(self.up_bias))
        if self.activation in GATED:
            h = constrain(h, "batch", "length", "gate", "mlp")
            h = checkpoint_name(h, "mlp")
            h = activate(h[..., 0, :]) * h[..., 1, :]
        else:
            h = constrain(h, "batch", "length", "mlp")
            h = activate(checkpoint_name(h, "mlp"))
        return dense(h, self.down[...], bias=value(self.down_bias), transposed=True)


class Block(nnx.Module):
    """One layer, pre-norm: attention and MLP, each added to the residual stream."""

    def __init__(self, config: TransformerConfig, dtype: Any, rngs: nnx.Rngs) -> None:
        self.dropout = config.dropout
        self.attention_norm = Norm(config, dtype)
        stddev = residual_stddev(config)
        self.attention = Attention(config, dtype, rngs, stddev)
        self.mlp_norm = Norm(config, dtype)
        self.mlp = Mlp(config, dtype, rngs, stddev)

    def __call__(
        self,
        x: Float[Array, "batch residual_length embed"],
        index: UInt32[Array, ""],
        context: Context,
    ) -> Float[Array, "batch residual_length embed"]:
        """Runs the layer.

        Args:
            x: the residual stream.
            index: the layer's place in the model.
            context: positions, segments and dropout keys.
        """
        x = checkpoint_name(x, INPUT)
        h = normed(self.attention_norm(x))
        h = residual(self.attention(h, index, context), "attention_out")
        x = x + dropout(h, self.dropout, context.keys, index, 0, context.places)
        h = normed(self.mlp_norm(x))
        h = residual(self.mlp(h), "mlp_out")
        return x + dropout(h, self.dropout, context.keys, index, 1, context.places)


class Transformer(nnx.Module):
    """Embedding, a stack of blocks, a head."""

    def __init__(
        self,
        config: TransformerConfig,
        *,
        vocab_size: int,
        max_length: int,
        dtype: Any,
        rngs: nnx.Rngs,
    ) -> None:
        """Draws the parameters.

        Args:
            config: the `[model]` section.
            vocab_size: tokens that can be predicted; the table is padded to `vocab_multiple`.
            max_length: rows of a learned position table.
            dtype: dtype of the parameters.
            rngs: the stream `params` is used.
        """
        self.config = config
        self.vocab_size = vocab_size
        rows = config.padded_vocab(vocab_size)
        embed = config.embed_dim
        self.embedding = table(rngs, vocab_size, rows, embed, dtype)
        self.positions = (
            param(rngs, ("position", "embed"), (max_length, embed), dtype, INIT_STDDEV)
            if config.position == "learned"
            else None
        )
        self.embed_norm = Norm(config, dtype) if config.embed_norm else None

        @nnx.split_rngs(splits=config.num_layers)
        @nnx.vmap(transform_metadata={nnx.PARTITION_NAME: "layers"})
        def stack(rngs: nnx.Rngs) -> Block:
            return Block(config, dtype, rngs)

        self.layers = stack(rngs)
        self.norm = Norm(config, dtype)
        self.head = None if config.tied else table(rngs, vocab_size, rows, embed, dtype)

    def context(self, batch: Mapping[str, jax.Array], key: jax.Array | None) -> Context:
        """What the blocks read, from a batch and the step's dropout key (None: no dropout)."""
        places, positions = batch.get("places"), batch.get("positions")
        if positions is None:
            positions = default_positions(batch["tokens"]) if places is None else places
        keys = None
        if key is not None and self.config.drops:
            keys = sample_keys(key, batch["sample"])
        return Context(positions, batch.get("segments"), keys, places)

    def embed(
        self, batch: Mapping[str, jax.Array], context: Context
    ) -> Float[Array, "batch residual_length embed"]:
        """The residual stream before the first layer, from the batch's `tokens`."""
        x = embedding(self.embedding[...], batch["tokens"])
        if self.positions is not None:
            x = x + embedding(self.positions[...], context.positions, axis="position")
        if self.embed_norm is not None:
            x = self.embed_norm(x)
        x = constrain(x, "batch", "residual_length", "embed")
        return dropout(x, self.config.dropout, context.keys, EMBED_SITE, 0, context.places)

    def logits(
        self, x: Float[Array, "batch residual_length embed"]
    ) -> Float[Array, "batch length vocab"]:
        """Scores of the next token in at least 32 bits; columns past `vocab_size` are padding."""
        scores = dense(*self.scored(x), transposed=True, wide=True)
        return constrain(scores, "batch", "length", "vocab")

    def scored(
        self, x: Float[Array, "batch residual_length embed"]
    ) -> tuple[Float[Array, "batch length embed"], Float[Array, "vocab embed"]]:
        """What the scores are the product of: activations, and a row for each token."""
        table = self.embedding if self.head is None else self.head
        return normed(self.norm(x)), table[...]

    def hidden(
        self, batch: Mapping[str, jax.Array], key: jax.Array | None, stack: Stack
    ) -> Float[Array, "batch residual_length embed"]:
        """Tokens to the residual stream after the last layer.

        Args:
            batch: `tokens`, and `sample`, `positions`, `segments`, `places` where they apply.
            key: the step's dropout key, or None.
            stack: how the layers are run.
        """
        context = self.context(batch, key)
        x = self.embed(batch, context)
        return stack(self.layers, lambda layer, index, x: layer(x, index, context), x)  # type: ignore[no-any-return]

    def __call__(
        self, batch: Mapping[str, jax.Array], key: jax.Array | None, stack: Stack
    ) -> Float[Array, "batch length vocab"]:
        """Tokens to scores; the arguments are those of `hidden`."""
        return self.logits(self.hidden(batch, key, stack))


def normed(x: jax.Array) -> jax.Array:
    """Takes a norm's result out of the residual stream's layout, gathered after its cast."""
    x = constrain(x, "batch", "residual_length", "embed")
    return constrain(x, "batch", "length", "embed")


def residual(x: jax.Array, name: str) -> jax.Array:
    """Brings a half block's result into the residual stream's layout, under a name for remat."""
    x = constrain_in_steps(x, ("batch", "length", "embed"), ("batch", "residual_length", "embed"))
    named: jax.Array = checkpoint_name(x, name)
    return named


def rope_frequencies(config: TransformerConfig) -> np.ndarray:
    """Radians a position of each pair of channels, float64 [head_dim / 2]."""
    frequencies = rotary_frequencies(config.head_size, config.rope_theta)
    if config.rope_scaling == "linear":
        return frequencies / config.rope_factor
    if config.rope_scaling == "llama3":
        return llama3_frequencies(
            frequencies,
            factor=config.rope_factor,
            trained_length=config.rope_trained_length,
            low=config.rope_low,
            high=config.rope_high,
        )
    return frequencies


def residual_stddev(config: TransformerConfig) -> float:
    """GPT-2's scaling of matrices that write into the residual stream."""
    return INIT_STDDEV / float((2 * config.num_layers) ** 0.5)


def table(
    rngs: nnx.Rngs, vocab_size: int, rows: int, embed: int, dtype: Any
) -> nnx.Param[jax.Array]:
    """A table of `rows` rows, one a token.

    Those from `vocab_size` on are padding and start at zero; so they stay, as no gradient reaches
    them and decay keeps zero.
    """
    normal = nnx.initializers.normal(INIT_STDDEV)

    def init(key: jax.Array, shape: tuple[int, ...], dtype: Any) -> jax.Array:
        drawn: jax.Array = normal(key, shape, dtype)
        if rows == vocab_size:
            return drawn
        return jnp.where(jnp.arange(rows)[:, None] < vocab_size, drawn, 0)

    names = ("vocab", "embed")
    return nnx.Param(nnx.with_partitioning(init, names)(rngs.params(), (rows, embed), dtype))


def value(parameter: Any) -> jax.Array | None:
    """A parameter's array, or None for one that the config leaves out."""
    return None if parameter is None else parameter[...]
