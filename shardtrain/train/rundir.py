"""The run directory: who may write it, what is where in it, whether a run may go on in it.

Owns: making the folder, the lock, `resolved.toml`, the comparison of a resumed run's config with
the saved one. Does not own: what is inside checkpoints and metrics, and what a config means.
"""

import contextlib
import dataclasses
import errno
import fcntl
import json
import os
import socket
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Self

from shardtrain.errors import ConfigError

LOCK = "run.lock"
RESOLVED = "resolved.toml"

Kind = Literal["breaks", "free"]

# What may change between two parts of one run: a key, or a section with all that is in it.
BASE = "base"
DISK = "disk"
"""The folder of a run's frozen weights, a folder of checkpoints with the step 0 alone."""
_FREE = frozenset(
    {"run", "mesh", "sharding", "train", "pipeline", "checkpoint", "log", "eval"}
    | {"guard", "watchdog", "targets", "offload"}
    # Where and how far ahead the same batches are read; that they are the same has its own check.
    | {"data.path", "data.tokenizer", "data.cache", "data.prefetch", "data.threads"}
    | {"data.bad_images"}  # until now all images could be read, or they were skipped
    | {"model.attention", "model.layer_loop", "task.loss_chunks"}  # how the same is computed
)
# Keys of free sections that shape the run all the same.
_BREAKS = frozenset({"run.seed", "run.steps", "run.init", "train.precision"})


@dataclasses.dataclass(frozen=True)
class Change:
    """One key that differs; `breaks` means that the run would not be the same run any more."""

    key: str
    old: object
    new: object
    kind: Kind

    def __str__(self) -> str:
        return f"{self.key}: {_word(self.old)} -> {_word(self.new)}"


def checkpoints_in(run_dir: str | Path) -> Path:
    """The folder of a run's checkpoints, without taking hold of the run."""
    return Path(run_dir) / "checkpoints"


def replace_text(path: Path, text: str) -> None:
    """Write a file whose readers, also after a crash, see the old text or the new one.

    Args:
        path: The file.
        text: Its content.

    Raises:
        OSError: The disk is full.
    """
    temporary = path.with_name(path.name + ".tmp")
    with temporary.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def holder(run_dir: str | Path) -> str:
    """Who runs in a folder, as far as its lock tells.

    Args:
        run_dir: The run directory.

    Returns:
        Process and machine; "" for nobody. A process on another machine counts as alive.
    """
    path = Path(run_dir) / LOCK
    return _holder_text(path) if _holder_lives(path) else ""


