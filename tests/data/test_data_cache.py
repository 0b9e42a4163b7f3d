"""The cache's lock: waits for the living, not for the dead or the stuck."""

import threading
import time
from pathlib import Path

import pytest

from shardtrain.data import cache
from shardtrain.data.cache import exclusive, write_atomic


def test_a_stuck_holder_is_not_waited_for(tmp_path: Path) -> None:
    said: list[str] = []
    with (
        exclusive(tmp_path / ".lock"),
        exclusive(tmp_path / ".lock", say=said.append, patience=0.2),
    ):
        pass
    assert said == [
        f"waiting for another process that prepares {tmp_path}",
        "the other process has done nothing for 0 s: going on without it",
    ]


def test_a_holder_that_lives_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "_SIGN_SECONDS", 0.0)
    lock, held, ended = tmp_path / ".lock", threading.Event(), threading.Event()

    def hold() -> None:
        with exclusive(lock) as alive:
            held.set()
            for _ in range(10):
                time.sleep(0.1)
                alive()
            ended.set()

    holder = threading.Thread(target=hold)
    holder.start()
    held.wait()
    with exclusive(lock, patience=0.5):
        assert ended.is_set()
    holder.join()


def test_no_locks_on_this_file_system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import errno
    import fcntl

    def unsupported(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", unsupported)
    with exclusive(tmp_path / ".lock"), exclusive(tmp_path / ".lock", patience=10):
        pass


def test_a_small_file_is_whole_or_absent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_atomic(tmp_path / "a", b"one")
    monkeypatch.setattr(cache.os, "fsync", lambda _: (_ for _ in ()).throw(OSError("full")))
    with pytest.raises(OSError, match="full"):
        write_atomic(tmp_path / "a", b"two")
    assert [(path.name, path.read_bytes()) for path in tmp_path.iterdir()] == [("a", b"one")]
