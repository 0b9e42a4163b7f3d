"""`launch --engine local`: what its processes get, how they end, and that nothing is left."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from launched import end, gone, pid_of, start

from shardtrain import cli, launch
from shardtrain.launch_ending import Ended, first_failure, one_code

SLEEP = "time.sleep(100)"
LISTEN = "signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))\n"


# -- one code for many


@pytest.mark.parametrize(
    ("codes", "expected", "first"),
    [
        ([0, 0], 0, None),
        ([75, 75, 75], 75, 0),
        ([130, 130], 130, 0),
        ([2, 2], 2, 0),
        ([76, 70, 76], 70, 1),
        ([-6, 3, 134], 3, 1),
        ([-9, 76, 76], 76, 0),
        ([76, -9, -6], 76, 1),
        ([76, 137, 76], 76, 1),
        ([137, 143], 76, 0),
        ([-11, 76], 76, 0),
        ([124, 70], 124, 0),
        ([75, 70], 70, 1),
        ([75, -6], 75, 0),
        ([75, -9], 76, 1),
        ([0, 76], 76, 1),
        ([-6, -6], 76, 0),
        ([0, 1], 1, 1),
    ],
)
def test_the_code_of_a_run(codes: list[int], expected: int, first: int | None) -> None:
    ended = [Ended(index, code) for index, code in enumerate(codes)]
    found = first_failure(ended)
    assert (one_code(ended), found.index if found else None) == (expected, first)


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGTERM, 75), (signal.SIGUSR1, 75), (signal.SIGINT, 130)]
)
def test_a_signal_before_there_was_a_handler(number: signal.Signals, code: int) -> None:
    ended = [Ended(index, -number, told=(number,)) for index in range(2)]
    assert one_code(ended) == code
    assert one_code([Ended(0, -number)]) == 76  # not ours


def test_who_was_ended_by_the_launcher_does_not_count() -> None:
    assert one_code([Ended(0, 124), Ended(1, -9, forced=True), Ended(2, 75, forced=True)]) == 124


# -- what processes get


def test_peers_and_output(tmp_path: Path) -> None:
    program = """
print("out", me, count, os.environ["SHARDTRAIN_COORDINATOR"].split(":")[0])
print("error", me, file=sys.stderr)
sys.stdout.write("no newline"); sys.stdout.flush()
"""
    out, error = end(start(tmp_path, program, 3), 0)
    lines = [f"{prefix}out {i} 3 127.0.0.1" for i, prefix in enumerate(["", "[1] ", "[2] "])]
    lines += [f"{prefix}no newline" for prefix in ("", "[1] ", "[2] ")]
    assert sorted(out.splitlines()) == sorted(lines)
    assert sorted(error.splitlines()) == ["[1] error 1", "[2] error 2", "error 0"]


def test_flags_of_train_go_through(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def note(words: list[str], count: int, *, restarts: int) -> int:
        seen.append((words, count, restarts))
        return 75

    monkeypatch.setattr(launch, "run_local", note)
    flags = ["--run.steps", "3", "--mesh.data=-1", "--log.trackers"]
    words = ["launch", "-n", "2", "quickstart", "--restarts", "1", *flags]
    assert cli.main(words) == 75
    train = ["train", "quickstart", "--run.steps", "3", "--mesh.data=-1", "--log.trackers"]
    assert seen == [([sys.executable, "-m", "shardtrain", *train], 2, 1)]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), "how many processes"),
        (("--engine", "locl", "-n", "2"), "did you mean local?"),
        (("-n", "-2"), "--processes: must not be negative\n  value: -2"),
        (("-n", "3"), "run.cpu_devices=8: .*equally to 3 processes\n  allowed: .* 6 or 9\n  to do"),
        (("-n", "2", "--image", "x"), "--image: the engine local has no use for it\n  value: x"),
        (("-n", "2", "--mesh.tensor", "3"), "is not divisible by 3; use 1, 2 or 4"),
        (("-n", "2", "--run.stepz", "3"), "did you mean run.steps?"),
    ],
)
def test_refusals(words: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["launch", *words]) == 2
    out, error = capsys.readouterr()
    assert out == ""
    assert re.search(message, error), error


def test_a_mesh_that_is_not_there_is_refused_before_anything_starts() -> None:
    code = """
import sys
from shardtrain.cli import main
code = main(["launch", "-n", "2", "--mesh.data", "2"])
sys.exit(77 if "jax" in sys.modules or "ray" in sys.modules else code)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert "the product is 4, but there are 8 devices" in done.stderr


# -- how they end


