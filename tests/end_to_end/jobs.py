"""Small training jobs in processes of their own: started, watched, signalled, compared."""

import codecs
import json
import os
import random
import signal
import struct
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any, ClassVar

import pytest
from tensorboardX.proto.event_pb2 import Event

from shardtrain.checkpoint.folder import TEMPORARY

CONFIG = """
[run]
name = "tiny"
dir = "run"
steps = 40
cpu_devices = 8

[model]
num_layers = 2
embed_dim = 16
num_heads = 4
dropout = 0.1

[data]
path = "my.txt"
sequence_length = 16
batch_size = 8

[sharding]
zero = 1

[optimizer]
learning_rate = 1e-2
warmup_steps = 4

[checkpoint]
every = 5

[eval]
every = 10
steps = 2
sample_tokens = 0
"""
LAST = 40
UPDATES = ("step", "sample_digest", "loss", "grad_norm", "learning_rate", "tokens")
EXACT = (*UPDATES, "val_loss")
"""What a row says about the run, and not about the machine."""
PATIENCE = 120.0

Row = dict[str, Any]


def write_project(folder: Path) -> Path:
    """A folder with a config and a text; both are the same in every call."""
    folder.mkdir(parents=True, exist_ok=True)
    words = random.Random(0)
    lines = [" ".join(words.choices(("to", "be", "or", "not", "that"), k=12)) for _ in range(600)]
    (folder / "my.txt").write_text("\n".join(lines))
    (folder / "tiny.toml").write_text(CONFIG)
    return folder


class Job:
    """`shardtrain train` in its own process and process group; what it says is read as it comes."""

    started: ClassVar[list["Job"]] = []

    def __init__(self, folder: Path, *flags: str, terminal: bool = False, cache: bool = True):
        """Starts it.

        Args:
            folder: of the project; its current folder.
            flags: after the config.
            terminal: whether it sits at a terminal, where `type` types.
            cache: whether it may take compiled programs from the cache.
        """
        self.started.append(self)
        self.folder = folder
        self._keyboard, screen = os.openpty() if terminal else os.pipe()
        words = [sys.executable, "-m", "shardtrain", "train", "tiny.toml", *flags]
        if terminal:  # the first that a new session opens is the one it is controlled from
            words = ["sh", "-c", 'exec "$@" <"$0" 2>"$0"', os.ttyname(screen), *words]
        self.process = subprocess.Popen(
            words,
            cwd=folder,
            env=os.environ | {"JAX_ENABLE_COMPILATION_CACHE": str(cache)},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=screen,
            start_new_session=True,
        )
        os.close(screen)
        self.text = ""
        self._news = threading.Condition()
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        decoder = codecs.getincrementaldecoder("utf-8")()
        while True:
            try:
                data = os.read(self._keyboard, 4096)
            except OSError:  # a terminal whose last process has gone
                data = b""
            with self._news:
                self.text += decoder.decode(data, final=not data)
                self._news.notify_all()
            if not data:
                return

    def type(self, keys: bytes) -> None:
        """Types at the terminal."""
        os.write(self._keyboard, keys)

    def wait_for(self, words: str) -> None:
        """Returns when the job has said something."""
        with self._news:
            done = self._news.wait_for(
                lambda: words in self.text or not self._reader.is_alive(), PATIENCE
            )
        assert done, f"nothing of {words!r} in {PATIENCE} s:\n{self.text}"
        assert words in self.text, f"ended without {words!r}:\n{self.text}"

    def wait_for_step(self, step: int) -> None:
        """Returns when the row of a step is written, or the job has ended."""
        while self.alive() and last_step(self.folder) < step:
            time.sleep(0.001)

    def wait_for_save(self) -> None:
        """Returns when a save is under way, or the job has ended."""
        checkpoints = self.folder / "run" / "checkpoints"
        while self.alive() and not any(checkpoints.glob(f"*{TEMPORARY}")):
            time.sleep(0.001)

    def alive(self) -> bool:
        """Whether the process runs."""
        return self.process.poll() is None

    def send(self, number: signal.Signals) -> None:
        """Sends a signal."""
        self.process.send_signal(number)

    def finish(self, code: int = 0) -> str:
        """Waits for the end with that exit code; returns what was said."""
        found = self.process.wait(PATIENCE)
        self._close()
        assert found == code, f"exit code {found}, expected {code}:\n{self.text}"
        assert "Traceback" not in self.text, self.text
        return self.text

    def kill(self) -> bool:
        """Kills it; whether it was still running."""
        self.process.kill()
        killed = self.process.wait() == -signal.SIGKILL
        self._close()
        return killed

    def _close(self) -> None:
        self._reader.join()
        if self._keyboard >= 0:
            os.close(self._keyboard)
            self._keyboard = -1


def run(folder: Path, *flags: str, code: int = 0) -> str:
    """A job from its start to its end; returns what it said."""
    return Job(folder, *flags).finish(code)


def entries(folder: Path) -> list[Row]:
    """Every line of the metrics file, as strict JSON."""

    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is not JSON")

    text = (folder / "run" / "metrics.jsonl").read_text()
    return [json.loads(line, parse_constant=refuse) for line in text.splitlines()]


def rows(folder: Path, *keys: str) -> list[Row]:
    """The rows, with some of their values."""
    chosen = keys or EXACT
    return [
        {key: row[key] for key in chosen if key in row}
        for row in entries(folder)
        if "event" not in row
    ]


def events(folder: Path, name: str) -> list[Row]:
    """The events of a name."""
    return [entry for entry in entries(folder) if entry.get("event") == name]


def last_step(folder: Path) -> int:
    """The step of the newest whole row while a job is writing; 0 before there is one."""
    path = folder / "run" / "metrics.jsonl"
    try:
        with path.open("rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - 4096))
            lines = file.read().split(b"\n")[1:-1]
    except FileNotFoundError:
        return 0
    found = [line for line in lines if line.startswith(b'{"step"')]
    return int(json.loads(found[-1])["step"]) if found else 0


def read_curves(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """The curves as TensorBoard shows them: a start event hides what comes after its step."""
    curves: dict[str, list[tuple[int, float]]] = {}
    files = (folder / "run" / "tensorboard").glob("events.*")
    for path in sorted(files, key=lambda p: p.stat().st_mtime_ns):
        data = path.read_bytes()
        while len(data) > 12:
            (length,) = struct.unpack("<Q", data[:8])
            event = Event.FromString(data[12 : 12 + length])
            data = data[16 + length :]
            if event.HasField("session_log"):
                for points in curves.values():
                    points[:] = [point for point in points if point[0] < event.step]
            for value in event.summary.value:
                if value.HasField("simple_value"):
                    curves.setdefault(value.tag, []).append((event.step, value.simple_value))
    return curves


def assert_curves(folder: Path) -> None:
    """Each curve has the steps of the metrics file, once each and growing (O-43)."""
    curves = read_curves(folder)
    for name in ("loss", "val_loss", "grad_norm", "tokens_per_second"):
        values = [(row["step"], row[name]) for row in rows(folder, "step", name) if name in row]
        expected = [(step, pytest.approx(value)) for step, value in values]
        assert curves[name] == expected, name
