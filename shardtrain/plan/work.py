"""What a traced function costs one device: FLOPs of its products, bytes it moves and holds.

Owns: counting over a jaxpr, with XLA's habit of fusing what is elementwise into what reads it.
Does not own: how long that takes (`cost`), and what is traced (`pieces`).

Products, reductions and whatever moves data write their results; elementwise work and other forms
of the same data are done by whoever reads them, and have no result of their own unless a product
reads them. So a value's bytes are written once and read once by each result that needs it.
"""

import math
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, Var
from jax.interpreters.partial_eval import dce_jaxpr

from shardtrain.strategies import traced

PyTree = Any

_WRITES = frozenset(
    {
        *("dot_general", "conv_general_dilated", "reduce_sum", "reduce_max", "reduce_min"),
        *("argmax", "cumsum", "sort", "gather", "scatter", "scatter-add", "scatter_add"),
        *("dynamic_update_slice", "while", "scan", "cond", "pallas_call"),
        "rev",  # what arrives from another device: `ops.ring_attention`
    }
)
"""Primitives whose result XLA writes to memory."""
_PRODUCTS = frozenset({"dot_general"})
_BY_THEMSELVES = _PRODUCTS | {"scan"}
"""Primitives that XLA makes nothing else together with."""
_IN_PLACE = frozenset({"dynamic_slice", "dynamic_update_slice"})
_CALLS = ("custom_vjp_call", "custom_jvp_call")


@dataclass(frozen=True)
class Product:
    """A matrix product [batch] x [rows, inner] x [inner, columns], and how often it is made."""

    batch: int
    rows: int
    inner: int
    columns: int
    dtype: str
    """Of what is multiplied."""

    @property
    def flops(self) -> float:
        """Twice the multiplications."""
        return 2.0 * self.batch * self.rows * self.inner * self.columns


@dataclass(frozen=True)
class Work:
    """What one run of a function costs one device."""

    products: tuple[Product, ...]
    product_bytes: float
    """Bytes that its products read and write."""
    other_bytes: float
    """Bytes that all else reads and writes."""
    peak: float
    """Most bytes of results that are held at once, inputs and outputs not counted."""

    @property
    def flops(self) -> float:
        """FLOPs of the products."""
        return sum(product.flops for product in self.products)

    def times(self, factor: float) -> "Work":
        """The same for so many times the samples; exact but for the bytes of weights."""
        products = tuple(replace(p, rows=round(p.rows * factor)) for p in self.products)
        scaled = (factor * x for x in (self.product_bytes, self.other_bytes, self.peak))
        return Work(products, *scaled)


def trace(function: Callable[..., PyTree], *shapes: PyTree) -> ClosedJaxpr:
    """Traces a function for its shapes, calls inlined; without what no result needs.

    Args:
        function: of arrays.
        shapes: of its arguments.
    """
    closed = traced.inline(jax.make_jaxpr(function)(*shapes), *_CALLS)
    # A custom derivative also makes gradients that nobody asked for, as of a frozen table.
    needed, _ = dce_jaxpr(closed.jaxpr, [True] * len(closed.jaxpr.outvars), instantiate=True)
    return ClosedJaxpr(needed, closed.consts)


def work_of(closed: ClosedJaxpr, *, in_loop: bool = False) -> Work:
    """What a traced function costs.

    Args:
        closed: from `trace`.
        in_loop: whether it is one turn of a loop, which changes what it carries in place.
    """
    eqns = closed.jaxpr.eqns
    materialised = _materialised(closed)
    reads: dict[Var, frozenset[Var]] = {v: frozenset([v]) for v in closed.jaxpr.invars}
    products: list[Product] = []
    product_bytes = other_bytes = 0.0
    made_at: dict[Var, int] = {}
    read_at: dict[Var, int] = {}
    peaks: dict[int, float] = {}
    for at, eqn in enumerate(eqns):
        if eqn.primitive.name == "optimization_barrier":
            # Each result is its own operand, and reads nothing of the others.
            pairs = zip(eqn.outvars, eqn.invars, strict=True)
            reads |= {var: reads.get(v, frozenset()) for var, v in pairs if isinstance(v, Var)}
            continue
        sources = frozenset[Var]().union(*(reads.get(v, frozenset()) for v in _variables(eqn)))
        inner = _turn(eqn)
        if inner is not None:
            # What it reads and writes is counted inside, turn by turn.
            times = eqn.params.get("length", 1)
            products += [replace(p, batch=p.batch * times) for p in inner.products]
            product_bytes += times * inner.product_bytes
            other_bytes += times * inner.other_bytes
            peaks[at] = inner.peak
            read_at |= dict.fromkeys(_variables(eqn), at)
            made_at |= dict.fromkeys(eqn.outvars, at)
            reads |= {var: frozenset([var]) for var in eqn.outvars}
            continue
        for var in eqn.outvars:
            if in_loop and eqn.primitive.name in _IN_PLACE:
                # A part of an array that the loop carries: read, or written into it, by itself.
                part = eqn.invars[1] if eqn.primitive.name == "dynamic_update_slice" else var
                if var is not part:
                    other_bytes += _bytes(part) + sum(map(_bytes, reads.get(part, ())))
                reads[var] = frozenset([var])
                continue
            if var not in materialised:
                reads[var] = sources
                continue
            reads[var] = frozenset([var])
            made_at[var] = at
            for source in sources:
                read_at[source] = at
            moved = _bytes(var) + sum(map(_bytes, sources))
            if eqn.primitive.name in _PRODUCTS:
                products.append(_product(eqn))
                product_bytes += moved
            else:
                other_bytes += moved
    outputs = {v for v in closed.jaxpr.outvars if isinstance(v, Var)}
    if in_loop:
        # What a turn hands on is in the next one's place only if it was changed there.
        handed_on = {"scan", "dynamic_update_slice"}
        outputs = {v for eqn in eqns if eqn.primitive.name in handed_on for v in eqn.outvars}
        outputs |= _added_up(closed)
    peak = _peak(closed, made_at, read_at, peaks, outputs)
    return Work(tuple(products), product_bytes, other_bytes, peak)


