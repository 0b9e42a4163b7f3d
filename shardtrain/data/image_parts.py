"""What a source of images is made into: a part, with its classes; and what is done about damage.

Owns: the type that all kinds of files give, and the policy for shards that are cut off.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from shardtrain.data.image_codec import SUFFIXES
from shardtrain.data.images import ImageSource
from shardtrain.errors import DataError

_IMAGES: Final = f"images, whose names end in {', '.join(SUFFIXES)}"
_ADD_IMAGES: Final = 'put its images there, or set data.bad_images to "skip" to go on without them'


@dataclass(frozen=True, eq=False)
class Part:
    """The images of a split."""

    source: ImageSource
    classes: tuple[str, ...]
    """Names, by label."""
    digest: str
    """Equal for equal data."""


@dataclass(frozen=True)
class Damage:
    """What happens to a file that is not whole."""

    policy: str
    """ "stop" or "skip"."""
    say: Callable[[str], None]

    def met(self, where: str, what: str) -> None:
        """Says it, or stops.

        Raises:
            DataError: the policy is "stop".
        """
        if self.policy == "stop":
            raise DataError(
                "this file is not whole",
                where=where,
                value=what,
                cure='copy it again, or set data.bad_images to "skip" to use what is there',
            )
        self.say(f"skipped what is not whole: {where}: {what}")

    def met_class(
        self, where: str, what: str, *, allowed: str = _IMAGES, cure: str = _ADD_IMAGES
    ) -> None:
        """Says that a class of a split has no images to use, or stops.

        Args:
            where: the folder of the class.
            what: what is wrong, in words.
            allowed: what would have been right.
            cure: what to do.

        Raises:
            DataError: the policy is "stop".
        """
        if self.policy == "stop":
            raise DataError(what, where=where, allowed=allowed, cure=cure)
        self.say(f"skipped a class: {where}: {what}")
