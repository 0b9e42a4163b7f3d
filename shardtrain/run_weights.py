"""The weights of a run for others: to begin another run with, or to be exported.

Owns: which arrays of a checkpoint they are, and the merging of a LoRA run's change into them. Does
not own: checkpoints, and what is done with the weights.
"""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from shardtrain.checkpoint.checkpointer import Checkpointer
from shardtrain.checkpoint.folder import LeafRecord, StepRecord
from shardtrain.config import LanguageRunConfig, RunConfig, TextRunConfig, with_defaults, with_text
from shardtrain.config_init import Origin, find_origin
from shardtrain.config_language import TOKENIZERS
from shardtrain.errors import CheckpointError, ConfigError
from shardtrain.interop.family import Family
from shardtrain.interop.hf_config import (
    BESIDE,
    CONFIG_FILE,
    KEPT_CONFIG,
    TOKENIZER_FILE,
    family_of,
)
from shardtrain.interop.hf_files import WeightFiles
from shardtrain.interop.hf_keys import Keys
from shardtrain.interop.tensors import Parameter
from shardtrain.interop.weights import Mapped, map_files, parameters
from shardtrain.models.config import LoraConfig
from shardtrain.models.lora import BASE, DOWN, UP, Lora, Matrix, merge
from shardtrain.ops.sums import sum_dtype
from shardtrain.run_program import make_training
from shardtrain.run_state import base_of, check_base, is_imported, restore_leaf
from shardtrain.sharding.placement import leaves_by_path
from shardtrain.train.begin import in_turn
from shardtrain.train.build import Program
from shardtrain.train.rundir import checkpoints_in

PyTree = Any
_LAYERS: Final = "layers/"
_Home = tuple[Checkpointer, int, StepRecord, str]
"""Checkpoints, a step of them, its record, and the name of a leaf."""


class SavedWeights:
    """The parameters of a step as the plain model has them: masters where there are any, merged."""

    def __init__(self, checkpoints: Checkpointer, step: int) -> None:
        """Looks at a step.

        Args:
            checkpoints: of the run.
            step: a complete one.

        Raises:
            CheckpointError: the frozen weights of a LoRA run are gone, or others.
        """
        self._checkpoints, self._step = checkpoints, step
        self._record = checkpoints.record(step)
        metadata = checkpoints.metadata(step)
        training = make_training(LoraConfig(**with_defaults(metadata["config"])["lora"]))
        self._lora: Lora | None = None
        if isinstance(training, Lora) and not is_imported(metadata):
            self._lora = training
        self._base = base_of(checkpoints)
        rests = not is_imported(metadata) and 0 in self._base.steps()
        self._has_frozen = self._lora is not None or rests
        if self._has_frozen:
            check_base(checkpoints, step)
            self._base_record = self._base.record(0)

    def read(self, path: str, dtype: Any = None, sharding: Any = None) -> Any:
        """One parameter, whole.

        Args:
            path: as the plain model has it.
            dtype: what it becomes; None = as it was saved.
            sharding: where it goes; None = the host.
        """
        found = _restored(*self._home(path), sharding)
        if self._lora is not None and (matrix := self._matrix(path)) is not None:
            changes = (_restored(*self._trained(f"{path}/{name}"), None) for name in (DOWN, UP))
            wide, scale = dtype or sum_dtype(found.dtype), self._lora.scale
            parts = (jnp.asarray(part).astype(wide) for part in (found, *changes))
            merged = lambda w, a, b: merge(w, a, b, matrix, scale)  # noqa: E731
            found = jax.jit(merged, out_shardings=sharding)(*parts)
        if sharding is None:
            host: NDArray[Any] = np.asarray(found)
            return host if dtype is None else host.astype(dtype)
        return jax.jit(lambda x: x.astype(dtype or x.dtype), out_shardings=sharding)(found)

    def shape(self, path: str) -> tuple[int, ...]:
        """That of a parameter, by the records alone.

        Raises:
            CheckpointError: there is no such parameter.
        """
        return _stored(*self._home(path)).shape

    def _matrix(self, path: str) -> Matrix | None:
        """How a parameter is used that LoRA changes; None where it does not."""
        return self._lora.matrices.get(path.removeprefix(_LAYERS)) if self._lora else None

    def _home(self, path: str) -> _Home:
        """Where a parameter is, without its change: beside the frozen ones, or trained."""
        if self._matrix(path) is not None:
            path = f"{path}/{BASE}"
        if self._has_frozen and f"params/{path}" not in self._record.leaves:
            return self._base, 0, self._base_record, f"frozen/{path}"
        return self._trained(path)

    def _trained(self, path: str) -> _Home:
        """The leaf that has most of a parameter that is trained: its master, or itself."""
        master = f"opt_state/master/{path}"
        name = master if master in self._record.leaves else f"params/{path}"
        return self._checkpoints, self._step, self._record, name


def _restored(
    checkpoints: Checkpointer, step: int, record: StepRecord, name: str, sharding: Any
) -> Any:
    leaf = _stored(checkpoints, step, record, name)
    wanted = jax.ShapeDtypeStruct(leaf.shape, jnp.dtype(leaf.dtype), sharding=sharding)
    return restore_leaf(checkpoints, step, name, wanted)


