"""Residual networks 10, 18, 34, 50 and 101 (He et al. 2015, arXiv 1512.03385), version 1.5.

Owns: parameters, their logical names, and the arithmetic. A network is no stack of equal layers, so
it has no `layers`, and no pipeline can share it out. Does not own: which numbers batch norm takes
(`ops.batch_norm`), running statistics beyond those of one step, and the loss.
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from shardtrain.models.config import ResNetConfig
from shardtrain.models.resnet_shape import BlockShape, block_shapes, features
from shardtrain.models.transformer import constant, param
from shardtrain.ops.batch_norm import batch_norm, normalise
from shardtrain.sharding.rules import constrain

Image = Float[Array, "batch height width channels"]
Features = Float[Array, "batch height width embed"]


class Convolution(nnx.Module):
    """A convolution without a bias, drawn by the fan-out (He et al. 2015, arXiv 1502.01852)."""

    def __init__(
        self, kernel: int, channels: int, embed: int, stride: int, dtype: Any, rngs: nnx.Rngs
    ) -> None:
        self.stride = stride
        self.kernel = param(
            rngs,
            ("kernel", "kernel", "channels", "embed"),
            (kernel, kernel, channels, embed),
            dtype,
            (2 / (kernel * kernel * embed)) ** 0.5,
        )

    def __call__(self, x: Image) -> Features:
        """Slides the window over each image."""
        pad = (self.kernel.shape[0] - 1) // 2
        y: jax.Array = jax.lax.conv_general_dilated(
            x,
            self.kernel[...],
            window_strides=(self.stride, self.stride),
            padding=((pad, pad), (pad, pad)),
            dimension_numbers=("NHWC", "HWIO", "NHWC"),
        )
        return constrain(y, "batch", None, None, "embed")


class BatchNorm(nnx.Module):
    """Batch norm; its variables are running statistics, and after training those of one batch."""

    def __init__(self, config: ResNetConfig, embed: int, dtype: Any, scale: float = 1.0) -> None:
        self.epsilon = config.norm_epsilon
        self.per_replica = config.norm_statistics == "per_replica"
        self.scale = constant(("embed",), (embed,), dtype, scale)
        self.bias = constant(("embed",), (embed,), dtype, 0.0)
        self.mean = nnx.BatchStat(jnp.zeros(embed, dtype))
        self.variance = nnx.BatchStat(jnp.ones(embed, dtype))

    def __call__(self, x: Features, training: bool) -> Features:
        """Normalises by the batch while training, else by the running statistics."""
        scale, bias, epsilon = self.scale[...], self.bias[...], self.epsilon
        if not training:
            statistics = (self.mean[...], self.variance[...])
            return normalise(x, scale, bias, statistics, epsilon=epsilon)
        y, (mean, variance) = batch_norm(
            x, scale, bias, epsilon=epsilon, per_replica=self.per_replica
        )
        self.mean.set_value(jax.lax.stop_gradient(mean))
        self.variance.set_value(jax.lax.stop_gradient(variance))
        return y


class Block(nnx.Module):
    """Two convolutions of 3 x 3, or a bottleneck of three, beside a shortcut.

    The last batch norm begins at zero, so that the block begins as its shortcut (Goyal et al. 2017,
    arXiv 1706.02677).
    """

    def __init__(self, config: ResNetConfig, shape: BlockShape, dtype: Any, rngs: nnx.Rngs) -> None:
        self.bottleneck = shape.bottleneck
        read, width, stride, make = shape.channels, shape.width, shape.stride, shape.embed
        first = (1, read, width, 1) if shape.bottleneck else (3, read, width, stride)
        second = (3, width, width, stride) if shape.bottleneck else (3, width, width, 1)
        self.conv1 = Convolution(*first, dtype, rngs)
        self.norm1 = BatchNorm(config, width, dtype)
        self.conv2 = Convolution(*second, dtype, rngs)
        self.norm2 = BatchNorm(config, width, dtype, 1.0 if shape.bottleneck else 0.0)
        self.conv3 = Convolution(1, width, make, 1, dtype, rngs) if shape.bottleneck else None
        self.norm3 = BatchNorm(config, make, dtype, 0.0) if shape.bottleneck else None
        self.shortcut = Convolution(1, read, make, stride, dtype, rngs) if shape.projects else None
        self.shortcut_norm = BatchNorm(config, make, dtype) if shape.projects else None

    def __call__(self, x: Features, training: bool) -> Features:
        """Adds what the block makes to its input."""
        y = jax.nn.relu(self.norm1(self.conv1(x), training))
        y = self.norm2(self.conv2(y), training)
        if self.conv3 is not None and self.norm3 is not None:
            y = self.norm3(self.conv3(jax.nn.relu(y)), training)
        if self.shortcut is not None and self.shortcut_norm is not None:
            x = self.shortcut_norm(self.shortcut(x), training)
        return jax.nn.relu(x + y)


class ResNet(nnx.Module):
    """A stem, four stages of blocks, and a linear map of the mean over all places."""

    def __init__(
        self, config: ResNetConfig, *, channels: int, num_classes: int, dtype: Any, rngs: nnx.Rngs
    ) -> None:
        """Draws the parameters.

        Args:
            config: the `[model]` section.
            channels: of the images.
            num_classes: that are told apart.
            dtype: dtype of the parameters.
            rngs: the stream `params` is used.
        """
        self.large = config.stem == "large"
        kernel, stride = (7, 2) if self.large else (3, 1)
        self.stem = Convolution(kernel, channels, config.width, stride, dtype, rngs)
        self.stem_norm = BatchNorm(config, config.width, dtype)
        shapes = block_shapes(config)
        self.blocks = tuple(shape.name for shape in shapes)
        for shape in shapes:
            setattr(self, shape.name, Block(config, shape, dtype, rngs))
        size = features(config)
        self.head = param(rngs, ("embed", "classes"), (size, num_classes), dtype, 0.01)
        self.head_bias = constant(("classes",), (num_classes,), dtype, 0.0)

    def __call__(self, images: Image, training: bool) -> Float[Array, "batch classes"]:
        """Scores of the classes, in the dtype of the parameters.

        Args:
            images: normalised, in the dtype of the parameters.
            training: whether batch norm uses the batch; its variables then hold what it has seen.
        """
        x = constrain(images, "batch", None, None, None)
        x = jax.nn.relu(self.stem_norm(self.stem(x), training))
        if self.large:
            x = nnx.max_pool(x, (3, 3), (2, 2), ((1, 1), (1, 1)))
        for name in self.blocks:
            block: Block = getattr(self, name)
            x = block(x, training)
        scores = x.mean((1, 2)) @ self.head[...] + self.head_bias[...]
        return constrain(scores, "batch", "classes")
