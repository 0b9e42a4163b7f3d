"""Images packed into shards: WebDataset's tar files and Parquet.

Owns: the index of what is where in them, made once at the start, and reading one image. Does not
own: decoding (`image_codec`), which files a run takes (`image_files`).
"""

import hashlib
import tarfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from shardtrain.data.image_codec import SUFFIXES, ImageFault, Pixels, decode
from shardtrain.data.image_parts import Damage, Part
from shardtrain.errors import DataError

_BLOCK: Final = 512
_LABELS: Final = ("label", "labels", "cls", "fine_label", "target")
_IMAGES: Final = ("image", "img", "jpg", "png", "bytes")


# -- WebDataset


@dataclass(frozen=True, eq=False)
class TarImages:
    """Images in tar files (an `ImageSource`)."""

    paths: tuple[Path, ...]
    shards: NDArray[np.int32] = field(repr=False)
    """Which file each image is in."""
    offsets: NDArray[np.int64] = field(repr=False)
    sizes: NDArray[np.int64] = field(repr=False)
    keys: Sequence[str] = field(repr=False)
    labels: NDArray[np.int32] = field(repr=False)
    channels: int

    def read(self, index: int) -> Pixels:
        """Read an image; see `ImageSource`."""
        try:
            with self.paths[self.shards[index]].open("rb") as file:
                file.seek(int(self.offsets[index]))
                data = file.read(int(self.sizes[index]))
        except OSError as error:
            raise ImageFault(str(error)) from error
        return decode(data, self.channels)

    def place(self, index: int) -> str:
        """Return where an image lies."""
        return f"{self.paths[self.shards[index]]}: {self.keys[index]} at {self.offsets[index]}"


@dataclass
class _Index:
    """What is found in tar files, image by image."""

    shards: list[int] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    keys: list[str] = field(default_factory=list)
    labels: list[int] = field(default_factory=list)


def read_tars(paths: Sequence[Path], channels: int, damage: Damage) -> Part:
    """WebDataset's shards: files of one sample have one name, and .cls has the class as a number.

    Args:
        paths: the shards, in order.
        channels: of what is read.
        damage: what happens to a shard that is cut off.

    Raises:
        DataError: a shard is cut off, or a sample lacks its class.
    """
    index = _Index()
    for number, path in enumerate(paths):
        _index_tar(path, number, index, damage)
    labels = np.array(index.labels, np.int32)
    source = TarImages(
        tuple(paths),
        np.array(index.shards, np.int32),
        np.array(index.offsets, np.int64),
        np.array(index.sizes, np.int64),
        index.keys,
        labels,
        channels,
    )
    digest = hashlib.blake2b("\n".join(index.keys).encode(), digest_size=16)
    digest.update(source.sizes.tobytes() + labels.tobytes())
    classes = tuple(map(str, range(int(labels.max(initial=-1)) + 1)))
    return Part(source, classes, digest.hexdigest())


