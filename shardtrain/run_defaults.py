"""What most kinds of run have not: the part of `run_work.Work` that a kind need not write.

Owns: these answers. Does not own: the interface (`run_work`).
"""

from collections.abc import Mapping
from pathlib import Path

from jax.sharding import AbstractMesh, Mesh

from shardtrain.errors import ConfigError
from shardtrain.models.lora import Training
from shardtrain.optim.tables import RowRule, RowSgd
from shardtrain.sharding.rules import Table
from shardtrain.strategies.zigzag import Arrange, in_order
from shardtrain.train.kept import Part


class WorkDefaults:
    """Nothing to note, to keep or to leave, no tables, no text; see `run_work.Work`."""

    @property
    def threads(self) -> int:
        """Threads that read batches."""
        return 1

    @property
    def sample_tokens(self) -> int:
        """Tokens that the model writes at the end."""
        return 0

    @property
    def notes(self) -> tuple[str, ...]:
        """None."""
        return ()

    def size_faults(
        self, found: int, degrees: Mapping[str, int], *, counted: bool = False
    ) -> list[ConfigError]:
        """What the data tells is not split."""
        del found, degrees, counted
        return []

    def training(self) -> Training | None:
        """As `[lora]` says."""
        return None

    def row_rule(self) -> RowRule:
        """There are no tables with gradients of rows."""
        return RowSgd()

    def row_gradient_bytes(self, num_devices: int) -> int:
        """There are none."""
        del num_devices
        return 0

    def arrange(self, mesh: Mesh | AbstractMesh, compute: Table) -> Arrange:
        """As they are."""
        del mesh, compute
        return in_order

    def kept(self) -> tuple[tuple[str, Part], ...]:
        """Nothing of its own."""
        return ()

    def microbatches_alone(self) -> int:
        """One: microbatches do not change what is computed."""
        return 1

    def leave(self, folder: Path) -> None:
        """Nothing: the config says it all."""
