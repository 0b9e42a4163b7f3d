"""The state that a run goes on from: of a checkpoint of its own, or of imported weights.

Owns: which of the two a step is, and what of it is read. Does not own: checkpoints and programs.
"""

from collections.abc import Mapping
from typing import Any, Final

from shardtrain.checkpoint.checkpointer import Checkpointer
from shardtrain.train.build import Program
from shardtrain.train.state import TrainState

WEIGHTS: Final = "weights"
"""The metadata of a step that holds parameters and nothing else: where they are from.

It has them in the master dtype, so that precision, optimizer, data and steps are still open.
"""


def is_imported(metadata: Mapping[str, Any]) -> bool:
    """Whether a step has weights from elsewhere, and nothing was trained since."""
    return WEIGHTS in metadata


def chosen_by_weights(key: str) -> bool:
    """Whether a key of the config is settled where weights are given: what the model computes."""
    return key.startswith("model.") and key != "model.dropout"


def restore_state(
    checkpoints: Checkpointer, step: int, program: Program, *, evaluates: bool = False
) -> TrainState:
    """Reads a step straight to where the run has its state.

    Args:
        checkpoints: of the run.
        step: a complete one.
        program: the run's functions; its mesh need not be that of the save.
        evaluates: whether nothing is trained; the state's `opt_state` is then empty.

    Raises:
        CheckpointError: it cannot be read, or it is that of another model.
    """
    if is_imported(checkpoints.metadata(step)):
        found = checkpoints.restore(step, {"params": program.abstract_weights})
        return program.init_from(found["params"], evaluates=evaluates)
    wanted = program.abstract_saved
    if evaluates:
        wanted = wanted.replace(opt_state=())
    saved: TrainState = checkpoints.restore(step, wanted, subset=evaluates, missing={"skipped": 0})
    return program.from_saved(saved)
