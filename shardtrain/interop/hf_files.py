"""The safetensors files of a Hugging Face folder: found, checked, mapped, written.

Owns: which files count, what is refused (pickles, an index that leaves the folder, files cut off),
and cutting an export into files. Does not own: what the tensors mean.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import ml_dtypes
import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from shardtrain.errors import CheckpointError

SINGLE: Final = "model.safetensors"
INDEX: Final = "model.safetensors.index.json"
DTYPES: Final[dict[str, np.dtype[Any]]] = {
    "F32": np.dtype(np.float32),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F16": np.dtype(np.float16),
}
"""Types of weights, by their names in safetensors files."""
_PICKLES = ("pytorch_model.bin", "pytorch_model.bin.index.json", "model.bin")
_FILE_BYTES = 5_000_000_000
_SAVE_AGAIN = (
    "load it with transformers where you trust it, and save it again: "
    "`model.save_pretrained(FOLDER)` writes safetensors"
)


@dataclass(frozen=True)
class Entry:
    """Where a tensor lies."""

    path: Path
    dtype: str
    shape: tuple[int, ...]
    offset: int
    """In bytes, from the beginning of the file."""

    @property
    def where(self) -> str:
        """The file."""
        return str(self.path)


class WeightFiles:
    """The tensors of a folder by name; read from a mapping of the file when they are asked for."""

    def __init__(self, folder: str | Path) -> None:
        """Find the files and read their headers.

        Args:
            folder: with `model.safetensors`, or several files and their index.

        Raises:
            CheckpointError: there are none, or one is missing, damaged or outside of the folder.
        """
        self.folder = Path(folder)
        index = self.folder / INDEX
        named = {} if (self.folder / SINGLE).is_file() else _read_index(index)
        files = sorted(set(named.values())) or [SINGLE]
        if not named and not (self.folder / SINGLE).is_file():
            raise _no_weights(self.folder)
        self.entries: dict[str, Entry] = {}
        for file in files:
            for name, entry in _read_header(self.folder / file).items():
                if name in self.entries:
                    raise CheckpointError(
                        f"{name} is in two files",
                        where=entry.where,
                        value=self.entries[name].where,
                    )
                self.entries[name] = entry
        for name, file in named.items():
            found = self.entries.get(name)
            if found is None or found.path.name != file:
                raise CheckpointError(
                    f"{name} is not in this file, though {INDEX} says so",
                    where=str(self.folder / file),
                    cure="copy the folder again",
                )

    @property
    def where(self) -> str:
        """The only file, or the index of several."""
        files = {entry.where for entry in self.entries.values()}
        return files.pop() if len(files) == 1 else str(self.folder / INDEX)

    def read(self, name: str) -> NDArray[Any]:
        """Return a tensor; it is read from the disk where it is used."""
        entry = self.entries[name]
        dtype = DTYPES[entry.dtype]
        if not np.prod(entry.shape):
            return np.zeros(entry.shape, dtype)
        return np.memmap(entry.path, dtype, "r", entry.offset, entry.shape).view(np.ndarray)


def _read_index(path: Path) -> dict[str, str]:
    """Tensor to file; empty where there is no index."""
    if not path.is_file():
        return {}
    try:
        named = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
        assert isinstance(named, dict)
    except (OSError, ValueError, KeyError, TypeError, AssertionError):
        raise CheckpointError(
            "is no index of safetensors files", where=str(path), cure="copy the folder again"
        ) from None
    for name, file in named.items():
        plain = isinstance(file, str) and "\\" not in file and Path(file).name == file
        if not plain or not str(file).endswith(".safetensors"):
            raise CheckpointError(
                f"{name} would be read from outside of this folder, or from no safetensors file",
                where=str(path),
                value=json.dumps(file),
                allowed="names of .safetensors files in the same folder",
            )
    return named


def _no_weights(folder: Path) -> CheckpointError:
    pickles = [name for name in _PICKLES if (folder / name).exists()]
    if pickles:
        return CheckpointError(
            "weights in a pickle are not read: loading one runs whatever code is in it",
            where=str(folder / pickles[0]),
            allowed=f"{SINGLE}, or several files with {INDEX}",
            cure=_SAVE_AGAIN,
        )
    return CheckpointError(
        "there are no weights in this folder",
        where=str(folder),
        allowed=f"{SINGLE}, or several files with {INDEX}",
        cure=_SAVE_AGAIN,
    )


def _read_header(path: Path) -> dict[str, Entry]:
    if not path.is_file():
        raise CheckpointError("this file is missing", where=str(path), cure="copy the folder again")
    try:
        with safe_open(path, framework="numpy"):  # proves the header and the size of the file
            pass
        with path.open("rb") as handle:
            length = int.from_bytes(handle.read(8), "little")
            header: Mapping[str, Any] = json.loads(handle.read(length))
    except (SafetensorError, OSError, ValueError) as error:
        raise CheckpointError(
            "this file is damaged or cut off",
            where=str(path),
            value=str(error),
            cure="copy it again",
        ) from None
    entries = {}
    for name, found in header.items():
        if name == "__metadata__":
            continue
        begin = 8 + length + found["data_offsets"][0]
        entries[name] = Entry(path, found["dtype"], tuple(found["shape"]), begin)
    return entries


# -- writing


def write_files(
    folder: Path,
    shapes: Mapping[str, tuple[Sequence[int], str]],
    tensors: Iterable[tuple[str, NDArray[Any]]],
    *,
    file_bytes: int = _FILE_BYTES,
) -> list[Path]:
    """Write tensors as transformers does, no more of them in memory than fill one file.

    Args:
        folder: an empty folder.
        shapes: shape and type of every tensor, in the order in which they come.
        tensors: name and tensor.
        file_bytes: most bytes of tensors in one file.

    Returns:
        The files: one, or several and an index.

    Raises:
        CheckpointError: a file cannot be written.
    """
    sizes = {n: int(np.prod(s)) * DTYPES[dtype].itemsize for n, (s, dtype) in shapes.items()}
    groups: list[list[str]] = [[]]
    room = file_bytes
    for name, size in sizes.items():
        if size > room and groups[-1]:
            groups.append([])
            room = file_bytes
        groups[-1].append(name)
        room -= size
    names = [_file_name(number, len(groups)) for number in range(len(groups))]
    coming = iter(tensors)
    for file, group in zip(names, groups, strict=True):
        held: dict[str, NDArray[Any]] = {}
        for name in group:
            found, tensor = next(coming)
            assert found == name, (found, name)
            held[name] = tensor
        try:
            save_file(held, folder / file, metadata={"format": "pt"})
        except (OSError, SafetensorError) as error:  # such as a full disk
            raise CheckpointError(f"cannot be written: {error}", where=str(folder / file)) from None
    paths = [folder / file for file in names]
    if len(groups) > 1:
        weight_map = {n: f for f, group in zip(names, groups, strict=True) for n in group}
        index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": weight_map}
        paths.append(folder / INDEX)
        paths[-1].write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    return paths


def _file_name(number: int, count: int) -> str:
    return SINGLE if count == 1 else f"model-{number + 1:05}-of-{count:05}.safetensors"
