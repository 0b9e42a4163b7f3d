"""What a layout leads one to expect of its compiled program, from the run's own placements.

Owns: the facts that promises are checked against: shapes of parameters and of the state as one
device has them, FLOPs, and which parameter an array in the program may be. Does not own: the
promises (`promises`), and the program (`hlo`, `collectives`).
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, Mesh

from shardtrain.models.config import TransformerConfig
from shardtrain.models.flops import training_flops_per_token
from shardtrain.ops.blockwise import block_size
from shardtrain.plan.host_copies import Travels
from shardtrain.plan.recompute import Passes, Products, expected_products, kept_entries
from shardtrain.sharding.disk import Disk
from shardtrain.sharding.mesh import DATA_AXES, PIPELINE, mesh_axes, mesh_platform
from shardtrain.sharding.placement import path_name, split_size
from shardtrain.sharding.tiers import HOST
from shardtrain.strategies.config import all_on_device
from shardtrain.strategies.order import is_stacked
from shardtrain.strategies.pipeline import Pipeline
from shardtrain.train.build import Program

Dims: TypeAlias = tuple[int, ...]

CONTEXT = "context"
STATE = "state"
"""What the step calls its first argument: so the program's arguments are named."""


@dataclass(frozen=True)
class Leaf:
    """One parameter, as one device computes with it."""

    path: str
    keys: str
    """The path as jax writes it in the names of the program's arguments."""
    dims: Dims
    layers: int
    """Layers that it stacks on one device; 0 for a parameter of no layer."""
    unsplit: int
    """Entries of one layer, or of all of it, that all devices together have."""
    tensor_split: bool
    """Whether the mesh's tensor axis splits it."""
    data_split: bool
    """Whether its optimizer state rests in shards of it."""

    @property
    def size(self) -> int:
        """Entries."""
        return math.prod(self.dims)

    @property
    def layer_size(self) -> int:
        """Entries of one layer, or of all of it."""
        return self.size // max(self.layers, 1)


@dataclass(frozen=True)
class Expected:
    """A layout's facts. Bytes, entries and FLOPs are those of one device and one step."""

    degrees: Mapping[str, int]
    """Of each mesh axis, slowest first."""
    zero: int
    microbatches: int
    remat: str
    leaves: tuple[Leaf, ...]
    state: Mapping[str, tuple[Dims, int]]
    """Dims and bytes of each tensor of the state, by the program's name of it."""
    on_host: frozenset[str]
    """Those that rest in the memory of the host."""
    travels: Travels
    disk: Travels
    """Between the device and its host."""
    parameter_width: int
    """Bytes of an entry of a parameter where it is used."""
    gradient_width: int
    """Bytes of an entry of a gradient when data shards reduce it."""
    products: Products
    """FLOPs of products. Of a pipeline every tick counts in full, as its program reads."""
    products_in_kernels: Products
    """The same where attention is a library's kernel."""
    model_flops: float
    """By the convention of utilisation, nothing twice."""
    kept_bytes: float | None
    """Most bytes that all layers together may keep for the backward; None without a bound."""
    domain: int
    """How many neighbouring devices the fast link joins."""
    memory: float | None
    """Bytes of the chip; None = unknown."""

    @property
    def is_pipeline(self) -> bool:
        """Whether layers are shared out among stages."""
        return self.degrees[PIPELINE] > 1

    @property
    def data_axes(self) -> tuple[str, ...]:
        """Axes of degree above 1 over which gradients are summed."""
        return tuple(axis for axis in (*DATA_AXES, CONTEXT) if self.degrees[axis] > 1)

    @property
    def splits_state(self) -> bool:
        """Whether there are axes that ZeRO splits state over."""
        return self.degrees["data"] * self.degrees[CONTEXT] > 1

    @property
    def state_bytes(self) -> int:
        """All that rests between two steps."""
        return sum(size for _, size in self.state.values())

    @property
    def device_bytes(self) -> int:
        """What of it rests on the device."""
        return sum(size for name, (_, size) in self.state.items() if name not in self.on_host)

    @property
    def parameters(self) -> int:
        """Entries of all parameters."""
        return sum(leaf.size for leaf in self.leaves)

    @cached_property
    def by_argument(self) -> Mapping[str, Leaf]:
        """Parameters by the names of the program's arguments."""
        return {f"{STATE}.params{leaf.keys}": leaf for leaf in self.leaves}

    @cached_property
    def _owners(self) -> Mapping[int, tuple[str, ...]]:
        owners: dict[int, dict[str, None]] = {}
        for leaf in self.leaves:
            for size in (leaf.size, leaf.layer_size):
                owners.setdefault(size, {})[leaf.path] = None
        return {size: tuple(paths) for size, paths in owners.items()}

    def owners(self, size: int) -> tuple[str, ...]:
        """Parameters of which a device has so many entries, in all layers together or in one."""
        return self._owners.get(size, ())

    def unsplit_owners(self, size: int) -> tuple[str, ...]:
        """Parameters split over tensor which would have so many entries without that."""
        split = [leaf for leaf in self.leaves if leaf.tensor_split]
        return tuple(x.path for x in split if size in (x.unsplit, x.unsplit * max(x.layers, 1)))


