"""What a person sees: what runs where, then a line now and then, and a bar on a terminal."""

import os
import time
from collections.abc import Mapping, Sequence
from typing import Any, Final, Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

_NO_EDGE: Final = 10_000
"""Columns of what has no edge, such as a file."""


def human_bytes(number: float) -> str:
    """A size in words, such as `1.5 MiB`."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if number < 1024:
            return f"{number:.0f} {unit}" if unit == "B" else f"{number:.1f} {unit}"
        number /= 1024
    return f"{number:.2f} TiB"


def human_time(seconds: float) -> str:
    """A duration as `m:ss` or `h:mm:ss`."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


class Screen:
    """An observer of the loop that writes to standard error."""

    def __init__(
        self,
        *,
        first: int,
        last: int,
        every: int,
        quiet: bool = False,
        console: Console | None = None,
    ) -> None:
        """Prepares the screen.

        Args:
            first: updates done at the start.
            last: the update after which the run ends.
            every: updates between two lines.
            quiet: show nothing, as another process of the run does it.
        """
        self.console = console or make_console(quiet=quiet)
        self._first, self._last, self._every = first, last, every
        self._begun = time.perf_counter()
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            console=self.console,
            transient=True,
            disable=not self.console.is_terminal,
        )
        self._task = self._bar.add_task("training", total=last, completed=first)

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def table(self, title: str, rows: Sequence[tuple[str, str]]) -> None:
        """Shows pairs of a name and a text; in a file a line each, for who searches it."""
        if not self.console.is_terminal:
            width = max(len(name) for name, _ in rows)
            lines = [f" {name:{width}}  {text}".rstrip() for name, text in rows]
            self.say("\n".join([title, *lines]))
            return
        table = Table(title=Text(title), show_header=False, title_justify="left", box=None)
        for name, text in rows:
            table.add_row(Text(name, "bold"), Text(text))
        self.console.print(table)

    def say(self, message: str) -> None:
        """Shows a message as it is; lines are not cut into pieces."""
        self.console.print(message, markup=False, soft_wrap=True)

    def row(self, step: int, values: Mapping[str, Any]) -> None:
        """Moves the bar; writes a line when it is time or a validation loss came in."""
        self._bar.update(self._task, completed=step)
        now = time.perf_counter()
        if step == self._first + 1:
            self._begun = now - values["step_time"]
        elif step % self._every and step != self._last and "val_loss" not in values:
            return
        left = (now - self._begun) / (step - self._first) * (self._last - step)
        words = [
            f"step {step:>{len(str(self._last))}}/{self._last}",
            f"loss {values['loss']:.4f}",
            *(f"{name} {value:.4f}" for name, value in values.items() if name.startswith("val_")),
            f"grad {values['grad_norm']:.3f}",
            f"lr {values['learning_rate']:.2e}",
            *(
                f"{values[name]:,.0f} {unit}/s"
                for unit in ("tokens", "examples")
                if (name := f"{unit}_per_second") in values
            ),
            *([f"mfu {values['mfu']:.1%}"] if values.get("mfu") is not None else []),
            f"eta {human_time(left)}",
        ]
        self.say("  ".join(words))

    def event(self, name: str, step: int, values: Mapping[str, Any]) -> None:
        """Says what took time; other events have their own words where they happen."""
        if name == "compile":
            need = [
                f"{human_bytes(values[part])} of {part}"
                for part in ("arguments", "temporaries")
                if part in values
            ]
            room = f"; on each device {' and '.join(need)}" if need else ""
            self.say(f"compiled the step in {values['seconds']:.1f} s{room}")
        elif name == "restore":
            self.say(f"restored step {step} in {values['seconds']:.1f} s")
        elif name == "save":
            self.say(f"saved step {step} in {values['seconds']:.1f} s")
        elif name in ("spike", "drift", "target"):
            self.say(f"{name}: {values['reason']}")
        elif name == "overflow":
            self.say(
                f"overflow in update {step + 1}: the loss scale is {values['loss_scale']:g} now"
            )
        elif name == "skip":
            self.say(f"left a batch out: {values['reason']}")
        elif name == "rollback":
            self.say(f"{values['reason']}: back to step {step}, past {values['left_out']} batches")
        elif name == "sample":
            self.say(f"what the model writes now:\n{printable(values['text'])}")

    def flush(self) -> None:
        """Nothing waits here."""


def printable(text: str) -> str:
    """A text that cannot steer a terminal: control characters become replacement characters."""
    return "".join(c if c.isprintable() or c in "\n\t" else "\ufffd" for c in text)


class _Console(Console):
    """A console whose reader may go, such as `head`, which is no reason to end a run."""

    def on_broken_pipe(self) -> None:
        """Says no more, here and in whatever else would be written to the same place."""
        self.quiet = True
        os.dup2(os.open(os.devnull, os.O_WRONLY), self.file.fileno())


def make_console(*, quiet: bool = False, stderr: bool = True) -> Console:
    """A console as everything here writes to it: words as they are, no colours of its own.

    Where it is no terminal, and nothing says how wide it is, lines are as long as they are.
    """
    console = _Console(stderr=stderr, highlight=False, emoji=False, quiet=quiet)
    if not (console.is_terminal or console.is_jupyter or "COLUMNS" in os.environ):
        console.width = _NO_EDGE
    return console
