"""Files for what rests on a disk: a row of tensors at a time, read ahead and written behind.

Owns: files, staging buffers, threads, and the order of reads and writes of one device's rows. Does
not own: which tensors are here, and when a program asks for them (`disk`).

The files are scratch: a run writes them from its checkpoint when it begins, and they are gone when
it ends. Each row has a version, which a write raises by one and a read must name: what is read is
what was written, or an error.
"""

import fcntl
import mmap
import os
import shutil
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

PAGE: Final = 4096
"""Bytes to which rows and buffers are aligned, as reads past the page cache want them."""
THREADS: Final = 4
"""Reads and writes under way at once, of all devices of a process."""
BUFFERS: Final = 4
"""Rows of one device and group in memory at once: in use, read ahead, and two being written."""

_LOCK: Final = "in-use"
_CALL: Final = 1 << 30

Array = NDArray[Any]


@dataclass(frozen=True)
class Block:
    """One tensor's part of a row, as one device has it."""

    path: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def nbytes(self) -> int:
        """Bytes of it."""
        return int(np.prod(self.shape, dtype=np.int64)) * np.dtype(self.dtype).itemsize

    @property
    def room(self) -> int:
        """Bytes of it in a file, where it begins at a page."""
        return -(-max(self.nbytes, 1) // PAGE) * PAGE


@dataclass(frozen=True)
class Group:
    """Tensors that are read and written together, row by row."""

    name: str
    rows: int
    blocks: tuple[Block, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of a row in its file, with what aligns it."""
        return sum(block.room for block in self.blocks)

    def views(self, buffer: mmap.mmap) -> list[Array]:
        """The blocks of a row in a buffer."""
        found, start = [], 0
        for block in self.blocks:
            found.append(_view(block, buffer, start))
            start += block.room
        return found

    def block(self, path: str) -> tuple[Block, int]:
        """A tensor's block, and where in a row it begins."""
        start = 0
        for block in self.blocks:
            if block.path == path:
                return block, start
            start += block.room
        raise KeyError(path)


def _require(rows: "_Rows", row: int, version: int) -> None:
    """Refuses to read another version than the reader means."""
    if rows.versions[row] != version:
        raise RuntimeError(
            f"row {row} of {rows.group.name} is at version {rows.versions[row]}, not {version}"
        )


def _view(block: Block, buffer: mmap.mmap, start: int = 0) -> Array:
    part = np.frombuffer(buffer, np.uint8, block.nbytes, start)
    return part.view(block.dtype).reshape(block.shape)


@dataclass(eq=False)
class _Rows:
    """The rows of one group that one device has."""

    group: Group
    file: int
    free: list[mmap.mmap]
    versions: list[int]
    lock: threading.Condition = field(default_factory=threading.Condition)
    writing: dict[int, Future[None]] = field(default_factory=dict)
    ahead: tuple[int, int, mmap.mmap, Future[None]] | None = None
    """Row, version, buffer, and its read."""
    lent: tuple[int, int, mmap.mmap] | None = None
    """Row, version and buffer of what was read last: its reader copies it after the call."""
    last: int = -1

    def take(self) -> mmap.mmap:
        """A free buffer; waits for one."""
        with self.lock:
            while not self.free:
                self.lock.wait()
            return self.free.pop()

    def give(self, buffer: mmap.mmap) -> None:
        """Gives a buffer back."""
        with self.lock:
            self.free.append(buffer)
            self.lock.notify()


class DiskFiles:
    """The files of one program in one process; none is made before the first write."""

    def __init__(self, parent: Path, *, threads: int = THREADS) -> None:
        """Opens nothing yet.

        Args:
            parent: the folder in which they get one of their own.
            threads: reads and writes under way at once.
        """
        self.parent = parent
        self._num_threads = threads
        self._rows: dict[tuple[str, int], _Rows] = {}
        self._lock = threading.Lock()
        self.read_bytes = self.written_bytes = 0

    @cached_property
    def folder(self) -> Path:
        """The folder of these files; that of a process that is gone is deleted first."""
        folder = own_folder(self.parent)
        weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)
        return folder

    @cached_property
    def _threads(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(self._num_threads, thread_name_prefix="disk")

    @cached_property
    def is_direct(self) -> bool:
        """Whether reads and writes pass the page cache by; some file systems cannot."""
        return can_be_direct(self.folder)

    def allocate(self, group: Group, device: int) -> None:
        """Makes the file of a group at its full size.

        Raises:
            OSError: the disk is full.
        """
        self._of(group, device)

    def write(self, group: Group, device: int, row: int, arrays: Sequence[Array]) -> int:
        """Copies a row and begins to write it.

        Args:
            group: what it is a row of.
            device: whose.
            row: its number.
            arrays: one for each block.

        Returns:
            The row's new version.
        """
        rows = self._of(group, device)
        self._landed(rows, row)
        buffer = rows.take()
        for view, array in zip(group.views(buffer), arrays, strict=True):
            view[...] = array
        rows.versions[row] += 1
        with self._lock:  # devices write at the same time
            self.written_bytes += group.nbytes
        rows.writing[row] = self._begin(self._put, rows, row, buffer)
        return rows.versions[row]

    def read(self, group: Group, device: int, row: int, version: int) -> list[Array]:
        """A row; it may be read until the next read of this group and device.

        Args:
            group: what it is a row of.
            device: whose.
            row: its number.
            version: which the reader means.

        Raises:
            RuntimeError: the disk has another version: a fault of ours.
        """
        rows = self._of(group, device)
        _require(rows, row, version)
        buffer = self._fetched(rows, row, version)
        if rows.lent is not None and rows.lent[2] is not buffer:
            rows.give(rows.lent[2])
        rows.lent = (row, version, buffer)
        self._go_ahead(rows, row, version)
        return group.views(buffer)

    def store(self, group: Group, device: int, path: str, rows: Sequence[Array]) -> None:
        """Writes one tensor of all rows, and waits; the group is at version 0 then.

        Args:
            group: what it is of.
            device: whose.
            path: which tensor.
            rows: each row's.
        """
        there = self._of(group, device)
        self._settle(there)
        block, start = group.block(path)
        buffer = mmap.mmap(-1, block.room)
        for row, array in enumerate(rows):
            _view(block, buffer)[...] = array
            self._pwrite(there.file, buffer, row * group.nbytes + start)
        there.versions[:] = [0] * group.rows

    def load(self, group: Group, device: int, path: str, version: int) -> list[Array]:
        """One tensor of all rows, as copies.

        Args:
            group: what it is of.
            device: whose.
            path: which tensor.
            version: which the reader means.

        Raises:
            RuntimeError: the disk has another version: a fault of ours.
        """
        there = self._of(group, device)
        for row in range(group.rows):
            _require(there, row, version)
        self._settle(there)
        block, start = group.block(path)
        buffer, found = mmap.mmap(-1, block.room), []
        for row in range(group.rows):
            self._preadv(there.file, buffer, row * group.nbytes + start)
            found.append(_view(block, buffer).copy())
        return found

    def close(self) -> None:
        """Waits for writes and deletes the files."""
        if "folder" not in self.__dict__:
            return
        self._threads.shutdown(wait=True)
        for rows in self._rows.values():
            os.close(rows.file)
        self._rows.clear()
        shutil.rmtree(self.folder, ignore_errors=True)

    # -- one device's rows

    def _of(self, group: Group, device: int) -> _Rows:
        key = (group.name, device)
        with self._lock:
            if key not in self._rows:
                flags = os.O_RDWR | os.O_CREAT | (os.O_DIRECT if self.is_direct else 0)
                name = f"{group.name.replace('/', '.')}.{device}.rows"
                file = os.open(self.folder / name, flags, 0o600)
                _reserve(file, group.nbytes * group.rows)
                buffers = [mmap.mmap(-1, group.nbytes) for _ in range(BUFFERS)]
                self._rows[key] = _Rows(group, file, buffers, [0] * group.rows)
            return self._rows[key]

    def _settle(self, rows: _Rows) -> None:
        """Waits until all that was begun is done, and forgets what was read."""
        for row in list(rows.writing):
            self._landed(rows, row)
        if rows.ahead is not None:
            *_, buffer, read = rows.ahead
            rows.ahead = None
            read.result()
            rows.give(buffer)
        if rows.lent is not None:
            rows.give(rows.lent[2])
            rows.lent = None

    def _landed(self, rows: _Rows, row: int) -> None:
        """Waits until an earlier write of the row is on disk."""
        if (before := rows.writing.pop(row, None)) is not None:
            before.result()

    def _fetched(self, rows: _Rows, row: int, version: int) -> mmap.mmap:
        """A buffer with the row: the one just read, the one read ahead, or one that is read now."""
        if rows.lent is not None and rows.lent[:2] == (row, version):
            return rows.lent[2]
        if rows.ahead is not None:
            *which, buffer, read = rows.ahead
            rows.ahead = None
            read.result()
            if which == [row, version]:
                return buffer
            rows.give(buffer)
        self._landed(rows, row)
        buffer = rows.take()
        self._get(rows, row, buffer)
        return buffer

    def _go_ahead(self, rows: _Rows, row: int, version: int) -> None:
        """Begins to read the row that comes next, if reads go on as they went."""
        step = -1 if row < rows.last or row == rows.group.rows - 1 == rows.last else 1
        rows.last, following = row, row + step
        if rows.ahead is not None or not 0 <= following < rows.group.rows or not rows.free:
            return
        if rows.versions[following] != version:
            return
        self._landed(rows, following)
        buffer = rows.take()
        read = self._begin(self._get, rows, following, buffer)
        rows.ahead = (following, version, buffer, read)

    # -- in threads

    def _begin(self, call: Callable[..., None], *args: Any) -> Future[None]:
        try:
            return self._threads.submit(call, *args)
        except RuntimeError:  # the interpreter ends, and a program still runs: at once, then
            call(*args)
            done: Future[None] = Future()
            done.set_result(None)
            return done

    def _put(self, rows: _Rows, row: int, buffer: mmap.mmap) -> None:
        try:
            self._pwrite(rows.file, buffer, row * rows.group.nbytes)
        finally:
            rows.give(buffer)

    def _get(self, rows: _Rows, row: int, buffer: mmap.mmap) -> None:
        self._preadv(rows.file, buffer, row * rows.group.nbytes)
        with self._lock:
            self.read_bytes += rows.group.nbytes

    def _pwrite(self, file: int, buffer: mmap.mmap, start: int) -> None:
        for part, at in _parts(buffer):
            if os.pwrite(file, part, start + at) != len(part):
                raise OSError(f"a write to {self.folder} was cut off: is the disk full?")

    def _preadv(self, file: int, buffer: mmap.mmap, start: int) -> None:
        for part, at in _parts(buffer):
            if os.preadv(file, [part], start + at) != len(part):
                raise OSError(f"a read from {self.folder} was cut off")


def _parts(buffer: mmap.mmap) -> Iterator[tuple[memoryview, int]]:
    """A buffer in pieces that one call takes: Linux moves no more than 2 GiB less a page."""
    view = memoryview(buffer)
    for start in range(0, len(view), _CALL):
        yield view[start : start + _CALL], start


# -- the folder and the disk


def _reserve(file: int, size: int) -> None:
    """Makes a file that large; where the system can, so that writes to it cannot fail."""
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(file, 0, size)
    else:
        os.ftruncate(file, size)


def own_folder(parent: Path) -> Path:
    """Makes a folder for this process's files, and deletes those that nobody uses any more.

    A folder is in use as long as a process holds the lock of the file in it.

    Args:
        parent: where.
    """
    parent.mkdir(parents=True, exist_ok=True)
    for old in parent.glob("disk-*"):
        if _lock(old / _LOCK) is not None:
            shutil.rmtree(old, ignore_errors=True)
    for number in range(1 << 16):
        folder = parent / f"disk-{os.getpid()}-{number}"
        try:
            folder.mkdir()
        except FileExistsError:
            continue
        lock = folder / _LOCK
        lock.touch()
        assert _lock(lock) is not None, lock  # stays open, and so locked, until the process ends
        return folder
    raise OSError(f"{parent} is full of folders of this process")


def _lock(path: Path) -> int | None:
    """Takes the lock of a file; None where somebody else has it, or there is none yet."""
    try:
        file = os.open(path, os.O_RDWR)
    except OSError:
        return None
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(file)
        return None
    return file


def can_be_direct(folder: Path) -> bool:
    """Whether files of a folder can be read and written past the page cache."""
    path = folder / "probe"
    try:
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_DIRECT, 0o600)
    except (OSError, AttributeError):
        return False
    try:
        os.pwrite(file, mmap.mmap(-1, PAGE), 0)
    except OSError:
        return False
    finally:
        os.close(file)
        path.unlink()
    return True


@dataclass(frozen=True)
class Speed:
    """What a disk can do: bytes a second, past the page cache where it can be passed by."""

    read: float
    write: float
    direct: bool


def measure(folder: Path, size: int = 64 << 20, piece: int = 4 << 20) -> Speed:
    """Measures a disk as the run will use it: several pieces at once.

    Args:
        folder: on it.
        size: bytes that are written and read.
        piece: bytes of each call.

    Raises:
        OSError: it cannot be written.
    """
    direct = can_be_direct(folder)
    path, flags = folder / "probe", os.O_RDWR | os.O_CREAT | (os.O_DIRECT if direct else 0)
    buffer = mmap.mmap(-1, piece)
    buffer.write(os.urandom(piece))  # some disks compress
    file = os.open(path, flags, 0o600)
    starts, seconds = range(0, size, piece), []
    try:
        _reserve(file, size)
        with ThreadPoolExecutor(THREADS) as pool:
            begun = time.perf_counter()
            list(pool.map(lambda start: os.pwrite(file, buffer, start), starts))
            os.fdatasync(file)
            seconds.append(time.perf_counter() - begun)
            buffers = [mmap.mmap(-1, piece) for _ in starts]
            begun = time.perf_counter()
            list(pool.map(os.preadv, [file] * len(starts), [[b] for b in buffers], starts))
            seconds.append(time.perf_counter() - begun)
    finally:
        os.close(file)
        path.unlink()
    return Speed(read=size / seconds[1], write=size / seconds[0], direct=direct)
