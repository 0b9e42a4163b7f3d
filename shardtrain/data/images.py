"""Batches of images as a pure function of the cursor.

Owns: what a batch holds, which random numbers an image gets, and what happens to one that cannot be
read. Does not own: files (`image_files`), what augmentation does (`image_augment`), devices.

An image is cut and mirrored by numbers that come of the run's seed and the sample's place among all
samples of all epochs. So it looks the same on any mesh, and in a run that goes on.
"""

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from shardtrain.data.image_augment import for_evaluation, for_training, mixed
from shardtrain.data.image_codec import ImageFault, Pixels
from shardtrain.data.order import InOrder
from shardtrain.errors import DataError

Batch = dict[str, NDArray[Any]]
"""image [rows, height, width, channels] uint8, label [rows] int32, weights [rows] float32; with
mixup also other [rows] int32 and share [rows] float32."""
_SHOWN = 10
_MIXUP = 1
"""What tells the generator of shares from that of crops."""


class ImageSource(Protocol):
    """Images by number."""

    @property
    def labels(self) -> NDArray[np.int32]:
        """The class of each, [images]."""

    def read(self, index: int) -> Pixels:
        """Read an image.

        Raises:
            ImageFault: it cannot be read.
        """

    def place(self, index: int) -> str:
        """Return where an image lies, for messages."""


@dataclass(frozen=True)
class View:
    """How images are shown to the model."""

    size: int
    """Height and width."""
    channels: int
    crop: str = "none"
    flip: bool = False
    mixup: float = 0.0


@dataclass(eq=False)
class BadImages:
    """What happens to images that cannot be read; safe to use from several threads."""

    policy: str
    """ "stop" or "skip"."""
    say: Callable[[str], None]
    _found: set[str] = field(default_factory=set)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def __len__(self) -> int:
        return len(self._found)

    def met(self, place: str, why: ImageFault) -> None:
        """Counts an image, or stops.

        Raises:
            DataError: the policy is "stop".
        """
        if self.policy == "stop":
            raise DataError(
                "an image cannot be read",
                where=place,
                value=str(why),
                cure='repair or delete it, or set data.bad_images to "skip"',
            )
        with self._lock:
            if place in self._found:
                return
            self._found.add(place)
            count = len(self._found)
        if count <= _SHOWN:
            more = "" if count < _SHOWN else "; further ones are only counted"
            self.say(f"skipped an image that cannot be read: {place}: {why}{more}")


@dataclass(frozen=True, eq=False)
class ImageData(InOrder):
    """Some images of a source, in batches."""

    source: ImageSource
    ids: NDArray[np.int64] = field(repr=False)
    """Which images of the source."""
    view: View
    batch_size: int
    seed: int = 0
    shuffle: bool = True
    bad: BadImages = field(default_factory=lambda: BadImages("stop", lambda _: None))

    @property
    def num_samples(self) -> int:
        """Images that there are."""
        return len(self.ids)

    def remarks(self) -> dict[str, int]:
        """How many images could not be read so far, in this process, where there were any."""
        return {"skipped_images": len(self.bad)} if len(self.bad) else {}

    def rows(self, cursor: int, start: int, stop: int) -> Batch:
        """Read some rows of a global batch.

        Args:
            cursor: the batch, counted from 0 over all epochs.
            start, stop: rows of the global batch.

        Returns:
            The rows, see `Batch`.
        """
        ids = self.order.sample_ids(cursor)
        read: dict[int, tuple[Pixels, int]] = {}

        def shown(row: int) -> tuple[Pixels, int]:
            if row not in read:
                pixels, label = self._readable(int(ids[row]))
                random = self._random(cursor, row)
                view = self.view
                cut = for_training(pixels, view.size, view.crop, view.flip, random)
                read[row] = cut, label
            return read[row]

        batch = self.blank(stop - start)
        batch["weights"][:] = 1.0
        for place, row in enumerate(range(start, stop)):
            pixels, batch["label"][place] = shown(row)
            if self.view.mixup:
                # Samples are shuffled, so any other row will do.
                other, batch["other"][place] = shown((row + 1) % self.batch_size)
                share = self._random(cursor, row, _MIXUP).beta(self.view.mixup, self.view.mixup)
                batch["share"][place] = share
                pixels = mixed(pixels, other, float(share))
            batch["image"][place] = pixels
        return batch

    def batch_at(self, cursor: int) -> Batch:
        """Read a global batch; see `rows`."""
        return self.rows(cursor, 0, self.batch_size)

    def evaluation_rows(self, index: int, start: int, stop: int) -> Batch:
        """Read some rows of a batch for evaluation, each image once and not augmented.

        Args:
            index: the batch, from 0.
            start, stop: rows of the global batch.

        Returns:
            The rows; after the last image, and where one cannot be read, they have weight 0.
        """
        batch = self.blank(stop - start)
        for place, sample in enumerate(self.order.evaluation_ids(index, start, stop)):
            image = self._try(int(sample))
            if image is None:
                continue
            pixels, label = image
            batch["image"][place] = for_evaluation(pixels, self.view.size, self.view.crop)
            batch["label"][place], batch["weights"][place] = label, 1.0
        if self.view.mixup:
            batch["other"], batch["share"][:] = batch["label"].copy(), 1.0
        return batch

    def blank(self, rows: int) -> Batch:
        """Return rows that count for nothing; they also tell shapes and dtypes."""
        view = self.view
        return blank_images(rows, view.size, view.channels, mixes=view.mixup > 0)

    def _random(self, cursor: int, row: int, purpose: int = 0) -> np.random.Generator:
        """The random numbers of a sample, for one purpose."""
        number = cursor * self.batch_size + row
        words = np.random.SeedSequence([self.seed, number % 2**32, number >> 32, purpose])
        return np.random.Generator(np.random.Philox(words))

    def _try(self, sample: int) -> tuple[Pixels, int] | None:
        """An image and its class; None where it cannot be read and need not be."""
        index = int(self.ids[sample])
        try:
            return self.source.read(index), int(self.source.labels[index])
        except ImageFault as why:
            self.bad.met(self.source.place(index), why)
            return None

    def _readable(self, sample: int) -> tuple[Pixels, int]:
        """An image and its class; the next one in place of one that cannot be read."""
        for step in range(self.num_samples):
            image = self._try((sample + step) % self.num_samples)
            if image is not None:
                return image
        raise DataError(
            "none of the images can be read", where="data.path", value=self.source.place(0)
        )


def blank_images(rows: int, size: int, channels: int, *, mixes: bool) -> Batch:
    """Return rows that count for nothing; they tell shapes and dtypes where there is no data.

    Args:
        rows: how many.
        size: height and width of the images.
        channels: of the images.
        mixes: whether images are mixed.
    """
    batch: Batch = {
        "image": np.zeros((rows, size, size, channels), np.uint8),
        "label": np.zeros(rows, np.int32),
        "weights": np.zeros(rows, np.float32),
    }
    if mixes:
        batch |= {"other": np.zeros(rows, np.int32), "share": np.zeros(rows, np.float32)}
    return batch
