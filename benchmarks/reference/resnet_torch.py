"""A residual network as torch users write it (He et al. 2015, arXiv 1512.03385, version 1.5).

Written for itself, by torch's own layers; only the names of its parts are those of
`shardtrain.models.resnet`, so that weights find their place. Needs torch and nothing of ours.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

BLOCKS = {
    10: (1, 1, 1, 1),
    18: (2, 2, 2, 2),
    34: (3, 4, 6, 3),
    50: (3, 4, 6, 3),
    101: (3, 4, 23, 3),
}


def convolution(kernel: int, read: int, make: int, stride: int) -> nn.Conv2d:
    """A convolution that keeps the size but for its stride."""
    return nn.Conv2d(read, make, kernel, stride, padding=kernel // 2, bias=False)


class Block(nn.Module):
    """Two convolutions of 3 x 3, or a bottleneck that strides in its 3 x 3."""

    def __init__(self, read: int, width: int, make: int, stride: int, epsilon: float) -> None:
        super().__init__()
        deep = make != width
        self.conv1 = convolution(1 if deep else 3, read, width, 1 if deep else stride)
        self.norm1 = nn.BatchNorm2d(width, epsilon)
        self.conv2 = convolution(3, width, width, stride if deep else 1)
        self.norm2 = nn.BatchNorm2d(width, epsilon)
        self.conv3 = convolution(1, width, make, 1) if deep else None
        self.norm3 = nn.BatchNorm2d(make, epsilon) if deep else None
        projects = stride != 1 or read != make
        self.shortcut = convolution(1, read, make, stride) if projects else None
        self.shortcut_norm = nn.BatchNorm2d(make, epsilon) if projects else None

    def forward(self, x: Tensor) -> Tensor:
        """Runs the block."""
        y = self.norm2(self.conv2(functional.relu(self.norm1(self.conv1(x)))))
        if self.conv3 is not None and self.norm3 is not None:
            y = self.norm3(self.conv3(functional.relu(y)))
        if self.shortcut is not None and self.shortcut_norm is not None:
            x = self.shortcut_norm(self.shortcut(x))
        return functional.relu(x + y)


class Network(nn.Module):
    """Stem, four stages, head."""

    def __init__(self, model: Mapping[str, Any], channels: int, classes: int) -> None:
        super().__init__()
        width, epsilon = model["width"], model["norm_epsilon"]
        self.large = model["stem"] == "large"
        kernel, stride = (7, 2) if self.large else (3, 1)
        self.stem = convolution(kernel, channels, width, stride)
        self.stem_norm = nn.BatchNorm2d(width, epsilon)
        self.names = []
        expansion, read = (4 if model["depth"] >= 50 else 1), width
        for stage, count in enumerate(BLOCKS[model["depth"]]):
            for place in range(count):
                inner = width * 2**stage
                name = f"stage{stage + 1}_block{place + 1}"
                stride = 2 if stage and not place else 1
                self.add_module(name, Block(read, inner, inner * expansion, stride, epsilon))
                self.names.append(name)
                read = inner * expansion
        self.head = nn.Linear(read, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Scores of the classes."""
        x = functional.relu(self.stem_norm(self.stem(x)))
        if self.large:
            x = functional.max_pool2d(x, 3, 2, 1)
        for name in self.names:
            x = self.get_submodule(name)(x)
        scores: Tensor = self.head(x.mean((2, 3)))
        return scores


class Classifier(nn.Module):
    """The network with its loss: cross-entropy with label smoothing and mixup."""

    mean: Tensor
    deviation: Tensor

    def __init__(self, settings: Mapping[str, Any]) -> None:
        super().__init__()
        self.network = Network(settings["model"], settings["channels"], settings["classes"])
        self.smoothing = settings["smoothing"]
        for name in ("mean", "deviation"):
            values = torch.tensor(settings[name]).view(1, -1, 1, 1)
            self.register_buffer(name, values, persistent=False)

    def forward(self, batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """The sum of the losses of the rows, and how many they are."""
        image = batch["image"].permute(0, 3, 1, 2).float() / 255
        scores = self.network((image - self.mean) / self.deviation)
        weights = batch["weights"]

        def nll(label: Tensor) -> Tensor:
            return functional.cross_entropy(
                scores, label.long(), reduction="none", label_smoothing=self.smoothing
            )

        losses = nll(batch["label"])
        if "share" in batch:
            losses = batch["share"] * losses + (1 - batch["share"]) * nll(batch["other"])
        return (losses * weights).sum(), weights.sum()