def expect(
    program: Program,
    *,
    model: TransformerConfig,
    vocab_size: int,
    length: int,
    batch_size: int,
    remat: str,
    domain: int,
    memory: float | None = None,
    loss_chunks: int = 1,
) -> Expected:
    """Reads the facts of a layout off a program that need not be runnable here.

    Args:
        program: on any mesh, also an abstract one.
        model: its section.
        vocab_size: tokens of the data; `model.vocab_size` goes first.
        length: tokens of a sequence.
        batch_size: sequences of a step, of all devices.
        remat: `train.remat`.
        domain: how many neighbouring devices the fast link joins, as `Cluster.domain`.
        memory: bytes of a chip, if known.
        loss_chunks: `task.loss_chunks`.
    """
    placement, policy, layout = program.placement, program.policy, program.layout
    mesh, table, microbatches = layout.mesh, layout.compute, layout.microbatches
    split = {name: split_size(mesh, axes) for name, axes in table.items()}
    rows, device_length = batch_size / split["batch"], length / split["length"]
    passes = _passes(program, rows / microbatches * device_length)
    products = [
        expected_products(
            model,
            rows=model.padded_vocab(vocab_size),
            length=_seen(model, length, mesh),
            remat=remat,
            passes=passes,
            head_products=4 if loss_chunks > 1 else 3,
            split=split,
            in_kernels=in_kernels,
        )
        for in_kernels in (False, True)
    ]
    width = np.dtype(policy.compute).itemsize
    kept, kept_anywhere = (
        _kept_bytes(model, where, rows / microbatches, length, split, width)
        for where in (remat, all_on_device(remat))
    )
    own = max((leaf.layers for leaf in _leaves(program)), default=1)
    runs = passes.layer_tokens / (rows / microbatches * device_length * own)
    kept_there = ((kept_anywhere or 0) - (kept or 0)) * microbatches
    gathered = policy.compute if placement.zero == 3 else policy.params
    is_summed = layout.runner.sums_gradients or policy.reduces_wider
    gradient = policy.reduce_dtype(summed=is_summed and placement.zero <= 1)
    vocab = model.vocab_size or vocab_size
    per_token = training_flops_per_token(model, vocab_size=vocab, length=length)
    return Expected(
        degrees=dict(mesh.shape),
        zero=placement.zero,
        microbatches=microbatches,
        remat=remat,
        leaves=tuple(_leaves(program)),
        state=_state(program),
        on_host=_on_host(program),
        travels=_travels(program, reads=2 * runs, kept=kept_there),
        disk=_disk(program.disk, reads=2 * runs, masters=policy.has_master),
        parameter_width=np.dtype(gathered).itemsize,
        gradient_width=np.dtype(gradient).itemsize,
        products=products[0],
        products_in_kernels=products[1],
        model_flops=per_token * batch_size * length / math.prod(mesh.shape.values()),
        kept_bytes=kept,
        domain=domain,
        memory=memory,
    )


def _on_host(program: Program) -> frozenset[str]:
    """Leaves of the state that rest on the host."""
    return frozenset(
        STATE + jax.tree_util.keystr(path)
        for path, sharding in jax.tree.leaves_with_path(program.shardings)
        if sharding.memory_kind == HOST
    )


def _disk(disk: Disk, *, reads: float, masters: bool) -> Travels:
    """What one device reads from a disk and writes there in a step; see `_travels`."""
    state, params, ends = (
        sum(rows.group.rows * sum(block.nbytes for block in rows.group.blocks) for rows in some)
        for some in (
            [disk.state] if disk.state else [],
            [disk.parameters] if disk.parameters else [],
            disk.ends.values(),
        )
    )
    rows = disk.all[0].group.rows if disk.all else 1
    return Travels(
        loaded=state + ends + params * (reads + (not masters)),
        stored=state + ends + params,
        again=(state + params) / rows,
    )