def changes(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[Change]:
    """Compare two configs key by key.

    Args:
        old: The saved config, as nested dicts.
        new: The config of now.

    Returns:
        What differs, by key. A key that only one of them has is a difference; its other value is
        None.
    """
    before, after = _flatten(old), _flatten(new)
    return [
        Change(key, before.get(key), after.get(key), _kind(key))
        for key in sorted(before.keys() | after.keys())
        if before.get(key) != after.get(key)
    ]


def check_changes(found: Sequence[Change], *, allow: bool, where: str) -> None:
    """Refuse to go on with a run that would not be the same run any more.

    Args:
        found: What `changes` returned.
        allow: Whether the user said that it is meant (`run.allow_changes`).
        where: The run directory, for the message.

    Raises:
        ConfigError: A change breaks the run and is not allowed.
    """
    breaking = [change for change in found if change.kind == "breaks"]
    if breaking and not allow:
        raise ConfigError(
            "the run in this directory was begun with another config",
            where=where,
            value="\n    ".join(["", *map(str, breaking)]),
            allowed="changes of mesh, sharding, train, offload, pipeline, checkpoint, log, eval, "
            "guard, watchdog and targets",
            cure="take another run.dir, undo the changes, or add --run.allow_changes true",
        )


class RunDirectory:
    """One run directory, held by one process at a time."""

    def __init__(self, path: str | Path, *, hold: bool = True, key: str = "run.dir") -> None:
        """Make the directory if it is not there, and take it.

        Args:
            path: The run directory.
            hold: Whether this process takes it; of several that share a run only process 0 does.
            key: What the user gave it with, for messages.

        Raises:
            ConfigError: It cannot be made or written, or another process is running in it.
        """
        self.path = Path(path).absolute()
        self._lock: int | None = None
        if not hold:
            return
        try:
            self._made = not self.path.exists()
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock = _take(self.path / LOCK)
        except _HeldError as error:
            raise ConfigError(
                "another process is running in this directory",
                where=key,
                value=f"{self.path}, held by {error}",
                cure=f"wait for it, stop it, or take another {key}",
            ) from None
        except FileExistsError:
            raise ConfigError(
                "is a file, and a run has a directory",
                where=key,
                value=str(self.path),
                cure=f"take another {key}, or move the file away",
            ) from None
        except OSError as error:
            raise ConfigError(
                "the run directory cannot be written",
                where=key,
                value=f"{self.path}: {error.strerror or error}",
                cure=f"take another {key}, on a disk that you may write",
            ) from error

    @property
    def checkpoints(self) -> Path:
        """The folder of the checkpoints."""
        return checkpoints_in(self.path)

    @property
    def metrics(self) -> Path:
        """The metrics file."""
        return self.path / "metrics.jsonl"

    @property
    def timeline(self) -> Path:
        """The timeline of all attempts."""
        return self.path / "timeline.jsonl"

    @property
    def resolved(self) -> Path:
        """The whole config as run."""
        return self.path / RESOLVED

    def write_resolved(self, text: str) -> None:
        """Write the config as run; a reader sees the old text or the new one.

        Args:
            text: TOML.

        Raises:
            OSError: The disk is full.
        """
        replace_text(self.resolved, text)

    def saved_config(self) -> dict[str, Any] | None:
        """Read the config that was last run here.

        Returns:
            Nested dicts, or None where nothing was run yet.

        Raises:
            ConfigError: `resolved.toml` is damaged.
        """
        try:
            return tomllib.loads(self.resolved.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return None
        except ValueError as error:
            raise ConfigError(
                "the saved config cannot be read",
                where=str(self.resolved),
                value=str(error),
                cure="repair or delete it",
            ) from error

    def close(self) -> None:
        """Let go of the directory; one that was made here and is empty goes again."""
        if self._lock is None:
            return
        with contextlib.suppress(FileNotFoundError):
            (self.path / LOCK).unlink()
        os.close(self._lock)
        self._lock = None
        if self._made:
            with contextlib.suppress(OSError):
                self.path.rmdir()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _HeldError(Exception):
    """Somebody else holds the lock; the text says who."""


def _take(path: Path) -> int:
    while True:
        handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            # The kernel's lock goes with its process, so a dead one never holds it. Some network
            # disks have no such locks; there the pid in the file decides.
            if error.errno in (errno.EAGAIN, errno.EACCES) or _holder_lives(path):
                os.close(handle)
                raise _HeldError(_holder_text(path)) from None
        if not _same_file(handle, path):
            os.close(handle)  # its last holder took the name away between our two calls
            continue
        os.ftruncate(handle, 0)
        os.write(handle, json.dumps({"pid": os.getpid(), "host": socket.gethostname()}).encode())
        return handle


def _same_file(handle: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(handle), os.stat(path))
    except FileNotFoundError:
        return False


def _holder(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_bytes())
        return found if isinstance(found, dict) else {}
    except (OSError, ValueError):
        return {}


def _holder_text(path: Path) -> str:
    found = _holder(path)
    return f"process {found.get('pid', '?')} on {found.get('host', '?')}"


def _holder_lives(path: Path) -> bool:
    found = _holder(path)
    pid = found.get("pid")
    if not isinstance(pid, int):
        return False
    if found.get("host") != socket.gethostname():
        return True  # nothing can be known of a process on another machine
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _flatten(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in config.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping):
            flat |= _flatten(value, f"{name}.")
        elif value is not None:  # TOML has no None: a missing key says the same
            flat[name] = list(value) if isinstance(value, tuple) else value
    return flat


def _kind(key: str) -> Kind:
    if any(key == name or key.startswith(f"{name}.") for name in _BREAKS):
        return "breaks"
    parts = key.split(".")
    free = any(".".join(parts[:count]) in _FREE for count in range(1, len(parts) + 1))
    return "free" if free else "breaks"


def _word(value: object) -> str:
    return "(none)" if value is None else json.dumps(value, default=str)
