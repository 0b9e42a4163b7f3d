"""What one device holds between two steps, and what a layer keeps within one.

Owns: these figures and the counting of entries. Does not own: where anything rests (`sharding`).
"""

import dataclasses
from dataclasses import dataclass

import jax

from shardtrain.sharding.placement import LAYERS, Placement, bytes_per_device, leaves_by_path


@dataclass(frozen=True)
class Kept:
    """Bytes that a layer's forward keeps of a sample for the backward."""

    device: int
    host: int


@dataclass(frozen=True)
class Entries:
    """Entries of parameters on one device: as they are used, and split further by ZeRO."""

    layers: int
    ends: int
    split_layers: int
    split_ends: int

    @property
    def used(self) -> int:
        """All that one device computes with, however it rests."""
        return self.layers + self.ends

    @property
    def split(self) -> int:
        """Its part of them after ZeRO's split."""
        return self.split_layers + self.split_ends


@dataclass(frozen=True)
class State:
    """Bytes that rest on one device between two steps, or on its host."""

    parameters: int
    """Those on the device."""
    optimizer: int
    """Masters, moments, counts; those on the device."""
    master: int
    """The part of it that is the wider copy of the parameters."""
    host: int
    """What of the optimizer's rests in the memory of the device's host."""
    away: int
    """Parameters that rest there or on a disk."""
    disk: int
    """What of the optimizer's rests on a disk."""
    disk_parameters: int
    """Those of `away` that rest on a disk."""
    entries: Entries
    """Of parameters that are trained."""
    weights: Entries
    """Of all parameters."""


def entries_of(placement: Placement) -> Entries:
    """Counts the entries of a placement's parameters on one device."""
    counts = []
    shapes = leaves_by_path(placement.shapes)
    whole = jax.tree.leaves(placement.computed)
    split = jax.tree.leaves(dataclasses.replace(placement, zero=1).optimizer)
    for shardings in (whole, split):
        sizes = {True: 0, False: 0}
        for (path, leaf), sharding in zip(shapes, shardings, strict=True):
            is_layer = path.split("/")[0] == LAYERS
            sizes[is_layer] += bytes_per_device(leaf.shape, "int8", sharding)
        counts += [sizes[True], sizes[False]]
    return Entries(*counts)
