"""One stage of the pipeline, while it goes through a table: what it does in each tick.

Owns: the loop over ticks, the buffers between them, and who sends what when. Does not own: the
`shard_map` around it (`pipeline`), where parameters rest and how gradients are summed and reduced
(`shards`), tables (`schedules`), one layer (`layer_vjp`).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from shardtrain.errors import ShardingError
from shardtrain.sharding.mesh import PIPELINE
from shardtrain.sharding.rules import constrain
from shardtrain.strategies.layer_vjp import Arrays, LayerVjp
from shardtrain.strategies.parts import EARLIER, Cut, Sums
from shardtrain.strategies.schedules.layout import Layout
from shardtrain.strategies.schedules.table import NOTHING, Schedule
from shardtrain.strategies.shards import Shard

PyTree = Any
Found = tuple[Arrays, PyTree]
"""Gradients of the layers' leaves, and what was seen in the place of the inputs."""
Cell = dict[str, jax.Array]
"""What one stage does in one tick: the entry of each of the table's columns."""


@dataclass(frozen=True, eq=False)
class Model:
    """What a stage runs, and on what."""

    cut: Cut
    layer: Callable[..., jax.Array]
    """`cut.layer` under its remat policy."""
    shard: Shard
    """The parameters of this device."""
    batch: PyTree
    """Leaves [microbatches, batch, ...]."""
    key: jax.Array | None
    """The step's dropout key."""
    value: Callable[[Sums], jax.Array] | None
    """What sums contribute to the loss; None where there is no backward."""
    inputs: PyTree = ()
    """Those of a `ModelState`: [layers, ...], the layers as the model has them; or nothing."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Carry:
    """All that goes from tick to tick on one stage."""

    activation: jax.Array
    """What has arrived for forwards: [slots, batch, residual_length, embed]."""
    gradient: jax.Array
    """What has arrived for backwards, or was made of the loss; likewise."""
    residual: Arrays
    """What forwards keep for backwards: each [slots, layers of a virtual stage, ...]."""
    pending: Arrays
    """What backwards leave for weight parts; likewise."""
    layers: Arrays
    """Gradients of this stage's layers so far, by leaf."""
    ends: PyTree
    """Gradients of the ends that this stage runs so far."""
    sums: Sums
    seen: PyTree
    """The largest that was seen in the place of the inputs so far; nothing without any."""