def _travels(program: Program, *, reads: float, kept: float) -> Travels:
    """What goes between a device and its host in a step.

    Args:
        program: the run's.
        reads: how often forwards and backwards read a layer.
        kept: bytes that forwards keep there for backwards.
    """
    policy, placement = program.policy, program.placement
    state, on_host = _state(program), _on_host(program)
    is_away = {name: name.startswith(f"{STATE}.params") for name in on_host}
    away, moments = (
        sum(state[name][1] for name in on_host if is_away[name] is want) for want in (True, False)
    )
    if program.layout.tiers.updates:
        width: int = np.dtype(
            policy.gradient_dtype(summed=program.layout.runner.sums_gradients)
        ).itemsize
        sizes = [
            (math.prod(place.shard_shape(shape.shape)), is_away)
            for shape, place, is_away in zip(
                *map(jax.tree.leaves, (placement.shapes, placement.optimizer, placement.away)),
                strict=True,
            )
        ]
        narrow: int = np.dtype(policy.params).itemsize
        here = narrow * sum(size for size, is_away in sizes if not is_away)
        return Travels(
            loaded=away * reads + kept,
            stored=width * sum(size for size, _ in sizes)
            + (0 if policy.has_master else here)
            + kept,
            # The call on the host may write them to the device itself.
            again=here,
        )
    # Masters are read in their parameters' place; without, the update reads those too.
    read_too = 0 if policy.has_master else away
    again = sum(
        state[name][1] / state[name][0][0]
        for name in on_host
        if "['layers']" in name and not (policy.has_master and is_away[name])
    )
    return Travels(
        loaded=moments + away * reads + read_too + kept,
        stored=moments + away + kept,
        again=again,
    )


def _seen(model: TransformerConfig, length: int, mesh: Mesh | AbstractMesh) -> float:
    """Keys that a query is multiplied with; tile by tile those of tiles that are not hidden."""
    degree = mesh.shape[CONTEXT]
    if degree == 1 and model.attention not in ("ring", "ulysses"):
        return length
    parts = 2 * degree if degree > 1 and model.attention != "ulysses" else 1
    return (length + block_size(length // parts, mesh_platform(mesh))) / 2


def _passes(program: Program, tokens: float) -> Passes:
    """How often a device runs its layers; `tokens` are those of a microbatch on it."""
    runner = program.layout.runner
    if isinstance(runner, Pipeline):
        ticks = runner.schedule.work.num_ticks
        return Passes(tokens * ticks * runner.layout.num_slots, tokens * ticks)
    layers = max((leaf.layers for leaf in _leaves(program)), default=0)
    all_tokens = tokens * program.layout.microbatches
    return Passes(all_tokens * layers, all_tokens)


def _kept_bytes(
    model: TransformerConfig,
    remat: str,
    rows: float,
    length: int,
    split: Mapping[str, int],
    width: int,
) -> float | None:
    """What a microbatch of so many rows on a device may keep in all layers."""
    kept = kept_entries(model, remat)
    if kept is None:
        return None
    stream, heads, mlp = kept
    inside = length / split["length"]
    entries = (
        # Products are kept before their results are brought into the stream's layout.
        stream * (inside if remat == "dots" else length / split["residual_length"])
        + heads * inside / split["kv_heads"]
        + mlp * inside / split["mlp"]
    )
    return width * rows * model.num_layers * entries


def _leaves(program: Program) -> Iterable[Leaf]:
    placement = program.placement
    names = jax.tree.leaves(placement.names, is_leaf=lambda node: isinstance(node, tuple))
    shardings = (jax.tree.leaves(tree) for tree in (placement.computed, placement.optimizer))
    leaves = jax.tree.leaves_with_path(placement.shapes)
    for (path, shape), axes, computed, rests in zip(leaves, names, *shardings, strict=True):
        dims, is_layered = computed.shard_shape(shape.shape), is_stacked(axes)
        yield Leaf(
            path=path_name(path),
            keys=jax.tree_util.keystr(path),
            dims=dims,
            layers=dims[0] if is_layered else 0,
            unsplit=math.prod(shape.shape[is_layered:]),
            tensor_split=any("tensor" in mesh_axes(entry) for entry in computed.spec),
            data_split=math.prod(rests.shard_shape(shape.shape)) < math.prod(dims),
        )


def _state(program: Program) -> Mapping[str, tuple[Dims, int]]:
    """Every leaf of the state by the name that jax gives the compiler's arguments."""

    def words(leaf: Any) -> Any:
        """A key is an array of integers."""
        if not jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            return leaf
        data = jax.eval_shape(jax.random.key_data, leaf)
        return jax.ShapeDtypeStruct(data.shape, data.dtype)

    leaves = jax.tree.leaves_with_path(program.shapes)
    shardings = jax.tree.leaves(program.shardings)
    state = {}
    for (path, leaf), sharding in zip(leaves, shardings, strict=True):
        held = words(leaf)
        dims = held.shape if held is not leaf else sharding.shard_shape(leaf.shape)
        size = math.prod(dims) * np.dtype(held.dtype).itemsize
        state[STATE + jax.tree_util.keystr(path)] = (tuple(dims), int(size))
    return state
