"""What a residual network consists of: its stages, blocks and convolutions, as plain numbers.

Owns: the table of depths, and sizes. Does not own: parameters and arithmetic (`resnet`).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from shardtrain.models.config import ResNetConfig

DEPTHS: Final[dict[int, tuple[int, int, int, int]]] = {
    10: (1, 1, 1, 1),
    18: (2, 2, 2, 2),
    34: (3, 4, 6, 3),
    50: (3, 4, 6, 3),
    101: (3, 4, 23, 3),
}
"""Blocks of the four stages, by depth (table 1 of arXiv 1512.03385; 10 is not in it)."""
EXPANSION: Final = 4
"""How many times more channels a bottleneck makes than it works with."""


@dataclass(frozen=True)
class BlockShape:
    """One residual block."""

    name: str
    channels: int
    """Channels that it reads."""
    width: int
    """Channels that it works with."""
    stride: int
    bottleneck: bool

    @property
    def embed(self) -> int:
        """Channels that it makes."""
        return self.width * (EXPANSION if self.bottleneck else 1)

    @property
    def projects(self) -> bool:
        """Whether its shortcut is a convolution, since the sizes differ."""
        return self.stride != 1 or self.channels != self.embed


@dataclass(frozen=True)
class Convolution:
    """One convolution, for counting."""

    kernel: int
    channels: int
    embed: int
    out_size: int
    """Height and width of what it makes."""


def block_shapes(config: ResNetConfig) -> list[BlockShape]:
    """All blocks in order, named by stage and place in it."""
    bottleneck = config.depth >= 50
    blocks: list[BlockShape] = []
    channels = config.width
    for stage, count in enumerate(DEPTHS[config.depth]):
        for place in range(count):
            block = BlockShape(
                name=f"stage{stage + 1}_block{place + 1}",
                channels=channels,
                width=config.width * 2**stage,
                stride=2 if stage and not place else 1,
                bottleneck=bottleneck,
            )
            blocks.append(block)
            channels = block.embed
    return blocks


def features(config: ResNetConfig) -> int:
    """Channels after the last block."""
    return block_shapes(config)[-1].embed


def convolutions(config: ResNetConfig, *, channels: int, image_size: int) -> Iterator[Convolution]:
    """All convolutions of a network.

    Args:
        config: the model.
        channels: of the image.
        image_size: its height and width, in pixels.
    """
    large = config.stem == "large"
    size = _halved(image_size) if large else image_size
    yield Convolution(7 if large else 3, channels, config.width, size)
    size = _halved(size) if large else size
    for block in block_shapes(config):
        out = size if block.stride == 1 else _halved(size)
        if block.bottleneck:
            yield Convolution(1, block.channels, block.width, size)
            yield Convolution(3, block.width, block.width, out)
            yield Convolution(1, block.width, block.embed, out)
        else:
            yield Convolution(3, block.channels, block.width, out)
            yield Convolution(3, block.width, block.width, out)
        if block.projects:
            yield Convolution(1, block.channels, block.embed, out)
        size = out


def _halved(size: int) -> int:
    """What a stride of 2 leaves, with the padding of all windows here."""
    return (size + 1) // 2
