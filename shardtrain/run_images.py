"""Runs that classify images, as functions: model, task, data and counts.

Owns: what is particular to them. Does not own: what all runs share (`run_program`, `run`), and the
interface (`run_work`).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from flax import nnx
from jax.sharding import AbstractMesh, Mesh

from shardtrain.config import ImageRunConfig
from shardtrain.data.image_files import ImageInfo, open_images, require_classes
from shardtrain.data.images import ImageData, blank_images
from shardtrain.data.loader import Rows
from shardtrain.errors import ConfigError
from shardtrain.models.flops import training_flops_per_image
from shardtrain.models.resnet import ResNet
from shardtrain.run_defaults import WorkDefaults
from shardtrain.strategies.accumulate import Accumulation
from shardtrain.strategies.parts import Runner
from shardtrain.tasks.base import Task
from shardtrain.tasks.image_classification import ImageClassification
from shardtrain.train.build import Create
from shardtrain.train.kept import STATISTICS, Part, RunningStatistics


@dataclass(frozen=True)
class ImageWork(WorkDefaults):
    """A residual network on images; see `run_work.Work`."""

    config: ImageRunConfig

    unit = "examples"
    samples = "images"

    @property
    def units(self) -> int:
        """Images of a global batch."""
        return self.config.data.batch_size

    @property
    def portions(self) -> str:
        """A global batch in words."""
        size = self.config.data.image_size
        return f"{self.config.data.batch_size} images of {size} x {size}"

    @property
    def threads(self) -> int:
        """Threads that read batches."""
        return self.config.data.threads

    def known_size(self) -> int | None:
        """Classes, where the config says how many."""
        return self.config.model.num_classes or None

    def size(self, found: int) -> int:
        """`model.num_classes` goes before what the data has."""
        return self.config.model.num_classes or found

    def open_data(
        self, say: Callable[[str], None]
    ) -> tuple[ImageData, ImageData | None, ImageInfo]:
        """Images by index, none of them read yet."""
        config = self.config
        data, validation, info = open_images(config.data, seed=config.run.seed, say=say)
        if config.model.num_classes:
            require_classes(config.model.num_classes, info)
        return data, validation, info

    def create(self, size: int) -> Create:
        """(dtype, rngs) -> the network."""
        model, channels = self.config.model, self.config.data.channels

        def create(dtype: Any, rngs: nnx.Rngs) -> nnx.Module:
            return ResNet(model, channels=channels, num_classes=size, dtype=dtype, rngs=rngs)

        return create

    def task(self, size: int) -> Task:
        """Telling the class."""
        data = self.config.data
        return ImageClassification(self.config.task, size, tuple(data.mean), tuple(data.deviation))

    def runner(self, mesh: Mesh | AbstractMesh, size: int) -> Runner:
        """Microbatches one after another; there is no stack of layers to loop over."""
        del mesh, size
        return Accumulation(microbatches=self.config.train.microbatches, whole=True)

    def kept(self) -> tuple[tuple[str, Part], ...]:
        """The running statistics of batch norm."""
        return ((STATISTICS, RunningStatistics(self.config.model.norm_momentum)),)

    def blank(self, rows: int) -> Rows:
        """Images that count for nothing."""
        data = self.config.data
        return blank_images(rows, data.image_size, data.channels, mixes=data.mixup > 0)

    def microbatches_alone(self) -> int:
        """As many as batch norm has statistics of their own for."""
        statistics = self.config.model.norm_statistics
        if statistics == "per_replica":
            raise ConfigError(
                "each mesh is another run then: batch norm has the statistics of each device's own "
                "samples, so there is nothing to compare",
                where=f'model.norm_statistics="{statistics}"',
                allowed='"global" or "microbatch"',
            )
        return self.config.train.microbatches if statistics == "microbatch" else 1

    def shrunk(
        self, sections: Mapping[str, Any], degrees: Mapping[str, int]
    ) -> dict[str, dict[str, Any]]:
        """A narrow network on images of 32 x 32 at most, two for each device."""
        rows = degrees["replica"] * degrees["data"] * sections["train"]["microbatches"]
        model, data = sections["model"], sections["data"]
        small = {
            "image_size": min(data["image_size"], 32),
            "batch_size": min(data["batch_size"], 2 * rows),
        }
        width = {"width": min(model["width"], 8)}
        return {**sections, "model": {**model, **width}, "data": {**data, **small}}

    def flops(self, size: int) -> int:
        """FLOPs of forward and backward for a global batch."""
        data = self.config.data
        return self.units * training_flops_per_image(
            self.config.model,
            image_size=data.image_size,
            channels=data.channels,
            num_classes=size,
        )
