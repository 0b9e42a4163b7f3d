"""A plan as a picture: memory by class, time by part, one step; with matplotlib.

Owns: the picture. Does not own: any figure in it.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardtrain.errors import ConfigError, unwritable
from shardtrain.plan.answer import Plan
from shardtrain.plan.search import Candidate

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SUFFIXES = (".svg", ".png")
MOST = 5
"""Layouts that are drawn: the config's and the best."""
_TAB10 = "C{}"


def save(plan: Plan, path: str | Path) -> None:
    """Writes the picture.

    Args:
        plan: what to draw.
        path: the file; its ending, one of `SUFFIXES`, says what kind.

    Raises:
        ConfigError: another ending, no matplotlib, or the file cannot be written.
    """
    if Path(path).suffix.lower() not in SUFFIXES:
        raise ConfigError(
            "is no kind of picture that can be written",
            where=f"picture={path}",
            allowed=", ".join(SUFFIXES),
        )
    try:
        draw(plan).savefig(path, dpi=110)
    except OSError as error:
        raise unwritable("picture", path, error) from None


def draw(plan: Plan) -> Any:
    """The picture as a matplotlib `Figure`, for a notebook.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError(
            "a picture needs matplotlib, which is not installed",
            where="plan",
            cure='pip install "shardtrain[plots]"',
        ) from error
    some = _drawn(plan)
    labels = [_label(plan, candidate) for candidate in some]
    figure = Figure(figsize=(12, 4 + 0.9 * len(some)), layout="constrained")
    figure.suptitle(f"{plan.size}, {plan.cluster}")
    memory, time, step = figure.subplots(3, 1, height_ratios=[len(some), len(some), 1.6])
    _stacked(memory, labels, [_memory(candidate) for candidate in some], "GiB on a device")
    memory.axvline(plan.room / 2**30, color="black", linestyle="--", linewidth=1)
    _stacked(time, labels, [asdict(candidate.cost.high) for candidate in some], "seconds of a step")
    _step(step, plan)
    return figure


def _drawn(plan: Plan) -> list[Candidate]:
    """The layout that is planned, then the best others."""
    others = [c for c in (plan.found.best if plan.found else ()) if c.layout != plan.own.layout]
    return [plan.own, *others[: MOST - 1]]


def _label(plan: Plan, candidate: Candidate) -> str:
    words, mark = str(candidate.layout), ""
    if candidate.layout == plan.own.layout and not plan.refused:
        mark = "this config: "
    head, _, tail = words.partition(", ")
    return f"{mark}{head}\n{tail}"


def _memory(candidate: Candidate) -> dict[str, float]:
    parts = candidate.memory.by_class()
    del parts["total"]
    return {name: size / 2**30 for name, size in parts.items()}


def _stacked(
    axes: "Axes", labels: Sequence[str], rows: Sequence[Mapping[str, float]], unit: str
) -> None:
    """A bar for each row, cut into its parts."""
    lefts = [0.0] * len(rows)
    for index, name in enumerate(rows[0]):
        widths = [row[name] for row in rows]
        if any(width > 0 for width in widths):
            axes.barh(range(len(rows)), widths, left=lefts, label=name, color=_TAB10.format(index))
        lefts = [left + width for left, width in zip(lefts, widths, strict=True)]
    axes.set_yticks(range(len(rows)), labels, fontsize=7)
    axes.invert_yaxis()
    axes.set_xlabel(unit)
    axes.legend(fontsize=7, frameon=False, bbox_to_anchor=(1, 1), loc="upper left")


def _step(axes: "Axes", plan: Plan) -> None:
    """One step from left to right: what a device does, and what travels meanwhile."""
    low, high = plan.own.cost.low, plan.own.cost.high
    begin = 0.0
    bars: tuple[tuple[str, Callable[[Any], float], str], ...] = (
        ("forward and backward", lambda s: s.products + s.other + s.tensor, "C0"),
        ("waiting for stages", lambda s: s.bubble + s.sends, "C3"),
        ("data collectives that nothing hides", lambda s: s.data, "C5"),
        ("update", lambda s: s.update, "C6"),
        ("copies from and to the host", lambda s: s.host, "C7"),
        ("reads and writes of the disk", lambda s: s.disk, "C8"),
    )
    for name, length, colour in bars:
        width = (length(low) + length(high)) / 2
        if width > 0:
            axes.barh([0], [width], left=[begin], color=colour, label=name)
        begin += width
    hidden = high.data - low.data
    if hidden > 0:
        compute = (low.products + high.products) / 2
        axes.barh(
            [1],
            [hidden],
            left=[compute / 3],
            color="C5",
            alpha=0.4,
            label="hidden if all goes well",
        )
    axes.set_yticks([0, 1], ["device", "links"], fontsize=7)
    axes.invert_yaxis()
    axes.set_xlabel("seconds, one step of this config")
    axes.legend(fontsize=7, frameon=False, bbox_to_anchor=(1, 1), loc="upper left")
