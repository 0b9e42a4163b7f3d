"""From the `[data]` section of a run with images to training and validation data.

Owns: what `data.path` may be, folders with a folder a class, and the split. Does not own: the other
kinds of files (`image_arrays`, `image_shards`), batches (`images`).
"""

import difflib
import hashlib
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from shardtrain.data.config import ImageDataConfig
from shardtrain.data.image_arrays import digits, read_cifar, read_npz
from shardtrain.data.image_codec import SUFFIXES, ImageFault, Pixels, decode
from shardtrain.data.image_parts import Damage, Part
from shardtrain.data.image_shards import read_parquet, read_tars
from shardtrain.data.images import BadImages, ImageData, View
from shardtrain.data.permutation import keys, permute
from shardtrain.errors import DataError

Say = Callable[[str], None]
_TRAIN: Final = ("train", "training")
_VALIDATION: Final = ("val", "valid", "validation", "test")
_SPLIT_SEED: Final = 0


@dataclass(frozen=True)
class ImageInfo:
    """What the data is, for the screen and for comparisons between processes."""

    source: str
    """In words: where the images are from."""
    classes: tuple[str, ...]
    digest: str
    """Equal for equal training data."""

    @property
    def vocab_size(self) -> int:
        """Classes that can be predicted."""
        return len(self.classes)


def open_images(
    config: ImageDataConfig, *, seed: int, say: Say
) -> tuple[ImageData, ImageData | None, ImageInfo]:
    """Open a run's images; what they look like is read when they are used.

    Args:
        config: the `[data]` section.
        seed: decides the order of samples and what augmentation does. Which images are kept for
            validation does not depend on it.
        say: told what is skipped.

    Returns:
        Training data, validation data (None if there is none) and what they are.

    Raises:
        DataError: the path is missing, empty or damaged, or has too few images for one batch.
    """
    parts = _parts(config, say)
    train = parts["train"]
    source = str(config.path) or "the handwritten digits of scikit-learn"
    ids = np.arange(len(train.source.labels), dtype=np.int64)
    bad = BadImages(config.bad_images, say)

    def data(part: Part, ids: NDArray[np.int64], view: View) -> ImageData:
        shown = (config.batch_size, seed, config.shuffle)
        return ImageData(part.source, ids, view, *shown, bad=bad)

    view = View(config.image_size, config.channels, config.crop, config.flip, config.mixup)
    validation = parts.get("validation")
    held: ImageData | None = None
    if validation is not None:
        _same_classes(train, validation, source)
        count = len(validation.source.labels)
        held = data(validation, np.arange(count, dtype=np.int64), view)
    elif config.validation_fraction:
        order = permute(ids, len(ids), keys(_SPLIT_SEED, 0)) if len(ids) else ids
        count = round(config.validation_fraction * len(ids))
        ids = np.sort(order[count:])
        held = data(train, np.sort(order[:count]), view) if count else None
    if len(ids) < config.batch_size:
        raise DataError(
            f"too few images for one batch of {config.batch_size}",
            where=f'data.path="{config.path}"',
            value=f"{len(ids)} images",
            cure="use more, or a smaller data.batch_size",
        )
    return data(train, ids, view), held, ImageInfo(source, train.classes, train.digest)


def require_classes(num_classes: int, info: ImageInfo) -> None:
    """Refuse a model that has fewer classes than the data.

    Raises:
        DataError: it has.
    """
    if num_classes < info.vocab_size:
        raise DataError(
            f"fewer classes than {info.source} has",
            where="model.num_classes",
            value=str(num_classes),
            allowed=f"at least {info.vocab_size}",
            cure="leave model.num_classes out: it is then that of the data",
        )


def _same_classes(train: Part, validation: Part, source: str) -> None:
    more = len(validation.classes) - len(train.classes)
    if more > 0:
        raise DataError(
            f"validation has {more} classes more than training",
            where=source,
            value=f"{len(validation.classes)}, {len(train.classes)}",
        )


# -- kinds of files


def _parts(config: ImageDataConfig, say: Say) -> dict[str, Part]:
    """The data by split: train, and validation where it has its own."""
    damage = Damage(config.bad_images, say)
    if not config.path:
        return {"train": digits(config.channels)}
    path = Path(config.path).expanduser()
    if not path.exists():
        raise DataError(
            "there is no such file or folder",
            where="data.path",
            value=str(path),
            cure="check the path; relative paths start at the current folder",
        )
    files = [path] if path.is_file() else sorted(p for p in path.rglob("*") if p.is_file())

    def named(suffix: str) -> list[Path]:
        return [file for file in files if file.suffix == suffix]

    if found := named(".npz"):
        return read_npz(_only(found), config.channels)
    if found := named(".bin"):
        return _cifar(found, config.channels, damage)
    if found := named(".tar"):
        return _by_split(path, found, read_tars, config.channels, damage)
    if found := named(".parquet"):
        return _by_split(path, found, read_parquet, config.channels, damage)
    if path.is_file():
        raise DataError(
            "is no kind of file with images that is known",
            where="data.path",
            value=str(path),
            allowed="a folder with a folder a class, .npz, CIFAR's .bin, .tar, .parquet",
        )
    return _folders(path, config.channels, damage)


