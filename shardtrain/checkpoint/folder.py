"""The checkpoint folder: which steps are complete, what is a leftover, what may be deleted.

Owns: the names in the folder, the commit (a rename, after everything is on the disk), retention,
clean-up and the record that makes a step complete. Plain files only; imports no jax.
Does not own: arrays and how they are stored, and when to save.

A step is the folder `<step>`. It holds `state/` (Orbax) and `checkpoint.json` (the record: also a
manifest, with size and SHA-256 of every file, a digest of every leaf, and its own SHA-256). It is
written as `<step>.shardtrain-tmp` and renamed when complete, so it is complete or absent whatever
commit protocol the installed Orbax has. A step that is going away is first renamed to
`<step>.shardtrain-deleting`; one that was found damaged is `<step>.shardtrain-damaged` from then on
and is never deleted. Everything else in the folder belongs to somebody else.
"""

import dataclasses
import datetime
import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePosixPath
from typing import Any

from shardtrain.errors import CheckpointError

FORMAT = "shardtrain-checkpoint"
FORMAT_VERSION = 2
RECORD = "checkpoint.json"
STATE = "state"
APART = "apart"
TEMPORARY = ".shardtrain-tmp"
DELETING = ".shardtrain-deleting"
DAMAGED = ".shardtrain-damaged"

_STEP = re.compile(r"0|[1-9]\d*")
_LEFTOVER = re.compile(rf"(0|[1-9]\d*)({re.escape(TEMPORARY)}|{re.escape(DELETING)})")


class UnreadableError(CheckpointError):
    """A step that may be whole and cannot be read here and now: it is not to be set aside."""


@dataclasses.dataclass(frozen=True)
class LeafRecord:
    """One stored array; the dtype of random keys is `key<threefry2x32>`, stored as their bits."""

    shape: tuple[int, ...]
    dtype: str
    digest: str = dataclasses.field(default="", compare=False)
    """Of its entries, whatever mesh holds them (`ops/digest.py`); "" in format 1."""


@dataclasses.dataclass(frozen=True)
class FileRecord:
    """One stored file."""

    size: int
    sha256: str


@dataclasses.dataclass(frozen=True)
class StepRecord:
    """What a step says about itself; readable without jax and without the saved mesh."""

    step: int
    leaves: Mapping[str, LeafRecord]
    num_bytes: int
    versions: Mapping[str, str]
    created: str
    metadata: Mapping[str, object]
    metric: float | None = None
    """The validation loss of the step, where it was evaluated and is a number."""
    files: Mapping[str, FileRecord] = dataclasses.field(default_factory=dict)
    """By path in the step; none in format 1, which cannot be verified."""
    format_version: int = FORMAT_VERSION

    @property
    def time(self) -> datetime.datetime:
        """When it was saved."""
        return datetime.datetime.fromisoformat(self.created)

    @property
    def digest(self) -> str:
        """Of all entries of all leaves."""
        leaves = {name: leaf.digest for name, leaf in sorted(self.leaves.items())}
        return hashlib.sha256(json.dumps(leaves).encode()).hexdigest()[:32]

    def to_json(self) -> str:
        """Return the text of `checkpoint.json`.

        Returns:
            One JSON object.

        Raises:
            ValueError: The metadata holds something that JSON cannot.
            TypeError: The same.
        """
        document = {
            "format": FORMAT,
            "format_version": self.format_version,
            "step": self.step,
            "created": self.created,
            "versions": dict(self.versions),
            "num_bytes": self.num_bytes,
            "metadata": dict(self.metadata),
            "metric": self.metric,
            "leaves": {
                name: {"shape": list(leaf.shape), "dtype": leaf.dtype, "digest": leaf.digest}
                for name, leaf in self.leaves.items()
            },
            "files": {name: dataclasses.asdict(file) for name, file in self.files.items()},
        }
        document["sha256"] = _own_digest(document)
        return _text(document)


def complete_steps(directory: Path) -> list[int]:
    """List the complete steps, oldest first.

    Args:
        directory: The checkpoint folder; it may be missing.

    Returns:
        Step numbers in ascending order.
    """
    if not directory.is_dir():
        return []
    while True:
        names = [entry.name for entry in directory.iterdir() if _STEP.fullmatch(entry.name)]
        found = [int(name) for name in names if (directory / name / RECORD).is_file()]
        # A writer may have completed one step and retired another after the names were read.
        if all((directory / name).exists() for name in names):
            return sorted(found)


def leftovers(directory: Path) -> list[Path]:
    """List what an interrupted save or deletion of ours has left.

    Args:
        directory: The checkpoint folder; it may be missing.

    Returns:
        Folders that `remove` may take away, by name.
    """
    if not directory.is_dir():
        return []
    return sorted(
        entry
        for entry in directory.iterdir()
        if _LEFTOVER.fullmatch(entry.name) and entry.is_dir() and not entry.is_symlink()
    )


