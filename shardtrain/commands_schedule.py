"""What the `schedule` command does: it finds a schedule, and tells what it costs.

Owns: defaults of sizes that are not given, the text and the JSON. Does not own: schedules, proofs,
figures and pictures (`shardtrain.strategies.schedules`). Nothing here imports jax.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from shardtrain.errors import ConfigError, unwritable
from shardtrain.strategies.schedules.csv_file import read_table, write_table
from shardtrain.strategies.schedules.kinds import make_schedule
from shardtrain.strategies.schedules.layout import Layout, balance, read_layout
from shardtrain.strategies.schedules.picture import save
from shardtrain.strategies.schedules.simulate import Figures
from shardtrain.strategies.schedules.table import BUFFERS, Schedule
from shardtrain.strategies.schedules.timeline import Timeline, draw, legend
from shardtrain.train.screen import human_bytes


@dataclass(frozen=True, eq=False)
class Told:
    """A schedule with all that is told about it."""

    schedule: Schedule
    layout: Layout | None
    figures: Figures
    timeline: Timeline


# -- what to tell about


def find_schedule(
    name: str, table: str, *, stages: int, microbatches: int, virtual_stages: int
) -> Schedule:
    """Return a named schedule, or that of a file.

    Args:
        name: A schedule's name; "" = 1f1b.
        table: A CSV file; "" = none.
        stages: Stages; 0 = 4, or the table's.
        microbatches: Microbatches; 0 = 8, or the table's.
        virtual_stages: Virtual stages; 0 = 1 (2 for interleaved), or the table's.

    Returns:
        The proven table.

    Raises:
        ConfigError: It does not exist, is faulty, or both a name and a file are given.
    """
    given = {"stages": stages, "microbatches": microbatches, "virtual_stages": virtual_stages}
    for what, size in given.items():
        if size < 0:
            raise ConfigError("must be at least 1", where=f"{what}={size}")
    if not table:
        virtual = virtual_stages or (2 if name == "interleaved" else 1)
        return make_schedule(name or "1f1b", stages or 4, microbatches or 8, virtual)
    if name:
        raise ConfigError(
            f"there is a table too, {table}", where=f"schedule={name}", cure="leave one of them out"
        )
    schedule = read_table(table, stages, microbatches)
    if virtual_stages not in (0, schedule.work.num_virtual):
        raise ConfigError(
            f"has {schedule.work.num_virtual} virtual stages, but virtual_stages={virtual_stages}",
            where=table,
        )
    return schedule


def find_layout(
    text: str, layers: int, *, stages: int, virtual_stages: int, embedding: float, head: float
) -> Layout | None:
    """Return the layout that is asked for, None for equal parts.

    Args:
        text: A layout; "" = the automatic one.
        layers: Layers of the model; 0 = not known.
        stages: Stages of the pipeline.
        virtual_stages: Parts of the model on each stage.
        embedding: Cost of the embedding in layers.
        head: Cost of the head in layers.

    Raises:
        ConfigError: It cannot be read, does not fit, or a number is negative or without effect.
    """
    numbers = {"layers": layers, "embedding": embedding, "head": head}
    for what, number in numbers.items():
        if not 0 <= number < float("inf"):
            raise ConfigError("must be at least 0", where=f"{what}={number:g}")
    if text:
        return read_layout(text, stages, virtual_stages, layers)
    if layers:
        return balance(layers, stages, virtual_stages, embedding=embedding, head=head)
    for what in ("embedding", "head"):
        if numbers[what]:
            raise ConfigError(
                "is in layers, and they are not known",
                where=f"{what}={numbers[what]:g}",
                cure="add --layers or --layout",
            )
    return None


# -- files


def write(told: Told, out: str) -> None:
    """Write a picture or the table.

    Args:
        told: A schedule with its timeline.
        out: The file; its ending says what kind.

    Raises:
        ConfigError: Another ending, or the file cannot be written.
    """
    suffix = Path(out).suffix.lower()
    if suffix not in (".svg", ".png", ".csv"):
        raise ConfigError(
            "is no kind of file that can be written", where=f"out={out}", allowed=".svg, .png, .csv"
        )
    try:
        if suffix == ".csv":
            write_table(told.schedule, out)
        else:
            save(told.timeline, out)
    except OSError as error:
        raise unwritable("out", out, error) from None


# -- text and JSON


def print_text(told: Told) -> None:
    """Print the figures and the timeline.

    Args:
        told: A schedule with all that is told about it.
    """
    console = Console(highlight=False, emoji=False)
    work, figures = told.schedule.work, told.figures
    virtual = f", {work.num_virtual} virtual stages on each" if work.num_virtual > 1 else ""
    lines = [
        f"{told.schedule.name}: {work.num_stages} stages{virtual}, "
        f"{work.num_microbatches} microbatches, {work.num_ticks} ticks",
        f"lockstep time {figures.time:g}, ideal {figures.ideal:g}: {figures.ratio:.4g} of the "
        f"ideal; bubble {figures.bubble:.1%}",
    ]
    if told.layout is not None:
        lines.append(f"layout {told.layout}")
    for line in lines:
        console.print(line, markup=False, soft_wrap=True)
    console.print(_stage_table(told))
    for text in [*draw(told.timeline, console.width), legend(told.timeline)]:
        console.print(text, no_wrap=True, crop=True)


def _stage_table(told: Told) -> Table:
    """A row for each stage."""
    figures = told.figures
    table = Table(box=None, title_justify="left", header_style="bold")
    counted = [buffer for buffer in BUFFERS if any(figures.live[buffer])]
    names = ["stage", *(["layers"] if told.layout else []), "sends"]
    names += [f"live {buffer}s".replace("pendings", "pending") for buffer in counted]
    names += ["live bytes", "bytes sent"] if figures.slot_bytes else []
    for name in names:
        table.add_column(name, justify="right")
    for stage in range(told.schedule.work.num_stages):
        row = [str(stage), *([_layers(told.layout, stage)] if told.layout else [])]
        row.append(str(figures.messages[stage]))
        row += [str(figures.live[buffer][stage]) for buffer in counted]
        if figures.slot_bytes:
            row.append(human_bytes(figures.live_bytes[stage]))
            row.append(human_bytes(figures.message_bytes[stage]))
        table.add_row(*[Text(cell) for cell in row])
    if figures.slot_bytes:
        sizes = f"every stage has room for the most of any: {human_bytes(figures.slot_bytes)}"
        table.caption, table.caption_justify = Text(sizes), "left"
    return table


def _layers(layout: Layout, stage: int) -> str:
    return "+".join(str(count) for count in layout.layers[stage :: layout.stages])


def print_json(told: Told) -> None:
    """Print the figures as JSON.

    Args:
        told: A schedule with all that is told about it.
    """
    print(json.dumps(_as_json(told), indent=2))


def _as_json(told: Told) -> dict[str, Any]:
    work, figures, layout = told.schedule.work, told.figures, told.layout
    return {
        "schedule": told.schedule.name,
        "stages": work.num_stages,
        "microbatches": work.num_microbatches,
        "virtual_stages": work.num_virtual,
        "ticks": work.num_ticks,
        "time": figures.time,
        "ideal": figures.ideal,
        "ratio": figures.ratio,
        "bubble": figures.bubble,
        "layout": None if layout is None else str(layout),
        "slots": {buffer: told.schedule.slots.size(buffer) for buffer in BUFFERS},
        "slot_bytes": figures.slot_bytes,
        "per_stage": [
            {
                "stage": stage,
                "layers": None if layout is None else layout.layers[stage :: layout.stages],
                "live": {buffer: figures.live[buffer][stage] for buffer in BUFFERS},
                "live_bytes": figures.live_bytes[stage],
                "messages": figures.messages[stage],
                "message_bytes": figures.message_bytes[stage],
            }
            for stage in range(work.num_stages)
        ],
    }
