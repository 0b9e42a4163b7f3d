"""Tables in CSV files: one line a tick, one column a stage.

Owns: the file format. Does not own: slots, which follow from what runs when (`table`), and whether
a table is right (`proof`).

A cell is empty or has up to three words: F, B or W and a microbatch for its forward, backward or
weight gradient, such as `F3 B1`. With several virtual stages the virtual stage comes first: `F1.3`
is the forward of microbatch 3 on virtual stage 1. The first line names the stages.
"""

import csv
import re
from pathlib import Path

import numpy as np

from shardtrain.errors import ConfigError, unreadable
from shardtrain.strategies.schedules.proof import prove
from shardtrain.strategies.schedules.table import NOTHING, PARTS, Schedule, Work, with_slots

_WORD = re.compile(r"([FBW])(?:(\d{1,8})\.)?(\d{1,8})")
_LETTER = {part[0].upper(): part for part in PARTS}


def read_table(path: str | Path, stages: int = 0, microbatches: int = 0) -> Schedule:
    """Read and prove a table.

    Args:
        path: A CSV file.
        stages: How many stages it must have; 0 = as many as it has columns.
        microbatches: How many microbatches it must have; 0 = as many as it names.

    Returns:
        The proven table.

    Raises:
        ConfigError: The file cannot be read, has other sizes, or its table is faulty; the message
            has the line, or the tick and the stage.
    """
    where = str(path)
    lines = _lines(Path(path))
    width = len(lines[0][1]) if lines else 0
    body = lines[1:]
    if not body or not width:
        raise ConfigError("has no ticks", where=where, allowed="a line of stages, a line a tick")
    if any(_WORD.fullmatch(word) for cell in lines[0][1] for word in cell.split()):
        raise ConfigError("has work in its first line, which names the stages", where=where)
    if stages and width != stages:
        raise ConfigError(
            f"has {width} stages, but there are {stages}",
            where=where,
            cure="use as many columns as stages",
        )
    cells: dict[str, list[list[int]]] = {
        f"{part}_{what}": [] for part in PARTS for what in ("virtual", "micro")
    }
    for number, line in body:
        if len(line) != width:
            raise ConfigError(
                f"has {len(line)} cells, but there are {width} stages",
                where=f"{where}, line {number}",
            )
        read = [_cell(text, f"{where}, line {number}, stage {at}") for at, text in enumerate(line)]
        for name, column in cells.items():
            column.append([cell.get(name, NOTHING) for cell in read])
    columns = {name: np.array(column, np.int32) for name, column in cells.items()}
    found = 1 + max(int(columns[f"{part}_micro"].max()) for part in PARTS)
    num_virtual = 1 + max(int(columns[f"{part}_virtual"].max()) for part in PARTS)
    if not found:
        raise ConfigError("does nothing at all", where=where)
    return prove(with_slots(where, Work(num_virtual, microbatches or found, **columns)))


def write_table(schedule: Schedule, path: str | Path) -> None:
    """Write a table, to be read by people, changed, and read back.

    Args:
        schedule: A table.
        path: The CSV file.
    """
    work = schedule.work
    with Path(path).open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow([f"stage {stage}" for stage in range(work.num_stages)])
        for tick in range(work.num_ticks):
            writer.writerow([_text(work, tick, stage) for stage in range(work.num_stages)])


def _lines(path: Path) -> list[tuple[int, list[str]]]:
    """The lines that are not blank, with their numbers."""
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            reader = csv.reader(file)
            return [(reader.line_num, line) for line in reader if line]
    except OSError as error:
        raise unreadable(path, error) from None
    except (UnicodeDecodeError, csv.Error) as error:
        raise ConfigError("is no CSV file in UTF-8", where=str(path)) from error


def _cell(text: str, where: str) -> dict[str, int]:
    """The columns of the table that a cell fills."""
    found: dict[str, int] = {}
    for word in text.split():
        match = _WORD.fullmatch(word)
        if match is None:
            raise ConfigError(
                f'cannot read "{word}"',
                where=where,
                allowed="F, B or W and a microbatch, such as F3 B1; F1.3 on virtual stage 1",
            )
        part = _LETTER[match[1]]
        if f"{part}_micro" in found:
            raise ConfigError(
                f"has two {part}s in one tick", where=where, cure="move one to another line"
            )
        found |= {f"{part}_virtual": int(match[2] or 0), f"{part}_micro": int(match[3])}
    order = [name for name in found if name.endswith("_micro")]
    if order != [f"{part}_micro" for part in PARTS if f"{part}_micro" in found]:
        raise ConfigError(
            "has its parts in another order than they run in",
            where=where,
            allowed="F, then B, then W",
        )
    return found


def _text(work: Work, tick: int, stage: int) -> str:
    """A cell as it stands in the file."""
    words = []
    for part in PARTS:
        key = work.at(part, tick, stage)
        if key is not None:
            virtual = f"{key[0]}." if work.num_virtual > 1 else ""
            words.append(f"{part[0].upper()}{virtual}{key[1]}")
    return " ".join(words)
