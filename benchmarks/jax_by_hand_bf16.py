"""The step of jax_by_hand.py in bfloat16 with float32 masters, for a CPU with such instructions.

XLA's CPU backend has a fast product only for bfloat16 x bfloat16 -> float32 with a left operand
that is contracted on its last axis. Each product here is phrased that way: a weight gradient's left
operand is transposed by a product with the identity, which XLA cannot fold back, and attention's
backward makes both the scores and their transpose.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from benchmarks import common, jax_by_hand
from benchmarks.common import SIZES, Size
from benchmarks.jax_by_hand import BLOCK, Params

HALF, FULL = jnp.bfloat16, jnp.float32


def main() -> None:
    """Times the step."""
    flags = common.parser(__doc__)
    flags.add_argument("--microbatches", type=int, default=1)
    options = flags.parse_args()
    params = init(SIZES[options.size])
    jax_by_hand.run("jax_by_hand_bf16", options, params, loss_of, dtype="bf16")


# -- products


def dot(x: jax.Array, w: jax.Array, over_x: int, over_w: int, batched: int = 0) -> jax.Array:
    """Contracts one dim of each, both rounded to bfloat16; the result is float32."""
    same = tuple(range(batched))
    dims = (((over_x,), (over_w,)), (same, same))
    return lax.dot_general(x.astype(HALF), w.astype(HALF), dims, preferred_element_type=FULL)


def turned(x: jax.Array) -> jax.Array:
    """The transpose of a matrix, made where XLA cannot see that it is one."""
    return dot(jnp.eye(x.shape[1], dtype=HALF), x, 1, 1).astype(HALF)


@jax.custom_vjp
def linear(x: jax.Array, w: jax.Array) -> jax.Array:
    """A bfloat16 x times a float32 w [in, out]."""
    return dot(x, w, 1, 0).astype(HALF)


def _linear_backward(saved: Any, g: jax.Array) -> tuple[jax.Array, jax.Array]:
    x, w = saved
    return dot(g, w, 1, 1).astype(HALF), dot(turned(x), g, 1, 0)


linear.defvjp(lambda x, w: (linear(x, w), (x, w)), _linear_backward)


@jax.custom_vjp
def linear_down(x: jax.Array, w: jax.Array) -> jax.Array:
    """The same with w [out, in], so that the narrower side is transposed in its gradient."""
    return dot(x, w, 1, 1).astype(HALF)


def _linear_down_backward(saved: Any, g: jax.Array) -> tuple[jax.Array, jax.Array]:
    x, w = saved
    return dot(g, w, 1, 0).astype(HALF), dot(turned(g), x, 1, 0)


linear_down.defvjp(lambda x, w: (linear_down(x, w), (x, w)), _linear_down_backward)


# -- attention


@jax.custom_vjp
def attention(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """Causal attention of [rows, length, head_dim], where a row is a head of a sequence."""
    return _attention_forward(q, k, v)[0]


def _seen(start: int, end: int) -> jax.Array:
    """Which keys before `end` each query of the block from `start` sees."""
    return jnp.arange(end)[None, :] <= (start + jnp.arange(BLOCK))[:, None]


def _attention_forward(q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[jax.Array, Any]:
    outs, logs = [], []
    for start in range(0, q.shape[1], BLOCK):
        end = start + BLOCK
        scores = dot(q[:, start:end], k[:, :end], 2, 2, 1) * q.shape[-1] ** -0.5
        scores = jnp.where(_seen(start, end), scores, -1e30)
        peak = scores.max(-1, keepdims=True)
        weights = jnp.exp(scores - peak)
        total = weights.sum(-1, keepdims=True)
        outs.append((dot(weights, v[:, :end], 2, 1, 1) / total).astype(HALF))
        logs.append((peak + jnp.log(total))[..., 0])
    out = jnp.concatenate(outs, 1)
    return out, (q, k, v, out, jnp.concatenate(logs, 1))


def _attention_backward(saved: Any, g: jax.Array) -> tuple[jax.Array, ...]:
    q, k, v, out, logs = saved
    length, scale = q.shape[1], q.shape[-1] ** -0.5
    delta = jnp.sum(g.astype(FULL) * out.astype(FULL), -1)
    dq, dk, dv = [], jnp.zeros(k.shape, FULL), jnp.zeros(v.shape, FULL)
    for start in range(0, length, BLOCK):
        end = start + BLOCK
        block, seen = slice(start, end), _seen(start, end)
        qb, gb, kb, vb = q[:, block], g[:, block], k[:, :end], v[:, :end]
        log, shift = logs[:, block], delta[:, block]
        p = jnp.where(seen, jnp.exp(dot(qb, kb, 2, 2, 1) * scale - log[..., None]), 0)
        ds = p * (dot(gb, vb, 2, 2, 1) - shift[..., None]) * scale
        dq.append(dot(ds, kb, 2, 1, 1).astype(HALF))
        p = jnp.where(seen.T, jnp.exp(dot(kb, qb, 2, 2, 1) * scale - log[:, None]), 0)
        ds = p * (dot(vb, gb, 2, 2, 1) - shift[:, None]) * scale
        rest = ((0, 0), (0, length - end), (0, 0))
        dk = dk + jnp.pad(dot(ds, qb, 2, 1, 1), rest)
        dv = dv + jnp.pad(dot(p, gb, 2, 1, 1), rest)
    return jnp.concatenate(dq, 1), dk.astype(HALF), dv.astype(HALF)


attention.defvjp(_attention_forward, _attention_backward)


# -- the model


def init(size: Size) -> Params:
    """Draws the parameters; `down` is [out, in] and the table [embed, vocab]."""
    params = jax_by_hand.init(size)
    layers = [{**p, "down": jnp.asarray(np.asarray(p["down"]).T)} for p in params["layers"]]
    return {**params, "layers": layers, "tokens": jnp.asarray(np.asarray(params["tokens"]).T)}


def layer_norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    """Layernorm over the last dim, in float32."""
    return jax_by_hand.layer_norm(x.astype(FULL), scale).astype(HALF)


def layer(x: jax.Array, p: Params, size: Size) -> jax.Array:
    """One block."""
    qkv = linear(layer_norm(x, p["norm1"]), p["qkv"])
    qkv = qkv.reshape(-1, size.length, 3, size.heads, size.head_dim).transpose(2, 0, 3, 1, 4)
    out = attention(*qkv.reshape(3, -1, size.length, size.head_dim))
    out = out.reshape(-1, size.heads, size.length, size.head_dim).transpose(0, 2, 1, 3)
    x = x + linear(out.reshape(-1, size.embed), p["out"])
    h = linear(layer_norm(x, p["norm2"]), p["up"])
    return x + linear_down(jax.nn.gelu(h, approximate=True), p["down"])


def loss_of(params: Params, x: jax.Array, y: jax.Array, size: Size) -> jax.Array:
    """The mean negative log-likelihood."""
    h = jnp.take(params["tokens"], x.reshape(-1), axis=1).T
    h = h.reshape(-1, size.length, size.embed) + params["positions"]
    h = h.reshape(-1, size.embed).astype(HALF)
    for p in params["layers"]:
        h = layer(h, p, size)
    logits = linear(layer_norm(h, params["norm"]), params["tokens"]).astype(FULL)
    return jax_by_hand.negative_log_likelihood(logits, y)


if __name__ == "__main__":
    main()
