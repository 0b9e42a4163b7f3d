"""A report told for the eye, on one screen.

Owns: tables, words and their width. Does not own: any figure in them (`report`).
"""

import time
from typing import TYPE_CHECKING, Final

from rich.console import Console
from rich.table import Table
from rich.text import Text

from shardtrain.train.screen import human_bytes, human_time, printable

if TYPE_CHECKING:
    from shardtrain.report import AttemptReport, Report

SHOWN: Final = 8
"""Attempts that are shown; of more, the last ones."""
_BAR: Final = 12
_WORDS: Final = {
    "skip": "batches skipped",
    "overflow": "overflows",
    "spike": "spikes",
    "rollback": "rolled back",
    "damaged": "checkpoints damaged",
    "drift": "times drift",
    "target": "targets missed",
}


def show(report: "Report", console: Console) -> None:
    """Prints a report."""
    part = Table.grid(padding=(0, 3))
    part.add_row(_time(report), _facts(report))
    console.print(Text(_title(report), "bold"))
    console.print(part)
    console.print(_attempts(report))
    left_out = len(report.attempts) - SHOWN
    if left_out > 0:
        console.print(f"{left_out} attempts before these: --json has them all", markup=False)


def seconds(value: float) -> str:
    """A duration: seconds below 100, else minutes and hours."""
    return f"{value:.1f} s" if value < 100 else human_time(value)


def _title(report: "Report") -> str:
    count = len(report.attempts)
    return (
        f"{report.run}: {report.done:,} of {report.steps:,} steps in {seconds(report.elapsed)}, "
        f"{count} attempt{'s' if count > 1 else ''}, goodput {report.goodput:.1%}"
    )


def _time(report: "Report") -> Table:
    """The buckets that are not empty, the largest first, productive time before all."""
    table = Table.grid(padding=(0, 1))
    rest = sorted(report.buckets.items(), key=lambda item: -item[1])
    for name, value in sorted(rest, key=lambda item: item[0] != "productive"):
        if value > 0 or name == "productive":
            share = value / report.elapsed if report.elapsed else 0.0
            bar = "#" * round(_BAR * share)
            table.add_row(name, Text(seconds(value), justify="right"), f"{share:6.1%}", bar)
    return table


def _facts(report: "Report") -> Table:
    table, saves = Table.grid(padding=(0, 1)), report.saves
    examples = report.tokens_per_second is None and report.examples_per_second is not None
    found = report.examples_per_second if examples else report.tokens_per_second
    speed = "-" if found is None else f"{found:,.0f}"
    top = "" if report.val_top1 is None else f", {report.val_top1:.2%} right"
    mfu = "" if report.mfu is None else f", mfu {report.mfu:.1%}"
    counts = [f"{n} {word}" for name, word in _WORDS.items() if (n := report.happened[name])]
    steps = "-" if report.step_time is None else f"{report.step_time:.3g} s a step"
    took = "" if saves.took is None else f"{seconds(saves.took)} after it begins (median)"
    newest = "none" if saves.newest is None else f"step {saves.newest:,}"
    now = f"{report.under_way}, last heard of {seconds(report.heard)} ago"
    price = f"unknown, {report.device_hours:.3g} device hours"
    if report.cost is not None:
        price = f"{report.cost:,.2f} for {report.device_hours:.3g} device hours"
    for name, text in (
        ("loss", f"{_number(report.loss)}, validation {_number(report.val_loss)}{top}"),
        *([("AUC", f"{report.val_auc:.4f}")] if report.val_auc is not None else []),
        *([("recall", f"{report.val_recall:.2%}")] if report.val_recall is not None else []),
        ("examples/s" if examples else "tokens/s", f"{speed}{mfu}, {steps} (medians)"),
        ("saves", f"{saves.count}, {human_bytes(saves.bytes)} in all"),
        *([("complete", took)] if took else []),
        ("blocked", f"the loop for {seconds(saves.blocked)}, {saves.blocked_share:.2%}"),
        ("newest", newest),
        ("events", ", ".join(counts) or "none"),
        ("cost", price),
        *([("runs", now)] if report.under_way else []),
    ):  # fmt: skip
        table.add_row(Text(name, "bold"), Text(text))
    return table


def _attempts(report: "Report") -> Table:
    table = Table("", "began", "devices", "steps", "first step", "program", "ended", box=None)
    for one in report.attempts[-SHOWN:]:
        table.add_row(*map(Text, _cells(one)))
    return table


def _cells(one: "AttemptReport") -> tuple[str, ...]:
    first = "-" if one.first_step is None else seconds(one.first_step)
    program = {None: "-", True: "from cache", False: "compiled"}[one.cached]
    code = "" if one.code is None else f" ({one.code})"
    return (
        str(one.attempt),
        time.strftime("%m-%d %H:%M:%S", time.localtime(one.begun)),
        f"{one.devices}" + (f"/{one.processes}" if one.processes > 1 else ""),
        f"{one.resumed:,} to {one.reached:,}",
        first,
        program,
        printable(one.ended) + code,
    )


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"
