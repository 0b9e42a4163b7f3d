"""What most kinds of run have not: the part of `run_work.Work` that a kind need not write.

Owns: these answers. Does not own: the interface (`run_work`).
"""

from pathlib import Path

from shardtrain.models.lora import Training
from shardtrain.optim.tables import RowRule, RowSgd


class WorkDefaults:
    """Nothing to note, nothing to leave, no tables; see `run_work.Work`."""

    @property
    def notes(self) -> tuple[str, ...]:
        """None."""
        return ()

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

    def leave(self, folder: Path) -> None:
        """Nothing: the config says it all."""
