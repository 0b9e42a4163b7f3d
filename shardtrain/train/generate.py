"""Text from a trained model: a prompt is read into a cache, then goes on token by token.

Owns: the cache, the two compiled functions (read a piece, go on), how a token is drawn, and what
happens when a text outgrows the model's positions. Does not own: the model, where its parameters
rest (they stay there), and where a checkpoint is found.

Everything but the parameters is the same on every device of the data axes: one text is no batch.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding
from jaxtyping import Array, Float, Int, Key
from numpy.typing import NDArray

from shardtrain.data.tokenizer import Tokenizer, encode_text
from shardtrain.errors import ConfigError
from shardtrain.models.config import TransformerConfig
from shardtrain.models.transformer import Transformer
from shardtrain.ops.cached_attention import cached_attention
from shardtrain.ops.dropout import Thinning
from shardtrain.ops.sums import sum_dtype
from shardtrain.sharding.placement import Placement
from shardtrain.sharding.rules import Active, constrain, use_rules
from shardtrain.strategies.stack import Stack

PyTree = Any
PIECE = 256
"""Tokens that are read at once, at most: scores of a longer piece would fill the memory."""
EMPTY_PROMPT = "\n"
"""What stands for an empty prompt where the tokenizer has no token for a document's end."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Cache:
    """Keys and values of every layer, one row a position."""

    keys: Float[Array, "layers batch kept kv_heads head_dim"]
    values: Float[Array, "layers batch kept kv_heads head_dim"]

    def write(self, layer: jax.Array, first: jax.Array, k: jax.Array, v: jax.Array) -> "Cache":
        """The cache with rows from `first` on written in one layer."""
        zero = jnp.int32(0)
        at = (layer.astype(jnp.int32), zero, first, zero, zero)
        names = (None, "batch", None, "kv_heads", "head_dim")
        keys, values = (
            constrain(jax.lax.dynamic_update_slice(old, new[None], at), *names)
            for old, new in ((self.keys, k), (self.values, v))
        )
        return Cache(keys, values)


class Remember:
    """Attention of one layer over the cache: it writes what is new, and keeps the result."""

    def __init__(self, cache: Cache, layer: jax.Array, first: jax.Array) -> None:
        """Takes the cache before the layer.

        Args:
            cache: what is kept.
            layer: the layer's place in the model.
            first: the position of the first new token.
        """
        self.cache = cache
        self._layer = layer
        self._first = first

    def __call__(
        self,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        *,
        segments: jax.Array | None,
        alibi: jax.Array | None,
        thinning: Thinning | None,
        implementation: str,
    ) -> jax.Array:
        """Mixes values for each query, over all positions up to its own."""
        del implementation  # kernels for training batches do not know a cache
        assert segments is None, "one text is one document"
        assert thinning is None, "nothing is dropped but in training"
        self.cache = self.cache.write(self._layer, self._first, k, v)
        keys, values = (
            jax.lax.dynamic_index_in_dim(kept, self._layer.astype(jnp.int32), keepdims=False)
            for kept in (self.cache.keys, self.cache.values)
        )
        out: jax.Array = cached_attention(q, keys, values, first=self._first, alibi=alibi)
        return out


