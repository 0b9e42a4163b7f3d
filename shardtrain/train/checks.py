"""Silent faults: copies of the state that differ, a step that does not give the same twice.

Owns: both checks. Does not own: how often they are made, what follows. A wrong bit raises no error
anywhere; these are the only things that see one, and they cost time, so they are asked for.
"""

import json
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from shardtrain.errors import PolicyError
from shardtrain.sharding.placement import leaves_by_path
from shardtrain.sharding.processes import Processes
from shardtrain.train.state import TrainState

PyTree = Any
_PATIENCE = 600.0


@jax.jit
def _sum_of_bits(leaf: jax.Array) -> jax.Array:
    """A number that changes when any bit of an array does, or when two entries change places."""
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    if leaf.dtype == jnp.bool_:
        leaf = leaf.astype(jnp.uint8)
    width = {1: jnp.uint8, 2: jnp.uint16}.get(leaf.dtype.itemsize, jnp.uint32)
    bits = jax.lax.bitcast_convert_type(leaf, width).astype(jnp.uint32).reshape(-1)
    place = jnp.arange(bits.size, dtype=jnp.uint32)
    mixed = (bits ^ (place * jnp.uint32(0x9E3779B1))) * jnp.uint32(0x85EBCA77)
    mixed = (mixed ^ (mixed >> 15)) * jnp.uint32(0xC2B2AE3D)
    return jnp.sum(mixed ^ (mixed >> 13), dtype=jnp.uint32)


def check_replicas(state: PyTree, peers: Processes, name: str) -> None:
    """Looks whether all copies of every piece of the state are equal, bit for bit.

    Args:
        state: arrays on the devices.
        peers: the processes that hold pieces of it.
        name: of this check; each may be used once.

    Raises:
        PolicyError: some differ; leaf and devices are named, in every process.
    """
    sums: dict[tuple[str, str], dict[int, int]] = defaultdict(dict)
    found = [
        (path, shard, _sum_of_bits(shard.data))
        for path, leaf in leaves_by_path(state)
        for shard in leaf.addressable_shards
    ]
    for path, shard, bits in found:
        where = str([(part.start, part.stop) for part in shard.index])
        sums[path, where][shard.device.id] = int(bits)
    if peers.count > 1:
        mine = [[*key, device, bits] for key, on in sums.items() for device, bits in on.items()]
        peers.set(f"{name}/{peers.index}", json.dumps(mine))
        peers.barrier(f"{name} told", _PATIENCE)
        for text in peers.under(name).values():
            for path, where, device, bits in json.loads(text):
                sums[path, where][device] = bits
    raise_if_apart(sums)


def raise_if_apart(sums: Mapping[tuple[str, str], Mapping[int, int]]) -> None:
    """Raises where the copies of a piece are not equal.

    Args:
        sums: for each leaf and piece, a sum of its bits by device.

    Raises:
        PolicyError: some differ.
    """
    apart = []
    for (path, _), by_device in sorted(sums.items()):
        values = list(by_device.values())
        usual = max(set(values), key=values.count)
        others = sorted(device for device, value in by_device.items() if value != usual)
        if others:
            apart.append(f"{path}: device {', '.join(map(str, others))} of {len(values)}")
    if apart:
        more = [f"and {len(apart) - 8} more"] if len(apart) > 8 else []
        raise PolicyError(
            "copies of the state differ between devices",
            where="guard.replicas_every",
            value="\n    ".join(["", *apart[:8], *more]),
            cure="take the machine with these devices out, and go on from the newest checkpoint",
        )


@dataclass
class Rerun:
    """A step that is computed twice now and then: the same bits must come out.

    On a GPU that asks for `run.deterministic`, without which a sum may be added up in any order.
    """

    step: Any
    every: int
    _calls: int = 0

    def __call__(
        self, state: TrainState, batch: Mapping[str, jax.Array]
    ) -> tuple[TrainState, dict[str, jax.Array]]:
        """One step."""
        self._calls += 1
        if self._calls % self.every:
            first: tuple[TrainState, dict[str, jax.Array]] = self.step(state, batch)
            return first
        copy = jax.tree.map(jnp.copy, state)
        stepped: tuple[TrainState, dict[str, jax.Array]] = self.step(state, batch)
        again, _ = self.step(copy, batch)
        apart = [
            path
            for (path, a), (_, b) in zip(
                leaves_by_path(stepped[0]), leaves_by_path(again), strict=True
            )
            if not _equal_here(a, b)
        ]
        if apart:
            raise PolicyError(
                f"a step computed twice gave two results in {len(apart)} arrays",
                where="guard.rerun_every",
                value=", ".join(apart[:8]),
                cure="take this machine out, and go on from the newest checkpoint",
            )
        return stepped


def _equal_here(a: jax.Array, b: jax.Array) -> bool:
    pieces = zip(a.addressable_shards, b.addressable_shards, strict=True)
    return all(
        np.array_equal(np.asarray(_sum_of_bits(x.data)), np.asarray(_sum_of_bits(y.data)))
        for x, y in pieces
    )
