"""Traced functions cut in pieces: which results need which inputs.

Owns: the few questions that the pipeline asks of a jaxpr. Does not own: what is done with the
pieces.
"""

from collections.abc import Collection, Iterable, Sequence
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, Literal, Var, jaxpr_as_fun

INLINED = ("jit", "pjit", "closed_call", "core_call", "remat", "remat2", "checkpoint")
"""Calls that `inline` looks into: their jaxpr is all that they do."""


def needs(closed: ClosedJaxpr, inputs: Iterable[int]) -> list[bool]:
    """Whether each output is computed from any of these inputs.

    Args:
        closed: the traced function.
        inputs: positions among its inputs.
    """
    jaxpr = closed.jaxpr
    tainted = {jaxpr.invars[i] for i in inputs}
    for eqn in jaxpr.eqns:
        if any(isinstance(v, Var) and v in tainted for v in eqn.invars):
            tainted.update(eqn.outvars)
    return [isinstance(v, Var) and v in tainted for v in jaxpr.outvars]


def passed_on(closed: ClosedJaxpr) -> list[int | None]:
    """For each output, the position of the input that it is; None for what is computed."""
    inputs = {var: i for i, var in enumerate(closed.jaxpr.invars)}
    return [None if isinstance(v, Literal) else inputs.get(v) for v in closed.jaxpr.outvars]


def only(closed: ClosedJaxpr, outputs: Sequence[int]) -> Any:
    """The function that computes these outputs and nothing else, from all inputs."""
    jaxpr = closed.jaxpr
    outvars = [jaxpr.outvars[i] for i in outputs]
    eqns = _needed(jaxpr.eqns, outvars)
    return jaxpr_as_fun(ClosedJaxpr(jaxpr.replace(eqns=eqns, outvars=outvars), closed.consts))


def _needed(eqns: Sequence[Any], outvars: Iterable[Any]) -> list[Any]:
    """The equations that some variables need, in order."""
    wanted = {v for v in outvars if isinstance(v, Var)}
    kept = []
    for eqn in reversed(eqns):
        if any(v in wanted for v in eqn.outvars):
            kept.append(eqn)
            wanted.update(v for v in eqn.invars if isinstance(v, Var))
    return kept[::-1]


def inline(closed: ClosedJaxpr) -> ClosedJaxpr:
    """The same function without calls, so that each product is an equation of its own."""
    shapes = [shape_of(v) for v in closed.jaxpr.invars]
    return jax.make_jaxpr(lambda *args: _run(closed, args))(*shapes)


def shape_of(var: Any) -> jax.ShapeDtypeStruct:
    """The shape and dtype of a variable of a jaxpr."""
    return jax.ShapeDtypeStruct(var.aval.shape, var.aval.dtype)


def _run(closed: ClosedJaxpr, args: Sequence[Any]) -> list[Any]:
    jaxpr = closed.jaxpr
    values: dict[Any, Any] = dict(zip(jaxpr.constvars, closed.consts, strict=True))
    values |= dict(zip(jaxpr.invars, args, strict=True))

    def read(var: Any) -> Any:
        return var.val if isinstance(var, Literal) else values[var]

    for eqn in jaxpr.eqns:
        inputs = [read(v) for v in eqn.invars]
        inner = eqn.params.get("jaxpr") if eqn.primitive.name in INLINED else None
        if inner is not None:
            inner = inner if isinstance(inner, ClosedJaxpr) else ClosedJaxpr(inner, [])
            results = _run(inner, inputs)
        else:
            variables = list(dict.fromkeys(v for v in eqn.invars if isinstance(v, Var)))
            alone = jaxpr.replace(
                constvars=[], invars=variables, eqns=[eqn], outvars=list(eqn.outvars)
            )
            results = jaxpr_as_fun(ClosedJaxpr(alone, []))(*(values[v] for v in variables))
        values |= dict(zip(eqn.outvars, results, strict=True))
    return [read(v) for v in jaxpr.outvars]


def split_products(
    closed: ClosedJaxpr, early: Collection[int], late: Collection[int]
) -> tuple[list[int], Any, Any, list[Any]]:
    """Cuts a function in two: the first computes some outputs, the second the products for others.

    An output of `late` moves to the second function if it ends in a matrix product that no output
    of `early` needs; then whatever that product alone needs moves too.

    Args:
        closed: the traced function, inlined.
        early: positions of the outputs that cannot wait.
        late: positions of those that can.

    Returns:
        The positions that moved; the first function, from all inputs to (all outputs that stay, in
        order; what the second needs of its work); the second, from (all inputs, the latter) to the
        outputs that moved, in order; and the shapes of what is passed between them.
    """
    jaxpr = closed.jaxpr
    urgent = _needed(jaxpr.eqns, [jaxpr.outvars[i] for i in early])
    urgent_ids = {id(eqn) for eqn in urgent}
    waits: set[Any] = set()
    late_eqns = []
    for eqn in jaxpr.eqns:
        if id(eqn) in urgent_ids:
            continue
        product = eqn.primitive.name == "dot_general"
        if product or any(isinstance(v, Var) and v in waits for v in eqn.invars):
            waits.update(eqn.outvars)
            late_eqns.append(eqn)
    moved = [i for i in late if isinstance(jaxpr.outvars[i], Var) and jaxpr.outvars[i] in waits]
    stays = [i for i in range(len(jaxpr.outvars)) if i not in moved]
    late_eqns = _needed(late_eqns, [jaxpr.outvars[i] for i in moved])
    made = {v for eqn in late_eqns for v in eqn.outvars}
    given = {*jaxpr.invars, *jaxpr.constvars}
    between = list(
        dict.fromkeys(
            v
            for eqn in late_eqns
            for v in eqn.invars
            if isinstance(v, Var) and v not in made and v not in given
        )
    )
    first_out = [*(jaxpr.outvars[i] for i in stays), *between]
    first = jaxpr.replace(eqns=_needed(jaxpr.eqns, first_out), outvars=first_out)
    second = jaxpr.replace(
        invars=[*jaxpr.invars, *between],
        eqns=late_eqns,
        outvars=[jaxpr.outvars[i] for i in moved],
    )
    return (
        moved,
        jaxpr_as_fun(ClosedJaxpr(first, closed.consts)),
        jaxpr_as_fun(ClosedJaxpr(second, closed.consts)),
        [shape_of(v) for v in between],
    )
