"""Traced functions cut in pieces: which results need which inputs.

Owns: the few questions that the pipeline asks of a jaxpr. Does not own: what is done with the
pieces.
"""

from collections.abc import Collection, Iterable, Sequence
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, Literal, Var, jaxpr_as_fun

FORMS = (
    "reshape",
    "squeeze",
    "expand_dims",
    "transpose",
    "broadcast_in_dim",
    "convert_element_type",
    "name",
    "sharding_constraint",
    "copy",
)
"""Operations of one operand whose result says nothing new."""
INLINED = ("jit", "pjit", "closed_call", "core_call", "remat", "remat2", "checkpoint")
"""Calls that `inline` looks into: their jaxpr is all that they do."""


def needing(closed: ClosedJaxpr, inputs: Iterable[int]) -> set[Var]:
    """All that is computed from any of these inputs, with them.

    Args:
        closed: the traced function.
        inputs: positions among its inputs.
    """
    found = {closed.jaxpr.invars[i] for i in inputs}
    for eqn in closed.jaxpr.eqns:
        if any(is_one_of(v, found) for v in eqn.invars):
            found.update(eqn.outvars)
    return found


def is_one_of(value: Any, some: Collection[Var]) -> bool:
    """Whether a value of a jaxpr is among some variables; a constant is none."""
    return isinstance(value, Var) and value in some


def sources(closed: ClosedJaxpr, variables: Iterable[Var]) -> list[Var]:
    """What each value is another form of: another shape, order of dims, or wider type."""
    made_by = {v: eqn for eqn in closed.jaxpr.eqns for v in eqn.outvars}

    def source(var: Var) -> Var:
        while var in made_by and made_by[var].primitive.name in FORMS:
            before = made_by[var].invars[0]
            if not isinstance(before, Var) or _size(before) > _size(var):
                break
            var = before
        return var

    return [source(var) for var in variables]


def _size(var: Var) -> int:
    aval: Any = var.aval
    return int(aval.size * aval.dtype.itemsize)


def part(closed: ClosedJaxpr, inputs: Sequence[Var], outputs: Sequence[Any]) -> Any:
    """The function of some values that computes others and nothing else.

    Args:
        closed: the traced function.
        inputs: variables of it, from which all outputs can be computed.
        outputs: variables of it.
    """
    jaxpr = closed.jaxpr
    eqns = _needed(jaxpr.eqns, inputs, outputs)
    piece = jaxpr.replace(invars=list(inputs), eqns=eqns, outvars=list(outputs))
    return jaxpr_as_fun(ClosedJaxpr(piece, closed.consts))


def _needed(eqns: Sequence[Any], given: Collection[Any], outvars: Iterable[Any]) -> list[Any]:
    """The equations that some variables need beside given ones, in order."""
    wanted = {v for v in outvars if isinstance(v, Var)} - set(given)
    kept = []
    for eqn in reversed(eqns):
        if any(v in wanted for v in eqn.outvars):
            kept.append(eqn)
            wanted.update(v for v in eqn.invars if isinstance(v, Var) and v not in given)
    return kept[::-1]


def inline(closed: ClosedJaxpr, *also: str) -> ClosedJaxpr:
    """The same function without calls, so that each product is an equation of its own.

    Args:
        closed: the traced function.
        also: further primitives whose jaxpr is all that they do, if nobody differentiates them.
    """
    shapes = [shape_of(v) for v in closed.jaxpr.invars]
    return jax.make_jaxpr(lambda *args: _run(closed, args, (*INLINED, *also)))(*shapes)


def opened(function: Any, *inputs: Any) -> tuple[Any, list[Any]]:
    """A function of more arguments, from one that reads arrays around it.

    Args:
        function: of arrays, to arrays; it may have traced ones in its closure.
        inputs: their shapes.

    Returns:
        The function of `inputs` and those arrays, and the arrays.
    """
    closed, shapes = jax.make_jaxpr(function, return_shape=True)(*inputs)

    def run(*args: Any) -> Any:
        *given, around = args
        out = jaxpr_as_fun(ClosedJaxpr(closed.jaxpr, around))(*jax.tree.leaves(given))
        return jax.tree.unflatten(jax.tree.structure(shapes), out)

    return run, closed.consts


