"""The pipeline: one program that runs any proven table of a schedule, and its gradient.

Owns: the `shard_map` around the stages, and which table they go through. Does not own: what a stage
does in each tick (`stage`), its parameters and gradients (`shards`), tables (`schedules`), the loss
and the model (`parts`).

The program is one `lax.scan` over the table's ticks inside a `jax.shard_map` that is manual over
`pipeline` and the data axes and leaves `tensor` to XLA. Each stage takes its own branches, so an
idle tick costs nothing; sends join the stages at the end of each part of a tick. Gradients are
summed where their data is and reduced once after the last tick (ZeRO 0-1), or layer by layer into
the shard that rests (ZeRO 2-3).
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
from jax.sharding import PartitionSpec

from shardtrain.errors import ShardingError
from shardtrain.sharding.mesh import DATA_AXES, PIPELINE
from shardtrain.sharding.placement import Placement, constrain_tree
from shardtrain.sharding.rules import manual_over
from shardtrain.strategies.order import LayerOrder
from shardtrain.strategies.parts import Cut, Evaluation, Gradients, Parts, Sums
from shardtrain.strategies.precision import Policy
from shardtrain.strategies.remat import remat
from shardtrain.strategies.schedules.layout import Layout
from shardtrain.strategies.schedules.table import Schedule, with_slots, without_backward
from shardtrain.strategies.shards import MANUAL, Shard, manual_specs
from shardtrain.strategies.stage import Model, Stage

PyTree = Any


@dataclass(frozen=True, eq=False)
class Pipeline:
    """Runs a batch's microbatches through stages, as a table says (a `Runner`)."""

    schedule: Schedule
    """A proven table."""
    layout: Layout
    """The layers of each virtual stage."""
    remat: str = "none"
    """What a layer's forward keeps for its backward; see `remat`."""
    loop: str = "scan"
    """How the layers of one virtual stage run: "scan" or "unroll"."""

    @cached_property
    def order(self) -> LayerOrder:
        """Where each layer rests: stage by stage, virtual stage by virtual stage."""
        return LayerOrder.of(self.layout.rows())

    @property
    def microbatches(self) -> int:
        """Parts of a step's batch."""
        return self.schedule.work.num_microbatches

    @property
    def sums_gradients(self) -> bool:
        """Always, even of one microbatch."""
        return True

    def gradients(self, parts: Parts, placement: Placement, dtypes: Policy) -> Gradients:
        """The gradient function of a whole step; see `Runner`.

        Raises:
            ShardingError: the model cannot be cut.
        """
        region = _Region(self, parts, _cut(parts), placement, dtypes)

        def gradients(
            params: PyTree, inputs: PyTree, batch: PyTree, shared: PyTree
        ) -> tuple[Sums, PyTree, PyTree]:
            seeds, key, _, frozen = shared
            specs = (PartitionSpec(), manual_specs(placement.optimizer), PartitionSpec())
            rests = (placement.params, placement.frozen.params)
            run = region.mapped(region.gradients, rests, specs)
            sums, grads, seen = run((params, frozen), batch, seeds, key, inputs)
            return sums, constrain_tree(grads, placement.optimizer), seen

        return gradients

    def evaluation(self, parts: Parts, placement: Placement) -> Evaluation:
        """Sums over all microbatches, by the table's forwards alone; see `Runner`."""
        region = _Region(self, parts, _cut(parts), placement, None)

        def sums(params: PyTree, _variables: PyTree, batch: PyTree) -> Sums:
            found: Sums = region.mapped(region.sums, placement.all.params, PartitionSpec())(
                params, batch
            )
            return found

        return sums


def _cut(parts: Parts) -> Cut:
    if parts.cut is None:
        raise ShardingError(
            "this model is no stack of equal layers that stages could share",
            where=f"mesh.{PIPELINE}",
            allowed="1",
        )
    return parts.cut


@dataclass(frozen=True, eq=False)
class _Region:
    """What is traced within the `shard_map`, and the way into it."""

    pipeline: Pipeline
    parts: Parts
    cut: Cut
    placement: Placement
    dtypes: Policy | None
    """None where there are no gradients."""

    def mapped(
        self, function: Callable[..., Any], rests: PyTree, out_specs: Any
    ) -> Callable[..., Any]:
        """A method below as a function of global arrays (parameters, batch, then whole ones).

        Args:
            function: the method.
            rests: shardings of the parameters.
            out_specs: of what it returns.
        """

        def run(*args: PyTree) -> Any:
            with manual_over(*MANUAL):
                return function(*args)

        def call(params: PyTree, batch: PyTree, *shared: PyTree) -> Any:
            whole = (PartitionSpec(),) * len(shared)
            samples = PartitionSpec(None, DATA_AXES)
            return jax.shard_map(
                run,
                mesh=self.placement.mesh,
                axis_names=frozenset(MANUAL),
                in_specs=(manual_specs(rests), samples, *whole),
                out_specs=out_specs,
                check_vma=False,
            )(params, batch, *shared)

        return call

    def gradients(
        self,
        weights: tuple[PyTree, PyTree],
        batch: PyTree,
        seeds: PyTree,
        key: PyTree,
        inputs: PyTree,
    ) -> tuple[Sums, PyTree, PyTree]:
        """Sums and gradients of a step, and what was seen in the place of `inputs`.

        `weights` are those that are trained, and the others.
        """
        shard = Shard(self.placement, *weights, self.dtypes)
        stage = self._stage(
            self.pipeline.schedule,
            shard,
            batch=batch,
            key=key,
            value=lambda sums: self.parts.value(sums, seeds),
            inputs=inputs,
        )
        sums, layers, ends, seen = stage.run()
        seen = jax.tree.map(lambda part: jax.lax.pmax(part, MANUAL), seen)
        return _everywhere(sums), shard.reduced(layers, ends), seen

    def sums(self, params: PyTree, batch: PyTree) -> Sums:
        """Sums of a step, by the table's forwards alone."""
        schedule = self.pipeline.schedule
        forwards = with_slots(schedule.name, without_backward(schedule.work))
        shard = Shard(self.placement.all, params, (), self.dtypes)
        return _everywhere(self._stage(forwards, shard, batch=batch, key=None, value=None).run()[0])

    def _stage(self, schedule: Schedule, shard: Shard, **step: Any) -> Stage:
        pipeline = self.pipeline
        layer = remat(pipeline.remat)(self.cut.layer)
        model = Model(cut=self.cut, layer=layer, shard=shard, **step)
        return Stage(model, schedule, pipeline.layout, pipeline.loop)


def _everywhere(sums: Sums) -> Sums:
    """Sums over all stages and data shards."""
    return {name: jax.lax.psum(part, MANUAL) for name, part in sums.items()}
