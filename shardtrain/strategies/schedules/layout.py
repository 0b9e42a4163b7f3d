"""Which layers each stage holds.

Owns: layouts as users write them, the automatic one, and where each layer lies in a stack
[stages, virtual stages, slots]. Does not own: what the embedding and the head cost.

Parts of the model are in model order: part v * stages + s is virtual stage v of stage s.
"""

import re
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from shardtrain.errors import ConfigError
from shardtrain.strategies.schedules.table import NOTHING

_PART = re.compile(r"(E?)(\d{0,6})(H?)(?:\*([1-9]\d{0,5}))?")


@dataclass(frozen=True)
class Layout:
    """How many layers each part of the model has, the first layers first."""

    stages: int
    virtual_stages: int
    layers: tuple[int, ...]
    """Layers of each part, in model order. The first holds the embedding too, the last the head."""

    @property
    def num_slots(self) -> int:
        """Layers of the largest part, which is what a stack has room for in each."""
        return max(self.layers)

    def rows(self) -> npt.NDArray[np.intp]:
        """Return the layer in each place [stages, virtual stages, slots]; -1 = padding."""
        rows = np.full((self.stages, self.virtual_stages, self.num_slots), NOTHING)
        first = 0
        for part, layers in enumerate(self.layers):
            virtual, stage = divmod(part, self.stages)
            rows[stage, virtual, :layers] = np.arange(first, first + layers)
            first += layers
        return rows

    def share(self, embedding: float = 0.0, head: float = 0.0) -> npt.NDArray[np.float64]:
        """Return what each part costs [stages, virtual stages], a layer being 1.

        Args:
            embedding: Cost of the embedding in layers.
            head: Cost of the head in layers.
        """
        cost = np.array(self.layers, np.float64)
        cost[0] += embedding
        cost[-1] += head
        return cost.reshape(self.virtual_stages, self.stages).T

    def __str__(self) -> str:
        """Return the layout as a user writes it."""
        words = [str(layers) if layers else "" for layers in self.layers]
        words[0], words[-1] = f"E{words[0]}", f"{words[-1]}H"
        return ",".join(words)


def balance(
    num_layers: int,
    stages: int,
    virtual_stages: int = 1,
    *,
    embedding: float = 0.0,
    head: float = 0.0,
    most: int = 0,
) -> Layout:
    """Spread layers so that the costliest part is as cheap as can be.

    Every part has a layer at least. Among equals the later parts get more, because the earlier
    stages hold more live microbatches.

    Args:
        num_layers: Layers of the model.
        stages: Stages of the pipeline.
        virtual_stages: Parts of the model on each stage.
        embedding: Cost of the embedding in layers.
        head: Cost of the head in layers.
        most: Layers of a part at most; 0 = any number. Each part takes the memory of the largest.

    Returns:
        The layout.

    Raises:
        ConfigError: There are fewer layers than parts.

    Example:
        >>> str(balance(16, 4, head=1.5))
        'E4,4,5,3H'
    """
    parts = stages * virtual_stages
    if num_layers < parts:
        times = f"{stages} stages x {virtual_stages} virtual stages = " * (virtual_stages > 1)
        raise ConfigError(
            f"too few for {times}{parts} parts: one would be empty",
            where=f"num_layers={num_layers}",
            allowed=f"at least {parts} layers, or at most {num_layers} parts",
        )
    layers = np.ones(parts, np.intp)
    extra = np.zeros(parts)
    extra[0] += embedding
    extra[-1] += head
    for _ in range(num_layers - parts):
        cost = np.where(layers == most, np.inf, layers + extra) if most else layers + extra
        layers[np.flatnonzero(cost == cost.min())[-1]] += 1
    return Layout(stages, virtual_stages, tuple(int(count) for count in layers))


def read_layout(text: str, stages: int, virtual_stages: int = 1, num_layers: int = 0) -> Layout:
    """Read a layout as a user writes it.

    Args:
        text: The layers of each part in model order, with commas; `E` before the first and `H`
            after the last stand for the embedding and the head, and can be left out or, without
            layers, be a part of their own; `4*3` is three parts of 4. E.g. `E,4,4,4,3H`.
        stages: Stages of the pipeline.
        virtual_stages: Parts of the model on each stage.
        num_layers: Layers that the model has; 0 = any number.

    Returns:
        The layout.

    Raises:
        ConfigError: It cannot be read, a part is empty, or the parts or layers are too few or many.

    Example:
        >>> read_layout("E,4,4,4,3H", stages=5).layers
        (0, 4, 4, 4, 3)
    """
    where = f'layout="{text}"'
    layers: list[int] = []
    words = [word.strip() for word in text.split(",")]
    for index, word in enumerate(words):
        match = _PART.fullmatch(word)
        if match is None:
            raise ConfigError(
                f'cannot read "{word}"',
                where=where,
                allowed="layers of each part, such as E,4,4,4,3H or E3,4*2,3H",
            )
        embedding, count, head, repeats = match.groups()
        misplaced = (embedding and index > 0) or (head and index < len(words) - 1)
        if misplaced or (repeats and (embedding or head)):
            raise ConfigError(
                f'"{word}" is misplaced: E stands once, in the first part, H once, in the last',
                where=where,
            )
        if int(count or 0) == 0 and not embedding and not head:
            raise ConfigError(
                f"part {index} is empty",
                where=where,
                cure="give it a layer, or use fewer stages",
            )
        layers += [int(count or 0)] * int(repeats or 1)
    parts = stages * virtual_stages
    if len(layers) != parts:
        times = f" x {virtual_stages} virtual stages" * (virtual_stages > 1)
        raise ConfigError(
            f"has {len(layers)} parts, but there are {stages} stages{times}",
            where=where,
            allowed=f"{parts} parts",
        )
    if num_layers and sum(layers) != num_layers:
        raise ConfigError(
            f"has {sum(layers)} layers, but the model has {num_layers}",
            where=where,
            cure=f"change it by {num_layers - sum(layers):+d}",
        )
    return Layout(stages, virtual_stages, tuple(layers))
