"""What a run is about: the one place where each kind of model, task and data becomes functions.

Owns: the interface, and its table. Does not own: any kind (`run_language`, `run_images`,
`run_bert`, `run_recommenders`), and what most kinds have not (`run_defaults`). All else in a run
(layout, optimizer, state, loop, checkpoints) is the same for every kind.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final, Protocol

from jax.sharding import AbstractMesh, Mesh

from shardtrain.config import (
    BertRunConfig,
    DlrmRunConfig,
    ImageRunConfig,
    LanguageRunConfig,
    RunConfig,
    TwoTowerRunConfig,
)
from shardtrain.data.loader import Rows, Samples
from shardtrain.errors import ConfigError
from shardtrain.models.lora import Training
from shardtrain.optim.tables import RowRule
from shardtrain.run_bert import BertWork
from shardtrain.run_images import ImageWork
from shardtrain.run_language import LanguageWork
from shardtrain.run_recommenders import RecommenderWork
from shardtrain.sharding.rules import Table
from shardtrain.strategies.parts import Runner
from shardtrain.strategies.zigzag import Arrange
from shardtrain.tasks.base import Task
from shardtrain.train.build import Create
from shardtrain.train.kept import Part

Say = Callable[[str], None]


class Info(Protocol):
    """What the data is."""

    @property
    def source(self) -> str:
        """In words: where it is from."""

    @property
    def vocab_size(self) -> int:
        """Tokens, or classes, that it has."""

    @property
    def digest(self) -> str:
        """Equal for equal training data, wherever it lies."""


class Work(Protocol):
    """A kind of run. `size` is the number of tokens or classes that are predicted."""

    @property
    def unit(self) -> str:
        """What the work is counted in: "tokens" or "examples"."""

    @property
    def samples(self) -> str:
        """What a sample of the data is, in the plural."""

    @property
    def units(self) -> int:
        """How many of them a global batch has."""

    @property
    def portions(self) -> str:
        """A global batch in words."""

    @property
    def threads(self) -> int:
        """Threads that read batches."""

    @property
    def sample_tokens(self) -> int:
        """Tokens of text that the model writes after the last step; 0 = none."""

    @property
    def notes(self) -> tuple[str, ...]:
        """Lines that `plan` shows about the layout."""

    def training(self) -> Training | None:
        """Which parameters are trained, where the kind says so; None = as `[lora]` says."""

    def row_rule(self) -> RowRule:
        """What moves tables whose gradients are rows."""

    def row_gradient_bytes(self, num_devices: int) -> int:
        """Bytes on one of so many devices of gradients that are rows."""

    def known_size(self) -> int | None:
        """The size where the config says it; None where only the data does."""

    def size(self, found: int) -> int:
        """The size of the model, for data of that size."""

    def size_faults(
        self, found: int, degrees: Mapping[str, int], *, counted: bool = False
    ) -> list[ConfigError]:
        """Why a size that only the data has told cannot be split over a mesh.

        `counted`: whether it is the largest number there and one.
        """

    def open_data(self, say: Say) -> tuple[Samples, Samples | None, Info]:
        """Training data, validation data (None where there is none) and what they are.

        Raises:
            UserError: It cannot be read, or it does not fit the model.
        """

    def create(self, size: int) -> Create:
        """How the model is made."""

    def task(self, size: int) -> Task:
        """Its loss terms."""

    def runner(self, mesh: Mesh | AbstractMesh, size: int) -> Runner:
        """How a step's microbatches go through it."""

    def arrange(self, mesh: Mesh | AbstractMesh, compute: Table) -> Arrange:
        """The order in which the positions of a batch are worked on."""

    def kept(self) -> tuple[tuple[str, Part], ...]:
        """What it keeps in the state beside parameters, by name."""

    def blank(self, rows: int) -> Rows:
        """Rows that count for nothing; they tell shapes and dtypes without data."""

    def microbatches_alone(self) -> int:
        """Microbatches of a run on one device that computes the same; most have one.

        Raises:
            ConfigError: No other layout computes the same.
        """

    def leave(self, folder: Path) -> None:
        """Puts into a run's folder what its weights are of no use without, once they are begun."""

    def shrunk(
        self, sections: Mapping[str, Any], degrees: Mapping[str, int]
    ) -> dict[str, dict[str, Any]]:
        """A small run of the same kind on the same mesh, as sections; from its own sections."""

    def flops(self, size: int) -> int:
        """FLOPs of forward and backward for a global batch."""


WORK: Final[dict[type[RunConfig], Callable[[Any], Work]]] = {
    LanguageRunConfig: LanguageWork,
    ImageRunConfig: ImageWork,
    BertRunConfig: BertWork,
    DlrmRunConfig: RecommenderWork,
    TwoTowerRunConfig: RecommenderWork,
}
"""One row a kind: from its config."""


def work_of(config: RunConfig) -> Work:
    """What a config's run is about.

    Args:
        config: from `load_config`.
    """
    return WORK[type(config)](config)


def find_size(config: RunConfig) -> int:
    """The size of a config's model; the data is opened where nothing else says it."""
    work = work_of(config)
    known = work.known_size()
    return work.size(work.open_data(lambda _: None)[2].vocab_size) if known is None else known
