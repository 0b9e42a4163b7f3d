"""Images that are arrays already: scikit-learn's digits, .npz and CIFAR's binary files.

Owns: how these files are laid out, and what is said about damaged ones. Does not own: which of them
a run takes (`image_files`).
"""

import hashlib
import zipfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from shardtrain.data.image_codec import Pixels, with_channels
from shardtrain.data.image_parts import Damage, Part
from shardtrain.errors import DataError

_PAIRS: Final = (
    ("train", "x_train", "y_train"),
    ("train", "train_images", "train_labels"),
    ("train", "images", "labels"),
    ("train", "x", "y"),
    ("validation", "x_test", "y_test"),
    ("validation", "val_images", "val_labels"),
    ("validation", "test_images", "test_labels"),
)
"""Names of a pair of arrays in a .npz, and what they are."""
_CIFAR_SIDE: Final = 32


@dataclass(frozen=True, eq=False)
class ArrayImages:
    """Images in memory, or mapped into it (an `ImageSource`)."""

    images: NDArray[np.uint8] = field(repr=False)
    """[images, height, width] or [images, height, width, channels]."""
    labels: NDArray[np.int32] = field(repr=False)
    channels: int
    name: str

    def read(self, index: int) -> Pixels:
        """Read an image."""
        return with_channels(np.asarray(self.images[index]), self.channels)

    def place(self, index: int) -> str:
        """Return where an image lies."""
        return f"{self.name}: image {index}"

    def digest(self) -> str:
        """Equal for equal images and labels."""
        return _digest(self.images, self.labels)


def digits(channels: int) -> Part:
    """The 1,797 handwritten digits of 8 x 8 that come with scikit-learn (UCI, Alpaydin and Kaynak).

    Raises:
        DataError: scikit-learn is not installed.
    """
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise DataError(
            "the handwritten digits come with scikit-learn, which is not installed",
            where='data.path=""',
            cure="pip install 'shardtrain[vision]', or give a data.path",
        ) from error
    found = load_digits()
    # 16 steps of grey; the brightest is 255.
    images = np.rint(found.images * (255 / 16)).astype(np.uint8)
    labels = found.target.astype(np.int32)
    source = ArrayImages(images, labels, channels, "scikit-learn's digits")
    return Part(source, tuple(map(str, range(10))), source.digest())


def read_npz(path: Path, channels: int) -> dict[str, Part]:
    """The arrays of a .npz, by split.

    Args:
        path: the file.
        channels: of what is read.

    Raises:
        DataError: it is cut off or damaged, or holds no images.
    """
    try:
        with path.open("rb") as opened, np.load(opened, allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files}
    except (OSError, ValueError, zipfile.BadZipFile, EOFError) as error:
        raise DataError(
            "cannot be read; it may be cut off",
            where=str(path),
            value=f"{type(error).__name__}: {error}",
            cure="copy it again",
        ) from error
    parts: dict[str, Part] = {}
    for split, images, labels in _PAIRS:
        if images in arrays and labels in arrays and split not in parts:
            parts[split] = _checked(path, arrays[images], arrays[labels].reshape(-1), channels)
    if "train" not in parts:
        raise DataError(
            "there are no images in it",
            where=str(path),
            value=", ".join(arrays) or "nothing",
            allowed="; ".join(f"{images} and {labels}" for _, images, labels in _PAIRS),
        )
    return parts


def _checked(
    path: Path, images: NDArray[np.generic], labels: NDArray[np.generic], channels: int
) -> Part:
    fits = images.dtype == np.uint8 and (
        images.ndim == 3 or (images.ndim == 4 and images.shape[3] in (1, 3, 4))
    )
    if not fits or len(images) != len(labels) or labels.dtype.kind not in "iu":
        raise DataError(
            "these arrays are no images with a class each",
            where=str(path),
            value=f"{images.dtype} {images.shape}, {labels.dtype} {labels.shape}",
            allowed="uint8 [images, height, width] or [images, height, width, 1 or 3], "
            "whole numbers [images]",
        )
    if len(labels) and int(labels.min()) < 0:
        place = int(labels.argmin())
        raise DataError(
            "a label is below 0", where=f"{path}: image {place}", value=str(labels[place])
        )
    source = ArrayImages(
        np.asarray(images, np.uint8), np.asarray(labels, np.int32), channels, str(path)
    )
    classes = tuple(map(str, range(int(labels.max(initial=-1)) + 1)))
    return Part(source, classes, source.digest())


def read_cifar(paths: list[Path], channels: int, damage: Damage) -> Part:
    """CIFAR-10's or CIFAR-100's binary files, one after another.

    A record is one byte of label (CIFAR-100 has two, coarse and fine, of which the fine counts),
    then 32 x 32 values of red, of green, of blue.

    Args:
        paths: the files, in order.
        channels: of what is read.
        damage: what happens to a file that is cut off.

    Raises:
        DataError: a file is cut off, or holds something else.
    """
    images, labels, classes = [], [], 0
    for path in paths:
        wide = path.name in ("train.bin", "test.bin")
        head, count = (2, 100) if wide else (1, 10)
        size = head + 3 * _CIFAR_SIDE**2
        data = np.fromfile(path, np.uint8)
        whole, rest = divmod(len(data), size)
        if rest or not whole:
            damage.met(str(path), f"cut off {rest} bytes into record {whole} of {size} bytes")
        records = data[: whole * size].reshape(whole, size)
        found = records[:, head - 1].astype(np.int32)
        if whole and int(found.max()) >= count:
            place = int(found.argmax())
            raise DataError(
                f"a label is beyond the {count} classes; this is no file of CIFAR-{count}",
                where=f"{path}: record {place}",
                value=str(found[place]),
            )
        images.append(records[:, head:].reshape(-1, 3, _CIFAR_SIDE, _CIFAR_SIDE))
        labels.append(found)
        classes = max(classes, count)
    source = ArrayImages(
        np.concatenate(images).transpose(0, 2, 3, 1),
        np.concatenate(labels),
        channels,
        str(paths[0].parent),
    )
    return Part(source, tuple(map(str, range(classes))), source.digest())


def _digest(images: NDArray[np.uint8], labels: NDArray[np.int32]) -> str:
    digest = hashlib.blake2b(digest_size=16)
    digest.update(str(images.shape).encode())
    digest.update(np.ascontiguousarray(images).data)
    digest.update(np.ascontiguousarray(labels).data)
    return digest.hexdigest()
