"""What is planned: a run's work without its layout, and one layout of it.

Owns: `Layout`, the choices that do not change what is computed, and `Workload`, all else that the
planner must know, traced at most once. Does not own: what a layout costs (`memory`, `cost`), or
which are legal (`layout`).
"""

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache, cached_property
from typing import Any

import jax
import jax.numpy as jnp

from shardtrain.models.config import TransformerConfig
from shardtrain.plan.host_copies import Travels
from shardtrain.plan.pieces import Pieces, Shapes, trace_pieces
from shardtrain.plan.resting import Entries, Kept, State, entries_of
from shardtrain.plan.stages import make_stages
from shardtrain.sharding.mesh import MESH_AXES, abstract_mesh
from shardtrain.sharding.placement import (
    LAYERS,
    Placement,
    bytes_by_memory,
    tree_bytes,
)
from shardtrain.sharding.rules import compute_table, stored_table
from shardtrain.sharding.tiers import MASTER
from shardtrain.strategies.config import (
    INPUT,
    PipelineConfig,
    all_on_device,
    device_names,
    host_names,
)
from shardtrain.strategies.schedules.layout import Layout as Spread
from shardtrain.strategies.schedules.layout import balance
from shardtrain.strategies.schedules.simulate import even, lockstep_time, make_costs
from shardtrain.strategies.schedules.table import BUFFERS, Schedule
from shardtrain.train.build import Program

PyTree = Any
MOST_ROUGH_STAGES = 16
"""Stages of the longest pipeline whose table is made for rough figures."""
Rules = Mapping[str, str | list[str] | None]


@dataclass(frozen=True)
class Layout:
    """Everything about a run that costs or saves, and does not change what is computed.

    The fields are keys of a config: see `sections`.
    """

    pipeline: int = 1
    replica: int = 1
    data: int = 1
    context: int = 1
    tensor: int = 1
    zero: int = 0
    sequence_parallel: bool = False
    microbatches: int = 1
    remat: str = "none"
    schedule: str = "1f1b"
    virtual_stages: int = 1
    layers: str = ""
    """`pipeline.layout`."""
    table: str = ""

    @property
    def degrees(self) -> dict[str, int]:
        """Degree of every mesh axis."""
        return {axis: getattr(self, axis) for axis in MESH_AXES}

    @property
    def table_key(self) -> tuple[str | int, ...]:
        """What the table of a pipeline depends on, besides the number of microbatches."""
        return (self.pipeline, self.schedule, self.virtual_stages, self.layers, self.table)

    @property
    def recomputes(self) -> str:
        """The policy by what it computes again, wherever it keeps what it keeps."""
        return all_on_device(self.remat)

    @property
    def shards(self) -> int:
        """Parts that a microbatch is cut into."""
        return self.replica * self.data

    @property
    def sections(self) -> dict[str, dict[str, Any]]:
        """The same as sections of a config."""
        pipeline = {
            "schedule": self.schedule,
            "virtual_stages": self.virtual_stages,
            "layout": self.layers,
            "table": self.table,
        }
        return {
            "mesh": self.degrees,
            "sharding": {"zero": self.zero, "sequence_parallel": self.sequence_parallel},
            "train": {"microbatches": self.microbatches, "remat": self.remat},
            **({"pipeline": pipeline} if self.pipeline > 1 else {}),
        }

    def __str__(self) -> str:
        mesh = [f"{axis} {degree}" for axis, degree in self.degrees.items() if degree > 1]
        words = [" x ".join(mesh) or "one device", f"zero {self.zero}"]
        words += ["sequence parallel"] * self.sequence_parallel
        if self.pipeline > 1:
            virtual = f" x {self.virtual_stages}" if self.virtual_stages > 1 else ""
            words.append(self.schedule + virtual)
        words.append(f"microbatches {self.microbatches}")
        return ", ".join([*words, f"remat {self.remat}"])


