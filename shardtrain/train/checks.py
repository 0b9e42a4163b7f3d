"""Silent faults: copies of the state that differ, a step that does not give the same twice.

Owns: both checks. Does not own: how often they are made, what follows. A wrong bit raises no error
anywhere; these are the only things that see one, and they cost time, so they are asked for.
"""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from shardtrain.errors import PolicyError
from shardtrain.ops.digest import pieces, text
from shardtrain.sharding.placement import leaves_by_path
from shardtrain.sharding.processes import Processes, told_by_all
from shardtrain.train.state import TrainState

PyTree = Any
_PATIENCE = 600.0


def check_replicas(state: PyTree, peers: Processes, name: str) -> None:
    """Looks whether all copies of every piece of the state are equal, bit for bit.

    Args:
        state: arrays on the devices.
        peers: the processes that hold pieces of it.
        name: of this check; each may be used once.

    Raises:
        PolicyError: some differ; leaf and devices are named, in every process.
    """
    sums: dict[tuple[str, str], dict[int, str]] = defaultdict(dict)
    begun = [(path, leaf, pieces(leaf)) for path, leaf in leaves_by_path(state)]
    for path, leaf, found in begun:
        where = {shard.device.id: shard.index for shard in leaf.addressable_shards}
        for device, digest in found.by_device().items():
            place = str([(part.start, part.stop) for part in where[device]])
            sums[path, place][device] = text(digest)
    if peers.count > 1:
        mine = [[*key, device, bits] for key, on in sums.items() for device, bits in on.items()]
        for told in told_by_all(peers, name, mine, _PATIENCE):
            for path, where, device, bits in told:
                sums[path, where][device] = bits
    raise_if_apart(sums)


def raise_if_apart(sums: Mapping[tuple[str, str], Mapping[int, str]]) -> None:
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
            once: tuple[TrainState, dict[str, jax.Array]] = self.step(state, batch)
            return once
        copy = jax.tree.map(jnp.copy, state)
        stepped: tuple[TrainState, dict[str, jax.Array]] = self.step(state, batch)
        again, _ = self.step(copy, batch)
        first, second = _digests(stepped[0]), _digests(again)
        apart = [path for path, digest in first.items() if digest != second[path]]
        if apart:
            raise PolicyError(
                f"a step computed twice gave two results in {len(apart)} arrays",
                where="guard.rerun_every",
                value=", ".join(apart[:8]),
                cure="take this machine out, and go on from the newest checkpoint",
            )
        return stepped


def _digests(state: PyTree) -> dict[str, str]:
    begun = [(path, pieces(leaf)) for path, leaf in leaves_by_path(state)]
    return {path: text(found.total()) for path, found in begun}
