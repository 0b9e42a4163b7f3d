"""Saves and restores the state of a run: asynchronous, complete or absent, on any mesh.

Owns: the order of a save (copy, write in the background, read back, commit, retire older steps),
when its errors surface, what is refused before, what becomes of damaged steps. Does not own: file
names, the manifest and the commit (`folder`), arrays and Orbax (`arrays`), which steps stay
(`retention`), when to save (the loop), the lock on the run directory. Of several processes each
writes its own part and process 0 does all that concerns folders; an error in one is one in all.
"""

import contextlib
import dataclasses
import datetime
import importlib.metadata
import json
import math
import platform
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol, Self

import numpy as np

from shardtrain.checkpoint import arrays, folder
from shardtrain.checkpoint.retention import Retention, Step
from shardtrain.errors import CheckpointError
from shardtrain.ops.digest import text
from shardtrain.sharding.disk import Apart
from shardtrain.sharding.processes import Alone, Processes, told_by_all

PyTree = Any

_PACKAGES = ("shardtrain", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy")
_SLACK_BYTES = 1 << 20  # names, records and block sizes
_SHOWN = 8  # lines of one message
_PATIENCE = 24 * 3600.0  # a slow disk is not an error; a stuck one is the watchdog's affair


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

    def __init__(
        self,
        directory: str | Path,
        keep: int = 2,
        *,
        retention: Retention | None = None,
        peers: Processes | None = None,
        writer: Writer | None = None,
        label: str = "checkpoint",
    ) -> None:
        """Look at a folder; nothing is written or deleted before the first save.

        Args:
            directory: The folder of the steps, which all processes see; made by the first save.
            keep: Complete steps that stay, the newest ones, and two at least.
            retention: Which steps stay, in place of `keep`.
            peers: The processes of the run; each makes the same calls. None = this one alone.
            writer: What writes the arrays. None = Orbax.
            label: Tells what processes do together here from what they do in other folders.
        """
        assert keep >= 1, "keep=0 would delete what was just saved"
        self.directory = Path(directory).absolute()
        self._retention = retention or Retention(keep)
        self._peers = peers or Alone()
        self._writer = writer
        self._label = label
        self._beside: dict[str, Checkpointer] = {}
        self._rounds = 0
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None
        self._saved: list[Saved] = []

    def beside(self, name: str) -> "Checkpointer":
        """Return the steps of another folder beside this one, for the same processes.

        Args:
            name: The folder's name; always the same object for one name, closed with this one.
        """
        if name not in self._beside:
            folder_ = self.directory.parent / name
            self._beside[name] = Checkpointer(folder_, peers=self._peers, label=name)
        return self._beside[name]

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

    # -- what several processes do together

    @property
    def _leads(self) -> bool:
        """Whether this process makes, renames and deletes folders."""
        return self._peers.index == 0

    def _round(self, what: str) -> str:
        """A name for something that all processes do once, in the same order."""
        self._rounds += 1
        return f"{self._label} {what} {self._rounds}"

    def _together(self, name: str, mine: object) -> list[Any]:
        """What every process says, by process; all wait for all."""
        if self._peers.count == 1:
            return [json.loads(json.dumps(mine))]
        return told_by_all(self._peers, name, mine, _PATIENCE)

    def _agreed(self, name: str, error: Exception | None) -> None:
        """Raises in all processes where one has failed."""
        told = self._together(name, None if error is None else f"{type(error).__name__}: {error}")
        if error is not None:
            raise error
        for index, words in enumerate(told):
            if words is not None:
                raise OSError(f"process {index}: {words}")

    # -- damage

    def newest_good(self, say: Callable[[str], None] = print) -> int | None:
        """Find the newest step whose files are all as they were written; set others aside.

        Args:
            say: Told of every damaged step, what is wrong with it and where it is now.

        Returns:
            The step; None where no step was ever complete, not even one that is set aside.

        Raises:
            CheckpointError: There were steps, and none of them is good; or one cannot be renamed.
        """
        damaged = []
        for step in reversed(self.steps()):
            found = self.faults(step)
            if not found:
                return step
            where = self.directory / str(step)
            if self._leads:
                where = self._set_aside(step)
            self._peers.barrier(self._round("set aside"), _PATIENCE)
            damaged.append(step)
            more = [f"and {len(found) - _SHOWN} more"] if len(found) > _SHOWN else []
            lines = [f"step {step} is damaged and not used; it is now {where.name}:"]
            say("\n  ".join([*lines, *found[:_SHOWN], *more]))
        aside = [] if self.steps() else folder.aside(self.directory)
        if damaged or aside:
            raise CheckpointError(
                "every checkpoint of this run is damaged",
                where=str(self.directory),
                value=", ".join(aside) or ", ".join(map(str, damaged)),
                cure="repair one and bring it back with `shardtrain checkpoints RUN adopt FOLDER`, "
                "or take another run.dir to begin anew",
            )
        return None

    def faults(self, step: int) -> list[str]:
        """Look for damage to a step; each process reads a part of the files.

        Args:
            step: A complete step.

        Returns:
            What is wrong, a line for each file; the same in every process.
        """
        share = slice(self._peers.index, None, self._peers.count)
        try:
            record = folder.read_record(self.directory, step)
            mine = folder.faults(self.directory / str(step), record, share=share)
        except folder.UnreadableError:
            raise
        except CheckpointError as error:
            mine = [f"{folder.RECORD}: {error.value or error.message}"]
        told = self._together(self._round("faults"), mine)
        return sorted({line for lines in told for line in lines})

    def _set_aside(self, step: int) -> Path:
        try:
            return folder.set_aside(self.directory, step)
        except OSError as error:
            raise CheckpointError(
                f"step {step} is damaged and cannot be set aside",
                where=str(self.directory),
                value=str(error),
                cure="move it away by hand",
            ) from error

    # -- saving

    def preflight(self, num_bytes: int) -> None:
        """Refuse when the disk cannot hold the checkpoints that stay and the one being written.

        Args:
            num_bytes: Size of one checkpoint (`arrays.tree_bytes` of the state).

        Raises:
            CheckpointError: It cannot.
        """
        there = sum(folder.folder_bytes(self.directory / str(step)) for step in self.steps())
        free = folder.free_bytes(self.directory)
        count = self._retention.count + 1
        needed = count * (num_bytes + _SLACK_BYTES) - there
        if needed > free:
            raise CheckpointError(
                "the disk is too small for the checkpoints of this run",
                where=str(self.directory),
                value=f"{_size(free)} free; {_size(needed)} needed: {count} checkpoints "
                f"of {_size(num_bytes)}, of which {_size(there)} are there",
                cure="free some space, lower checkpoint.keep, or put run.dir on another disk",
            )

    def save(
        self,
        step: int,
        state: PyTree,
        metadata: Mapping[str, object],
        *,
        metric: float | None = None,
    ) -> None:
        """Save a state; return as soon as a copy of it is safe from what the loop does next.

        Waits for the save before, if that is still under way. All processes call it.

        Args:
            step: The number of updates done.
            state: Nested containers of arrays; random keys may be among them.
            metadata: Whatever JSON can hold: the config, the cursor.
            metric: The validation loss of the step, where there is one.

        Raises:
            CheckpointError: The step is there already, the save before has failed, or this one
                cannot be begun.
        """
        self.wait()
        begun = time.perf_counter()
        final = self.directory / str(step)
        temporary = self.directory / f"{step}{folder.TEMPORARY}"
        name, error = self._round(f"save {step}"), None
        if final.exists():
            raise CheckpointError(
                f"step {step} is there already",
                where=str(self.directory),
                cure="move it away, or use another run directory",
            )
        leaves = arrays.flatten(state)
        record = _make_record(step, leaves, metadata, metric)
        try:
            if self._leads:
                folder.remove(temporary)
                temporary.mkdir(parents=True)
        except OSError as failed:
            error = failed
        try:
            self._agreed(f"{name} begun", error)
            self._writer = self._writer or arrays.Writer()
            together, turns = leaves.apart()
            by_themselves = self._save_in_turn(name, temporary, turns)
            digests = {**by_themselves, **together.digests()}
            self._writer.start(temporary / folder.STATE, together)
        except Exception as error:
            if self._leads:
                folder.remove(temporary)
            raise self._failed(step, error) from error
        blocked = time.perf_counter() - begun
        self._thread = threading.Thread(
            target=self._commit,
            args=(name, temporary, final, record, digests, begun, blocked),
            name=f"save-{step}",
        )
        self._thread.start()

    def _save_in_turn(
        self, name: str, temporary: Path, leaves: Mapping[str, Apart]
    ) -> arrays.Digests:
        """Saves leaves that must not be in memory together, and waits for each."""
        digests = {}
        for leaf, apart in leaves.items():
            one = arrays.single(leaf, apart.load())
            # Now, for the next one takes its memory.
            digests[leaf] = arrays.known(one.digests()[leaf]())
            assert self._writer is not None
            self._writer.start(temporary / folder.APART / leaf, one)
            self._finish(f"{name} {leaf}")
        return digests

    def _commit(
        self,
        name: str,
        temporary: Path,
        final: Path,
        record: folder.StepRecord,
        digests: arrays.Digests,
        begun: float,
        blocked: float,
    ) -> None:
        try:
            record = self._written(name, temporary, record, digests)
            failed: Exception | None = None
            try:
                if self._leads:
                    folder.commit(temporary, final, record)
            except OSError as error:
                failed = error
            self._agreed(f"{name} committed", failed)
        except Exception as error:
            self._error = self._failed(record.step, error)
            self._error.__cause__ = error
            if not threading.main_thread().is_alive():
                print(self._error, file=sys.stderr)  # nobody is left to raise it to
            with contextlib.suppress(OSError):  # stays a leftover, which the next run reports
                if self._leads:
                    folder.remove(temporary)
            return
        total = time.perf_counter() - begun
        self._saved.append(Saved(record.step, record.num_bytes, blocked, total))
        try:
            if self._leads:
                self._retire()
        except Exception as error:
            self._error = CheckpointError(
                f"step {record.step} is saved, but an older one cannot be deleted",
                where=str(self.directory),
                value=str(error),
            )

    def _written(
        self, name: str, temporary: Path, record: folder.StepRecord, digests: arrays.Digests
    ) -> folder.StepRecord:
        """Waits until all processes have written their parts; the record with its manifest."""
        error: Exception | None = None
        try:
            self._finish(name)
        except Exception as failed:
            error = failed
        self._agreed(f"{name} written", error)
        files: dict[str, folder.FileRecord] = {}
        try:
            names = folder.file_names(temporary)[self._peers.index :: self._peers.count]
            files = folder.hash_files(temporary, names)
        except OSError as failed:
            error = failed
        self._agreed(f"{name} read back", error)
        mine = {file: dataclasses.astuple(found) for file, found in files.items()}
        told = self._together(f"{name} files", mine)
        everything = {n: folder.FileRecord(*found) for part in told for n, found in part.items()}
        whole = self._whole(f"{name} leaves", digests)
        leaves = {
            leaf: dataclasses.replace(found, digest=whole[leaf])
            for leaf, found in record.leaves.items()
        }
        return dataclasses.replace(record, leaves=leaves, files=dict(sorted(everything.items())))

    def _finish(self, name: str) -> None:
        """Waits for the writer; not for ever, where that of another process has failed.

        Orbax's processes wait for each other, and one that has failed never comes.
        """
        writer, failed = self._writer, f"{name} failed"
        assert writer is not None
        if self._peers.count == 1:
            writer.finish()
            return
        errors: list[Exception] = []

        def finish() -> None:
            try:
                writer.finish()
            except Exception as error:
                errors.append(error)
                self._peers.set_first(failed, f"process {self._peers.index}: {error}")

        thread = threading.Thread(target=finish, name="writer", daemon=True)
        thread.start()
        while thread.is_alive():
            thread.join(0.2)
            told = self._peers.get(failed)
            if told is not None and not errors:
                self._writer = None  # it cannot be closed either; the process ends without it
                raise OSError(told)
        if errors:
            raise errors[0]

    def _whole(self, name: str, digests: arrays.Digests) -> dict[str, str]:
        """The digests of whole leaves, of what each process's pieces add to them."""
        mine = {leaf: found().tolist() for leaf, found in digests.items()}
        told = self._together(name, mine)
        return {
            leaf: text(np.sum([part[leaf] for part in told], axis=0, dtype=np.uint32))
            for leaf in mine
        }

    def _retire(self) -> None:
        """Deletes what need not stay; a step whose files have other sizes does not count."""
        steps = []
        for number in self.steps():
            try:
                record = folder.read_record(self.directory, number)
            except CheckpointError:
                continue  # stays as it is, and is found at the next restore
            if not folder.faults(self.directory / str(number), record, sizes_only=True):
                steps.append(Step(number, record.time, record.metric))
        kept = self._retention.kept(steps)
        folder.remove_steps(self.directory, [s.number for s in steps if s.number not in kept])

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
        # The newest first: whenever it is cut off, what is left is a beginning of the run.
        newer = [number for number in reversed(self.steps()) if number > step]
        return folder.remove_steps(self.directory, newer)

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

    def close(self) -> None:
        """Wait for the save under way and let go of threads.

        Raises:
            CheckpointError: The last save has failed.
        """
        for other in self._beside.values():
            other.close()
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

    def restore(
        self,
        step: int,
        abstract: PyTree,
        *,
        subset: bool = False,
        missing: Mapping[str, int] | None = None,
    ) -> PyTree:
        """Read a step straight into a placement, on any mesh.

        Args:
            step: A complete step.
            abstract: The tree of `jax.ShapeDtypeStruct`s to fill. A leaf goes where its sharding
                says; one without a sharding comes back as a NumPy array (a random key as its
                bits).
            subset: Whether the step may hold more than `abstract` asks for.
            missing: Values of leaves that steps of older versions do not have, by name.

        Returns:
            The tree of `abstract`, with bits as they were saved.

        Raises:
            CheckpointError: There is no such step, it cannot be read, names, shapes or dtypes
                differ from what was saved, or what was read is not what was saved.
        """
        record = self.record(step)
        wanted = arrays.flatten(abstract)
        where = str(self.directory / str(step))
        values = {k: v for k, v in (missing or {}).items() if k not in record.leaves}
        stored = dict(record.leaves) | {k: r for k, r in wanted.records().items() if k in values}
        arrays.check_fit(stored, wanted.records(), subset=subset, where=where)
        restored, found = self._read(step, wanted, values)
        digests = self._whole(self._round("restored"), found)
        apart = [
            name
            for name, record_ in record.leaves.items()
            if record_.digest and digests.get(name, record_.digest) != record_.digest
        ]
        if apart:
            more = f" and {len(apart) - _SHOWN} more" if len(apart) > _SHOWN else ""
            raise CheckpointError(
                f"step {step} was read, and is not what was saved",
                where=where,
                value=", ".join(apart[:_SHOWN]) + more,
                cure="look at the disk and the memory of this machine; "
                "`shardtrain checkpoints RUN verify` reads it all again",
            )
        return restored

    def restore_host(self, step: int) -> dict[str, Any]:
        """Read all of a step as NumPy arrays, without knowing what is in it.

        Args:
            step: A complete step.

        Returns:
            Nested dicts of arrays; random keys as their bits.

        Raises:
            CheckpointError: There is no such step, or it cannot be read.
        """
        tree: dict[str, Any] = self._read(step, arrays.nested(self.record(step).leaves))[0]
        return tree

    def _read(
        self, step: int, wanted: arrays.Leaves, values: Mapping[str, int] | None = None
    ) -> tuple[PyTree, arrays.Digests]:
        path = self.directory / str(step)
        try:
            return arrays.read(path, wanted, values or {})
        except (OSError, ValueError, KeyError) as error:
            raise CheckpointError(
                f"step {step} cannot be read",
                where=str(path),
                value=_shorten(f"{type(error).__name__}: {error}"),
                cure="move this step away; the run goes on from the one before",
            ) from error


def _make_record(
    step: int, leaves: arrays.Leaves, metadata: Mapping[str, object], metric: float | None
) -> folder.StepRecord:
    record = folder.StepRecord(
        step=step,
        leaves=leaves.records(),
        num_bytes=leaves.num_bytes(),
        versions=versions(),
        created=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        metadata=dict(metadata),
        metric=metric if metric is not None and math.isfinite(metric) else None,
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