def shape_of(var: Any) -> jax.ShapeDtypeStruct:
    """The shape and dtype of a variable of a jaxpr."""
    return jax.ShapeDtypeStruct(var.aval.shape, var.aval.dtype)


def _run(closed: ClosedJaxpr, args: Sequence[Any], calls: Collection[str]) -> list[Any]:
    jaxpr = closed.jaxpr
    values: dict[Any, Any] = dict(zip(jaxpr.constvars, closed.consts, strict=True))
    values |= dict(zip(jaxpr.invars, args, strict=True))

    def read(var: Any) -> Any:
        return var.val if isinstance(var, Literal) else values[var]

    for eqn in jaxpr.eqns:
        inputs = [read(v) for v in eqn.invars]
        body = eqn.params.get("jaxpr") or eqn.params.get("call_jaxpr")
        inner = body if eqn.primitive.name in calls else None
        if inner is not None:
            inner = inner if isinstance(inner, ClosedJaxpr) else ClosedJaxpr(inner, [])
            results = _run(inner, inputs, calls)
        else:
            variables = list(dict.fromkeys(v for v in eqn.invars if isinstance(v, Var)))
            alone = jaxpr.replace(
                constvars=[], invars=variables, eqns=[eqn], outvars=list(eqn.outvars)
            )
            results = jaxpr_as_fun(ClosedJaxpr(alone, []))(*(values[v] for v in variables))
        values |= dict(zip(eqn.outvars, results, strict=True))
    return [read(v) for v in jaxpr.outvars]


def split_products(
    closed: ClosedJaxpr, lasting: Sequence[Var], early: Sequence[int], late: Sequence[int]
) -> tuple[list[int], Any, Any, list[Any]]:
    """Cuts a function in two: the first computes some outputs, the second the products for others.

    An output of `late` moves to the second function if it ends in a matrix product that no output
    of `early` needs; then whatever that product alone needs moves too.

    Args:
        closed: the traced function, inlined.
        lasting: those of its inputs that the second function can have too.
        early: positions of the outputs that cannot wait.
        late: positions of those that can.

    Returns:
        The positions that moved; the first function, from all inputs to (all outputs that stay, in
        order; what the second needs of its work); the second, from (lasting inputs, the latter) to
        the outputs that moved, in order; and the shapes of what is passed between them.
    """
    jaxpr = closed.jaxpr
    urgent = _needed(jaxpr.eqns, (), [jaxpr.outvars[i] for i in early])
    is_urgent = {id(eqn) for eqn in urgent}
    waits: set[Any] = set()
    waiting = []
    for eqn in jaxpr.eqns:
        if id(eqn) in is_urgent:
            continue
        product = eqn.primitive.name == "dot_general"
        if product or any(is_one_of(v, waits) for v in eqn.invars):
            waits.update(eqn.outvars)
            waiting.append(eqn)
    moved = [i for i in late if is_one_of(jaxpr.outvars[i], waits)]
    last = [jaxpr.outvars[i] for i in moved]
    waiting = _needed(waiting, (), last)
    made = {v for eqn in waiting for v in eqn.outvars} | {*lasting, *jaxpr.constvars}
    read = (v for eqn in waiting for v in eqn.invars if isinstance(v, Var))
    between = list(dict.fromkeys(v for v in read if v not in made))
    stays = [v for i, v in enumerate(jaxpr.outvars) if i not in moved]
    first = part(closed, jaxpr.invars, [*stays, *between])
    second = part(closed, [*lasting, *between], last)
    return moved, first, second, [shape_of(v) for v in between]