def test_a_failure_ends_the_others(tmp_path: Path) -> None:
    # process 2 listens to SIGTERM, process 0 does not
    program = f"""
if me == 1: time.sleep(0.2); sys.exit(70)
if me == 0: signal.signal(signal.SIGTERM, signal.SIG_IGN)
if me == 2: {LISTEN}
{SLEEP}
"""
    begun = time.monotonic()
    _, error = end(start(tmp_path, program, 3), 70)
    assert time.monotonic() - begun < 20
    assert error.count("process 1: a fault of ours (70)") == 2
    assert "SIGTERM to what has not ended: 0, 2" in error
    assert "SIGKILL to what has not ended: 0" in error
    assert all(gone(pid_of(tmp_path, str(index))) for index in range(3))


def test_a_process_that_is_killed_is_a_lost_peer(tmp_path: Path) -> None:
    program = "\nif me == 0: os.kill(os.getpid(), 9)\ntime.sleep(0.3); sys.exit(76)"
    _, error = end(start(tmp_path, program, 2), 76)
    assert "process 0: killed by SIGKILL; the run ends with 76" in error


def test_a_stopped_process_is_killed(tmp_path: Path) -> None:
    program = "\nif me == 1: os.kill(os.getpid(), signal.SIGSTOP)\ntime.sleep(0.2); sys.exit(124)"
    _, error = end(start(tmp_path, program, 2), 124)
    assert "process 0: hung (124); the run ends with 124" in error
    assert gone(pid_of(tmp_path, "1"))


def test_those_that_agreed_to_end_are_not_hurried(tmp_path: Path) -> None:
    program = "\nif me == 1: sys.exit(75)\ntime.sleep(2.5); print('saved'); sys.exit(75)"
    out, _ = end(start(tmp_path, program, 2), 75)
    assert out == "saved\n"


@pytest.mark.parametrize(
    ("sent", "got", "code"),
    [
        (signal.SIGTERM, "SIGTERM", 75),
        (signal.SIGUSR1, "SIGUSR1", 75),
        (signal.SIGINT, "SIGINT", 130),
        (signal.SIGHUP, "SIGTERM", 75),
    ],
)
def test_signals_go_to_all(tmp_path: Path, sent: signal.Signals, got: str, code: int) -> None:
    program = f"""
signal.signal(signal.{got}, lambda *_: (print("got", me), sys.exit({code})))
open(f"ready{{me}}.pid", "w").write("1")
{SLEEP}
"""
    launcher = start(tmp_path, program, 2)
    for index in range(2):
        pid_of(tmp_path, f"ready{index}")
    launcher.send_signal(sent)
    out, _ = end(launcher, code)
    assert sorted(out.splitlines()) == ["[1] got 1", "got 0"]


def test_the_third_interrupt_kills(tmp_path: Path) -> None:
    program = f"""
signal.signal(signal.SIGINT, signal.SIG_IGN)
open(f"ready{{me}}.pid", "w").write("1")
{SLEEP}
"""
    launcher = start(tmp_path, program, 2)
    for index in range(2):
        pid_of(tmp_path, f"ready{index}")
    for _ in range(3):
        launcher.send_signal(signal.SIGINT)
        time.sleep(0.2)
    end(launcher, 130)


# -- what is left


CHILD = """
child = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(100)"])
open(f"child{me}.pid", "w").write(str(child.pid))
"""


def test_no_child_of_a_process_is_left(tmp_path: Path) -> None:
    end(start(tmp_path, CHILD, 2), 0)
    assert all(gone(pid_of(tmp_path, f"child{index}")) for index in range(2))


@pytest.mark.parametrize("stopped", [False, True])
def test_a_launcher_that_is_killed_takes_all_with_it(tmp_path: Path, stopped: bool) -> None:
    launcher = start(tmp_path, CHILD + SLEEP, 2)
    pids = [pid_of(tmp_path, name) for name in ("child0", "child1", "0", "1")]
    if stopped:
        os.kill(pids[2], signal.SIGSTOP)
    launcher.kill()
    launcher.communicate()
    assert all(gone(pid) for pid in pids)


# -- another start


AGAIN = """
starts = len(open(f"starts{me}", "a+").read()) if not os.path.exists(f"starts{me}") else 0
open(f"starts{me}", "a").write("x")
starts = len(open(f"starts{me}").read())
"""


@pytest.mark.parametrize("code", [76, 124])
def test_a_lost_or_hung_run_starts_again(tmp_path: Path, code: int) -> None:
    program = AGAIN + f"sys.exit(0 if starts == 3 else {code})"
    _, error = end(start(tmp_path, program, 2, restarts=5), 0)
    assert "start 2 of 5 follows" in error
    assert (tmp_path / "starts1").read_text() == "xxx"


def test_starts_are_counted(tmp_path: Path) -> None:
    end(start(tmp_path, AGAIN + "sys.exit(76)", 2, restarts=2), 76)
    assert (tmp_path / "starts0").read_text() == "xxx"


@pytest.mark.parametrize("code", [2, 3, 70, 75, 130])
def test_other_ends_stand(tmp_path: Path, code: int) -> None:
    end(start(tmp_path, AGAIN + f"sys.exit({code})", 2, restarts=2), code)
    assert (tmp_path / "starts0").read_text() == "x"
