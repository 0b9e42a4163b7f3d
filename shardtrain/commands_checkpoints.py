"""`shardtrain checkpoints`: what is saved, whether it is whole, how two steps differ, one adopted.

Owns: these four and what they print. Does not own: steps and manifests (`checkpoint.folder`) and
arrays (`checkpoint.arrays`, imported only where arrays are read). Works on a folder alone: without
the run's devices, data or mesh, also while the run goes on.
"""

import dataclasses
import json as json_
import shutil
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from shardtrain.checkpoint import folder
from shardtrain.checkpoint.folder import StepRecord
from shardtrain.checkpoint.retention import Retention, Step
from shardtrain.errors import EXIT_FAILED, CheckpointError, ConfigError
from shardtrain.train.metrics import plain
from shardtrain.train.rundir import BASE, RESOLVED, RunDirectory, changes, checkpoints_in
from shardtrain.train.screen import human_bytes

_SHOWN = 20


def list_steps(run: str, what: Sequence[str], *, json: bool) -> int:
    """Prints the steps of a run, why each stays, and what else is in their folder."""
    if what:
        raise ConfigError("list takes nothing more", where="checkpoints list", value=" ".join(what))
    directory = _directory(run)
    steps, damaged = [], {}
    for number in folder.complete_steps(directory):
        try:
            steps.append(folder.read_record(directory, number))
        except CheckpointError as error:
            damaged[number] = error.value
    looked_at = [Step(record.step, record.time, record.metric) for record in steps]
    why = _retention(run).kept(looked_at)
    aside = folder.aside(directory)
    left = [path.name for path in folder.leftovers(directory)]
    rows = [
        {
            "step": record.step,
            "created": record.created,
            "bytes": record.num_bytes,
            "val_loss": record.metric,
            "stays": why.get(record.step, ""),
            "verifiable": bool(record.files),
        }
        for record in steps
    ]
    if json:
        told = {"steps": rows, "damaged": damaged, "set_aside": aside, "leftovers": left}
        print(json_.dumps(told))
        return 0
    table = Table("step", "saved", "size", "val loss", "stays as", box=None)
    for record in steps:
        loss = "" if record.metric is None else f"{record.metric:.4f}"
        size, stays = human_bytes(record.num_bytes), why.get(record.step, "")
        table.add_row(str(record.step), record.created, size, loss, stays)
    console = _console()
    console.print(table)
    for number, reason in damaged.items():
        console.print(f"step {number}: damaged, {reason}")
    for name in aside:
        console.print(f"{name}: set aside as damaged")
    for name in left:
        console.print(f"{name}: left by a save or a deletion that was interrupted, or is under way")
    return 0


def verify(run: str, what: Sequence[str], *, json: bool) -> int:
    """Reads every file and every array of steps and compares them with the manifest; 1 = damage."""
    directory = _directory(run)
    numbers = [_number(word) for word in what] or folder.complete_steps(directory)
    told: dict[int, list[str]] = {}
    unknown = []
    wanted: dict[int, str] = {}
    for number in numbers:
        try:
            record = folder.read_record(directory, number)
        except CheckpointError as error:
            if not (directory / str(number)).exists():
                raise
            told[number] = [f"{folder.RECORD}: {error.value or error.message}"]
            continue
        if not record.files:
            unknown.append(number)
        if digest := str(record.metadata.get(BASE, "")):
            wanted[number] = digest
        path = directory / str(number)
        told[number] = folder.faults(path, record) or _leaf_faults(path, record)
    base = _base_faults(directory.parent / BASE, wanted)
    bad = [lines for lines in (*told.values(), *base.values()) if lines]
    if json:
        found = {"steps": told, "cannot_be_verified": unknown, **base, "good": not bad}
        print(json_.dumps(found))
        return EXIT_FAILED if bad else 0
    console = _console()
    for number, lines in told.items():
        if number in unknown:
            console.print(f"step {number}: saved by an older version, cannot be verified")
        elif not lines:
            console.print(f"step {number}: every file and array is as it was saved")
        for line in lines[:_SHOWN]:
            console.print(f"step {number}: {line}")
    for name, lines in base.items():
        for line in lines[:_SHOWN] or ["every file and array is as it was saved"]:
            console.print(f"{name}: {line}")
    return EXIT_FAILED if bad else 0


