"""The state that a run goes on from: of a checkpoint of its own, or of imported weights.

Owns: which of the two a step is, what of it is read, and the frozen weights, which lie beside the
steps. Does not own: checkpoints and programs.

Weights that are not trained never change, so a run saves them once, in `base/0` of its folder. Each
step names them by a digest of all their entries, and is restored only with those.
"""

from collections.abc import Mapping
from typing import Any, Final

import jax

from shardtrain.checkpoint.checkpointer import Checkpointer
from shardtrain.errors import CheckpointError
from shardtrain.train.begin import in_turn
from shardtrain.train.build import Program
from shardtrain.train.rundir import BASE
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
    return key.startswith("model.") and key not in ("model.dropout", "model.attention_dropout")


def base_of(checkpoints: Checkpointer) -> Checkpointer:
    """The folder of a run's frozen weights; it has one step, 0."""
    return checkpoints.beside(BASE)


def base_digest(checkpoints: Checkpointer) -> str:
    """A digest of the frozen weights that a run has; "" where it has none.

    Raises:
        CheckpointError: their record is damaged.
    """
    base = base_of(checkpoints)
    if 0 not in base.steps():
        return ""
    return base.record(0).digest


def check_base(checkpoints: Checkpointer, step: int) -> None:
    """Refuses frozen weights that are not those of a step.

    Raises:
        CheckpointError: they are gone, or others.
    """
    wanted, found = str(checkpoints.metadata(step).get(BASE, "")), base_digest(checkpoints)
    if wanted != found:
        raise CheckpointError(
            "the frozen weights that this step was trained with are "
            + ("others" if found else "gone"),
            where=str(base_of(checkpoints).directory),
            value=found or "nothing",
            allowed=wanted or "nothing",
            cure=f"put the folder `{BASE}` of that run there",
        )


def save_base(checkpoints: Checkpointer, state: TrainState, program: Program) -> None:
    """Saves the frozen weights of a run that begins, if it has any, and waits until they are there.

    Args:
        checkpoints: of the run.
        state: of the run.
        program: its functions.

    Raises:
        CheckpointError: they cannot be written.
    """
    base = base_of(checkpoints)
    if state.frozen != () and not base.steps():
        base.save(0, {"frozen": program.saved.save(state).frozen}, {})
        base.wait()


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
        weights = in_turn(
            program.abstract_weights,
            lambda path, leaf: restore_leaf(checkpoints, step, f"params/{path}", leaf),
        )
        return program.init_from(weights, evaluates=evaluates)
    check_base(checkpoints, step)
    whole = program.saved.wanted
    wanted = whole.replace(frozen=(), opt_state=() if evaluates else whole.opt_state)
    saved: TrainState = checkpoints.restore(step, wanted, subset=evaluates, missing={"skipped": 0})
    if whole.frozen != ():
        frozen = base_of(checkpoints).restore(0, {"frozen": whole.frozen})["frozen"]
        saved = saved.replace(frozen=frozen)
    return program.saved.rest(saved)


def restore_leaf(checkpoints: Checkpointer, step: int, name: str, wanted: Any) -> Any:
    """Reads one leaf of a step.

    Args:
        checkpoints: of the run.
        step: a complete one.
        name: of the leaf, such as `params/head`.
        wanted: its shape, dtype and sharding; see `Checkpointer.restore`.

    Raises:
        CheckpointError: it cannot be read, or is another one.
    """
    tree = wanted
    for part in reversed(name.split("/")):
        tree = {part: tree}
    return jax.tree.leaves(checkpoints.restore(step, tree, subset=True))[0]
