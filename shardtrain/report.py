"""`shardtrain report`: where a run's time went, how its attempts ended, what it cost.

Owns: what is read of a run's folder, and the figures made of it. Does not own: the sums of the time
(`shardtrain.train.goodput`), tables (`report_text`). Imports no jax: a folder that was copied to a
laptop is enough, and a run that is under way may be read too.
"""

import json as json_
import statistics
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from shardtrain.checkpoint.folder import complete_steps
from shardtrain.config import RunConfig
from shardtrain.errors import EXIT_POLICY, ConfigError
from shardtrain.report_text import show
from shardtrain.train.goodput import Goodput, Spent, attempts, goodput
from shardtrain.train.metrics import plain, read_rows
from shardtrain.train.phases import read_timeline
from shardtrain.train.rundir import checkpoints_in, holder
from shardtrain.train.screen import make_console

HAPPENED = ("skip", "overflow", "spike", "rollback", "damaged", "drift", "target")
"""Events that are counted."""

Row = dict[str, Any]


@dataclass(frozen=True)
class AttemptReport:
    """One attempt."""

    attempt: int
    begun: float
    """When its process was started, in seconds since 1970."""
    seconds: float
    processes: int
    devices: int
    resumed: int
    """The step that it went on from."""
    reached: int
    """The last step that its timeline tells of."""
    first_step: float | None
    """Seconds from the start of its process to the end of its first step; None if it had none."""
    cached: bool | None
    """Whether the step came from the compile cache; None if it was not compiled yet."""
    ended: str
    """Why, in a word or a sentence; "killed" where it wrote no end, "under way"."""
    code: int | None
    """Its exit code, where it was told."""


@dataclass(frozen=True)
class Saves:
    """The checkpoints."""

    count: int
    bytes: int
    """Of all of them together."""
    took: float | None
    """Seconds from its beginning until one is complete, the median."""
    blocked: float
    """Seconds that the loop was held up."""
    blocked_share: float
    """Part of the elapsed time."""
    newest: int | None
    """The step that the run would go on from."""


@dataclass(frozen=True)
class Report:
    """A run in figures."""

    run: str
    folder: str
    done: int
    """Updates that its metrics have now."""
    steps: int
    """Updates in the whole run."""
    loss: float | None
    val_loss: float | None
    val_top1: float | None
    val_auc: float | None
    val_recall: float | None
    tokens_per_second: float | None
    """The median over the updates; None where the work is counted in examples."""
    examples_per_second: float | None
    mfu: float | None
    step_time: float | None
    """Seconds of an update, the median too."""
    under_way: str
    """Who is running it; "" for nobody."""
    heard: float
    """Seconds since its last line."""
    goodput: float
    """The productive part of the elapsed time."""
    elapsed: float
    buckets: dict[str, float]
    """Seconds; they add up to `elapsed`."""
    attempts: list[AttemptReport]
    saves: Saves
    happened: dict[str, int]
    """How often each of `HAPPENED`; what was seen again after a restart counts once."""
    device_hours: float
    """Of all attempts, without the time between them."""
    cost: float | None
    """None where targets.device_hour is 0."""


def report_command(config: RunConfig, *, json: bool) -> int:
    """`shardtrain report`: the exit code.

    Args:
        config: Of the run.
        json: Print JSON and nothing else.

    Returns:
        0.

    Raises:
        ConfigError: Nothing has run in its folder.
    """
    found = make_report(config)
    if json:
        print(json_.dumps(plain(asdict(found)), indent=2))
    else:
        show(found, make_console(stderr=False))
    return 0


