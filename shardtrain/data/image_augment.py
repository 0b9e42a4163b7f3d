"""What is done to an image on the host, as a function of the image and a random generator.

Owns: crops, flips and mixing. Does not own: which generator a sample gets (`images`), so that a
sample looks the same whichever process reads it.
"""

import math

import numpy as np
from numpy.typing import NDArray

from shardtrain.data.image_codec import Pixels, resized

_TRIES = 10
_AREA = (0.08, 1.0)
_RATIO = (3 / 4, 4 / 3)
_EVALUATION_SCALE = 256 / 224
"""Of the shorter side of an image to the part of it that evaluation sees, where training crops."""


def for_training(
    pixels: Pixels, size: int, crop: str, flip: bool, random: np.random.Generator
) -> Pixels:
    """A training image.

    Args:
        pixels: as decoded.
        size: height and width of the result.
        crop: see `data.crop`.
        flip: whether to mirror half of the images.
        random: decides; it is drawn from in the same order whatever the image is.

    Returns:
        [size, size, channels].
    """
    if crop == "resized":
        out = _random_part(pixels, size, random)
    else:
        out = _middle(pixels, size, 1.0)
        if crop == "pad":
            out = _shifted(out, size, random)
    if flip and random.random() < 0.5:
        out = out[:, ::-1]
    return out


def for_evaluation(pixels: Pixels, size: int, crop: str) -> Pixels:
    """The middle of an image, [size, size, channels].

    Args:
        pixels: as decoded.
        size: height and width of the result.
        crop: of training; after "resized" objects look larger, so evaluation cuts closer too.
    """
    return _middle(pixels, size, _EVALUATION_SCALE if crop == "resized" else 1.0)


def mixed(own: Pixels, other: Pixels, share: float) -> NDArray[np.uint8]:
    """Share x own + (1 - share) x other, rounded to whole values."""
    wide = share * own.astype(np.float32) + (1 - share) * other.astype(np.float32)
    return np.rint(wide).astype(np.uint8)


def _middle(pixels: Pixels, size: int, scale: float) -> Pixels:
    """The largest square in the middle, without the edge that `scale` leaves out."""
    height, width = pixels.shape[:2]
    side = min(height, width) / scale
    left, upper = (width - side) / 2, (height - side) / 2
    return resized(pixels, size, size, (left, upper, left + side, upper + side))


def _shifted(pixels: Pixels, size: int, random: np.random.Generator) -> Pixels:
    """A crop at a random place after black edges were added."""
    pad = max(1, size // 8)
    upper, left = random.integers(0, 2 * pad + 1, 2)
    padded = np.pad(pixels, ((pad, pad), (pad, pad), (0, 0)))
    return padded[upper : upper + size, left : left + size]


def _random_part(pixels: Pixels, size: int, random: np.random.Generator) -> Pixels:
    """A part of random area and shape, brought to size (Szegedy et al. 2014, arXiv 1409.4842)."""
    height, width = pixels.shape[:2]
    draws = random.random((_TRIES, 4))
    for area, ratio, across, down in draws:
        wanted = height * width * (_AREA[0] + (_AREA[1] - _AREA[0]) * area)
        low, high = (math.log(edge) for edge in _RATIO)
        aspect = math.exp(low + (high - low) * ratio)
        wide, high_ = round(math.sqrt(wanted * aspect)), round(math.sqrt(wanted / aspect))
        if 0 < wide <= width and 0 < high_ <= height:
            left = math.floor(across * (width - wide + 1))
            upper = math.floor(down * (height - high_ + 1))
            box = (float(left), float(upper), float(left + wide), float(upper + high_))
            return resized(pixels, size, size, box)
    return _middle(pixels, size, 1.0)
