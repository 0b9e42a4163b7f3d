"""Weights of a Hugging Face folder in our parameters' places, and the way back.

Owns: what is compared before anything is read (names, shapes, types, tied heads), reading straight
into a placement, leaf by leaf, and the tensors of an export. Does not own: files, tables, configs.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np
from numpy.typing import NDArray

from shardtrain.errors import CheckpointError, raise_all
from shardtrain.interop.family import EMBEDDING, HEAD, Family
from shardtrain.interop.hf_files import DTYPES, WeightFiles
from shardtrain.interop.tensors import Parameter, Tensor
from shardtrain.sharding.placement import leaves_by_path, names_by_path

PyTree = Any
_SHOWN = 8


def parameters(shapes: PyTree, names: PyTree, *, vocab_size: int) -> dict[str, Parameter]:
    """Describe the parameters of a model of ours.

    Args:
        shapes: of each, in model order.
        names: of the dims of each.
        vocab_size: tokens, without padding.

    Returns:
        By path.
    """
    axes = names_by_path(names)
    return {
        path: Parameter(path, tuple(map(str, axes[path])), tuple(leaf.shape), vocab_size)
        for path, leaf in leaves_by_path(shapes)
    }


@dataclass(frozen=True)
class Mapped:
    """A folder whose tensors are known to be those of a model of ours."""

    family: Family
    files: WeightFiles
    own: Mapping[str, Parameter]
    found: Mapping[str, str]
    """Names as transformers writes them -> names in the files."""
    not_numbers: list[str] = field(default_factory=list)
    """The first tensor, in the files' words, with an entry that is no finite number, of what was
    read until now; empty while there is none."""

    def place(self, abstract: PyTree) -> PyTree:
        """Read every parameter straight to where it rests.

        Args:
            abstract: shape, dtype and sharding of each.

        Returns:
            The tree of arrays.
        """
        paths = dict(leaves_by_path(abstract))
        placed = {path: self.read(path, leaf) for path, leaf in paths.items()}
        return jax.tree.unflatten(jax.tree.structure(abstract), list(placed.values()))

    def read(self, path: str, leaf: Any) -> jax.Array:
        """Read one parameter straight to where it rests.

        Args:
            path: its path.
            leaf: its shape, dtype and sharding.
        """
        own, row = self.own[path], self.family.row(path)

        def piece(index: tuple[slice, ...] | None) -> NDArray[Any]:
            whole = tuple(slice(None) for _ in leaf.shape)
            found = own.gather(row, self._read, index or whole, leaf.dtype)
            if not self.not_numbers and not np.isfinite(found).all():
                self._name_the_first(own, row)
            return found

        return jax.make_array_from_callback(leaf.shape, leaf.sharding, piece)

    def _name_the_first(self, own: Parameter, row: Sequence[Tensor]) -> None:
        """Looks which of a parameter's tensors it is; only where one is known to be."""
        names = (name for name, _, _ in own.names(row))
        bad = next((name for name in names if not np.isfinite(self._read(name)).all()), None)
        if bad is not None:  # else a number was too large for the type that it became
            self.not_numbers.append(self.found[bad])

    def _read(self, name: str) -> NDArray[Any]:
        return self.files.read(self.found[name])

    def dtypes(self) -> dict[str, str]:
        """The type of each tensor in the files, by the name that transformers writes."""
        return {name: self.files.entries[found].dtype for name, found in self.found.items()}


def map_files(family: Family, files: WeightFiles, own: Mapping[str, Parameter]) -> Mapped:
    """Compare a folder's tensors with a model of ours, by their headers.

    Args:
        family: whose names they have.
        files: the folder.
        own: the model's parameters.

    Raises:
        CheckpointError: one is missing, or nobody's, or has another shape or type; or a tied head
            differs from the embedding.
    """
    wanted = {
        name: parameter.tensor_shape(tensor)
        for path, parameter in own.items()
        for name, _, tensor in parameter.names(family.row(path))
    }
    tied_head = "" if HEAD in own else family.row(HEAD)[0].name
    found: dict[str, str] = {}
    faults: list[CheckpointError] = []
    for name, entry in files.entries.items():
        now = family.current_name(name)
        known = next((n for n in (now, family.prefix + now) if n in wanted), "")
        if known and known not in found:
            found[known] = name
        elif not known and not re.fullmatch(family.buffers, name) and name != tied_head:
            faults.append(
                CheckpointError(
                    f"{name} is no tensor of this {family.model_type}", where=entry.where
                )
            )
    where = files.where
    faults += [
        CheckpointError(f"{name} is missing, {list(shape)}", where=where)
        for name, shape in wanted.items()
        if name not in found
    ]
    faults += _misshapen(files, wanted, found)
    raise_all([*faults[:_SHOWN], *_more(faults, where)])
    mapped = Mapped(family, files, own, found)
    if tied_head in files.entries:
        _check_tied(mapped, tied_head)
    return mapped


def _misshapen(
    files: WeightFiles, wanted: Mapping[str, tuple[int, ...]], found: Mapping[str, str]
) -> Iterator[CheckpointError]:
    for name, there in found.items():
        entry = files.entries[there]
        if entry.shape != wanted[name]:
            yield CheckpointError(
                f"{there} has another shape than config.json says",
                where=entry.where,
                value=str(list(entry.shape)),
                allowed=str(list(wanted[name])),
            )
        elif entry.dtype not in DTYPES:
            yield CheckpointError(
                f"{there} is of a type that weights do not have here",
                where=entry.where,
                value=entry.dtype,
                allowed=", ".join(DTYPES),
            )


def _more(faults: list[CheckpointError], where: str) -> list[CheckpointError]:
    left = len(faults) - _SHOWN
    return [CheckpointError(f"and {left} more tensors", where=where)] if left > 0 else []


def _check_tied(mapped: Mapped, head: str) -> None:
    """Refuses a head that is there and is not the embedding, though they are to be one."""
    files = mapped.files
    table = mapped.found[mapped.family.row(EMBEDDING)[0].name]
    if files.entries[head].shape == files.entries[table].shape and np.array_equal(
        files.read(head), files.read(table)
    ):
        return
    raise CheckpointError(
        f"{head} is not {table}, though config.json ties them",
        where=files.entries[head].where,
        cure='set "tie_word_embeddings": false in config.json if the head is its own',
    )


# -- the way back


def exported_shapes(
    family: Family, own: Mapping[str, Parameter], dtype_of: Callable[[str], str]
) -> dict[str, tuple[tuple[int, ...], str]]:
    """Return shape and type of every tensor of an export, in the order of `exported`."""
    return {
        name: (parameter.tensor_shape(tensor), dtype_of(name))
        for path, parameter in own.items()
        for name, _, tensor in parameter.names(family.row(path))
    }


def exported(
    family: Family,
    own: Mapping[str, Parameter],
    read: Callable[[str], NDArray[Any]],
    dtype_of: Callable[[str], str],
) -> Iterator[tuple[str, NDArray[Any]]]:
    """Take our parameters apart, one after another.

    Args:
        family: whose names the tensors get.
        own: the parameters.
        read: path -> the whole parameter, in model order.
        dtype_of: name of a tensor -> its type in the file.

    Yields:
        Name and tensor.
    """
    for path, parameter in own.items():
        whole = read(path)
        for name, tensor in parameter.scatter(family.row(path), whole):
            yield name, np.ascontiguousarray(tensor.astype(DTYPES[dtype_of(name)]))