def read_record(directory: Path, step: int) -> StepRecord:
    """Read what a step says about itself.

    Args:
        directory: The checkpoint folder.
        step: A complete step.

    Returns:
        The record.

    Raises:
        CheckpointError: There is no such step, or its record is damaged or of a newer format.
    """
    if not (directory / str(step) / RECORD).exists():
        found = ", ".join(map(str, complete_steps(directory))) or "none"
        raise CheckpointError(
            f"step {step} is not there", where=str(directory), allowed=f"complete steps: {found}"
        )
    record = read_record_of(directory / str(step))
    if record.step != step:
        error = ValueError(f"it says that it is step {record.step}")
        raise _damaged(directory / str(step) / RECORD, error)
    return record


def read_record_of(step: Path) -> StepRecord:
    """Read what a step says about itself, wherever its folder is.

    Args:
        step: The folder.

    Returns:
        The record.

    Raises:
        CheckpointError: There is no record, or it is damaged or of a newer format.
    """
    path = step / RECORD
    try:
        raw = path.read_bytes()
    except FileNotFoundError:
        raise CheckpointError("there is no step here", where=str(path)) from None
    except OSError as error:  # no damage: a disk or a permission that may come back
        raise UnreadableError(
            "the record of this step cannot be read", where=str(path), value=str(error)
        ) from error
    try:
        document = json.loads(raw)
        if document["format"] != FORMAT:
            raise ValueError(f"its format is {document['format']!r}")
        version = _whole(document, "format_version")
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise _damaged(path, error) from error
    if version > FORMAT_VERSION:
        raise UnreadableError(
            "written by a newer shardtrain",
            where=str(path),
            value=f"format version {version}",
            allowed=f"up to {FORMAT_VERSION}",
            cure="install the newer version",
        )
    try:
        return _record(document, raw, version)
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise _damaged(path, error) from error


def _record(document: Mapping[str, Any], raw: bytes, version: int) -> StepRecord:
    """A record of what a file says; raises where it is not what a save writes."""
    if version == FORMAT_VERSION:
        if document["sha256"] != _own_digest(document) or raw != _text(document).encode():
            raise ValueError("it is not as it was written")
    elif version != 1 or document.keys() & {"sha256", "files"}:
        raise ValueError("its version is not that of its content")
    record = StepRecord(
        step=_whole(document, "step"),
        leaves={
            str(name): LeafRecord(
                tuple(map(int, leaf["shape"])), str(leaf["dtype"]), str(leaf.get("digest", ""))
            )
            for name, leaf in document["leaves"].items()
        },
        num_bytes=_whole(document, "num_bytes"),
        versions=dict(document["versions"]),
        created=str(document["created"]),
        metadata=dict(document["metadata"]),
        metric=None if document.get("metric") is None else float(document["metric"]),
        files={
            _inside(name): FileRecord(_whole(file, "size"), str(file["sha256"]))
            for name, file in document.get("files", {}).items()
        },
        format_version=version,
    )
    if record.time.tzinfo is None:
        raise ValueError("its time has no zone")
    return record


def _whole(document: Mapping[str, Any], key: str) -> int:
    value = document[key]
    if type(value) is not int or value < 0:
        raise ValueError(f"{key} is {value!r}")
    return value


def commit(temporary: Path, final: Path, record: StepRecord) -> None:
    """Make a written step complete: record, then all of it on the disk, then one rename.

    Args:
        temporary: The folder that holds the arrays.
        final: The name under which the step is found from now on.
        record: What the step says about itself.

    Raises:
        OSError: The disk is full or the folder is not writable; the step is not complete then.
    """
    write_durably(temporary / RECORD, record.to_json())
    for folder, _, _ in os.walk(temporary):
        sync_directory(Path(folder))
    temporary.rename(final)
    sync_directory(final.parent)


def file_names(step: Path) -> list[str]:
    """List the files of a step, but for its record.

    Args:
        step: Its folder.

    Returns:
        Paths in it, with slashes, in order. What is no plain file is in the list too.
    """
    found = []
    for folder, folders, names in os.walk(step):
        links = [name for name in folders if os.path.islink(os.path.join(folder, name))]
        found += [Path(folder, name).relative_to(step).as_posix() for name in (*names, *links)]
    return sorted(name for name in found if name != RECORD)


def hash_files(step: Path, names: Iterable[str]) -> dict[str, FileRecord]:
    """Read files and return what a manifest says of them.

    Args:
        step: The folder of the step.
        names: Files in it.

    Returns:
        Their records.

    Raises:
        OSError: One cannot be read.
    """
    names = list(names)
    with ThreadPoolExecutor(4) as pool:  # hashing and reading leave Python's lock
        return dict(zip(names, pool.map(lambda name: _hash(step, name), names), strict=True))


def _hash(step: Path, name: str) -> FileRecord:
    path = step / name
    if path.is_symlink() or not path.is_file():
        raise OSError(f"{name} is no plain file")
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256")
    return FileRecord(path.stat().st_size, digest.hexdigest())