def _index_tar(path: Path, number: int, index: _Index, damage: Damage) -> None:
    size, end, samples = path.stat().st_size, 0, 0
    images: dict[str, tuple[int, int]] = {}
    classes: dict[str, int] = {}
    cut = ""
    try:
        with tarfile.open(path, "r:") as tar:
            for member in tar:
                stop = member.offset_data + member.size
                if stop > size:
                    cut = f"cut off within {member.name}, which begins at {member.offset_data}"
                    break
                end = member.offset_data + -(-member.size // _BLOCK) * _BLOCK
                _take(path, tar, member, images, classes)
    except (tarfile.TarError, EOFError) as error:
        cut = f"cut off or damaged after {end} bytes: {error}"
    if not cut and size < end + 2 * _BLOCK:  # the mark of the end
        cut = f"cut off after {size} bytes: the mark of its end is missing"
    if cut:
        damage.met(str(path), cut)
    for key, (offset, length) in images.items():
        if key in classes:
            index.shards.append(number)
            index.offsets.append(offset)
            index.sizes.append(length)
            index.keys.append(key)
            index.labels.append(classes[key])
            samples += 1
        elif not cut:
            raise DataError(
                "a sample has no class", where=f"{path}: {key}", allowed=f"a file {key}.cls beside"
            )
    if not samples and not cut:
        raise DataError("there are no images in it", where=str(path))


def _take(
    path: Path,
    tar: tarfile.TarFile,
    member: tarfile.TarInfo,
    images: dict[str, tuple[int, int]],
    classes: dict[str, int],
) -> None:
    """Takes a file of a sample, if it is an image or its class."""
    if not member.isfile():
        return
    folder, slash, name = member.name.rpartition("/")
    stem, _, suffix = name.partition(".")
    key = f"{folder}{slash}{stem}"
    if f".{suffix.lower()}" in SUFFIXES:
        images[key] = (member.offset_data, member.size)
    elif suffix == "cls":
        file = tar.extractfile(member)
        text = file.read().strip() if file else b""
        if not text.isdigit():
            raise DataError(
                "a class is no whole number from 0 on",
                where=f"{path}: {member.name} at {member.offset_data}",
                value=repr(text[:40]),
            )
        classes[key] = int(text)


# -- Parquet


@dataclass(frozen=True, eq=False)
class ParquetImages:
    """Images in Parquet files (an `ImageSource`)."""

    paths: tuple[Path, ...]
    groups: NDArray[np.int64] = field(repr=False)
    """[row groups, 3]: file, row group in it, number of its first image among all."""
    labels: NDArray[np.int32] = field(repr=False)
    column: str
    channels: int

    def read(self, index: int) -> Pixels:
        """Read an image; see `ImageSource`."""
        file, group, row = self._find(index)
        cell = _cells(self.paths[file], group, self.column)[row]
        data = cell.get("bytes") if isinstance(cell, dict) else cell
        if not data:
            raise ImageFault("the cell is empty")
        return decode(data, self.channels)

    def place(self, index: int) -> str:
        """Return where an image lies."""
        file, group, row = self._find(index)
        return f"{self.paths[file]}: row group {group}, row {row}"

    def _find(self, index: int) -> tuple[int, int, int]:
        at = int(np.searchsorted(self.groups[:, 2], index, side="right")) - 1
        file, group, first = map(int, self.groups[at])
        return file, group, index - first


@lru_cache(maxsize=8)
def _cells(path: Path, group: int, column: str) -> list[Any]:
    """A column of one row group; a few are kept, since whole groups are read at a time."""
    import pyarrow
    import pyarrow.parquet

    try:
        cells: list[Any] = (
            pyarrow.parquet.ParquetFile(path).read_row_group(group, [column])[column].to_pylist()
        )
    except (OSError, pyarrow.ArrowException) as error:
        raise ImageFault(f"row group {group}: {error}") from error
    return cells


def read_parquet(paths: Sequence[Path], channels: int, damage: Damage) -> Part:
    """Parquet with a column of encoded images, as Hugging Face's `datasets` writes it.

    Args:
        paths: the files, in order.
        channels: of what is read.
        damage: what happens to a file that is cut off.

    Raises:
        DataError: a file is cut off or lacks a column, or pyarrow is not installed.
    """
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise DataError(
            "Parquet needs pyarrow, which is not installed",
            where=str(paths[0]),
            cure="pip install 'shardtrain[parquet]'",
        ) from error
    groups: list[tuple[int, int, int]] = []
    labels: list[NDArray[np.int32]] = []
    total, column = 0, ""
    for number, path in enumerate(paths):
        try:
            file = pyarrow.parquet.ParquetFile(path)
            image, label = (_column(path, file.schema_arrow.names, k) for k in (_IMAGES, _LABELS))
            for group in range(file.num_row_groups):
                found = file.read_row_group(group, [label])[label].to_numpy().astype(np.int32)
                groups.append((number, group, total))
                labels.append(found)
                total += len(found)
        except (OSError, pyarrow.ArrowException) as error:
            damage.met(str(path), str(error))
            continue
        column = image
    if not total:
        raise DataError("there are no images in it", where=str(paths[0]))
    all_labels = np.concatenate(labels)
    source = ParquetImages(
        tuple(paths), np.array(groups, np.int64).reshape(-1, 3), all_labels, column, channels
    )
    digest = hashlib.blake2b(all_labels.tobytes(), digest_size=16)
    for path in paths:
        digest.update(f"{path.name}:{path.stat().st_size}\n".encode())
    classes = tuple(map(str, range(int(all_labels.max()) + 1)))
    return Part(source, classes, digest.hexdigest())


def _column(path: Path, names: Sequence[str], known: Sequence[str]) -> str:
    for name in known:
        if name in names:
            return name
    raise DataError(
        "a column is missing", where=str(path), value=", ".join(names), allowed=" or ".join(known)
    )
