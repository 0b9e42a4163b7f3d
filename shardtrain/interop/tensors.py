"""How tensors of a published checkpoint are parts of our parameters: one table, read both ways.

Owns: the rows of such a table and their arithmetic, on NumPy arrays. Does not own: the tables (each
family has one), files, and where parameters rest.

A row says which dims a tensor has, in the words that our models name their axes with. So a fused
matrix, a transposed one and one that is a part of ours are all one reshape, one transpose and one
slice, and the way back is the same three in the other order.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

LAYERS = "layers"
Array = NDArray[Any]
Index = tuple[slice, ...]


@dataclass(frozen=True)
class Tensor:
    """One tensor of a published checkpoint."""

    name: str
    """Its name there; `{}` stands for the number of the layer."""
    layout: str
    """Its dims in order, parted by commas; axes of ours that are one dim there stand side by side:
    "kv_heads group head_dim, embed"."""
    axis: str = ""
    """The axis of our parameter that it has a part of. "" = it has all."""
    start: int = 0
    """Where that part begins; negative numbers count from the end, as they do in Python."""
    stop: int | None = None
    """Where it ends. None = at the end of the axis."""

    @property
    def dims(self) -> tuple[tuple[str, ...], ...]:
        """The axes of each dim."""
        return tuple(tuple(dim.split()) for dim in self.layout.split(","))

    @property
    def axes(self) -> tuple[str, ...]:
        """The axes of all dims, in order."""
        return tuple(axis for dim in self.dims for axis in dim)


Table = Mapping[str, tuple[Tensor, ...]]
"""The tensors that make up each parameter, by the parameter's path."""


@dataclass(frozen=True)
class Parameter:
    """A parameter of ours, whose padding no published checkpoint has."""

    path: str
    axes: tuple[str, ...]
    """The name of each dim; the first is `layers` where all layers are stacked."""
    shape: tuple[int, ...]
    vocab_size: int
    """Rows of a `vocab` dim that stand for tokens; the others are padding, and zero."""

    @property
    def is_stacked(self) -> bool:
        """Whether it holds one entry a layer."""
        return self.axes[0] == LAYERS

    @property
    def sizes(self) -> dict[str, int]:
        """The size of each axis without padding; of one layer."""
        sizes = dict(zip(self.axes, self.shape, strict=True))
        sizes.pop(LAYERS, None)
        return {a: min(s, self.vocab_size) if a == "vocab" else s for a, s in sizes.items()}

    def range(self, tensor: Tensor) -> dict[str, tuple[int, int]]:
        """From where to where on each axis the tensor reaches."""
        ranges = {axis: (0, size) for axis, size in self.sizes.items()}
        if tensor.axis:
            start, stop, _ = slice(tensor.start, tensor.stop).indices(self.sizes[tensor.axis])
            ranges[tensor.axis] = (start, stop)
        return ranges

    def tensor_shape(self, tensor: Tensor) -> tuple[int, ...]:
        """The shape that the tensor must have."""
        ranges = self.range(tensor)
        lengths = {axis: stop - start for axis, (start, stop) in ranges.items()}
        return tuple(int(np.prod([lengths[axis] for axis in dim])) for dim in tensor.dims)

    def names(self, tensors: Sequence[Tensor]) -> Iterator[tuple[str, int, Tensor]]:
        """Every tensor by its full name, with its layer (0 where there are none)."""
        for layer in range(self.shape[0] if self.is_stacked else 1):
            for tensor in tensors:
                yield tensor.name.format(layer), layer, tensor

    def gather(
        self,
        tensors: Sequence[Tensor],
        read: Callable[[str], Array],
        index: Index,
        dtype: Any,
    ) -> Array:
        """Puts a piece of the parameter together; tensors outside of it are not read.

        Args:
            tensors: its row of the table.
            read: name -> the tensor as it is in the file.
            index: which piece, one slice a dim.
            dtype: of the result.

        Returns:
            The piece; padding is zero.
        """
        bounds = [s.indices(size)[:2] for s, size in zip(index, self.shape, strict=True)]
        piece: Array = np.zeros([stop - start for start, stop in bounds], dtype)
        inner = bounds[1:] if self.is_stacked else bounds
        first, last = bounds[0] if self.is_stacked else (0, 1)
        for name, layer, tensor in self.names(tensors):
            overlaps = [
                (max(start, low), min(stop, high))
                for (start, stop), (low, high) in zip(
                    inner, self.range(tensor).values(), strict=True
                )
            ]
            if not first <= layer < last or any(low >= high for low, high in overlaps):
                continue
            found = self._ours(read(name), tensor)
            starts = [low for low, _ in self.range(tensor).values()]
            take = zip(overlaps, starts, strict=True)
            put = zip(overlaps, inner, strict=True)
            target = piece[layer - first] if self.is_stacked else piece
            target[tuple(slice(a - start, b - start) for (a, b), (start, _) in put)] = found[
                tuple(slice(a - low, b - low) for (a, b), low in take)
            ].astype(dtype)
        return piece

    def scatter(self, tensors: Sequence[Tensor], whole: Array) -> Iterator[tuple[str, Array]]:
        """Takes the whole parameter apart: name and tensor, the inverse of `gather`.

        Args:
            tensors: its row of the table.
            whole: the parameter, with its padding.

        Yields:
            Every tensor, in the dtype of the parameter.
        """
        for name, layer, tensor in self.names(tensors):
            one = whole[layer] if self.is_stacked else whole
            ranges = self.range(tensor)
            part = one[tuple(slice(start, stop) for start, stop in ranges.values())]
            axes = list(ranges)
            part = part.transpose([axes.index(axis) for axis in tensor.axes])
            yield name, np.ascontiguousarray(part.reshape(self.tensor_shape(tensor)))

    def _ours(self, found: Array, tensor: Tensor) -> Array:
        """A tensor with our axes in our order."""
        lengths = {axis: stop - start for axis, (start, stop) in self.range(tensor).items()}
        found = found.reshape([lengths[axis] for axis in tensor.axes])
        return found.transpose([tensor.axes.index(axis) for axis in lengths])