def _base_faults(directory: Path, wanted: Mapping[int, str]) -> dict[str, list[str]]:
    """What is wrong with the frozen weights of a run; nothing where there are none and need not be.

    Args:
        directory: where they lie.
        wanted: the digest of those that each step was trained with, of steps that had any.
    """
    if 0 not in folder.complete_steps(directory):
        return {BASE: [_trained_with("gone", directory, list(wanted))]} if wanted else {}
    try:
        record = folder.read_record(directory, 0)
    except CheckpointError as error:
        return {BASE: [f"{folder.RECORD}: {error.value or error.message}"]}
    path, found = directory / "0", record.digest
    faults = folder.faults(path, record) or _leaf_faults(path, record)
    if others := [step for step, digest in wanted.items() if digest != found]:
        faults.append(_trained_with("others", directory, others))
    return {BASE: faults}


def _trained_with(what: str, directory: Path, steps: Sequence[int]) -> str:
    which = (
        f"step {steps[0]} was" if len(steps) == 1 else f"steps {', '.join(map(str, steps))} were"
    )
    return f"the frozen weights that {which} trained with are {what}: {directory}"


def diff(run: str, what: Sequence[str], *, json: bool) -> int:
    """Prints how two steps differ, of one run or of two; 1 = they do."""
    if len(what) != 2:
        raise ConfigError(
            "two steps are compared",
            where="checkpoints diff",
            value=" ".join(what),
            allowed="STEP or OTHER_RUN:STEP, twice",
        )
    (one, first), (other, second) = (_find(run, word) for word in what)
    config = [str(c) for c in changes(_config(first), _config(second))]
    leaves: dict[str, dict[str, Any]] = {}
    for name in sorted(first.leaves.keys() | second.leaves.keys()):
        a, b = first.leaves.get(name), second.leaves.get(name)
        if a is None or b is None:
            leaves[name] = {"only_in": what[0] if b is None else what[1]}
        elif a != b:
            leaves[name] = {"first": dataclasses.asdict(a), "second": dataclasses.asdict(b)}
        elif not a.digest or a.digest != b.digest:
            found = _distance(_leaf(one, first, name), _leaf(other, second, name))
            if found is not None:
                leaves[name] = found
    if json:
        told = {"config": config, "leaves": leaves, "equal": not (config or leaves)}
        print(json_.dumps(plain(told)))
        return EXIT_FAILED if config or leaves else 0
    console = _console()
    for line in config:
        console.print(line)
    table = Table("array", "largest difference", "relative to its largest entry", box=None)
    for name, values in leaves.items():
        if "max_abs" in values:
            table.add_row(name, f"{values['max_abs']:.3g}", f"{values['relative']:.3g}")
        else:
            table.add_row(name, json_.dumps(values), "")
    if leaves:
        console.print(table)
    equal = len(first.leaves.keys() & second.leaves.keys() - leaves.keys())
    console.print(f"{equal} arrays are equal, {len(leaves)} differ")
    return EXIT_FAILED if config or leaves else 0


