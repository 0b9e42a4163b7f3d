"""The checkpoint folder: which steps are complete, what is a leftover, what may be deleted.

Owns: the names in the folder, the commit (a rename, after everything is on the disk), retention,
clean-up and the record that makes a step complete. Plain files only; imports no jax.
Does not own: arrays and how they are stored, and when to save.

A step is the folder `<step>`. It holds `state/` (Orbax) and `checkpoint.json` (the record). It is
written as `<step>.shardtrain-tmp` and renamed when complete, so it is complete or absent whatever
commit protocol the installed Orbax has. A step that is going away is first renamed to
`<step>.shardtrain-deleting`. Everything else in the folder belongs to somebody else.
"""

import dataclasses
import json
import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path

from shardtrain.errors import CheckpointError

FORMAT = "shardtrain-checkpoint"
FORMAT_VERSION = 1
RECORD = "checkpoint.json"
STATE = "state"
TEMPORARY = ".shardtrain-tmp"
DELETING = ".shardtrain-deleting"

_STEP = re.compile(r"0|[1-9]\d*")
_LEFTOVER = re.compile(rf"(0|[1-9]\d*)({re.escape(TEMPORARY)}|{re.escape(DELETING)})")


@dataclasses.dataclass(frozen=True)
class LeafRecord:
    """One stored array; the dtype of random keys is `key<threefry2x32>`, stored as their bits."""

    shape: tuple[int, ...]
    dtype: str


@dataclasses.dataclass(frozen=True)
class StepRecord:
    """What a step says about itself; readable without jax and without the saved mesh."""

    step: int
    leaves: Mapping[str, LeafRecord]
    num_bytes: int
    versions: Mapping[str, str]
    created: str
    metadata: Mapping[str, object]
    format_version: int = FORMAT_VERSION

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
            "leaves": {
                name: {"shape": list(leaf.shape), "dtype": leaf.dtype}
                for name, leaf in self.leaves.items()
            },
        }
        return json.dumps(document, indent=1, allow_nan=False) + "\n"


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
    path = directory / str(step) / RECORD
    try:
        document = json.loads(path.read_bytes())
        if document["format"] != FORMAT:
            raise ValueError(f"its format is {document['format']!r}")
        version = int(document["format_version"])
    except FileNotFoundError:
        found = ", ".join(map(str, complete_steps(directory))) or "none"
        raise CheckpointError(
            f"step {step} is not there", where=str(directory), allowed=f"complete steps: {found}"
        ) from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise _damaged(path, error) from error
    if version > FORMAT_VERSION:
        raise CheckpointError(
            "written by a newer shardtrain",
            where=str(path),
            value=f"format version {version}",
            allowed=f"up to {FORMAT_VERSION}",
            cure="install the newer version",
        )
    try:
        leaves = {
            name: LeafRecord(tuple(leaf["shape"]), leaf["dtype"])
            for name, leaf in document["leaves"].items()
        }
        return StepRecord(
            step=document["step"],
            leaves=leaves,
            num_bytes=document["num_bytes"],
            versions=document["versions"],
            created=document["created"],
            metadata=document["metadata"],
            format_version=version,
        )
    except (KeyError, TypeError, AttributeError) as error:
        raise _damaged(path, error) from error


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


def retire(directory: Path, keep: int) -> list[int]:
    """Delete all but the newest complete steps.

    Args:
        directory: The checkpoint folder.
        keep: How many stay.

    Returns:
        The steps that went.

    Raises:
        OSError: A step could not be deleted.
    """
    return remove_steps(directory, complete_steps(directory)[:-keep])


def remove_steps(directory: Path, steps: list[int]) -> list[int]:
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
        remove(doomed)
    return steps


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
