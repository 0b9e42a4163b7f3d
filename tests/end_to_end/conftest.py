"""One compile cache for all jobs, one uninterrupted run that others are compared with."""

import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from jobs import LAST, Job, rows, run, write_project


@pytest.fixture(scope="session", autouse=True)
def _caches() -> Iterator[None]:
    """Every program is kept, however fast it was compiled: processes start in seconds."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
        yield


@pytest.fixture(autouse=True)
def _no_job_survives() -> Iterator[None]:
    """A test that fails leaves no process behind."""
    yield
    while Job.started:
        Job.started.pop().kill()


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A folder with a config and a text."""
    return write_project(tmp_path)


@pytest.fixture(scope="session")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of an uninterrupted run, made once for all workers of a session."""
    shared = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        shared = shared.parent
    folder = shared / "straight"
    with (shared / "straight.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "done").exists():
            run(write_project(folder))
            assert len(rows(folder)) == LAST
            (folder / "done").touch()
    return folder