def _only(paths: Sequence[Path]) -> Path:
    if len(paths) > 1:
        raise DataError(
            "there are several .npz files in it",
            where=str(paths[0].parent),
            value=", ".join(path.name for path in paths),
            cure="give the path of one",
        )
    return paths[0]


def _cifar(paths: Sequence[Path], channels: int, damage: Damage) -> dict[str, Part]:
    test = [path for path in paths if path.name.startswith("test")]
    train = [path for path in paths if path not in test]
    parts = {"train": read_cifar(train or test, channels, damage)}
    if train and test:
        parts["validation"] = read_cifar(test, channels, damage)
    return parts


def _split_of(root: Path, path: Path) -> str:
    """The split of a shard, from its name or its folder's."""
    words = path.relative_to(root).parts if path != root else (path.name,)
    held = any(word.lower().startswith(_VALIDATION) for word in words)
    return "validation" if held else "train"


def _by_split(
    root: Path,
    paths: Sequence[Path],
    read: Callable[[Sequence[Path], int, Damage], Part],
    channels: int,
    damage: Damage,
) -> dict[str, Part]:
    splits: dict[str, list[Path]] = {"train": [], "validation": []}
    for path in paths:
        splits[_split_of(root, path)].append(path)
    if not splits["train"]:
        splits = {"train": splits["validation"]}
    return {name: read(some, channels, damage) for name, some in splits.items() if some}


# -- a folder a class


@dataclass(frozen=True, eq=False)
class FolderImages:
    """Image files below a folder (an `ImageSource`)."""

    root: Path
    names: Sequence[str] = field(repr=False)
    """Relative to the root."""
    labels: NDArray[np.int32] = field(repr=False)
    channels: int

    def read(self, index: int) -> Pixels:
        """Read an image; see `ImageSource`."""
        try:
            data = (self.root / self.names[index]).read_bytes()
        except OSError as error:
            raise ImageFault(error.strerror or str(error)) from error
        return decode(data, self.channels)

    def place(self, index: int) -> str:
        """Return where an image lies."""
        return str(self.root / self.names[index])


def _folders(path: Path, channels: int, damage: Damage) -> dict[str, Part]:
    there = {entry.name.lower(): entry for entry in path.iterdir() if entry.is_dir()}
    train = next((there[name] for name in _TRAIN if name in there), None)
    held = next((there[name] for name in _VALIDATION if name in there), None)
    if train is None:
        if held is not None:
            raise DataError(
                "the folder for training is missing",
                where=str(path),
                value=", ".join(sorted(there)),
                allowed=" or ".join(str(path / name) for name in _TRAIN),
            )
        return {"train": _folder(path, _classes(path), channels, damage)}
    classes = _classes(train)
    parts = {"train": _folder(train, classes, channels, damage)}
    if held is not None:
        _known_classes(held, classes, str(train), damage)
        for name in sorted(set(classes) - set(_classes(held))):
            damage.met_class(str(held / name), f"this folder is missing; {train} has the class")
        parts["validation"] = _folder(held, classes, channels, damage)
    return parts


def _classes(root: Path) -> tuple[str, ...]:
    """The classes of a split, in order of their names."""
    names = sorted(entry.name for entry in root.iterdir() if entry.is_dir())
    if not names:
        raise DataError(
            "there are no folders of classes in it",
            where=str(root),
            allowed="a folder a class, with images in it",
        )
    return tuple(names)


def _known_classes(held: Path, classes: Sequence[str], train: str, damage: Damage) -> None:
    """Look for classes that only validation has, which no step learns."""
    for name in _classes(held):
        if name in classes:
            continue
        near = difflib.get_close_matches(name, classes, n=1)
        damage.met_class(
            str(held / name),
            f"{train} has no such class",
            allowed=", ".join(classes[:20]) + (", ..." if len(classes) > 20 else ""),
            cure=(f"did you mean {near[0]}? " if near else "")
            + "Rename the folder, take it away, or add the class to training",
        )


def _folder(root: Path, classes: tuple[str, ...], channels: int, damage: Damage) -> Part:
    names: list[str] = []
    labels: list[int] = []
    for label, name in enumerate(classes):
        folder = root / name
        found = []
        if folder.is_dir():
            for place, _, files in os.walk(folder):
                inside = Path(place).relative_to(root)
                found += [str(inside / f) for f in files if Path(f).suffix.lower() in SUFFIXES]
        if not found and folder.is_dir():
            damage.met_class(str(folder), "this folder of a class has no images")
        names += sorted(found)
        labels += [label] * len(found)
    array = np.array(labels, np.int32)
    source = FolderImages(root, names, array, channels)
    digest = hashlib.blake2b("\n".join(names).encode(), digest_size=16)
    digest.update(array.tobytes())
    return Part(source, classes, digest.hexdigest())