def faults(
    step: Path, record: StepRecord, *, share: slice = slice(None), sizes_only: bool = False
) -> list[str]:
    """Compare the files of a step with its manifest.

    Args:
        step: The folder of the step.
        record: Its record; one of format 1 has no manifest, and no faults can be found.
        share: Which of the files to read, where several processes share the work.
        sizes_only: Whether to look at names and sizes only, which reads nothing.

    Returns:
        What is wrong, a line for each file; none when all is as it was written.
    """
    if not record.files:
        return []
    there = set(file_names(step))
    found = [f"{name}: missing" for name in sorted(record.files.keys() - there)]
    found += [
        f"{name}: was not written by this save" for name in sorted(there - record.files.keys())
    ]

    def compare(name: str) -> str:
        wanted, size = record.files[name], (step / name).lstat().st_size
        if size != wanted.size:
            return f"{name}: {size} bytes, {wanted.size} were written"
        try:
            same = sizes_only or _hash(step, name) == wanted
        except OSError as error:
            return f"{name}: {error.strerror or error}"
        return "" if same else f"{name}: its content is not what was written"

    with ThreadPoolExecutor(4) as pool:
        compared = pool.map(compare, sorted(there & record.files.keys())[share])
        return found + [line for line in compared if line]


def aside(directory: Path) -> list[str]:
    """List the folders of steps that were found damaged.

    Args:
        directory: The checkpoint folder.

    Returns:
        Their names, in order.
    """
    return sorted(path.name for path in directory.glob(f"*{DAMAGED}*"))


def set_aside(directory: Path, step: int) -> Path:
    """Take a damaged step out of the complete ones, without deleting anything.

    Args:
        directory: The checkpoint folder.
        step: The step.

    Returns:
        Where it is now.

    Raises:
        OSError: It cannot be renamed.
    """
    number, target = 1, directory / f"{step}{DAMAGED}"
    while target.exists():
        number += 1
        target = directory / f"{step}{DAMAGED}-{number}"
    (directory / str(step)).rename(target)
    sync_directory(directory)
    return target


def _text(document: Mapping[str, Any]) -> str:
    return json.dumps(document, indent=1, allow_nan=False) + "\n"


def _own_digest(document: Mapping[str, Any]) -> str:
    rest = {key: value for key, value in document.items() if key != "sha256"}
    text = json.dumps(rest, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


def _inside(name: str) -> str:
    """A path that cannot leave the folder it is in."""
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts or not path.parts:
        raise ValueError(f"{name!r} is outside of the step")
    return name


def remove_steps(directory: Path, steps: Sequence[int]) -> list[int]:
    """Delete steps, each absent before it is damaged.

    Args:
        directory: The checkpoint folder.
        steps: Complete steps.

    Returns:
        The steps.

    Raises:
        OSError: A step could not be deleted.
    """
    for step in steps:
        doomed = directory / f"{step}{DELETING}"
        remove(doomed)
        (directory / str(step)).rename(doomed)
        sync_directory(directory)
        remove(doomed)
    return list(steps)


def remove(path: Path) -> None:
    """Delete a folder with all that is in it, if it is there.

    Args:
        path: A folder of ours.

    Raises:
        OSError: It could not be deleted.
    """
    if path.exists():
        shutil.rmtree(path)


def folder_bytes(path: Path) -> int:
    """Add up the sizes of the files under a folder.

    Args:
        path: A folder; files that vanish meanwhile count as nothing.

    Returns:
        Bytes.
    """
    total = 0
    for folder, _, names in os.walk(path):
        for name in names:
            try:
                total += os.lstat(os.path.join(folder, name)).st_size
            except FileNotFoundError:
                continue
    return total


def free_bytes(path: Path) -> int:
    """Return what a user may still write on the disk of a folder that need not exist yet.

    Args:
        path: The folder.

    Returns:
        Bytes.
    """
    while not path.exists() and path != path.parent:
        path = path.parent
    return shutil.disk_usage(path).free


def write_durably(path: Path, text: str) -> None:
    """Write a file and wait until the disk has it.

    Args:
        path: The file.
        text: Its content.

    Raises:
        OSError: The disk is full or the folder is not writable.
    """
    with path.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def sync_file(path: Path) -> None:
    """Wait until the disk has a file.

    Args:
        path: The file.

    Raises:
        OSError: The disk failed.
    """
    with path.open("rb") as file:
        os.fsync(file.fileno())


def sync_directory(path: Path) -> None:
    """Wait until the disk has the names in a folder.

    Args:
        path: The folder.

    Raises:
        OSError: The disk failed.
    """
    handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _damaged(path: Path, error: Exception) -> CheckpointError:
    return CheckpointError(
        "the record of this step is damaged",
        where=str(path),
        value=f"{type(error).__name__}: {error}",
        cure="remove or repair this step; the run goes on from the one before",
    )