def make_report(config: RunConfig) -> Report:
    """Read a run's folder.

    Args:
        config: Of the run; its folder is `run.dir`.

    Returns:
        What there is to say.

    Raises:
        ConfigError: Nothing has run in its folder.
    """
    folder = Path(config.run.dir)
    lines = read_timeline(folder / "timeline.jsonl")
    if not lines:
        raise ConfigError(
            "this run has not begun: it has no timeline",
            where=str(folder / "timeline.jsonl"),
            cure="give the folder of a run that was trained with `shardtrain train`",
        )
    try:
        rows = read_rows(folder / "metrics.jsonl")
    except FileNotFoundError:
        rows = []
    spent, who = attempts(lines), holder(folder)
    summed = goodput(spent)
    device_hours = sum(a.devices * (a.last - a.begun) for a in spent) / 3600
    price = config.targets.device_hour
    return Report(
        run=config.run.name,
        folder=str(folder),
        done=rows[-1]["step"] if rows else 0,
        steps=config.run.steps,
        loss=_last(rows, "loss"),
        val_loss=_last(rows, "val_loss"),
        val_top1=_last(rows, "val_top1"),
        val_auc=_last(rows, "val_auc"),
        val_recall=_last(rows, "val_recall"),
        tokens_per_second=_median(rows, "tokens_per_second"),
        examples_per_second=_median(rows, "examples_per_second"),
        mfu=_median(rows, "mfu"),
        step_time=_median(rows, "step_time"),
        under_way=who if _end_of(spent[-1]) is None else "",
        heard=max(0.0, time.time() - spent[-1].last),
        goodput=summed.share,
        elapsed=summed.elapsed,
        buckets=dict(summed.buckets),
        attempts=[_attempt(one, alive=bool(who) and one is spent[-1]) for one in spent],
        saves=_saves(lines, summed, folder),
        happened=_happened(lines),
        device_hours=device_hours,
        cost=device_hours * price if price else None,
    )


def _attempt(spent: Spent, *, alive: bool) -> AttemptReport:
    first, compiled = _event(spent, "first_step"), _event(spent, "compile")
    end = _end_of(spent) or {"reason": "under way" if alive else "killed"}
    # A policy's stop has no code of its own: the error that follows it has.
    failed = _event(spent, "failed") or {}
    code = end.get("code", failed.get("code"))
    stopped_by_policy = code is None and "update" in end
    reached = max(max(line["step"], line.get("at", 0)) for line in spent.lines)
    return AttemptReport(
        attempt=spent.number,
        begun=spent.begun,
        seconds=spent.last - spent.begun,
        processes=spent.processes,
        devices=spent.devices,
        resumed=spent.resumed,
        reached=max(reached, spent.resumed),
        first_step=None if first is None else sum(first["seconds"].values()),
        cached=None if compiled is None else compiled.get("cached"),
        ended=str(end["reason"]),
        code=EXIT_POLICY if stopped_by_policy else code,
    )


def _end_of(spent: Spent) -> Row | None:
    """The line in which an attempt says how it ended."""
    return _event(spent, "stop") or _event(spent, "failed")


def _event(spent: Spent, name: str) -> Row | None:
    return next((dict(line) for line in spent.lines if line.get("event") == name), None)


def _saves(lines: Iterable[Row], summed: Goodput, folder: Path) -> Saves:
    saves = [line for line in lines if line.get("event") == "save"]
    blocked = summed.buckets["save"]
    return Saves(
        count=len(saves),
        bytes=sum(line["bytes"] for line in saves),
        took=_median(saves, "took"),
        blocked=blocked,
        blocked_share=blocked / summed.elapsed if summed.elapsed else 0.0,
        newest=max(complete_steps(checkpoints_in(folder)), default=None),
    )


def _happened(lines: Iterable[Row]) -> dict[str, int]:
    """A batch that is left out once more, after a restart, is the same one."""
    seen = {
        (line["event"], line.get("cursor"), line.get("at"), line.get("reason"))
        for line in lines
        if line.get("event") in HAPPENED
    }
    return {name: sum(event == name for event, *_ in seen) for name in HAPPENED}


def _last(rows: Sequence[Row], key: str) -> float | None:
    return next((row[key] for row in reversed(rows) if row.get(key) is not None), None)


def _median(rows: Iterable[Row], key: str) -> float | None:
    return statistics.median(found) if (found := [r[key] for r in rows if r.get(key)]) else None
