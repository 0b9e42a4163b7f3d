"""A plan told for the eye.

Owns: tables, lines and their width. Does not own: any figure in them (`shardtrain.plan`).
"""

from dataclasses import asdict

from rich.console import Console
from rich.table import Table

from shardtrain.plan.answer import Plan, Point, Program
from shardtrain.plan.cures import changes
from shardtrain.plan.memory import MARGIN
from shardtrain.plan.search import Candidate, Found

WIDTH = 110


def show(plan: Plan, console: Console) -> None:
    """Prints a plan for the eye."""
    console.print(
        f"{plan.size} on {plan.cluster}\n",
        markup=False,
    )
    if plan.refused:
        words = f"not this config's own layout: {plan.refused}"
        console.print(words, markup=False, soft_wrap=True)
        console.print(f"{'the best' if plan.fits else 'the smallest'} layout instead:")
    show_candidate(plan, plan.own, console)
    if not plan.fits:
        console.print(memory_help(plan), markup=False)
    if plan.found:
        _show_found(plan, plan.found, console)
    if plan.program:
        _show_program(plan, plan.program, console)
    for note in plan.notes:
        console.print(f"note: {note}", markup=False)


def memory_help(plan: Plan) -> str:
    """What is largest on a device, and what would make the config fit."""
    lines = ["largest on a device, parameters with their gradients and optimizer state:"]
    lines += [f"  {large.nbytes / 2**30:8.2f} GiB  {large.name}" for large in plan.largest]
    if not plan.cures and not plan.offloaded:
        others = plan.found is not None and plan.found.best
        more = "; layouts that do are below" if others else ": use more devices"
        return "\n".join([*lines, f"no three changes of the layout make it fit{more}"])
    lines.append("the cheapest changes that make it fit:")
    if off := plan.offloaded:
        lines.append(
            f"  offload.optimizer and offload.master host: {off.memory.total / 2**30:.1f} GiB, and "
            f"{off.memory.host / 2**30:.1f} of the host's for each device, "
            f"{off.cost.middle / plan.own.cost.middle:.2f} of the time"
        )
    for cure in plan.cures:
        words = changes(plan.own.layout, cure.layout)
        size, cost = cure.memory.total / 2**30, cure.cost.middle / plan.own.cost.middle
        lines.append(f"  {words}: {size:.1f} GiB, {cost:.2f} of the time")
    return "\n".join([*lines, ""])


def show_candidate(plan: Plan, one: Candidate, console: Console) -> None:
    """Prints the figures of a layout."""
    console.print(str(one.layout), markup=False)
    unit, scale = _unit(one.memory.total)
    table = Table("bytes on a device", unit, box=None)
    for name, size in one.memory.by_class().items():
        if size:
            table.add_row(name, f"{size / scale:.2f}")
    if one.memory.host:
        table.add_row("on its host", f"{one.memory.host / scale:.2f}")
    if one.memory.disk:
        table.add_row("on a disk", f"{one.memory.disk / scale:.2f}")
    console.print(table)
    needed = plan.needed if one is plan.own else one.memory.total
    console.print(
        f"{'fits' if needed <= plan.room else 'does NOT fit'} into {plan.room / 2**30:.1f} GiB: "
        f"{(plan.cluster.chip.memory or 0) / 2**30:.1f} of the device, less {MARGIN:.0%} for the "
        "driver, for communication and for fragments\n"
    )
    parts = Table("seconds of a step", "low", "high", box=None)
    low, high = asdict(one.cost.low), asdict(one.cost.high)
    for name in low:
        if high[name]:
            parts.add_row(name, f"{low[name]:.3g}", f"{high[name]:.3g}")
    parts.add_row("step", f"{one.cost.low.total:.3g}", f"{one.cost.high.total:.3g}")
    console.print(parts)
    console.print(
        f"bottleneck: {one.cost.bottleneck}; {plan.tokens / one.cost.middle:,.0f} tokens/s; model "
        f"FLOPs utilisation {plan.mfu(one):.0%}; {one.cost.model_flops:.3g} model FLOPs a step, "
        f"{one.cost.flops:.3g} with what is computed again"
    )
    if why := plan.why(one):
        console.print(why, markup=False)
    console.print()


