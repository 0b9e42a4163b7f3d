"""When each piece of work begins and ends, and the timeline in a terminal.

Owns: the pieces that every picture shows, their colours, the picture in text. Does not own: files
(`picture`).
"""

from dataclasses import dataclass

import numpy as np
from rich.style import Style
from rich.text import Text

from shardtrain.strategies.schedules.simulate import Costs, part_times
from shardtrain.strategies.schedules.table import PARTS, Schedule

LETTERS = {part: part[0].upper() for part in PARTS}
_COLOURS = {"forward": (90, 155, 213), "backward": (240, 160, 75), "weight": (130, 185, 115)}


@dataclass(frozen=True)
class Piece:
    """A piece of work on the time axis."""

    stage: int
    part: str
    virtual: int
    micro: int
    begin: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """A table on the time axis, in which a tick lasts as long as its slowest stage."""

    name: str
    num_stages: int
    num_virtual: int
    split: bool
    pieces: tuple[Piece, ...]
    ticks: tuple[float, ...]
    """When each tick begins, and the end."""

    @property
    def parts(self) -> tuple[str, ...]:
        """The parts that occur."""
        return PARTS if self.split else PARTS[:2]

    def colour(self, part: str, virtual: int) -> str:
        """Return the colour of a piece as `#rrggbb`: later virtual stages are lighter."""
        white = 0.6 * virtual / max(self.num_virtual - 1, 1)
        mixed = [round(value + (255 - value) * white) for value in _COLOURS[part]]
        return "#{:02x}{:02x}{:02x}".format(*mixed)


def make_timeline(schedule: Schedule, costs: Costs) -> Timeline:
    """Put a table on the time axis.

    Args:
        schedule: A proven table.
        costs: Time of one microbatch on each virtual stage.
    """
    work = schedule.work
    spent = part_times(work, costs)
    lengths = np.sum(list(spent.values()), axis=0).max(axis=1)
    ticks = np.concatenate([[0.0], lengths.cumsum()])
    pieces = []
    for tick, stage in np.ndindex(work.forward_micro.shape):
        begin = float(ticks[tick])
        for part in PARTS:
            key = work.at(part, tick, stage)
            if key is not None:
                end = begin + float(spent[part][tick, stage])
                pieces.append(Piece(stage, part, *key, begin, end))
                begin = end
    return Timeline(
        schedule.name,
        work.num_stages,
        work.num_virtual,
        work.split,
        tuple(pieces),
        tuple(float(tick) for tick in ticks),
    )


def draw(timeline: Timeline, width: int) -> list[Text]:
    """Draw a timeline in text.

    Args:
        timeline: What to draw.
        width: Columns of the terminal.

    Returns:
        A line for each stage: F, B or W with the microbatch where there is room, `.` where the
        stage waits. Where columns are wider than pieces, each shows what its middle falls on.
    """
    label = len(f"stage {timeline.num_stages - 1}  ")
    columns = max(width - label, 1)
    total = timeline.ticks[-1] or 1.0
    lines = []
    for stage in range(timeline.num_stages):
        mine = [piece for piece in timeline.pieces if piece.stage == stage]
        owner: list[Piece | None] = [None] * columns
        for piece in mine:  # the columns whose middle the piece covers
            first, last = (
                int(np.ceil(time / total * columns - 0.5)) for time in (piece.begin, piece.end)
            )
            owner[first:last] = [piece] * (min(last, columns) - first)
        line = Text(f"stage {stage}".ljust(label))
        at = 0
        while at < columns:
            end = at
            while end < columns and owner[end] is owner[at]:
                end += 1
            line.append(*_cells(timeline, owner[at], end - at))
            at = end
        lines.append(line)
    return lines


def _cells(timeline: Timeline, piece: Piece | None, room: int) -> tuple[str, Style]:
    """A piece in the columns that it has."""
    if piece is None:
        return "." * room, Style(dim=True)
    letter = LETTERS[piece.part]
    virtual = f"{piece.virtual}." if timeline.num_virtual > 1 else ""
    texts = (f"{letter}{virtual}{piece.micro}", f"{letter}{piece.micro}", letter)
    text = next(text for text in texts if len(text) <= room or text == letter)
    style = Style(color="#000000", bgcolor=timeline.colour(piece.part, piece.virtual))
    return text.ljust(room, "-"), style


def legend(timeline: Timeline) -> Text:
    """Return what the colours and letters of a timeline mean."""
    words = {"forward": "forward", "backward": "backward", "weight": "weight gradient"}
    line = Text()
    for part in timeline.parts:
        for virtual in range(timeline.num_virtual):
            number = f"{virtual}." if timeline.num_virtual > 1 else ""
            style = Style(color="#000000", bgcolor=timeline.colour(part, virtual))
            line.append(f" {LETTERS[part]}{number} ", style)
        line.append(f" {words[part]}   ")
    line.append("-", Style(dim=True)).append(" goes on   ")
    line.append(".", Style(dim=True))
    return line.append(" waits")