@dataclass(frozen=True, eq=False)
class Workload:
    """A run's work, whatever its layout."""

    program: Program
    """Of one device, on an abstract mesh: names, shapes, dtypes, optimizer."""
    part: Callable[[int], Program]
    """The same for the part of the model that one of so many tensor shards holds."""
    model: TransformerConfig
    vocab_size: int
    length: int
    """Tokens of a sequence."""
    batch_size: int
    """Sequences of a step."""
    separate_documents: bool
    platform: str
    """Of the devices: "gpu", "tpu" or "cpu"."""
    rules: Rules = field(default_factory=dict)
    rough: bool = False
    """Whether to take the optimizer's state by its bytes an entry, and stages as equal: for a
    search over thousands of layouts."""
    traced: "Traced" = field(default_factory=lambda: Traced({}, {}), repr=False)
    """What was traced already; other workloads made of this one by `replace` share it."""

    def samples(self, layout: Layout) -> int:
        """Sequences of one microbatch on one device."""
        return self.batch_size // (layout.microbatches * layout.shards)

    @cached_property
    def _stages(self) -> dict[Any, tuple[Schedule, Spread]]:
        return {}

    @cached_property
    def _figures(self) -> dict[Any, "TableFigures"]:
        return {}

    @cached_property
    def _states(self) -> dict[Any, State]:
        return {}

    def pieces(self, layout: Layout) -> Pieces:
        """The model's pieces as one device of a layout runs them, for one sample."""
        tensor = layout.tensor
        shapes = Shapes(
            length=self.length // layout.context,
            context=layout.context,
            tensor=tensor,
            sequence_parallel=layout.sequence_parallel and tensor > 1,
            separate_documents=self.separate_documents,
            dropout=self.model.drops,
            platform=self.platform,
            split=layout.pipeline > 1 and (layout.schedule == "zero_bubble" or bool(layout.table)),
        )
        key = (shapes, layout.recomputes)
        parts, pieces = self.traced.parts, self.traced.pieces
        if key not in pieces:
            if tensor not in parts:
                parts[tensor] = self.part(tensor)
            pieces[key] = trace_pieces(parts[tensor], shapes, layout.recomputes)
        return pieces[key]

    def kept(self, layout: Layout) -> Kept:
        """What a layer's forward keeps of a sample, by where it does."""
        pieces, names = self.pieces(layout), host_names(layout.remat)
        if not names:
            return Kept(pieces.layer.kept, 0)
        rest = dataclasses.replace(layout, remat=",".join(device_names(layout.remat)) or "full")
        device = self.pieces(rest).layer.kept - (INPUT in names) * pieces.activation
        host = pieces.layer.kept - device
        return Kept(device, host)

    def updated(self, layout: Layout) -> tuple[float, float]:
        """Bytes of an update on the host: gradients, and parameters that rest on the device."""
        state, policy = self.state(layout), self.program.policy
        count = state.entries.split if layout.zero >= 1 else state.entries.used
        summed = layout.microbatches > 1 or layout.pipeline > 1
        width: int = jnp.dtype(policy.gradient_dtype(summed=summed)).itemsize
        narrow: int = jnp.dtype(policy.params).itemsize
        here = state.parameters / (state.parameters + state.away)
        return float(width * count), narrow * count * here

    def to_host(self, layout: Layout) -> Travels:
        """What travels between a device and its host in a step.

        A layer of the state is loaded once more than it is used; XLA may fetch it early.
        """
        state, layers = self.state(layout), self.model.num_layers
        masters = self.program.policy.has_master
        away = state.away - state.disk_parameters
        kept = self.kept(layout).host * self.samples(layout) * layers * layout.microbatches
        if self.program.layout.tiers.updates:
            gradients, parameters = self.updated(layout)
            read = 2 * layout.microbatches * away
            return Travels(
                loaded=read + parameters + kept,
                stored=gradients + parameters * (not masters) + kept,
                again=0.0,
            )
        return self._travels(state.host, away, layout, kept)

    def to_disk(self, layout: Layout) -> Travels:
        """What one device reads from a disk and writes to it in a step."""
        state = self.state(layout)
        return self._travels(state.disk, state.disk_parameters, layout)

    def _travels(self, moments: float, params: float, layout: Layout, kept: float = 0.0) -> Travels:
        """Of a state that comes for its update, and of parameters that come for each use."""
        made = params if self.updates_away else 0.0
        # Of masters new parameters are made without the old ones.
        updated = moments + (0.0 if self.program.policy.has_master else made)
        again = updated / self.model.num_layers
        used = 2 * layout.microbatches * params
        return Travels(
            loaded=used + updated + kept + again, stored=moments + made + kept, again=again
        )

    @property
    def updates_away(self) -> bool:
        """Whether parameters that rest away change; beside frozen ones those trained stay here."""
        return bool(self.program.placement.frozen_names == ())

    def stages(self, layout: Layout, microbatches: int) -> tuple[Schedule, Spread]:
        """The table for so many microbatches, and the layers of each virtual stage.

        A schedule by name is not proven again: it is only priced here.
        """
        key = (*layout.table_key, microbatches)
        if key not in self._stages:
            section = PipelineConfig(**layout.sections["pipeline"])
            self._stages[key] = make_stages(
                section,
                self.model,
                stages=layout.pipeline,
                microbatches=microbatches,
                length=self.length,
                vocab_size=self.vocab_size,
                proven=False,
            )
        return self._stages[key]

    def figures(self, layout: Layout, microbatches: int) -> "TableFigures":
        """Figures of the table for so many microbatches, stages being equal.

        Rough ones are those of a pipeline that is shorter in proportion, as are its microbatches.
        """
        if self.rough and layout.pipeline > MOST_ROUGH_STAGES:
            factor = layout.pipeline / MOST_ROUGH_STAGES
            short = dataclasses.replace(layout, pipeline=MOST_ROUGH_STAGES)
            return self.figures(short, max(round(microbatches / factor), 1)).times(factor)
        key = (*layout.table_key, microbatches)
        if key not in self._figures:
            schedule = self.stages(layout, microbatches)[0]
            share = even(schedule.work.num_stages, schedule.work.num_virtual)
            self._figures[key] = TableFigures(
                slots={buffer: schedule.slots.size(buffer) for buffer in BUFFERS},
                ticks=schedule.work.num_ticks,
                time=lockstep_time(schedule, make_costs(share, 1 / 3, 2 / 3)),
            )
        return self._figures[key]

    def spread(self, layout: Layout) -> Spread:
        """The layers of each virtual stage, without the table of all microbatches."""
        if self.rough:
            return _even_spread(self.model.num_layers, layout.pipeline, layout.virtual_stages)
        few = layout.microbatches if layout.table else min(layout.pipeline, layout.microbatches)
        return self.stages(layout, few)[1]

    def rows(self, layout: Layout) -> int:
        """Places of the stack of layers, of which some may hold none."""
        if layout.pipeline == 1:
            return self.model.num_layers
        spread = self.spread(layout)
        return spread.stages * spread.virtual_stages * spread.num_slots

    def state(self, layout: Layout) -> State:
        """What rests on one device."""
        rows = self.rows(layout)
        key = (tuple(layout.degrees.values()), layout.zero, layout.sequence_parallel, rows)
        if key not in self._states:
            self._states[key] = self._rest(layout, rows)
        return self._states[key]

    def _rest(self, layout: Layout, rows: int) -> State:
        placement, policy = self.placement(layout, rows), self.program.policy
        entries, weights = entries_of(placement), entries_of(placement.all)
        if self.rough:
            return self._by_the_entry(layout, entries, weights)
        every, masters = (
            jax.tree.map(lambda a, t=dtype: jax.ShapeDtypeStruct(a.shape, t), shapes)
            for shapes, dtype in (
                (placement.all.shapes, policy.params),
                (placement.shapes, policy.master),
            )
        )
        optimizer = dataclasses.replace(self.program.optimizer, placement=placement)
        opt_state = jax.eval_shape(optimizer.init, masters)
        device, host = bytes_by_memory(opt_state, placement.optimizer_state(opt_state))
        disk = {path: device.pop(path) for path in placement.state_on_disk(opt_state)}
        averages = jax.eval_shape(lambda master: self.program.kept.init(master, {}), masters)
        beside = tree_bytes(averages, placement.beside(averages))
        on_device, away = bytes_by_memory(every, placement.all.params)
        return State(
            parameters=sum(on_device.values()),
            optimizer=sum(device.values()) + beside,
            master=sum(size for path, size in device.items() if path.startswith(f"{MASTER}/")),
            host=sum(host.values()),
            away=sum(away.values()),
            disk=sum(disk.values()),
            disk_parameters=sum(away.values()) if placement.tiers.parameters == "disk" else 0,
            entries=entries,
            weights=weights,
        )

    def _by_the_entry(self, layout: Layout, entries: Entries, weights: Entries) -> State:
        """The state as if each entry of a parameter cost the same."""
        one = self._one
        resting = entries.split if layout.zero >= 1 else entries.used
        share = resting / one.entries.used
        used = (weights.split if layout.zero >= 3 else weights.used) / one.weights.used
        return State(
            parameters=round(used * one.parameters),
            optimizer=round(share * one.optimizer),
            master=round(share * one.master),
            host=round(share * one.host),
            away=round(used * one.away),
            disk=round(share * one.disk),
            disk_parameters=round(used * one.disk_parameters),
            entries=entries,
            weights=weights,
        )

    @cached_property
    def _one(self) -> State:
        """What one device would hold of it all."""
        return dataclasses.replace(self, rough=False).state(Layout())

    @property
    def num_parameters(self) -> int:
        """Parameters of the model, padding of tables counted in."""
        return self._one.weights.used

    def placement(self, layout: Layout, rows: int) -> Placement:
        """Where the parameters rest, with so many rows of layers."""
        own = self.program.placement
        compute = compute_table(
            sequence_parallel=layout.sequence_parallel, overrides=self.rules or None
        )

        def with_rows(shapes: PyTree) -> PyTree:
            if shapes == ():
                return ()
            layers = jax.tree.map(
                lambda a: jax.ShapeDtypeStruct((rows, *a.shape[1:]), a.dtype), shapes[LAYERS]
            )
            return {**shapes, LAYERS: layers}

        return Placement(
            mesh=abstract_mesh(layout.degrees, self.platform),
            compute=compute,
            stored=stored_table(compute),
            zero=layout.zero,
            names=own.names,
            shapes=with_rows(own.shapes),
            tiers=own.tiers,
            stays=own.stays,
            frozen_names=own.frozen_names,
            frozen_shapes=with_rows(own.frozen_shapes),
        )


@cache
def _even_spread(num_layers: int, stages: int, virtual_stages: int) -> Spread:
    most = -(-num_layers // (stages * virtual_stages))
    return balance(num_layers, stages, virtual_stages, most=most)


@dataclass(frozen=True)
class TableFigures:
    """What a table of a pipeline costs, whatever its stages do."""

    slots: Mapping[str, float]
    """Of each buffer of a stage."""
    ticks: float
    time: float
    """If stages are equal, their work on one microbatch being 1."""

    def times(self, factor: float) -> "TableFigures":
        """Those of so many times the stages and the microbatches."""
        slots = {buffer: count * factor for buffer, count in self.slots.items()}
        return TableFigures(slots, self.ticks * factor, self.time * factor)


@dataclass(frozen=True, eq=False)
class Traced:
    """The model's parts by tensor degree, and their pieces."""

    parts: dict[int, Program]
    pieces: dict[tuple[Shapes, str], Pieces]