def _unit(largest: float) -> tuple[str, int]:
    """The unit of a table of bytes, by its largest row."""
    return ("GiB", 2**30) if largest >= 2**30 / 10 else ("MiB", 2**20)


def _show_found(plan: Plan, found: Found, console: Console) -> None:
    unit, scale = _unit(max((c.memory.total for c in found.best), default=2**30))
    table = Table("best layouts", "s a step", unit, "largest part", box=None)
    for c in found.best:
        mark = " (this config)" if c.layout == plan.own.layout and not plan.refused else ""
        table.add_row(
            f"{c.layout}{mark}",
            f"{c.cost.low.total:.3g}-{c.cost.high.total:.3g}",
            f"{c.memory.total / scale:.1f}",
            c.cost.bottleneck,
        )
    if found.best:
        console.print(table)
    rejected = Table("not among them", "why", box=None)
    for family in found.rejected:
        rejected.add_row(family.family, family.reason)
    console.print(rejected)
    console.print(f"{found.tried} legal layouts in {found.seconds:.1f} s\n")


def _show_program(plan: Plan, program: Program, console: Console) -> None:
    unit, scale = _unit(program.bytes_per_device["total"])
    table = Table("compiled", unit, box=None)
    for name, size in program.bytes_per_device.items():
        if size:
            table.add_row(name, f"{size / scale:.3f}")
    console.print(table)
    ratio = plan.own.memory.total / program.bytes_per_device["total"]
    found = program.audit
    told = f"planned / compiled: {ratio:.3f}; {program.compiled.seconds:.0f} s to compile"
    if found is None:
        console.print(f"{told}\n")
        return
    console.print(
        f"{told}; products {found.flops:.3g} FLOPs a device, {found.recomputed:+.0%} of what the "
        "layout's are\n"
    )
    moved = Table(
        "collectives", "axes", "dtypes", "times", "GiB sent", "domain", "beside products", box=None
    )
    for row in found.traffic:
        moved.add_row(
            row.kind,
            " ".join(row.axes),
            " ".join(row.dtypes),
            str(row.times),
            f"{row.wire / 2**30:.3f}",
            "between" if row.crosses else "within",
            f"{row.overlapped:.0%}",
        )
    console.print(moved)
    promises = Table("promises", "", "", box=None)
    for promise in found.promises:
        outcome = promise.outcome
        promises.add_row(promise.name, outcome.state, outcome.words)
        for fault in outcome.faults:
            amount = f"{fault.found:,.4g}"
            if fault.expected is not None:
                amount += f", {fault.expected:,.4g} expected"
            of = f" of {fault.belongs_to}" if fault.belongs_to else ""
            promises.add_row("", fault.instruction, f"{amount} {fault.unit}{of} {fault.note}")
    console.print(promises)
    for note in found.notes:
        console.print(f"note: {note}", markup=False)


def show_points(plan: Plan, points: tuple[Point, ...], console: Console) -> None:
    """Prints a sweep."""
    if not points:
        return
    priced = plan.price is not None
    unit, scale = _unit(max((p.best.memory.total for p in points if p.best), default=2**30))
    columns = [points[0].key, "s a step", "tokens/s", unit, "price of 1e9 tokens", "layout"]
    table = Table(*(c for c in columns if priced or not c.startswith("price")), box=None)
    for point in points:
        best = point.best
        if best is None:
            words = "does not fit" if point.legal else "no layout is legal"
            table.add_row(str(point.value), words)
            continue
        cells = [
            str(point.value),
            f"{best.cost.low.total:.3g}-{best.cost.high.total:.3g}",
            f"{point.tokens / best.cost.middle:,.0f}",
            f"{best.memory.total / scale:.1f}",
            *([f"{point.price_of_tokens(plan.price):,.0f}"] if plan.price is not None else []),
            str(best.layout),
        ]
        table.add_row(*cells)
    console.print(table)
