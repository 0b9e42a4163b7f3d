"""The commands `import` and `export`: a Hugging Face folder as a run, and a run as such a folder.

Owns: their order, what lies beside the weights, what is said. Does not own: families, tables and
files (`interop`), checkpoints.
"""

import json as json_
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
from jax.sharding import AbstractMesh

from shardtrain.checkpoint.checkpointer import Checkpointer
from shardtrain.config import (
    BertRunConfig,
    RunConfig,
    TextRunConfig,
    load_config,
    resolve_mesh,
    to_toml,
    with_text,
)
from shardtrain.data.sources import open_tokenizer
from shardtrain.data.tokenizer import Tokenizer
from shardtrain.errors import CheckpointError, ConfigError
from shardtrain.interop.family import Family, Sizes
from shardtrain.interop.hf_config import (
    BESIDE,
    CONFIG_FILE,
    FAMILIES,
    KEPT_CONFIG,
    TOKENIZER_FILE,
    choose_family,
    kept_keys,
    training_notes,
    write_config,
)
from shardtrain.interop.hf_files import DTYPES, write_files
from shardtrain.interop.hf_keys import Keys
from shardtrain.interop.weights import exported, exported_shapes
from shardtrain.run_bert import tokenizer_of
from shardtrain.run_program import count_parameters, make_program
from shardtrain.run_state import WEIGHTS
from shardtrain.run_weights import SavedWeights, map_folder, own_parameters
from shardtrain.sharding.mesh import abstract_mesh
from shardtrain.train.build import Program
from shardtrain.train.rundir import RunDirectory, checkpoints_in
from shardtrain.train.screen import make_console

# -- import


def import_weights(config: RunConfig, *, folder: str, out: str, json: bool) -> int:
    """`shardtrain import`: a run folder with the weights as its step 0.

    Args:
        config: of `interop.hf_config.read_folder`, and flags.
        folder: the Hugging Face folder.
        out: the run folder.
        json: print JSON and nothing else.
    """
    source, target = Path(folder), Path(out)
    config = _in_folder(with_text(config, "an import"), source, target)
    resolve_mesh(config, jax.device_count())
    program = make_program(config, vocab_size=config.model.vocab_size)
    family, mapped = map_folder(source, config, program)
    with RunDirectory(target, key="--out") as directory:
        with Checkpointer(directory.checkpoints, config.checkpoint.keep) as checkpoints:
            if checkpoints.latest() is not None:
                raise CheckpointError(
                    "this folder is a run already",
                    where=str(target),
                    cure="import into another folder, or move it away",
                )
            params = mapped.place(program.abstract_weights)
            origin = {"family": family.model_type, "dtypes": _common(mapped.dtypes())}
            metadata = {"config": config.model_dump(), WEIGHTS: origin}
            checkpoints.save(0, {"params": params}, metadata)
        for name in BESIDE:
            if (source / name).is_file():
                shutil.copyfile(source / name, target / name)
        shutil.copyfile(source / CONFIG_FILE, target / KEPT_CONFIG)
        directory.write_resolved(to_toml(config))
    count = count_parameters(program, config.model.vocab_size)
    bad = [f"{name} has entries that are no finite numbers" for name in mapped.not_numbers]
    notes = [*training_notes(source), *bad]
    if json:
        told = {"run": str(target), "family": family.model_type, "parameters": count}
        print(json_.dumps({**told, "notes": notes}))
        return 0
    console = make_console()
    for note in notes:
        console.print(f"note: {note}", markup=False, soft_wrap=True)
    if not (source / TOKENIZER_FILE).is_file():
        console.print(f"note: {source} has no {TOKENIZER_FILE}", markup=False, soft_wrap=True)
    console.print(
        f"{family.model_type}, {count:,} parameters, is a run now: {target}\n"
        f"  shardtrain train {target} --data.path FILE --run.steps N",
        markup=False,
        soft_wrap=True,
    )
    return 0


def _in_folder(config: TextRunConfig, source: Path, target: Path) -> TextRunConfig:
    """The config of the run as it lies in its folder."""
    sections = config.model_dump()
    if config.run.dir != f"runs/{config.run.name}":  # which is what it is unless it is given
        raise ConfigError(
            "the folder of an import is --out", where="--run.dir", value=config.run.dir
        )
    sections["run"]["dir"] = str(target)
    if Path(config.data.tokenizer) == source / TOKENIZER_FILE:
        sections["data"]["tokenizer"] = str(target / TOKENIZER_FILE)
    return with_text(load_config(sections), "an import")


def _common(dtypes: dict[str, str]) -> dict[str, str]:
    """Types by name, with the most common one under "" and not repeated."""
    kinds = sorted(dtypes.values())
    most = max(kinds, key=kinds.count)
    return {"": most, **{name: kind for name, kind in dtypes.items() if kind != most}}


# -- export