def _turn(eqn: Any) -> Work | None:
    """What one turn of a loop costs, or what is done where a condition holds; else None."""
    if eqn.primitive.name == "cond":
        return work_of(traced.inline(eqn.params["branches"][-1], *_CALLS))
    if eqn.primitive.name != "scan":
        return None
    return work_of(traced.inline(eqn.params["jaxpr"], *_CALLS), in_loop=True)


def _added_up(closed: ClosedJaxpr) -> set[Var]:
    """Results of a turn of a loop that are one of its inputs and something more: in its place."""
    made_by = {v: eqn for eqn in closed.jaxpr.eqns for v in eqn.outvars}
    results = (v for v in closed.jaxpr.outvars if isinstance(v, Var) and v in made_by)
    return {
        result
        for result in results
        if made_by[result].primitive.name in ("add", "add_any")
        and any(
            v in closed.jaxpr.invars and _bytes(v) == _bytes(result)
            for v in _variables(made_by[result])
        )
    }


def _materialised(closed: ClosedJaxpr) -> set[Var]:
    """The results that are written to memory."""
    written: set[Var] = {v for v in closed.jaxpr.outvars if isinstance(v, Var)}
    made_by = {v: eqn for eqn in closed.jaxpr.eqns for v in eqn.outvars}
    for eqn in closed.jaxpr.eqns:
        if eqn.primitive.name in _WRITES:
            written.update(eqn.outvars)
        if eqn.primitive.name in _PRODUCTS:
            for var in _variables(eqn):
                written.add(_other_form(var, made_by))
    return written - set(closed.jaxpr.invars)


def _other_form(var: Var, made_by: dict[Var, Any]) -> Var:
    """What a product's operand is but another form of, which it reads as well."""
    while var in made_by and made_by[var].primitive.name in traced.FORMS:
        before = made_by[var].invars[0]
        if not isinstance(before, Var) or _bytes(before) != _bytes(var):
            break
        var = before
    return var


def _variables(eqn: Any) -> list[Var]:
    return [v for v in eqn.invars if isinstance(v, Var)]


def _product(eqn: Any) -> Product:
    (over_x, over_y), (batch_x, batch_y) = eqn.params["dimension_numbers"]
    x, y = (v.aval for v in eqn.invars)

    def size(shape: Sequence[int], dims: Iterable[int]) -> int:
        return math.prod(shape[dim] for dim in dims)

    def others(shape: Sequence[int], *taken: Sequence[int]) -> int:
        return size(shape, (d for d in range(len(shape)) if not any(d in t for t in taken)))

    return Product(
        batch=size(x.shape, batch_x),
        rows=others(x.shape, over_x, batch_x),
        inner=size(x.shape, over_x),
        columns=others(y.shape, over_y, batch_y),
        dtype=str(x.dtype),
    )


def _peak(
    closed: ClosedJaxpr,
    made_at: dict[Var, int],
    read_at: dict[Var, int],
    peaks: dict[int, float],
    outputs: Collection[Var],
) -> float:
    """Most bytes held at once.

    XLA makes the results between two products together, so what they read is there until the next.

    Args:
        closed: the function.
        made_at: which equation makes a result.
        read_at: which is the last to read it.
        peaks: what loops hold themselves, by their equation.
        outputs: results that are counted elsewhere.
    """
    eqns = closed.jaxpr.eqns
    change = [0.0] * (len(eqns) + 2)
    ends = list(range(len(eqns)))
    for at in reversed(range(len(eqns) - 1)):
        if eqns[at + 1].primitive.name not in _BY_THEMSELVES:
            ends[at] = ends[at + 1]
    for var, at in made_at.items():
        if var in outputs:
            continue
        change[at] += _bytes(var)
        change[ends[read_at.get(var, at)] + 1] -= _bytes(var)
    held = most = 0.0
    for at, step in enumerate(change):
        held += step
        most = max(most, held + peaks.get(at, 0.0))
    return most


def _bytes(var: Any) -> int:
    aval = var.aval
    itemsize = getattr(aval.dtype, "itemsize", 8)  # a key's is not a number's
    return int(math.prod(aval.shape) * itemsize)