class Stage:
    """One stage of one data shard."""

    def __init__(self, model: Model, schedule: Schedule, layout: Layout, loop: str) -> None:
        """Traces the pieces for their shapes.

        Args:
            model: what runs here.
            schedule: a proven table, or its forwards alone.
            layout: the layers of each virtual stage.
            loop: how the layers of a virtual stage run: "scan" or "unroll".
        """
        self.model, self.work, self.slots = model, schedule.work, schedule.slots
        self.shard, self.loop, self.trains = model.shard, loop, model.value is not None
        for leaf in jax.tree.leaves(model.batch):
            if leaf.shape[0] != self.work.num_microbatches:
                raise ShardingError(
                    f"the batch has {leaf.shape[0]} microbatches, the table of the pipeline "
                    f"{self.work.num_microbatches}",
                    where="train.microbatches",
                )
        self.columns = {name: jnp.asarray(c) for name, c in schedule.columns().items()}
        self.index = jax.lax.axis_index(PIPELINE)
        self.num_slots = layout.num_slots
        rows = layout.rows().reshape(layout.stages, -1)
        self.is_padded = bool((rows == NOTHING).any())
        # The layer in each of this stage's places [virtual stages x slots].
        self.layer_at = jnp.asarray(rows, jnp.int32)[self.index]
        part, context = jax.eval_shape(self.microbatch, jnp.int32(0))
        self.hidden = jax.eval_shape(
            lambda part, context: self.embed(self.shard.gathered(), part, context),
            part,
            context,
        )
        trained, frozen = jax.eval_shape(self.weights, 0, 0)
        names = [path[0].key for path, _ in jax.tree.leaves_with_path(trained)]
        self.earlier_leaf = names.index(EARLIER) if EARLIER in names else None
        self.vjp = LayerVjp(
            model.layer,
            trained,
            jax.ShapeDtypeStruct((), jnp.uint32),
            self.hidden,
            context,
            trains=self.trains,
            split=self.work.split,
            frozen=frozen,
        )

    def run(self) -> tuple[Sums, Arrays, PyTree, PyTree]:
        """Goes through the table.

        Returns:
            The sums, and the gradients of the layers' leaves and of the ends, of this stage and
            data shard; and what was seen in the place of the inputs.
        """
        layers, ends = self.shard.no_gradients() if self.trains else ([], {})
        carry = Carry(
            activation=self.streams("activation"),
            gradient=self.streams("gradient"),
            residual=[self.buffer("residual", like) for like in self.vjp.kept],
            pending=[self.buffer("pending", like) for like in self.vjp.pending],
            layers=layers,
            ends=ends,
            sums=self.no_sums(),
            seen=jax.tree.map(jnp.zeros_like, self.model.inputs),
        )

        def step(carry: Carry, row: Cell) -> tuple[Carry, None]:
            return self.tick(carry, {name: c[self.index] for name, c in row.items()}), None

        carry = jax.lax.scan(step, carry, self.columns)[0]
        return carry.sums, carry.layers, carry.ends, carry.seen

    # -- ticks

    def tick(self, carry: Carry, cell: Cell) -> Carry:
        """A forward, a backward and a weight part, each if the table has one here."""
        carry, y = self.maybe(self.forward, "forward", carry, cell)
        # Sent before the backward, so that it travels while that computes.
        arrived = self.send(y, 1)
        if self.trains:
            carry, gx = self.maybe(self.backward, "backward", carry, cell)
            # One send at a time: the first ends before the second begins, so XLA must begin it
            # before the backward to hide it.
            gx, arrived = jax.lax.optimization_barrier((gx, arrived))
            back = self.received(carry.gradient, cell["receive_gradient"], self.send(gx, -1))
            carry = replace(carry, gradient=back)
        if self.work.split:
            carry = self.maybe(self.weight, "weight", carry, cell)[0]
        onward = self.received(carry.activation, cell["receive_activation"], arrived)
        return replace(carry, activation=onward)

    def maybe(
        self,
        do: Callable[[Carry, Cell], tuple[Carry, jax.Array]],
        part: str,
        carry: Carry,
        cell: Cell,
    ) -> tuple[Carry, jax.Array]:
        """Does a part of a tick if the table has it here; else there is nothing to send."""
        done: tuple[Carry, jax.Array] = jax.lax.cond(
            cell[f"{part}_micro"] != NOTHING,
            do,
            lambda carry, _: (carry, self.nothing()),
            carry,
            cell,
        )
        return done

    def forward(self, carry: Carry, cell: Cell) -> tuple[Carry, jax.Array]:
        """One microbatch through the layers of one virtual stage, and the loss after the last."""
        virtual = cell["forward_virtual"]
        part, context = self.microbatch(cell["forward_micro"])
        x = jax.lax.cond(
            self.is_first(virtual),
            lambda: self.embed(self.shard.gathered(), part, context),
            lambda: stream(at(carry.activation, cell["forward_activation"])),
        )

        def layer(slot: Any, passing: Any) -> Any:
            x, residual = passing
            place, index = self.place(virtual, slot)
            x, kept = self.if_layer(
                index,
                lambda x: self.vjp.forward(self.weights(place, index), unsigned(index), x, context),
                lambda x: (x, zeros_of(self.vjp.kept)),
                x,
            )
            where = (cell["forward_residual"], slot)
            return stream(x), [b.at[where].set(k) for b, k in zip(residual, kept, strict=True)]

        y, residual = self.each_layer(layer, (x, carry.residual))
        carry = jax.lax.cond(
            self.is_last(virtual),
            lambda carry: self.head(carry, cell, y, part),
            lambda carry: carry,
            replace(carry, residual=residual),
        )
        return carry, y

    def head(self, carry: Carry, cell: Cell, y: jax.Array, part: PyTree) -> Carry:
        """The loss and at once its gradient, so that nothing of the vocabulary's size is kept."""
        model, shard, value_of = self.model, self.shard, self.model.value
        if value_of is None:
            found = model.cut.head(shard.gathered(), y, part)
            return replace(carry, sums=add(carry.sums, found))

        def loss(ends: PyTree, y: jax.Array) -> tuple[jax.Array, Sums]:
            sums = model.cut.head(shard.whole(ends), y, part)
            value = value_of(sums)
            return value, {**sums, "loss": value}

        (ends, gy), sums = jax.grad(loss, argnums=(0, 1), has_aux=True)(shard.ends(), y)
        gradient = carry.gradient.at[cell["forward_gradient"]].set(stream(gy))
        return replace(
            carry,
            sums=add(carry.sums, sums),
            gradient=streams(gradient),
            ends=shard.add_ends(carry.ends, ends),
        )

    def backward(self, carry: Carry, cell: Cell) -> tuple[Carry, jax.Array]:
        """The gradient of one microbatch back through the layers of one virtual stage."""
        virtual = cell["backward_virtual"]
        part, context = self.microbatch(cell["backward_micro"])
        vjp, shard = self.vjp, self.shard

        def layer(slot: Any, passing: Any) -> Any:
            g, found, pending = passing
            place, index = self.place(virtual, slot)
            kept = [b[cell["backward_residual"], slot] for b in carry.residual]

            def do(g: jax.Array, found: Found) -> Any:
                weights = self.weights(place, index)
                new, g, left = vjp.backward(weights, unsigned(index), kept, g, context)
                return stream(g), self.added(found, vjp.early, place, index, new), left

            g, found, left = self.if_layer(
                index, do, lambda g, found: (g, found, zeros_of(vjp.pending)), g, found
            )
            where = (cell["backward_pending"], slot)
            return g, found, [b.at[where].set(p) for b, p in zip(pending, left, strict=True)]

        g = stream(at(carry.gradient, cell["backward_gradient"]))
        passing = (g, (carry.layers, carry.seen), carry.pending)
        gx, (layers, seen), pending = self.each_layer(layer, passing, reverse=True)

        def embedded(ends: PyTree) -> PyTree:
            def embed(ends: PyTree) -> jax.Array:
                return self.embed(shard.whole(ends), part, context)

            (new,) = jax.vjp(embed, shard.ends())[1](gx)
            return shard.add_ends(ends, new)

        ends = jax.lax.cond(self.is_first(virtual), embedded, lambda ends: ends, carry.ends)
        return replace(carry, layers=layers, seen=seen, pending=pending, ends=ends), gx

    def weight(self, carry: Carry, cell: Cell) -> tuple[Carry, jax.Array]:
        """The gradients of one virtual stage's matrices that its backward has left."""
        virtual = cell["weight_virtual"]
        _, context = self.microbatch(cell["weight_micro"])
        vjp = self.vjp

        def layer(slot: Any, found: Found) -> Any:
            place, index = self.place(virtual, slot)
            kept = [b[cell["weight_residual"], slot] for b in carry.residual]
            pending = [b[cell["weight_pending"], slot] for b in carry.pending]

            def do(found: Found) -> Found:
                weights = self.weights(place, index)
                new = vjp.late_gradients(weights, unsigned(index), kept, pending, context)
                return self.added(found, vjp.late, place, index, new)

            return self.if_layer(index, do, lambda found: found, found)

        layers, seen = self.each_layer(layer, (carry.layers, carry.seen))
        return replace(carry, layers=layers, seen=seen), self.nothing()

    # -- pieces

    def weights(self, place: Any, index: Any) -> tuple[PyTree, PyTree]:
        """A layer's parameters: those that are trained, with its row of the inputs; the others."""
        trained, frozen = self.shard.layer(place)
        for rows in jax.tree.leaves(self.model.inputs):
            trained = {**trained, EARLIER: at(rows, index)}
        return trained, frozen

    def added(
        self, found: "Found", leaves: Sequence[int], place: Any, index: Any, new: Arrays
    ) -> "Found":
        """What was found so far, with gradients of some leaves of `weights`."""
        layers, seen = found
        others: dict[int, jax.Array] = {}
        for leaf, gradient in zip(leaves, new, strict=True):
            if leaf == self.earlier_leaf:
                seen = jax.tree.map(lambda rows, g=gradient: rows.at[index].max(g), seen)
            else:
                others[leaf - (self.earlier_leaf is not None and leaf > self.earlier_leaf)] = (
                    gradient
                )
        return self.shard.add_layer(layers, list(others), place, list(others.values())), seen

    def microbatch(self, index: jax.Array) -> tuple[PyTree, PyTree]:
        """One microbatch of this data shard, and what every layer reads of it."""
        part = jax.tree.map(lambda leaf: at(leaf, index), self.model.batch)
        return part, self.model.cut.context(self.shard.resting(), part, self.model.key)

    def embed(self, params: PyTree, part: PyTree, context: PyTree) -> jax.Array:
        """The first layer's input."""
        return stream(self.model.cut.embed(params, part, context))

    def is_first(self, virtual: jax.Array) -> jax.Array:
        """Whether a virtual stage of this stage holds the beginning of the model."""
        return (self.index == 0) & (virtual == 0)

    def is_last(self, virtual: jax.Array) -> jax.Array:
        """Whether it holds the end."""
        return (self.index == self.work.num_stages - 1) & (virtual == self.work.num_virtual - 1)

    def place(self, virtual: jax.Array, slot: Any) -> tuple[jax.Array, jax.Array]:
        """A layer's place on this stage, and its index in the model; -1 for none."""
        place = virtual * self.num_slots + slot
        return place, self.layer_at[place]

    def each_layer(
        self, body: Callable[[Any, Any], Any], carry: Any, *, reverse: bool = False
    ) -> Any:
        """Runs (slot, carry) -> carry for the layers of a virtual stage."""
        last = self.num_slots - 1
        if self.loop == "scan":
            return jax.lax.fori_loop(
                0, self.num_slots, lambda i, c: body(last - i if reverse else i, c), carry
            )
        for slot in range(self.num_slots):
            carry = body(last - slot if reverse else slot, carry)
        return carry

    def if_layer(
        self, index: jax.Array, do: Callable[..., Any], otherwise: Callable[..., Any], *args: Any
    ) -> Any:
        """Does something if there is a layer; most layouts have one in every place."""
        return jax.lax.cond(index >= 0, do, otherwise, *args) if self.is_padded else do(*args)

    def no_sums(self) -> Sums:
        """The sums of nothing."""

        def shapes() -> Sums:
            part, _ = self.microbatch(jnp.int32(0))
            params = self.shard.gathered()
            sums = self.model.cut.head(params, self.nothing(), part)
            value = self.model.value
            return sums if value is None else {**sums, "loss": value(sums)}

        return zeros_of(jax.eval_shape(shapes))  # type: ignore[no-any-return]

    # -- buffers and sends

    def buffer(self, name: str, like: Any) -> jax.Array:
        """A buffer of what the layers of a virtual stage keep."""
        return jnp.zeros((self.slots.size(name), self.num_slots, *like.shape), like.dtype)

    def streams(self, name: str) -> jax.Array:
        """A buffer of what arrives, with one slot more to throw away into."""
        shape = (self.slots.size(name) + 1, *self.hidden.shape)
        return streams(jnp.zeros(shape, self.hidden.dtype))

    def nothing(self) -> jax.Array:
        """What an idle stage sends."""
        return stream(jnp.zeros(self.hidden.shape, self.hidden.dtype))

    def send(self, x: jax.Array, by: int) -> jax.Array:
        """Sends to the next stage (1) or the one before (-1); what nobody sends is zero."""
        count = self.work.num_stages
        pairs = [(stage, (stage + by) % count) for stage in range(count)]
        if self.work.num_virtual == 1:  # then the ends of the model are not neighbours
            pairs = [(stage, to) for stage, to in pairs if to == stage + by]
        return stream(jax.lax.ppermute(x, PIPELINE, pairs))

    def received(self, buffer: jax.Array, slot: jax.Array, x: jax.Array) -> jax.Array:
        """A buffer with what has arrived in its slot, or thrown away."""
        return streams(buffer.at[jnp.where(slot == NOTHING, len(buffer) - 1, slot)].set(x))


def stream(x: jax.Array) -> jax.Array:
    """A residual stream, or its gradient, as it goes from stage to stage."""
    return constrain(x, "batch", "residual_length", "embed")


def streams(x: jax.Array) -> jax.Array:
    """Several of them."""
    return constrain(x, None, "batch", "residual_length", "embed")


def at(x: jax.Array, index: jax.Array) -> jax.Array:
    """An entry along the first dim."""
    return jax.lax.dynamic_index_in_dim(x, index, keepdims=False)  # type: ignore[no-any-return]


def unsigned(index: jax.Array) -> jax.Array:
    """A layer's index as the model takes it."""
    return index.astype(jnp.uint32)


def zeros_of(shapes: PyTree) -> PyTree:
    """Arrays of zeros."""
    return jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)


def add(total: Mapping[str, jax.Array], part: Mapping[str, jax.Array]) -> Sums:
    """Adds sums."""
    return {name: total[name] + part[name] for name in total}
