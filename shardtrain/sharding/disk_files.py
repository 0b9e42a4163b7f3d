"""Files for what rests on a disk: a row of tensors at a time, read ahead and written behind.

Owns: files, staging buffers, threads, and the order of reads and writes of one device's rows. Does
not own: which tensors are here, and when a program asks for them (`disk`).

The files are scratch: a run writes them from its checkpoint when it begins, and they are gone when
it ends. Each row has a version, which a write raises by one and a read must name: what is read is
what was written, or an error.
"""

import contextlib
import mmap
import os
import threading
from collections.abc import Sequence
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


@dataclass(frozen=True)
class Group:
    """Tensors that are read and written together, row by row."""

    name: str
    rows: int
    blocks: tuple[Block, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of a row in its file, with what aligns it."""
        size = sum(block.nbytes for block in self.blocks)
        return -(-max(size, 1) // PAGE) * PAGE

    def views(self, buffer: mmap.mmap) -> list[Array]:
        """The blocks of a row in a buffer."""
        found, start = [], 0
        for block in self.blocks:
            part = np.frombuffer(buffer, np.uint8, block.nbytes, start)
            found.append(part.view(block.dtype).reshape(block.shape))
            start += block.nbytes
        return found


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
    """The files of one process."""

    def __init__(self, folder: Path, *, threads: int = THREADS) -> None:
        """Makes the folder; files are made at their first write.

        Args:
            folder: of this process alone.
            threads: reads and writes under way at once.
        """
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="disk")
        self._rows: dict[tuple[str, int], _Rows] = {}
        self._lock = threading.Lock()
        self.read_bytes = self.written_bytes = 0

    @cached_property
    def is_direct(self) -> bool:
        """Whether reads and writes pass the page cache by; some file systems cannot."""
        path = self.folder / "probe"
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
        self.written_bytes += group.nbytes
        rows.writing[row] = self._threads.submit(self._put, rows, row, buffer)
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
        if rows.versions[row] != version:
            raise RuntimeError(
                f"row {row} of {group.name} is at version {rows.versions[row]}, not {version}"
            )
        buffer = self._fetched(rows, row, version)
        if rows.lent is not None and rows.lent[2] is not buffer:
            rows.give(rows.lent[2])
        rows.lent = (row, version, buffer)
        self._go_ahead(rows, row, version)
        return group.views(buffer)

    def close(self) -> None:
        """Waits for writes and deletes the files."""
        self._threads.shutdown(wait=True)
        for rows in self._rows.values():
            os.close(rows.file)
        self._rows.clear()
        for path in self.folder.glob("*.rows"):
            with contextlib.suppress(OSError):
                path.unlink()
        with contextlib.suppress(OSError):
            self.folder.rmdir()

    # -- one device's rows

    def _of(self, group: Group, device: int) -> _Rows:
        key = (group.name, device)
        with self._lock:
            if key not in self._rows:
                flags = os.O_RDWR | os.O_CREAT | (os.O_DIRECT if self.is_direct else 0)
                name = f"{group.name.replace('/', '.')}.{device}.rows"
                file = os.open(self.folder / name, flags, 0o600)
                os.posix_fallocate(file, 0, group.nbytes * group.rows)
                buffers = [mmap.mmap(-1, group.nbytes) for _ in range(BUFFERS)]
                self._rows[key] = _Rows(group, file, buffers, [0] * group.rows)
            return self._rows[key]

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
        read = self._threads.submit(self._get, rows, following, buffer)
        rows.ahead = (following, version, buffer, read)

    # -- in threads

    def _put(self, rows: _Rows, row: int, buffer: mmap.mmap) -> None:
        try:
            size = rows.group.nbytes
            if os.pwrite(rows.file, buffer, row * size) != size:
                raise OSError(f"a write to {self.folder} was cut off: is the disk full?")
        finally:
            rows.give(buffer)

    def _get(self, rows: _Rows, row: int, buffer: mmap.mmap) -> None:
        size = rows.group.nbytes
        if os.preadv(rows.file, [buffer], row * size) != size:
            raise OSError(f"a read from {self.folder} was cut off")
        self.read_bytes += size
