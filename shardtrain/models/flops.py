"""How many FLOPs a token or an image costs a model: counted from its config, as it is built."""

from collections.abc import Sequence
from itertools import pairwise

from shardtrain.models.config import (
    GATED,
    BertConfig,
    DlrmConfig,
    ResNetConfig,
    TransformerConfig,
    TwoTowerConfig,
)
from shardtrain.models.resnet_shape import convolutions, features


def matrix_parameters(config: TransformerConfig, vocab_size: int) -> int:
    """Parameters that multiply every token: the stack's matrices and the head, tied or not."""
    return config.num_layers * layer_parameters(config) + vocab_size * config.embed_dim


def layer_parameters(config: TransformerConfig) -> int:
    """Parameters of one layer's matrices."""
    embed, size = config.embed_dim, config.head_size
    qkv = embed * (config.num_heads + 2 * config.kv_heads) * size
    out = config.num_heads * size * embed
    mlp = (3 if config.activation in GATED else 2) * embed * config.mlp_size
    return qkv + out + mlp


def head_in_layers(config: TransformerConfig, vocab_size: int, length: int) -> float:
    """The FLOPs of the head as so many layers'.

    Args:
        config: the model.
        vocab_size: tokens that are predicted.
        length: tokens of a sequence, which attention's products depend on.
    """
    attention = 2 * config.num_heads * config.head_size * length
    return vocab_size * config.embed_dim / (layer_parameters(config) + attention)


def training_flops_per_token(
    config: TransformerConfig,
    *,
    vocab_size: int,
    length: int,
    causal: bool = False,
    frozen: bool = False,
) -> int:
    """FLOPs of forward and backward for one token.

    6 for each matrix parameter, and 12 x layers x heads x head_dim x length for attention's two
    products, the convention of PaLM's appendix B (arXiv 2204.02311).

    Args:
        config: the model.
        vocab_size: tokens that are predicted, without padding.
        length: tokens of a sequence.
        causal: count only the half of attention that a causal mask leaves. The default counts it in
            full, as most published figures do.
        frozen: the matrices have no gradient, which leaves 4 for each parameter; adapters are not
            counted.
    """
    attention = 12 * config.num_layers * config.num_heads * config.head_size * length
    return (4 if frozen else 6) * matrix_parameters(config, vocab_size) + attention // (
        2 if causal else 1
    )


def training_flops_per_masked_sample(
    config: BertConfig, *, vocab_size: int, length: int, predicted: int
) -> int:
    """FLOPs of forward and backward for one sample of masked text, padding included.

    As `training_flops_per_token`, but that only the predicted places go through the head, and the
    first one through that for the next sentence.

    Args:
        config: the model.
        vocab_size: tokens that are predicted, without padding.
        length: tokens of a sample.
        predicted: places that are scored.
    """
    stack, embed = config.as_transformer, config.embed_dim
    layers = stack.num_layers * layer_parameters(stack)
    attention = 12 * stack.num_layers * embed * length
    heads = predicted * embed * (embed + vocab_size)
    following = embed * (embed + 2) if config.next_sentence else 0
    return length * (6 * layers + attention) + 6 * (heads + following)


def training_flops_per_image(
    config: ResNetConfig, *, image_size: int, channels: int, num_classes: int
) -> int:
    """FLOPs of forward and backward for one image: 6 for each multiply-add of a convolution.

    Args:
        config: the model.
        image_size: height and width, in pixels.
        channels: of the image.
        num_classes: that are told apart.
    """
    products = sum(
        conv.kernel**2 * conv.channels * conv.embed * conv.out_size**2
        for conv in convolutions(config, channels=channels, image_size=image_size)
    )
    return 6 * (products + features(config) * num_classes)


def training_flops_per_interaction(config: DlrmConfig | TwoTowerConfig, *, batch: int) -> int:
    """FLOPs of forward and backward for one interaction: 6 for each multiply-add of a product.

    Args:
        config: the model.
        batch: interactions whose items meet each other (two towers).
    """
    width, fields = config.embed_dim, len(config.table_sizes)
    if isinstance(config, DlrmConfig):
        pairs = (fields + 1) * fields // 2
        products = _products((config.num_dense, *config.bottom, width))
        products += (fields + 1) ** 2 * width
        return 6 * (products + _products((width + pairs, *config.top, 1)))
    user = ((fields - 1) * width + config.num_dense, *config.tower)
    products = _products(user) + _products((width, *config.tower))
    return 6 * (products + batch * config.tower[-1])


def _products(sizes: Sequence[int]) -> int:
    """Multiply-adds of layers of these widths."""
    return sum(read * make for read, make in pairwise(sizes))
