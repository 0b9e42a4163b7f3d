"""A placement, told: each parameter's names, partition and bytes per device."""

from dataclasses import dataclass
from typing import Any

from shardtrain.sharding.placement import (
    Placement,
    bytes_by_memory,
    bytes_per_device,
    leaves_by_path,
    names_by_path,
    owner_of,
    tree_bytes,
)
from shardtrain.sharding.row_gradient import is_table

PyTree = Any


@dataclass(frozen=True)
class Row:
    """One parameter."""

    path: str
    names: tuple[str | None, ...]
    shape: tuple[int, ...]
    spec: tuple[Any, ...]
    """Mesh axes of each dim, while the parameter rests."""
    stored_spec: tuple[Any, ...]
    """Mesh axes of each dim of its optimizer state."""
    note: str
    """Why it is split along another axis than the table's, or not at all."""
    parameters: int
    """Bytes on one device."""
    gradients: int
    optimizer: int


@dataclass(frozen=True)
class Report:
    """All parameters, and the totals in bytes on one device."""

    rows: tuple[Row, ...]
    parameters: int
    gradients: int
    """Without those of tables that are rows of a batch."""
    optimizer: int
    """Moments, master weights, counts: everything of the optimizer, but what is on the host."""
    host: int
    """What of the optimizer is in the host's memory, for each device."""
    disk: int
    """What of the state is on a disk, for each device."""
    beside: int
    """Statistics and averages, which are kept beside the parameters."""

    @property
    def state(self) -> int:
        """What rests between two steps: parameters, optimizer state, and what is beside them."""
        return self.parameters + self.optimizer + self.beside


def report(
    placement: Placement,
    *,
    params: PyTree,
    opt_state: PyTree,
    gradient_dtype: Any,
    model_state: PyTree = (),
    frozen: PyTree = (),
    disk: int = 0,
) -> Report:
    """Counts what one device holds.

    Args:
        placement: where things rest.
        params: shapes and dtypes of the parameters.
        opt_state: shapes and dtypes of the optimizer's state.
        gradient_dtype: dtype in which the whole step's gradient exists.
        model_state: shapes and dtypes of what is kept beside.
        frozen: shapes and dtypes of parameters that are not trained.
        disk: bytes on a disk; what is there has no shape in `params` and `opt_state`.
    """
    device, host = bytes_by_memory(opt_state, placement.optimizer_state(opt_state))
    by_owner: dict[str, int] = {}
    shapes, whole = dict(leaves_by_path(params)), dict(leaves_by_path(placement.shapes))
    for path, size in device.items():
        owner = owner_of(path, shapes)
        by_owner[owner] = by_owner.get(owner, 0) + size
    at_rest = dict(leaves_by_path(placement.params))
    gradients = dict(leaves_by_path(placement.gradients))
    stored = dict(leaves_by_path(placement.optimizer))
    notes = dict(leaves_by_path(placement.resting(stored=placement.zero >= 1)))
    names = names_by_path(placement.names)
    rows = tuple(
        Row(
            path=path,
            names=names[path],
            shape=whole[path].shape,
            spec=tuple(at_rest[path].spec),
            stored_spec=tuple(stored[path].spec),
            note="its gradient is that of a batch's rows" if rowwise else notes[path].note,
            parameters=bytes_per_device(leaf.shape, leaf.dtype, at_rest[path]),
            gradients=0
            if rowwise
            else bytes_per_device(whole[path].shape, gradient_dtype, gradients[path]),
            optimizer=by_owner.get(path, 0),
        )
        for path, leaf in shapes.items()
        for rowwise in (is_table(names[path]),)
    )
    rows += _frozen_rows(placement.frozen, frozen)
    return Report(
        rows=rows,
        parameters=sum(row.parameters for row in rows),
        gradients=sum(row.gradients for row in rows),
        optimizer=sum(device.values()),
        host=sum(host.values()),
        disk=disk,
        beside=tree_bytes(model_state, placement.beside(model_state)),
    )


def _frozen_rows(placement: Placement, frozen: PyTree) -> tuple[Row, ...]:
    """Parameters without gradients and optimizer state."""
    names, resting = names_by_path(placement.names), placement.resting(stored=placement.zero >= 3)
    notes = dict(leaves_by_path(resting))
    shardings, whole = (dict(leaves_by_path(t)) for t in (placement.params, placement.shapes))
    return tuple(
        Row(
            path=path,
            names=names[path],
            shape=whole[path].shape,
            spec=tuple(shardings[path].spec),
            stored_spec=tuple(shardings[path].spec),
            note=", ".join(filter(None, ("frozen", notes[path].note))),
            parameters=bytes_per_device(leaf.shape, leaf.dtype, shardings[path]),
            gradients=0,
            optimizer=0,
        )
        for path, leaf in leaves_by_path(frozen)
    )
