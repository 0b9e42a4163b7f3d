"""`metrics.jsonl`: one JSON object a line, a row for every step and a line for every event.

Owns: the order of the keys, what NaN becomes, what a resumed run keeps of the file. Does not own:
the values (they come from the step and the loop) and the trackers that show them.

A row has `step` (updates done) and values; an event has `event` and `step`. A file that is killed
in the middle of a line stays readable: the torn line is cut off when the file is opened again.
"""

import dataclasses
import errno
import json
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Self

from shardtrain.errors import UserError

KEYS = (
    "step",
    "sample_digest",
    "loss",
    "val_loss",
    "val_top1",
    "val_top5",
    "val_masked_accuracy",
    "val_next_loss",
    "val_next_accuracy",
    "val_auc",
    "val_recall",
    "grad_norm",
    "learning_rate",
    "tokens",
    "examples",
    "tokens_per_second",
    "examples_per_second",
    "mfu",
    "step_time",
    "data_wait",
)

Value = object  # a number (of Python, NumPy or jax), a string, a bool, None, or lists and dicts


@dataclasses.dataclass(frozen=True)
class Truncation:
    """What a resumed run took away: lines, and the last step that anybody had seen."""

    dropped: int
    last_step: int


class MetricsFile:
    """The metrics of one run; every line is in the file when the call returns."""

    def __init__(self, path: str | Path) -> None:
        """Open a file for appending; make it if it is not there, cut off a torn last line.

        Args:
            path: The file.

        Raises:
            OSError: It cannot be written.
        """
        self.path = Path(path)
        self._file = self.path.open("ab", buffering=0)
        whole = _whole_lines(self.path)
        if whole < self.path.stat().st_size:
            os.truncate(self.path, whole)

    def row(self, step: int, values: Mapping[str, Value]) -> None:
        """Append the values of one step.

        Args:
            step: Updates done; the first row is 1.
            values: By name; NaN and infinities become null.

        Raises:
            UserError: The disk is full, or has failed.
        """
        row = {"step": step, **values}
        known = {key: row[key] for key in KEYS if key in row}
        self._append(known | row)

    def event(self, name: str, step: int, values: Mapping[str, Value] | None = None) -> None:
        """Append an event line.

        Args:
            name: compile, save, restore, eval, sample, skip, rollback, stop, ...
            step: Updates done when it happened.
            values: What belongs to it.

        Raises:
            UserError: The disk is full, or has failed.
        """
        self._append({"event": name, "step": step, **(values or {})})

    def flush(self) -> None:
        """Wait until the disk has every line.

        Raises:
            UserError: The disk is full, or has failed.
        """
        try:
            os.fsync(self._file.fileno())
        except OSError as error:
            raise self._unwritten(error) from error

    def truncate(self, step: int) -> Truncation:
        """Go back to a step: drop rows and events after it, and lines that cannot be read.

        Call it before the first row of a resumed run, and write the result's `last_step` as
        `replayed_to` of the `restore` event: steps up to it will be seen a second time.

        Args:
            step: The restored step; 0 empties the file but for events of step 0.

        Returns:
            How many lines went, and the last step that the file knew of.

        Raises:
            OSError: The disk is full.
        """
        dropped, last = 0, 0
        temporary = self.path.with_name(self.path.name + ".tmp")
        with self.path.open("rb") as old, temporary.open("wb") as new:
            for line in old:
                entry = _parse(line)
                if entry is not None:
                    last = max(last, _int(entry.get("step")), _int(entry.get("replayed_to")))
                if entry is None or _int(entry.get("step")) > step:
                    dropped += 1
                else:
                    new.write(line)
            new.flush()
            os.fsync(new.fileno())
        temporary.replace(self.path)
        self._file.close()
        self._file = self.path.open("ab", buffering=0)
        return Truncation(dropped, last)

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _append(self, entry: Mapping[str, Value]) -> None:
        text = json.dumps({key: plain(value) for key, value in entry.items()}, allow_nan=False)
        line = text.encode() + b"\n"
        try:
            if self._file.write(line) != len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            raise self._unwritten(error) from error

    def _unwritten(self, error: OSError) -> UserError:
        return UserError(
            "the metrics cannot be written",
            where=str(self.path),
            value=error.strerror or str(error),
            cure="free some space, then run again: the run goes on from its newest checkpoint",
        )


def read_entries(path: str | Path) -> Iterator[dict[str, Any]]:
    """Read rows and events, also while a run is writing them; torn lines are left out.

    Args:
        path: The file.

    Yields:
        One dict for each line, in the order of the file.

    Raises:
        OSError: It cannot be read.
    """
    with Path(path).open("rb") as file:
        for line in file:
            entry = _parse(line)
            if entry is not None:
                yield entry


def read_rows(path: str | Path) -> list[dict[str, Any]]:
    """Read the rows of a metrics file, also while a run is writing it.

    Args:
        path: The file.

    Returns:
        One dict for each step, in the order of the file.

    Raises:
        OSError: It cannot be read.
    """
    return [entry for entry in read_entries(path) if "event" not in entry]


def read_events(path: str | Path) -> list[dict[str, Any]]:
    """Read the events of a metrics file, also while a run is writing it.

    Args:
        path: The file.

    Returns:
        One dict for each event, in the order of the file.

    Raises:
        OSError: It cannot be read.
    """
    return [entry for entry in read_entries(path) if "event" in entry]


def plain(value: Value) -> Any:
    """Turn a value into what JSON can hold.

    Args:
        value: A number of Python, NumPy or jax, a string, None, or lists and dicts of them.

    Returns:
        The same in Python's own types; NaN and infinities are None.

    Raises:
        TypeError: It is none of these.
    """
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    item = getattr(value, "item", None)
    if item is None:
        raise TypeError(f"{type(value).__name__} is no value for a metrics file")
    return plain(item())


def _parse(line: bytes) -> dict[str, Any] | None:
    if not line.endswith(b"\n"):
        return None
    try:
        entry = json.loads(line)
    except ValueError:
        return None
    return entry if isinstance(entry, dict) else None


def _whole_lines(path: Path) -> int:
    with path.open("rb") as file:
        end = file.seek(0, os.SEEK_END)
        while end:
            begin = max(0, end - 4096)
            file.seek(begin)
            found = file.read(end - begin).rfind(b"\n")
            if found >= 0:
                return begin + found + 1
            end = begin
    return 0


def _int(value: object) -> int:
    return value if isinstance(value, int) else 0
