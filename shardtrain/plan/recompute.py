"""How many FLOPs of products a step should have in the program, and which of them are done again.

Owns: a transformer's products by layer and head, as its own operations phrase them, and what each
remat policy computes again. Does not own: the convention by which utilisation is counted
(`models.flops`), and what a program has (`hlo`).

Where attention is plain products its backward has five of them: the scores once more, and four
gradients. So even without any remat a step has a little more than the convention's three forwards.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from shardtrain.models.config import GATED, TransformerConfig
from shardtrain.strategies.config import INPUT, all_on_device, device_names, host_names


@dataclass(frozen=True)
class Passes:
    """How often a device runs a token through its layers and through the head, in one step."""

    layer_tokens: float
    """Tokens times layers."""
    head_tokens: float
    """Tokens."""


@dataclass(frozen=True)
class Products:
    """FLOPs of the products of one step on one device."""

    model: float
    """Of forward and backward, with everything saved."""
    again: tuple[float, float]
    """At least and at most as many more by the remat policy."""

    @property
    def most(self) -> float:
        """All that the policy allows."""
        return self.model + self.again[1]


def layer_products(model: TransformerConfig, length: float) -> Mapping[str, float]:
    """FLOPs of one token's forward through one layer, product by product.

    Args:
        model: its section.
        length: keys that a query is multiplied with; masked scores are computed too.

    Returns:
        The products with weights by the name that remat has for their result, and `attention` for
        one of attention's two.
    """
    embed, size = model.embed_dim, model.head_size
    halves = 2 if model.activation in GATED else 1
    return {
        "qkv": 2.0 * embed * (model.num_heads + 2 * model.kv_heads) * size,
        "attention": 2.0 * model.num_heads * size * length,
        "attention_out": 2.0 * model.num_heads * size * embed,
        "mlp": 2.0 * embed * halves * model.mlp_size,
        "mlp_out": 2.0 * model.mlp_size * embed,
    }


def expected_products(
    model: TransformerConfig,
    *,
    rows: int,
    length: float,
    remat: str,
    passes: Passes,
    split: Mapping[str, int],
    in_kernels: bool = False,
    head_products: int = 3,
) -> Products:
    """The FLOPs of products that a device's program should have.

    Args:
        model: its section.
        rows: rows of the head's matrix, padding included.
        length: keys that a query is multiplied with.
        remat: the policy, as `strategies.remat` takes it.
        passes: how often the device does it.
        split: into how many parts the mesh cuts `kv_heads`, `mlp` and `vocab`.
        in_kernels: whether attention is a library's kernel, whose products no program shows.
        head_products: products of the head; a loss in chunks makes its scores twice.
    """
    heads, mlp = split["kv_heads"], split["mlp"]
    parts = {"qkv": heads, "attention": heads, "attention_out": heads, "mlp": mlp, "mlp_out": mlp}
    each = {name: flops / parts[name] for name, flops in layer_products(model, length).items()}
    if in_kernels:
        each["attention"] = 0.0
    attention = each.pop("attention")
    head = 2.0 * rows * model.embed_dim / split["vocab"]
    whole = passes.layer_tokens * (3 * sum(each.values()) + 7 * attention)
    least, most = _again(remat, each, attention)
    return Products(
        model=whole + passes.head_tokens * head_products * head,
        again=(passes.layer_tokens * least, passes.layer_tokens * most),
    )


def _again(remat: str, each: Mapping[str, float], attention: float) -> tuple[float, float]:
    """What the backward of a layer computes again of a token's forward.

    The last product of a layer is never needed again. Attention's two are wherever anything is:
    what its backward reads besides the result has no name to be kept by. But its scores are those
    that the backward makes anyway, and XLA may make them once; and a result that is kept may spare
    the second.
    """
    if remat == "none":
        return 0.0, 0.0
    if remat == "dots":
        return attention, 2 * attention
    kept = device_names(all_on_device(remat))
    products = sum(each[name] for name in ("qkv", "attention_out", "mlp") if name not in kept)
    fewest = 0.0 if "attention" in kept else attention
    return products + fewest, products + 2 * attention


def kept_entries(model: TransformerConfig, remat: str) -> tuple[float, float, float] | None:
    """What one token's forward may keep of one layer for the backward, in entries.

    Args:
        model: its section.
        remat: the policy.

    Returns:
        Entries on the device: of the residual stream, of what is split like heads, and of what is
        split like the MLP; None where there is no bound.
    """
    if remat == "none":
        return None
    embed, size = model.embed_dim, model.head_size
    heads = {
        "qkv": (model.num_heads + 2 * model.kv_heads) * size,
        "attention": model.num_heads * size,
    }
    mlp = (2 if model.activation in GATED else 1) * model.mlp_size
    dots = ("qkv", "attention_out", "mlp", "mlp_out")
    named = dots if remat == "dots" else device_names(remat)
    has_input = INPUT not in host_names(remat)
    stream = embed * (has_input + ("attention_out" in named) + ("mlp_out" in named))
    return (
        float(stream),
        float(sum(size for name, size in heads.items() if name in named)),
        float(mlp if "mlp" in named else 0),
    )