def adopt(run: str, what: Sequence[str], *, json: bool) -> int:
    """Makes a step from elsewhere, or one that was set aside, a step of this run."""
    if len(what) != 1:
        raise ConfigError(
            "one folder of a step is adopted",
            where="checkpoints adopt",
            value=" ".join(what),
            allowed="such as other_run/checkpoints/1200, or one that was set aside",
        )
    source, directory = Path(what[0]).absolute(), checkpoints_in(run).absolute()
    record = folder.read_record_of(source)
    found = folder.faults(source, record) or _leaf_faults(source, record)
    if found or not record.files:
        raise CheckpointError(
            "this step is damaged and cannot be adopted"
            if found
            else "this step was saved by an older version and cannot be verified",
            where=str(source),
            value="\n    ".join(["", *found[:_SHOWN]]) if found else "",
            cure="adopt another one",
        )
    target = directory / str(record.step)
    if target.exists():
        raise CheckpointError(
            f"step {record.step} is there already",
            where=str(directory),
            cure="move it away first",
        )
    temporary = directory / f"{record.step}{folder.TEMPORARY}"
    try:
        with RunDirectory(run):  # a run that goes on makes steps of its own
            folder.remove(temporary)
            shutil.copytree(source, temporary)
            wrong = folder.faults(temporary, record)
            if wrong:
                raise OSError(f"the copy is not as it should be: {wrong[0]}")
            for name in record.files:
                folder.sync_file(temporary / name)
            folder.commit(temporary, target, record)
    except OSError as error:
        raise CheckpointError(
            "the step cannot be copied", where=str(directory), value=str(error)
        ) from error
    if json:
        print(json_.dumps({"step": record.step, "path": str(target)}))
    else:
        _console().print(f"step {record.step} is a step of this run now: {target}")
    return 0


# -- finding


def _directory(run: str) -> Path:
    directory = checkpoints_in(run).absolute()
    if not directory.is_dir():
        raise CheckpointError(
            "there are no checkpoints here",
            where=str(directory),
            cure="name a run folder, the one that has resolved.toml",
        )
    return directory


def _number(word: str) -> int:
    if not word.isdecimal():
        raise ConfigError(
            "this is no step", where="checkpoints", value=word, allowed="a number such as 1200"
        )
    return int(word)


def _find(run: str, word: str) -> tuple[Path, StepRecord]:
    """The folder and record of STEP or RUN:STEP."""
    other, _, number = word.rpartition(":")
    directory = _directory(other or run)
    step = _number(number)
    return directory / str(step), folder.read_record(directory, step)


def _config(record: StepRecord) -> Mapping[str, Any]:
    config = record.metadata.get("config", {})
    return config if isinstance(config, Mapping) else {}


def _retention(run: str) -> Retention:
    """What `resolved.toml` says of which steps stay."""
    try:
        config = tomllib.loads((Path(run) / RESOLVED).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return Retention()
    part = config.get("checkpoint", {})
    return Retention(
        keep=part.get("keep", 2),
        every=part.get("keep_every", 0),
        hours=part.get("keep_hours", 0.0),
        best=part.get("keep_best", 0),
    )


# -- arrays, one after another


def _leaf(path: Path, record: StepRecord, name: str) -> NDArray[Any]:
    """One array of a step, on the host; random keys as their bits."""
    import jax

    from shardtrain.checkpoint import arrays

    tree, _ = arrays.read(path, arrays.nested({name: record.leaves[name]}))
    (leaf,) = jax.tree.leaves(tree)
    return np.asarray(leaf)


def _leaf_faults(path: Path, record: StepRecord) -> list[str]:
    return list(_wrong_leaves(path, record))


def _wrong_leaves(path: Path, record: StepRecord) -> Iterator[str]:
    from shardtrain.ops.digest import host_digest, text

    for name, stored in sorted(record.leaves.items()):
        if not stored.digest:
            continue
        try:
            found = text(host_digest(_leaf(path, record, name)))
        except (OSError, ValueError, KeyError) as error:
            yield f"{name}: cannot be read, {str(error).splitlines()[0]}"
            continue
        if found != stored.digest:
            yield f"{name}: its entries are not what was saved"


def _distance(a: NDArray[Any], b: NDArray[Any]) -> dict[str, Any] | None:
    """How far two arrays are apart; None where they are equal."""
    if a.tobytes() == b.tobytes():
        return None
    wide = [x.astype(np.float64) for x in (a, b)]
    apart = float(np.max(np.abs(wide[0] - wide[1]), initial=0.0))
    scale = float(np.max(np.abs(wide[1]), initial=0.0))
    return {"max_abs": apart, "relative": apart / scale if scale else apart}


def _console() -> Console:
    return Console(highlight=False, emoji=False, soft_wrap=True, markup=False)
