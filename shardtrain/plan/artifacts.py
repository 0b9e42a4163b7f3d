"""A plan and its compiled program as files, made to be compared with those of another one.

Owns: their names and their text, in which there is no time, no path and no line number: two
compilations of one program give the same bytes, and a difference is one of the program.
Does not own: any figure in them.
"""

import json
import re
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from shardtrain.errors import unwritable
from shardtrain.plan.answer import Plan, Program
from shardtrain.plan.collectives import Collective

_SOURCES: Final = re.compile(
    r"^(?:FileNames|FunctionNames|FileLocations|StackFrames)\n(?:\d+ .*\n)*\n*", re.MULTILINE
)
_FRAME: Final = re.compile(r' (?:stack_frame_id=\d+|source_file="[^"]*"|source_line=\d+)')


def artifacts(plan: Plan, program: Program) -> dict[str, str]:
    """What is kept of a plan whose step was compiled.

    Args:
        plan: the plan.
        program: its compiled step.

    Returns:
        File names to texts: the program, its collectives where they were read, its memory, and the
        plan.
    """
    figures = plan.as_json()
    del figures["compiled"]["seconds"]
    found = program.audit
    moved = _lines(_moved(found.collectives, plan.cluster.domain)) if found else ""
    return {
        "step.hlo": stable_text(program.compiled.text),
        **({"collectives.txt": moved} if moved else {}),
        "memory.txt": _lines(_memory(plan, program)),
        "plan.json": json.dumps(figures, indent=1, sort_keys=True) + "\n",
    }


def write_artifacts(plan: Plan, program: Program, folder: str) -> None:
    """Writes `artifacts` into a folder, which is made if it is missing.

    Raises:
        ConfigError: it cannot be written to.
    """
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
        for name, text in artifacts(plan, program).items():
            (Path(folder) / name).write_text(text, encoding="utf-8")
    except OSError as error:
        raise unwritable("keep", folder, error) from None


def stable_text(hlo: str) -> str:
    """A program's text without the files and lines that it stems from.

    Another checkout has other paths, and a comment that is added moves lines.
    """
    return _FRAME.sub("", _SOURCES.sub("", hlo))


def _moved(found: Iterable[Collective], domain: int) -> Iterable[str]:
    """A line for each kind of collective, with no name or number that another one would shift."""
    yield "instructions\tkind\taxes\tdtypes\tpayload\tsent\ttimes\tlinks\tproducts\toperation"
    rows = Counter(
        "\t".join(
            [
                c.kind,
                ",".join(c.axes),
                ",".join(c.dtypes),
                str(c.payload),
                f"{c.wire:.0f}",
                str(c.times),
                "between" if c.crosses(domain) else "within",
                "beside" if c.is_overlapped else "none",
                c.op_name,
            ]
        )
        for c in found
    )
    for row in sorted(rows):
        yield f"{rows[row]}\t{row}"


def _memory(plan: Plan, program: Program) -> Iterable[str]:
    """Bytes on one device by class; those of the plan, then XLA's."""
    for whose, sizes in (
        ("planned", plan.own.memory.by_class()),
        ("compiled", program.bytes_per_device),
    ):
        for name, size in sizes.items():
            yield f"{whose}\t{name}\t{size:.0f}"


def _lines(lines: Iterable[str]) -> str:
    return "".join(f"{line}\n" for line in lines)
