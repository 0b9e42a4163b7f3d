"""`launch --engine local` with a real run: a process is killed, and the run goes on."""

import os
import signal
from pathlib import Path

import pytest
from launched import gone
from small_runs import begin, events, launch, rows, said, wait_for_step, write_run

STEPS = 120


def processes_of(launcher: int) -> dict[int, int]:
    """The processes of the run, by their numbers."""
    children = Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split()
    found = {}
    for pid in map(int, children):
        environ = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        for entry in environ:
            name, _, value = entry.partition(b"=")
            if name == b"SHARDTRAIN_PROCESS":
                found[int(value)] = pid
    return found


@pytest.mark.engines
@pytest.mark.parametrize("index", [0, 1])
def test_a_killed_process_is_no_end(tmp_path: Path, index: int) -> None:
    straight = write_run(tmp_path / "straight", STEPS)
    launch(straight, "-n", "2")
    folder = write_run(tmp_path / "killed", STEPS)
    launcher = begin(folder, "-n", "2", "--restarts", "1")
    wait_for_step(folder, 25)
    pids = processes_of(launcher.pid)
    os.kill(pids[index], signal.SIGKILL)
    try:
        assert launcher.wait(240) == 0, said(folder)
    finally:
        launcher.kill()
    assert all(gone(pid) for pid in pids.values())
    text = said(folder)
    assert f"process {index}: killed by SIGKILL; the run ends with 76" in text
    assert "a peer was lost (76); start 1 of 1 follows in 1 s" in text
    assert "Traceback" not in text
    values = ("step", "loss", "sample_digest", "grad_norm")
    assert rows(folder, *values) == rows(straight, *values)
    assert events(folder, "restore")
