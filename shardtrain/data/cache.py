"""The cache folder: where it is, one builder at a time, and what was verified before.

Owns: the folder, locks that die with their process, remembered verifications, atomic small files.
Does not own: what is cached.
"""

import errno
import hashlib
import json
import os
import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from shardtrain.errors import DataError

Say = Callable[[str], None]

_SETTLED_NS = 2_000_000_000
_SIGN_SECONDS = 1.0


def silent(message: str) -> None:
    """Say nothing."""


def cache_folder(setting: str = "") -> Path:
    """Find the cache folder.

    Args:
        setting: `data.cache`; empty for $SHARDTRAIN_CACHE, else the user's cache folder.

    Returns:
        The folder, which may not exist yet.
    """
    chosen = setting or os.environ.get("SHARDTRAIN_CACHE", "")
    if chosen:
        return Path(chosen).expanduser()
    base = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(base) if base else Path.home() / ".cache") / "shardtrain"


def make_folder(path: Path, *, where: str, cure: str) -> None:
    """Create a folder that files will be written to.

    Args:
        path: the folder.
        where: the setting it came from, for the message.
        cure: what to do when it cannot be created or written.

    Raises:
        DataError: it cannot be created or written.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
        writable = os.access(path, os.W_OK | os.X_OK)
    except OSError as error:
        raise DataError(
            f"the folder cannot be created: {error.strerror}",
            where=where,
            value=str(path),
            cure=cure,
        ) from error
    if not writable:
        raise DataError("the folder cannot be written", where=where, value=str(path), cure=cure)


@contextmanager
def exclusive(
    lock: Path, *, say: Say = silent, patience: float = 60.0
) -> Iterator[Callable[[], None]]:
    """Let one process at a time do a piece of work that would be safe, but wasted, twice.

    The operating system frees the lock when its process ends in any way, so a lock file that was
    left behind means nothing. Where the file system has no locks, and where the holder shows no
    sign of life for `patience` seconds, the work is done without one.

    Args:
        lock: the lock file, created if needed.
        say: told when another process is waited for.
        patience: seconds without a sign of life after which the holder is not waited for.

    Yields:
        A function that shows a sign of life; call it as often as you like.
    """
    with lock.open("ab") as handle:
        seen, since, told = -1, time.monotonic(), False
        while not _try_lock(handle):
            if not told:
                say(f"waiting for another process that prepares {lock.parent}")
                told = True
            changed = os.fstat(handle.fileno()).st_mtime_ns
            if changed != seen:
                seen, since = changed, time.monotonic()
            elif time.monotonic() - since > patience:
                say(f"the other process has done nothing for {patience:.0f} s: going on without it")
                break
            time.sleep(0.05)
        yield _sign_of_life(lock)


def _sign_of_life(lock: Path) -> Callable[[], None]:
    last = 0.0

    def alive() -> None:
        nonlocal last
        if time.monotonic() - last > _SIGN_SECONDS:
            last = time.monotonic()
            os.utime(lock)

    return alive


def _try_lock(handle: BinaryIO) -> bool:
    """Take the lock if it is free; True too where there are no locks."""
    try:
        import fcntl
    except ImportError:  # not a POSIX system
        return True
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return error.errno not in (errno.EAGAIN, errno.EACCES)
    return True


def write_atomic(path: Path, content: bytes) -> None:
    """Write a small file that is whole or absent.

    Args:
        path: the file.
        content: what it holds.
    """
    temporary = temporary_name(path)
    try:
        with temporary.open("xb") as handle:
            handle.write(content)
            handle.flush()
            os.fsync(handle.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def temporary_name(path: Path) -> Path:
    """Return a fresh hidden name beside a file."""
    return path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}.tmp")


def sweep(folder: Path, *, older_than: float = 3600.0) -> None:
    """Remove temporary files that killed processes left in a folder of ours.

    Args:
        folder: the folder.
        older_than: seconds since the last write after which nobody can still be writing.
    """
    for path in folder.glob(".*.tmp"):
        try:
            if time.time() - path.stat().st_mtime > older_than:
                path.unlink()
        except OSError:
            continue


@dataclass(frozen=True)
class Fingerprint:
    """A file as it stood when it was looked at."""

    path: Path
    size: int
    mtime_ns: int

    @classmethod
    def of(cls, path: Path) -> "Fingerprint":
        """Look at a file."""
        stat = path.stat()
        return cls(path.resolve(), stat.st_size, stat.st_mtime_ns)

    def was_verified(self, digest: str, cache: Path) -> bool:
        """Tell whether this file, unchanged since, had this digest before.

        Args:
            digest: the digest it should have.
            cache: the cache folder.
        """
        try:
            stored = json.loads(self._record(cache).read_bytes())
        except (OSError, ValueError):
            return False
        return bool(stored == [self.size, self.mtime_ns, digest])

    def remember_verified(self, digest: str, cache: Path) -> None:
        """Note that the file had this digest, unless a later write could still look the same.

        A cache that cannot be written is no fault: the file is verified again next time.

        Args:
            digest: its digest, computed after the file was looked at.
            cache: the cache folder.
        """
        if time.time_ns() - self.mtime_ns < _SETTLED_NS:
            return
        record = self._record(cache)
        try:
            record.parent.mkdir(parents=True, exist_ok=True)
            write_atomic(record, json.dumps([self.size, self.mtime_ns, digest]).encode())
        except OSError:
            return

    def _record(self, cache: Path) -> Path:
        name = hashlib.sha256(os.fsencode(self.path)).hexdigest()[:32]
        return cache / "verified" / f"{name}.json"