def export_weights(config: RunConfig, *, out: str, dtype: str, json: bool) -> int:
    """`shardtrain export`: the newest checkpoint as a folder that transformers loads.

    Args:
        config: of the run.
        out: the folder.
        dtype: of the weights, or "auto".
        json: print JSON and nothing else.
    """
    config = with_text(config, "an export")
    family = choose_family(config.model)
    target = _new_folder(out)
    run = Path(config.run.dir)
    with Checkpointer(checkpoints_in(run), config.checkpoint.keep) as checkpoints:
        step = checkpoints.latest()
        if step is None:
            raise CheckpointError(
                "this run has no complete checkpoint", where=str(run), cure="train it first"
            )
        mesh = abstract_mesh(dict.fromkeys(config.mesh.model_dump(), 1))
        config = _with_vocabulary(config)
        program = _plain_program(config, mesh)
        own = own_parameters(config, program)
        count = count_parameters(program, config.model.vocab_size)
        dtype_of = _dtypes(checkpoints.metadata(step), dtype)
        saved = SavedWeights(checkpoints, step)
        temporary = target.with_name(target.name + ".tmp")
        with _making(out):
            shutil.rmtree(temporary, ignore_errors=True)
            temporary.mkdir(parents=True)
        try:
            tensors = exported(family, own, saved.read, dtype_of)
            files = write_files(temporary, exported_shapes(family, own, dtype_of), tensors)
            files.append(temporary / CONFIG_FILE)
            files[-1].write_text(_config_json(config, family, run, dtype_of("")), encoding="utf-8")
            for path in files:  # safetensors lets nobody else read what it writes
                path.chmod(files[-1].stat().st_mode)
            files += _copy_tokenizer(config, run, temporary)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise
    with _making(out):
        if target.exists():
            target.rmdir()
        temporary.rename(target)
    written = [path.name for path in files]
    if json:
        told = {"step": step, "family": family.model_type, "files": written}
        print(json_.dumps({**told, "parameters": count}))
        return 0
    console = make_console()
    if TOKENIZER_FILE not in written:
        words = f'no tokenizer.json is written: data.tokenizer="{config.data.tokenizer}" is no file'
        console.print(f"note: {words}", markup=False, soft_wrap=True)
    console.print(
        f"step {step} as {family.model_type}, {count:,} parameters: {target}",
        markup=False,
        soft_wrap=True,
    )
    return 0


def _new_folder(out: str) -> Path:
    target = Path(out)
    with _making(out):
        taken = target.exists() and (not target.is_dir() or any(target.iterdir()))
    if taken:
        raise ConfigError(
            "is there already", where="--out", value=out, allowed="a folder that is not, or empty"
        )
    return target


@contextmanager
def _making(out: str) -> Iterator[None]:
    """A folder that the system refuses is the user's to choose anew."""
    try:
        yield
    except OSError as error:
        raise ConfigError(
            f"cannot be made: {error.strerror or error}",
            where="--out",
            value=out,
            cure="take a folder on a disk that you may write",
        ) from None


def _with_vocabulary(config: TextRunConfig) -> TextRunConfig:
    """The config with its vocabulary as a number."""
    if config.model.vocab_size:
        return config
    size = _tokenizer(config).vocab_size
    model = config.model.model_copy(update={"vocab_size": size})
    return config.model_copy(update={"model": model})


def _tokenizer(config: TextRunConfig) -> Tokenizer:
    return (
        tokenizer_of(config) if isinstance(config, BertRunConfig) else open_tokenizer(config.data)
    )


def _plain_program(config: TextRunConfig, mesh: AbstractMesh) -> Program:
    """The run on one device that need not be here: for shapes in model order."""
    sections = config.model_dump()
    sections |= {"mesh": dict.fromkeys(sections["mesh"], 1), "sharding": {}, "pipeline": {}}
    sections["lora"] = {}
    return make_program(load_config(sections), vocab_size=config.model.vocab_size, mesh=mesh)


def _dtypes(metadata: dict[str, Any], asked: str) -> Callable[[str], str]:
    """Name of a tensor -> its type; of "" the most common one."""
    types = {kind.name: name for name, kind in DTYPES.items()}
    if asked != "auto":
        return lambda _name: types[asked]
    known: dict[str, str] = metadata.get(WEIGHTS, {}).get("dtypes", {"": "F32"})
    return lambda name: known.get(name, known[""])


def _config_json(config: TextRunConfig, family: Family, run: Path, dtype: str) -> str:
    model, kept = config.model, kept_keys(run, family)
    length = model.max_length or config.data.sequence_length
    if kept:
        length = FAMILIES[family.model_type].max_length(Keys(kept, KEPT_CONFIG))
    sizes = Sizes(model.vocab_size, length)
    return write_config(family, model, sizes, dtype=DTYPES[dtype].name, kept=kept)


def _copy_tokenizer(config: TextRunConfig, run: Path, target: Path) -> list[Path]:
    """What turns text into tokens, and the other files that came with the weights."""
    written = []
    for name in BESIDE:
        if (run / name).is_file():
            written.append(target / name)
            shutil.copyfile(run / name, written[-1])
    if not (target / TOKENIZER_FILE).is_file() and config.data.tokenizer != "bytes":
        _tokenizer(config).save(target)
        written.append(target / TOKENIZER_FILE)
    return written