@dataclass(frozen=True, eq=False)
class Generator:
    """Goes on with texts; compiled for the first text, and again only for other sizes."""

    config: TransformerConfig
    """The model's section."""
    graph: nnx.GraphDef[Any]
    """The model without its parameters."""
    placement: Placement
    """Where the parameters rest."""
    tokenizer: Tokenizer
    """Text to tokens and back; only its tokens are drawn."""
    stack: Stack
    """How its layers run."""
    window: int | None
    """Positions that the model can tell apart; None: as many as wanted."""

    # -- text

    def text(
        self, params: PyTree, prompt: str, *, tokens: int, temperature: float, seed: int
    ) -> str:
        """Goes on with a prompt.

        A text that outgrows the model's positions goes on from its last part; `note` says so.

        Args:
            params: the model's parameters, where they rest.
            prompt: what to go on with; an empty one stands for the beginning of a document.
            tokens: tokens to generate; a document may end before.
            temperature: randomness of the draws; 0 takes the likeliest token.
            seed: seed of the draws; they are the same on every mesh.

        Returns:
            What comes after the prompt. Bytes that are no text become replacement characters.

        Raises:
            ConfigError: a number is negative.
        """
        self.check(tokens=tokens, temperature=temperature)
        ids = self.encode(prompt)
        new = self.draw(params, ids, tokens=tokens, temperature=temperature, seed=seed)
        # Some tokenizers write a token otherwise at the beginning of a text.
        before, whole = (self.tokenizer.decode(part) for part in (ids, [*ids, *new]))
        return whole[len(before) :] if whole.startswith(before) else self.tokenizer.decode(new)

    def check(self, *, tokens: int, temperature: float) -> None:
        """Refuses what cannot be drawn.

        Raises:
            ConfigError: a number is negative.
        """
        for name, number in (("tokens", tokens), ("temperature", temperature)):
            if not number >= 0:
                raise ConfigError("must be 0 or more", where=name, value=str(number))

    def encode(self, prompt: str) -> NDArray[np.int64]:
        """The tokens of a prompt, at least one."""
        ids = encode_text(self.tokenizer, prompt)
        if ids.size:
            return ids
        end = np.array(self.tokenizer.end, np.int64)
        return end if end.size else encode_text(self.tokenizer, EMPTY_PROMPT)

    def note(self, prompt: str, tokens: int) -> str:
        """What a reader must know of a text that outgrows the model's positions; else empty."""
        length = self.encode(prompt).size
        if self.window is None or length + tokens - 1 <= self.window:
            return ""
        cut = f"only the last {self.window} tokens of the prompt are read, and " * (
            length > self.window
        )
        return (
            f"the model has {self.window} positions, the text {length + tokens}: {cut}whenever "
            f"they are full, it goes on from the last {self._kept} tokens"
        )

    # -- tokens

    @property
    def _kept(self) -> int:
        """Tokens that are read again when the window is full."""
        assert self.window is not None
        return max(1, self.window // 2)

    def draw(
        self,
        params: PyTree,
        prompt: Sequence[int] | NDArray[np.int64],
        *,
        tokens: int,
        temperature: float,
        seed: int,
    ) -> list[int]:
        """Draws the tokens that come after those of a prompt, up to the end of the document."""
        before = [int(token) for token in prompt]
        total = len(before) + tokens - 1
        rows = _bucket(total) if self.window is None else min(_bucket(total), self.window)
        view = before if self.window is None else before[-self.window :]
        new: list[int] = []
        while len(new) < tokens:
            room = min(tokens - len(new), rows - len(view) + 1)
            cache, logits = self._read(params, view, rows)
            numbers = (np.int32(n) for n in (len(view), len(new), room))
            drawn, count = self._go_on(
                params, cache, logits, *numbers, np.float32(temperature), np.uint32(seed)
            )
            new += np.asarray(drawn)[: int(count)].tolist()
            if count < room:
                break  # the document has ended
            view = [*before, *new][-self._kept :] if len(new) < tokens else []
        return new

    def _read(self, params: PyTree, view: list[int], rows: int) -> tuple[Cache, jax.Array]:
        """Reads tokens piece by piece: the cache, and the scores of what comes next."""
        piece = min(PIECE, _bucket(len(view)))
        cache = self._empty(-(-rows // piece) * piece, jax.tree.leaves(params)[0].dtype)
        for first in range(0, len(view), piece):
            part = view[first : first + piece]
            tokens = np.zeros((1, piece), np.int32)
            tokens[0, : len(part)] = part
            numbers = np.int32(first), np.int32(len(part) - 1)
            cache, logits = self._read_piece(params, cache, tokens, *numbers)
        return cache, logits

    def _empty(self, rows: int, dtype: Any) -> Cache:
        config = self.config
        shape = (config.num_layers, 1, rows, config.kv_heads, config.head_size)
        zeros = jnp.zeros(shape, dtype, device=self._cache_sharding)
        return Cache(zeros, zeros)

    # -- compiled

    @cached_property
    def _active(self) -> Active:
        """The run's rules, with nothing split that one text, or one token of it, has one of."""
        one = dict.fromkeys(("batch", "length", "residual_length"), ())
        return Active({**self.placement.compute, **one}, self.placement.mesh)

    @property
    def _cache_sharding(self) -> NamedSharding:
        # Every layer's on all stages: the layers come to one text, not the text to them.
        spec = self._active.spec(None, "batch", None, "kv_heads", "head_dim")
        return NamedSharding(self._active.mesh, spec)

    @cached_property
    def _read_piece(self) -> Any:
        """(params, cache, tokens, position of the first, index of the last) -> (cache, scores)."""
        return jax.jit(self._forward, out_shardings=(self._cache_sharding, self.placement.whole))

    @cached_property
    def _go_on(self) -> Any:
        """Draws up to `room` tokens, without coming back to Python in between."""
        return jax.jit(self._draw_many, out_shardings=self.placement.whole)

    def _forward(
        self,
        params: PyTree,
        cache: Cache,
        tokens: Int[Array, "batch length"],
        first: Int[Array, ""],
        last: Int[Array, ""],
    ) -> tuple[Cache, Float[Array, " vocab"]]:
        """Reads tokens into the cache; rows behind the last are written anew before any use."""
        model: Transformer = nnx.merge(self.graph, params)
        steps = jnp.minimum(jnp.arange(tokens.shape[1], dtype=jnp.int32), last)
        batch = {"tokens": tokens, "positions": (first + steps)[None]}
        with use_rules(self._active.table, self._active.mesh):
            context = model.context(batch, None)

            def block(layer: Any, index: jax.Array, carry: Any) -> Any:
                x, cache = carry
                remember = Remember(cache, index, first)
                x = layer(x, index, replace(context, attend=remember))
                return x, remember.cache

            x, cache = self.stack(model.layers, block, (model.embed(batch, context), cache))
            scores = model.logits(jax.lax.dynamic_slice_in_dim(x, last, 1, axis=1))
            return cache, constrain(scores, "batch", "length", None)[0, 0]

    def _draw_many(
        self,
        params: PyTree,
        cache: Cache,
        scores: Float[Array, " vocab"],
        first: Int[Array, ""],
        drawn: Int[Array, ""],
        room: Int[Array, ""],
        temperature: Float[Array, ""],
        seed: Any,
    ) -> tuple[Int[Array, " kept"], Int[Array, ""]]:
        """Draws tokens after those in the cache.

        Args:
            params: the parameters.
            cache: what has been read.
            scores: of the first token to draw.
            first: its position.
            drawn: tokens that were drawn before; each has its own random bits.
            room: tokens to draw.
            temperature: see `text`.
            seed: see `text`.

        Returns:
            The tokens, and how many there are.
        """
        key = jax.random.key(seed)
        stop = self.tokenizer.end[-1] if self.tokenizer.end else -1

        def draw(scores: jax.Array, index: jax.Array) -> jax.Array:
            key_ = jax.random.fold_in(key, drawn + index)
            return _draw(scores, temperature, key_, self.tokenizer.vocab_size)

        def alive(carry: Any) -> jax.Array:
            index, token, _, _ = carry
            more: jax.Array = (index < room) & (token != stop)
            return more

        def body(carry: Any) -> Any:
            index, token, cache, out = carry
            cache, scores = self._forward(
                params, cache, token[None, None], first + index - 1, jnp.int32(0)
            )
            token = draw(scores, index)
            return index + 1, token, cache, out.at[index].set(token)

        token = draw(scores, jnp.int32(0))
        out = jnp.zeros(cache.keys.shape[2], jnp.int32).at[0].set(token)
        start = (jnp.int32(1), token, cache, out)
        index, token, _, out = jax.lax.while_loop(alive, body, start)
        return out, index - (token == stop).astype(jnp.int32)


def _draw(
    scores: Float[Array, " vocab"],
    temperature: Float[Array, ""],
    key: Key[Array, ""],
    vocab_size: int,
) -> Int[Array, ""]:
    """The likeliest token, or a random one of the first `vocab_size`."""
    scores = scores.astype(sum_dtype(scores.dtype))
    scores = jnp.where(jnp.arange(scores.size) < vocab_size, scores, -jnp.inf)
    smallest = np.finfo(np.float32).tiny
    warm = scores / jnp.maximum(temperature, smallest).astype(scores.dtype)
    drawn = jax.random.categorical(key, warm).astype(jnp.int32)
    likeliest = jnp.argmax(scores).astype(jnp.int32)
    token: jax.Array = jnp.where(temperature > 0, drawn, likeliest)
    return token


def _bucket(number: int) -> int:
    """The next power of two: few sizes are compiled."""
    return int(max(16, 1 << max(number - 1, 0).bit_length()))