def _stored(checkpoints: Checkpointer, step: int, record: StepRecord, name: str) -> LeafRecord:
    if name not in record.leaves:
        raise CheckpointError(
            f"{name} is not in this checkpoint",
            where=str(checkpoints.directory / str(step)),
            cure="take weights of the same kind of model",
        )
    return record.leaves[name]


def check_weights(name: str, config: RunConfig, program: Program) -> None:
    """Refuses weights that are not those of the model, by names and shapes; reads none of them.

    Args:
        name: what `run.init` says.
        config: of the run that begins.
        program: its functions.

    Raises:
        UserError: there are none, one is missing, or has another shape.
    """
    origin = find_origin(name)
    if not origin.is_run:
        map_folder(origin.folder, with_text(config, "an import"), program)
        return
    with Checkpointer(checkpoints_in(origin.folder)) as checkpoints:
        saved = SavedWeights(checkpoints, _step_of(origin, checkpoints))
        for path, leaf in leaves_by_path(program.abstract_weights):
            _check_shape(name, path, saved.shape(path), leaf.shape)


def _check_shape(name: str, path: str, found: tuple[int, ...], wanted: tuple[int, ...]) -> None:
    if found != wanted:
        raise CheckpointError(
            f"the weights of run.init are of another model: {path}",
            where=name,
            value=str(list(found)),
            allowed=str(list(wanted)),
            cure="leave [model] out, and use their tokenizer",
        )


@contextmanager
def weights_of(name: str, config: RunConfig, program: Program) -> Iterator[PyTree]:
    """The weights of `run.init`, each read when its turn comes.

    They are those that `Program.abstract_weights` describes.

    Args:
        name: what `run.init` says.
        config: of the run that begins.
        program: its functions.

    Raises:
        UserError: there are none, they are damaged, or of another model.
    """
    origin = find_origin(name)
    abstract = program.abstract_weights
    if not origin.is_run:
        own = with_text(config, "an import")
        yield in_turn(abstract, map_folder(origin.folder, own, program)[1].read)
        return
    with Checkpointer(checkpoints_in(origin.folder)) as checkpoints:
        saved = SavedWeights(checkpoints, _step_of(origin, checkpoints))

        def read(path: str, leaf: Any) -> Any:
            own = saved.read(path, leaf.dtype, leaf.sharding)
            _check_shape(name, path, own.shape, leaf.shape)
            return own

        yield in_turn(abstract, read)


def _step_of(origin: Origin, checkpoints: Checkpointer) -> int:
    step = checkpoints.latest() if origin.step is None else origin.step
    if step is None:
        raise CheckpointError(
            "this run has no complete checkpoint to begin with",
            where=str(origin.folder),
            cure="train it first",
        )
    return step


def lacks_tokenizer(config: LanguageRunConfig) -> bool:
    """Whether a run has imported weights that were never trained on bytes, and only bytes to read.

    Args:
        config: of the run.
    """
    name, vocab = config.data.tokenizer, config.model.vocab_size
    if name != "bytes" or vocab in (0, TOKENIZERS["bytes"]):
        return False
    run, init = Path(config.run.dir), Path(config.run.init or config.run.dir)
    if init.name.isdecimal():
        init = init.parent.parent
    return any((f / KEPT_CONFIG).is_file() or _is_foreign(f) for f in (run, init))


def require_tokenizer(config: LanguageRunConfig) -> None:
    """Refuses to read text where `lacks_tokenizer`.

    Args:
        config: of a run that is about to read text.

    Raises:
        ConfigError: the weights came without their tokenizer.
    """
    if lacks_tokenizer(config):
        raise ConfigError(
            f"these weights, of {config.model.vocab_size} tokens, came without their "
            f"{TOKENIZER_FILE}: text cannot be read",
            where="data.tokenizer",
            value=config.data.tokenizer,
            cure=f"give it, --data.tokenizer PATH/{TOKENIZER_FILE}; or use data that is tokens "
            "already",
        )


def has_kept_config(folder: Path) -> bool:
    """Whether a run's folder has the config.json of weights that it was begun with."""
    return (folder / KEPT_CONFIG).is_file()


def _is_foreign(folder: Path) -> bool:
    return (folder / CONFIG_FILE).is_file()


def copy_beside(name: str, target: Path) -> None:
    """Copies what lies beside the weights of `run.init`, so that an export has it too."""
    folder = find_origin(name).folder
    for beside in (*BESIDE, KEPT_CONFIG):
        if (folder / beside).is_file() and not (target / beside).exists():
            shutil.copyfile(folder / beside, target / beside)
    if _is_foreign(folder) and not (target / KEPT_CONFIG).exists():
        shutil.copyfile(folder / CONFIG_FILE, target / KEPT_CONFIG)


# -- folders of Hugging Face


def own_parameters(config: TextRunConfig, program: Program) -> dict[str, Parameter]:
    """The parameters of the plain model, by path."""
    placement, training = program.placement, program.training
    names = training.weights(placement.names, placement.frozen_names)
    return parameters(program.abstract_weights, names, vocab_size=config.model.vocab_size)


def map_folder(folder: Path, config: TextRunConfig, program: Program) -> tuple[Family, Mapped]:
    """A folder's family, and its tensors in the places of our parameters.

    Raises:
        UserError: a file is missing or damaged, or the model is another one.
    """
    family = family_of(Keys.read(folder / CONFIG_FILE))
    return family, map_files(family, WeightFiles(folder), own_parameters(config, program))
