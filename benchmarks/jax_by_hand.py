"""The fastest float32 step that we know how to write by hand in JAX for a CPU: one jit, no library.

Activations stay [tokens, embed], as XLA's gradient of a product over two leading dims transposes
both operands; qkv is one matrix; causal attention runs in blocks of queries that stop at the
diagonal; layers are unrolled; microbatches keep the working set small; the state is donated.

Also owns what jax_by_hand_bf16.py shares with it: the optimizer's step and the loop around it.
"""

import argparse
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from benchmarks import common
from benchmarks.common import SIZES, Size

Params = dict[str, Any]
State = tuple[Params, Params, Params, jax.Array]
"""Parameters, both moments, the number of steps done."""
Loss = Callable[[Params, jax.Array, jax.Array, Size], jax.Array]

BLOCK = 128
"""Queries of one block of attention."""


def main() -> None:
    """Times the step."""
    flags = common.parser(__doc__)
    flags.add_argument("--microbatches", type=int, default=1)
    options = flags.parse_args()
    run("jax_by_hand", options, init(SIZES[options.size]), loss_of, dtype="f32")


# -- the model


def init(size: Size) -> Params:
    """Draws the parameters."""
    rng = np.random.default_rng(0)

    def normal(*shape: int, stddev: float = common.STDDEV) -> jax.Array:
        return jnp.asarray(rng.standard_normal(shape, dtype=np.float32) * stddev)

    embed = size.embed
    layers = [
        {
            "norm1": jnp.ones(embed),
            "norm2": jnp.ones(embed),
            "qkv": normal(embed, 3 * embed),
            "out": normal(embed, embed, stddev=size.residual),
            "up": normal(embed, 4 * embed),
            "down": normal(4 * embed, embed, stddev=size.residual),
        }
        for _ in range(size.layers)
    ]
    return {
        "tokens": normal(size.vocab, embed),
        "positions": normal(size.length, embed),
        "norm": jnp.ones(embed),
        "layers": layers,
    }


def layer_norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    """Layernorm over the last dim."""
    mean = x.mean(-1, keepdims=True)
    variance = jnp.mean(x * x, -1, keepdims=True) - mean * mean
    return (x - mean) * lax.rsqrt(variance + 1e-5) * scale


def attend(qkv: jax.Array, size: Size) -> jax.Array:
    """Causal attention: [tokens, 3 x embed] -> [tokens, embed]."""
    parts = jnp.split(qkv.reshape(-1, size.length, 3 * size.embed), 3, -1)
    heads = (-1, size.length, size.heads, size.head_dim)
    q, k, v = (part.reshape(heads).transpose(0, 2, 1, 3) for part in parts)
    outs = []
    for start in range(0, size.length, BLOCK):
        end = start + BLOCK
        scores = (q[:, :, start:end] * size.head_dim**-0.5) @ k[:, :, :end].swapaxes(-1, -2)
        seen = jnp.arange(end)[None, :] <= (start + jnp.arange(BLOCK))[:, None]
        outs.append(jax.nn.softmax(jnp.where(seen, scores, -1e30), -1) @ v[:, :, :end])
    return jnp.concatenate(outs, 2).transpose(0, 2, 1, 3).reshape(-1, size.embed)


def layer(x: jax.Array, p: Params, size: Size) -> jax.Array:
    """One block."""
    x = x + attend(layer_norm(x, p["norm1"]) @ p["qkv"], size) @ p["out"]
    return x + jax.nn.gelu(layer_norm(x, p["norm2"]) @ p["up"], approximate=True) @ p["down"]


def loss_of(params: Params, x: jax.Array, y: jax.Array, size: Size) -> jax.Array:
    """The mean negative log-likelihood."""
    h = (params["tokens"][x] + params["positions"]).reshape(-1, size.embed)
    for p in params["layers"]:
        h = layer(h, p, size)
    h = layer_norm(h, params["norm"])
    logits = lax.dot_general(h, params["tokens"], (((1,), (1,)), ((), ())))
    return negative_log_likelihood(logits, y)


def negative_log_likelihood(logits: jax.Array, y: jax.Array) -> jax.Array:
    """The mean over tokens, of logits [tokens, vocab]."""
    chosen = jnp.take_along_axis(logits, y.reshape(-1, 1), -1)[:, 0]
    return jnp.mean(jax.nn.logsumexp(logits, -1) - chosen)


# -- the step


def make_step(loss: Loss, size: Size, microbatches: int) -> Callable[..., Any]:
    """The compiled step (state, x, y) -> (state, loss): clipped AdamW, decay on matrices only."""
    gradient = jax.value_and_grad(loss)

    def gradients(params: Params, x: jax.Array, y: jax.Array) -> tuple[jax.Array, Params]:
        if microbatches == 1:
            return gradient(params, x, y, size)

        def add(carry: Any, part: Any) -> tuple[Any, None]:
            return jax.tree.map(jnp.add, carry, gradient(params, *part, size)), None

        parts = (z.reshape(microbatches, -1, size.length) for z in (x, y))
        zero = (jnp.zeros(()), jax.tree.map(jnp.zeros_like, params))
        total = lax.scan(add, zero, tuple(parts))[0]
        return jax.tree.map(lambda z: z / microbatches, total)

    def step(state: State, x: jax.Array, y: jax.Array) -> tuple[State, jax.Array]:
        params, m, v, done = state
        value, grads = gradients(params, x, y)
        norm = jnp.sqrt(sum(jnp.sum(g * g) for g in jax.tree.leaves(grads)))
        return adamw(params, grads, m, v, done + 1, jnp.minimum(1.0, common.CLIP / norm)), value

    return jax.jit(step, donate_argnums=0)


def adamw(
    params: Params, grads: Params, m: Params, v: Params, number: jax.Array, factor: jax.Array
) -> State:
    """Update `number` (the first is 1), of gradients times `factor`."""
    b1, b2 = common.BETA1, common.BETA2
    scale1, scale2 = 1 - b1**number, 1 - b2**number

    def one(p: jax.Array, g: jax.Array, m: jax.Array, v: jax.Array) -> tuple[jax.Array, ...]:
        g = g * factor
        m = b1 * m + (1 - b1) * g
        v = b2 * v + (1 - b2) * g * g
        direction = (m / scale1) / (jnp.sqrt(v / scale2) + common.EPSILON)
        decay = common.DECAY if p.ndim > 1 else 0.0
        return p - common.LEARNING_RATE * (direction + decay * p), m, v

    new = jax.tree.map(one, params, grads, m, v)
    params, m, v = jax.tree.transpose(
        jax.tree.structure(params), jax.tree.structure((0, 0, 0)), new
    )
    return params, m, v, number


def run(peer: str, options: argparse.Namespace, params: Params, loss: Loss, *, dtype: str) -> None:
    """Times the step of a loss and prints the figures.

    Args:
        peer: its name in the figures.
        options: from the command line.
        params: at the start; donated.
        loss: of a microbatch.
        dtype: of the products.
    """
    size = SIZES[options.size]
    zeros = [jax.tree.map(jnp.zeros_like, params) for _ in "mv"]
    state = (params, *zeros, jnp.zeros(()))
    del params, zeros
    step = make_step(loss, size, options.microbatches)
    data = common.batches(size, options.warmup + options.steps)

    def once(index: int) -> float:
        nonlocal state
        state, value = step(state, *data[index])
        return float(value)

    timings = common.measure(once, options)
    common.report(
        peer, options, timings, dtype=dtype, microbatches=options.microbatches, jax=jax.__version__
    )


if __name__ == "__main__":
    main()
