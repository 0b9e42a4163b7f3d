"""From the bytes of an image file to an array, and from one size to another.

Owns: decoding, colours and resizing. Does not own: where bytes lie, and what augmentation asks for.
Pillow does the work (the extra `vision`); arrays that have the right size already need none.
"""

import io
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardtrain.errors import DataError

Pixels = NDArray[np.uint8]
"""[height, width, channels]."""
SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".ppm", ".pgm", ".gif", ".tif", ".tiff")
"""Names of files that are taken for images."""


class ImageFault(Exception):  # noqa: N818  # never seen by a user as such
    """An image cannot be read; the text says why."""


def pillow() -> Any:
    """The package that decodes and resizes.

    Raises:
        DataError: it is not installed.
    """
    try:
        from PIL import Image
    except ImportError as error:
        raise DataError(
            "images are decoded and resized with pillow, which is not installed",
            where="data.path",
            cure="pip install 'shardtrain[vision]'",
        ) from error
    return Image


def decode(data: bytes, channels: int) -> Pixels:
    """Decode an image file, all of it.

    Args:
        data: the bytes of a JPEG, PNG or other file.
        channels: 1 or 3 of the result.

    Raises:
        ImageFault: they are no image, or not the whole of one.
        DataError: pillow is not installed.
    """
    image_class = pillow()
    try:
        with image_class.open(io.BytesIO(data)) as image:
            decoded = np.asarray(image.convert("L" if channels == 1 else "RGB"))
    except Exception as error:  # a damaged file makes Pillow raise nearly anything
        name = type(error).__name__
        known = name != "UnidentifiedImageError"  # whose text is the address of an object
        raise ImageFault(f"{name}: {error}" if known else "no image that Pillow knows") from error
    return decoded[:, :, None] if channels == 1 else decoded


def with_channels(pixels: NDArray[np.uint8], channels: int) -> Pixels:
    """An array [height, width] or [height, width, any] with 1 or 3 channels.

    Grey becomes three equal channels, colours become grey as in ITU-R BT.601, and a fourth channel
    is left out.
    """
    if pixels.ndim == 2:
        pixels = pixels[:, :, None]
    if pixels.shape[2] == channels:
        return pixels
    if pixels.shape[2] == 1:
        return np.repeat(pixels, channels, 2)
    if channels == 3:
        return pixels[:, :, :3]
    grey = pixels[:, :, :3].astype(np.float32) @ np.array([0.299, 0.587, 0.114], np.float32)
    return np.rint(grey).astype(np.uint8)[:, :, None]


def resized(
    pixels: Pixels, height: int, width: int, box: tuple[float, float, float, float] | None = None
) -> Pixels:
    """A part of an image at another size, bilinear, with antialiasing.

    Args:
        pixels: the image.
        height: of the result.
        width: of the result.
        box: left, upper, right and lower edge of the part; None = all of it.
    """
    whole = (0.0, 0.0, float(pixels.shape[1]), float(pixels.shape[0]))
    if pixels.shape[:2] == (height, width) and box in (None, whole):
        return pixels
    image_class = pillow()
    grey = pixels.shape[2] == 1
    image = image_class.fromarray(pixels[:, :, 0] if grey else pixels)
    image = image.resize((width, height), image_class.Resampling.BILINEAR, box=box or whole)
    out = np.asarray(image)
    return out[:, :, None] if grey else out
