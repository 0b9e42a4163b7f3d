"""The model and step as a user of flax nnx and optax writes them, with the library's own layers."""

from typing import Any

import flax
import jax
import jax.numpy as jnp
import optax
from flax import nnx

from benchmarks import common
from benchmarks.common import SIZES, Size

NORMAL = nnx.initializers.normal(common.STDDEV)


class Block(nnx.Module):
    """One layer."""

    def __init__(self, size: Size, dtype: Any, rngs: nnx.Rngs) -> None:
        embed = size.embed
        usual: dict[str, Any] = {
            "use_bias": False,
            "dtype": dtype,
            "kernel_init": NORMAL,
            "rngs": rngs,
        }
        self.norm1 = nnx.LayerNorm(embed, use_bias=False, rngs=rngs)
        self.norm2 = nnx.LayerNorm(embed, use_bias=False, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(
            num_heads=size.heads, in_features=embed, decode=False, **usual
        )
        self.up = nnx.Linear(embed, 4 * embed, **usual)
        self.down = nnx.Linear(4 * embed, embed, **usual)

    def __call__(self, x: jax.Array, mask: jax.Array) -> jax.Array:
        """Runs the layer."""
        x = x + self.attention(self.norm1(x), mask=mask)
        return x + self.down(nnx.gelu(self.up(self.norm2(x))))


class Model(nnx.Module):
    """Embedding, blocks, tied head."""

    def __init__(self, size: Size, dtype: Any, rngs: nnx.Rngs) -> None:
        usual: dict[str, Any] = {"embedding_init": NORMAL, "dtype": dtype, "rngs": rngs}
        self.tokens = nnx.Embed(size.vocab, size.embed, **usual)
        self.positions = nnx.Embed(size.length, size.embed, **usual)
        self.blocks = nnx.List([Block(size, dtype, rngs) for _ in range(size.layers)])
        self.norm = nnx.LayerNorm(size.embed, use_bias=False, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Tokens to scores."""
        h = self.tokens(x) + self.positions(jnp.arange(x.shape[1]))
        mask = nnx.make_causal_mask(x)
        for block in self.blocks:
            h = block(h, mask)
        return self.tokens.attend(self.norm(h))


def transform() -> optax.GradientTransformation:
    """Clipped AdamW, decay on matrices only."""
    return optax.chain(
        optax.clip_by_global_norm(common.CLIP),
        optax.adamw(
            common.LEARNING_RATE,
            common.BETA1,
            common.BETA2,
            common.EPSILON,
            weight_decay=common.DECAY,
            mask=lambda params: jax.tree.map(lambda p: p.ndim >= 2, params),
        ),
    )


@nnx.jit
def train(model: Model, optimizer: nnx.Optimizer[Model], x: jax.Array, y: jax.Array) -> jax.Array:
    """One step."""

    def loss(model: Model) -> jax.Array:
        scores = model(x).astype(jnp.float32)
        return optax.softmax_cross_entropy_with_integer_labels(scores, y).mean()

    value, grads = nnx.value_and_grad(loss)(model)
    optimizer.update(model, grads)
    return value


def main() -> None:
    """Times the step."""
    flags = common.parser(__doc__)
    flags.add_argument("--dtype", default="f32", choices=["f32", "bf16"])
    options = flags.parse_args()
    size = SIZES[options.size]
    dtype = jnp.bfloat16 if options.dtype == "bf16" else jnp.float32
    model = Model(size, dtype, nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, transform(), wrt=nnx.Param)
    data = common.batches(size, options.warmup + options.steps)

    def step(index: int) -> float:
        return float(train(model, optimizer, *map(jnp.asarray, data[index])))

    common.report(
        "flax_usual",
        options,
        common.measure(step, options),
        dtype=options.dtype,
        jax=jax.__version__,
        flax=flax.__version__,
    )


if __name__ == "__main__":
    main()
