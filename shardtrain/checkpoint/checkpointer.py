"""Saves and restores the state of a run: asynchronous, complete or absent, on any mesh.

Owns: the order of a save (copy, write in the background, commit, retire older steps), when its
errors surface, what is refused before. Does not own: file names and the commit (`folder`), arrays
and Orbax (`arrays`), when to save (the loop), the lock on the run directory.
"""

import dataclasses
import datetime
import importlib.metadata
import platform
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol, Self

from shardtrain.checkpoint import arrays, folder
from shardtrain.errors import CheckpointError

PyTree = Any

_PACKAGES = ("shardtrain", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy")
_SLACK_BYTES = 1 << 20  # names, records and block sizes


@dataclasses.dataclass(frozen=True)
class Saved:
    """A completed save: how long it held the loop up, how long it took in all."""

    step: int
    num_bytes: int
    blocked_seconds: float
    total_seconds: float


class Writer(Protocol):
    """What writes the arrays; `arrays.Writer` unless somebody brings another."""

    def start(self, path: Path, leaves: arrays.Leaves) -> None:
        """Take a copy of the leaves and begin to write it to a new folder."""

    def finish(self) -> None:
        """Wait until it is written; raise what went wrong."""

    def close(self) -> None:
        """Let go of threads."""


class Checkpointer:
    """The checkpoints of one run directory.

    Use it as a context manager, or call `close`: a save that is under way when the interpreter
    shuts down cannot start the threads that it needs.
    """

    def __init__(self, directory: str | Path, keep: int, *, writer: Writer | None = None) -> None:
        """Look at a folder; nothing is written or deleted before the first save.

        Args:
            directory: The folder of the steps; made by the first save.
            keep: Complete steps that stay, the newest ones.
            writer: What writes the arrays. None = Orbax.
        """
        assert keep >= 1, "keep=0 would delete what was just saved"
        self.directory = Path(directory).absolute()
        self._keep = keep
        self._writer = writer
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None
        self._saved: list[Saved] = []

    # -- what is there

    def steps(self) -> list[int]:
        """List the complete steps.

        Returns:
            Step numbers, oldest first.
        """
        return folder.complete_steps(self.directory)

    def latest(self) -> int | None:
        """Return the newest complete step.

        Returns:
            The step, or None where there is none.
        """
        found = self.steps()
        return found[-1] if found else None

    def record(self, step: int) -> folder.StepRecord:
        """Read what a step says about itself: shapes, bytes, versions, metadata.

        Args:
            step: A complete step.

        Returns:
            The record; reading it needs no device.

        Raises:
            CheckpointError: There is no such step, or its record is damaged.
        """
        return folder.read_record(self.directory, step)

    def metadata(self, step: int) -> dict[str, Any]:
        """Read the metadata that was given to `save`.

        Args:
            step: A complete step.

        Returns:
            The dict.

        Raises:
            CheckpointError: There is no such step, or its record is damaged.
        """
        return dict(self.record(step).metadata)

    def leftovers(self) -> list[Path]:
        """List what interrupted saves of ours have left.

        Returns:
            Folders; never one that somebody else made.
        """
        return folder.leftovers(self.directory)

    def clean(self) -> list[Path]:
        """Delete the leftovers. Only the one process that writes the run may do that.

        Returns:
            What was deleted, to be reported.

        Raises:
            CheckpointError: One could not be deleted.
        """
        assert self._thread is None, "a save is under way; its folder is no leftover"
        found = self.leftovers()
        try:
            for path in found:
                folder.remove(path)
        except OSError as error:
            raise CheckpointError(
                "leftovers of an interrupted save cannot be deleted",
                where=str(self.directory),
                value=str(error),
                cure="delete them by hand",
            ) from error
        return found

    # -- saving

    def preflight(self, num_bytes: int) -> None:
        """Refuse when the disk cannot hold `keep` checkpoints and the one being written.

        Args:
            num_bytes: Size of one checkpoint (`arrays.tree_bytes` of the state).

        Raises:
            CheckpointError: It cannot.
        """
        there = sum(folder.folder_bytes(self.directory / str(step)) for step in self.steps())
        free = folder.free_bytes(self.directory)
        needed = (self._keep + 1) * (num_bytes + _SLACK_BYTES) - there
        if needed > free:
            raise CheckpointError(
                "the disk is too small for the checkpoints of this run",
                where=str(self.directory),
                value=f"{_size(free)} free; {_size(needed)} needed: {self._keep + 1} checkpoints "
                f"of {_size(num_bytes)}, of which {_size(there)} are there",
                cure="free some space, lower checkpoint.keep, or put run.dir on another disk",
            )

    def save(self, step: int, state: PyTree, metadata: Mapping[str, object]) -> None:
        """Save a state; return as soon as a copy of it is safe from what the loop does next.

        Waits for the save before, if that is still under way.

        Args:
            step: The number of updates done.
            state: Nested containers of arrays; random keys may be among them.
            metadata: Whatever JSON can hold: the config, the cursor.

        Raises:
            CheckpointError: The step is there already, the save before has failed, or this one
                cannot be begun.
        """
        self.wait()
        begun = time.perf_counter()
        final = self.directory / str(step)
        temporary = self.directory / f"{step}{folder.TEMPORARY}"
        if final.exists():
            raise CheckpointError(
                f"step {step} is there already",
                where=str(self.directory),
                cure="move it away, or use another run directory",
            )
        leaves = arrays.flatten(state)
        record = _make_record(step, leaves, metadata)
        try:
            folder.remove(temporary)
            temporary.mkdir(parents=True)
            self._writer = self._writer or arrays.Writer()
            self._writer.start(temporary / folder.STATE, leaves)
        except Exception as error:
            folder.remove(temporary)
            raise self._failed(step, error) from error
        blocked = time.perf_counter() - begun
        self._thread = threading.Thread(
            target=self._commit,
            args=(temporary, final, record, begun, blocked),
            name=f"save-{step}",
        )
        self._thread.start()

    def _commit(
        self, temporary: Path, final: Path, record: folder.StepRecord, begun: float, blocked: float
    ) -> None:
        assert self._writer is not None
        try:
            self._writer.finish()
            folder.commit(temporary, final, record)
        except Exception as error:
            self._error = self._failed(record.step, error)
            self._error.__cause__ = error
            if not threading.main_thread().is_alive():
                print(self._error, file=sys.stderr)  # nobody is left to raise it to
            try:
                folder.remove(temporary)
            except OSError:
                return  # stays a leftover, which the next run reports
            return
        total = time.perf_counter() - begun
        self._saved.append(Saved(record.step, record.num_bytes, blocked, total))
        try:
            folder.retire(self.directory, self._keep)
        except OSError as error:
            self._error = CheckpointError(
                f"step {record.step} is saved, but an older one cannot be deleted",
                where=str(self.directory),
                value=str(error),
            )

    def _failed(self, step: int, error: Exception) -> CheckpointError:
        latest = self.latest()
        return CheckpointError(
            f"step {step} was not saved",
            where=str(self.directory),
            value=_shorten(f"{type(error).__name__}: {error}"),
            cure="free some space or repair the folder, then run again; "
            + ("no step is complete" if latest is None else f"the run goes on from step {latest}"),
        )

    def poll(self) -> list[Saved]:
        """Say what has been completed since the last call, without waiting.

        Returns:
            Completed saves, oldest first.

        Raises:
            CheckpointError: A save has failed.
        """
        if self._thread is not None and not self._thread.is_alive():
            self._thread = None
        if self._thread is None and self._error is not None:
            error, self._error = self._error, None
            raise error
        done, self._saved = self._saved, []
        return done

    def wait(self) -> None:
        """Wait until the save under way is complete.

        Raises:
            CheckpointError: It has failed; raised once.
        """
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def drop_after(self, step: int) -> list[int]:
        """Delete the steps after one, which a run that went back will do again.

        Args:
            step: The newest that stays.

        Returns:
            The steps that went.

        Raises:
            OSError: One could not be deleted.
        """
        self.wait()
        return folder.remove_steps(self.directory, [s for s in self.steps() if s > step])

    def close(self) -> None:
        """Wait for the save under way and let go of threads.

        Raises:
            CheckpointError: The last save has failed.
        """
        try:
            self.wait()
        finally:
            if self._writer is not None:
                self._writer.close()
                self._writer = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- restoring

    def restore(self, step: int, abstract: PyTree, *, subset: bool = False) -> PyTree:
        """Read a step straight into a placement, on any mesh.

        Args:
            step: A complete step.
            abstract: The tree of `jax.ShapeDtypeStruct`s to fill. A leaf goes where its sharding
                says; one without a sharding comes back as a NumPy array (a random key as its
                bits).
            subset: Whether the step may hold more than `abstract` asks for.

        Returns:
            The tree of `abstract`, with bits as they were saved.

        Raises:
            CheckpointError: There is no such step, it cannot be read, or names, shapes or dtypes
                differ from what was saved.
        """
        record = self.record(step)
        wanted = arrays.flatten(abstract)
        where = str(self.directory / str(step))
        arrays.check_fit(record.leaves, wanted.records(), subset=subset, where=where)
        return self._read(step, wanted)

    def restore_host(self, step: int) -> dict[str, Any]:
        """Read all of a step as NumPy arrays, without knowing what is in it.

        Args:
            step: A complete step.

        Returns:
            Nested dicts of arrays; random keys as their bits.

        Raises:
            CheckpointError: There is no such step, or it cannot be read.
        """
        tree: dict[str, Any] = self._read(step, arrays.nested(self.record(step).leaves))
        return tree

    def _read(self, step: int, wanted: arrays.Leaves) -> PyTree:
        path = self.directory / str(step) / folder.STATE
        try:
            return arrays.read(path, wanted)
        except (OSError, ValueError, KeyError) as error:
            raise CheckpointError(
                f"step {step} cannot be read",
                where=str(path),
                value=_shorten(f"{type(error).__name__}: {error}"),
                cure="move this step away; the run goes on from the one before",
            ) from error


def _make_record(
    step: int, leaves: arrays.Leaves, metadata: Mapping[str, object]
) -> folder.StepRecord:
    record = folder.StepRecord(
        step=step,
        leaves=leaves.records(),
        num_bytes=leaves.num_bytes(),
        versions=versions(),
        created=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        metadata=dict(metadata),
    )
    record.to_json()  # what JSON cannot hold is said here and not by the background thread
    return record


def versions() -> dict[str, str]:
    """Return the versions of Python and of the packages that shape a run.

    Returns:
        Versions by name; packages that are not installed are left out.
    """
    found = {"python": platform.python_version()}
    for name in _PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _shorten(text: str) -> str:
    # The reason is at the end, after long paths.
    return text if len(text) <= 400 else f"{text[:120]} ... {text[-260:]}"


def _size(num_bytes: int) -> str:
    value = float(num_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(value) < 1024:
            return f"{value:.4g} {unit}"
        value /= 1024
    return f"{value:.4g} TiB"
