"""The processes of one run: how they find each other, and what they tell each other besides steps.

Owns: joining the others through `jax.distributed`, the small store of texts that all of them read
and write, barriers. Does not own: what is agreed on, and who watches whom (`shardtrain.train`).
Importing this file never imports jax.

A process finds its peers in its environment: `SHARDTRAIN_COORDINATOR`, `SHARDTRAIN_PROCESSES` and
`SHARDTRAIN_PROCESS` (set by our own launchers), or what Slurm and Open MPI set for their tasks. The
coordinator alone may be named too, where an engine has numbered the processes.
"""

import contextlib
import json
import os
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final, NoReturn, Protocol

from shardtrain.errors import ConfigError

COORDINATOR: Final = "SHARDTRAIN_COORDINATOR"
PROCESSES: Final = "SHARDTRAIN_PROCESSES"
PROCESS: Final = "SHARDTRAIN_PROCESS"
_ENGINES: Final = (
    ("slurm", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS"),
    ("ompi", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
)
"""jax's name of an engine, and where it writes a process's number and how many there are."""
START_SECONDS: Final = 300
"""How long processes wait for each other at the start."""
_LEAVE_SECONDS: Final = 3.0
_HEARTBEAT_SECONDS: Final = 100
"""When jax itself takes a silent peer for dead; the watchdog is earlier."""


@dataclass(frozen=True)
class Peers:
    """What a process knows of its peers before it has met them."""

    index: int
    """The number of this process."""
    count: int
    """The number of processes."""
    coordinator: str
    """host:port of process 0; "" where jax finds it by `method`."""
    method: str = ""
    """jax's name of the engine that started the processes."""


class Processes(Protocol):
    """The processes of a run, as one of them sees them."""

    index: int
    count: int

    def set(self, key: str, value: str) -> None:
        """Write a text under a key, over what was there."""

    def set_first(self, key: str, value: str) -> bool:
        """Write a text unless there is one; returns whether it was written."""

    def get(self, key: str) -> str | None:
        """Read a text; None where there is none."""

    def wait(self, key: str, seconds: float) -> str:
        """Read a text as soon as it is there; raises TimeoutError."""

    def under(self, prefix: str) -> dict[str, str]:
        """Read all texts whose keys begin with `prefix/`, by the rest of their keys."""

    def barrier(self, name: str, seconds: float) -> None:
        """Wait until all processes are at the barrier of this name; raises TimeoutError.

        Each name can be used once.
        """


@dataclass
class Alone:
    """A run of one process."""

    index: int = 0
    count: int = 1
    _texts: dict[str, str] = field(default_factory=dict)
    _news: threading.Condition = field(default_factory=threading.Condition)

    def set(self, key: str, value: str) -> None:
        """Write a text under a key, over what was there."""
        with self._news:
            self._texts[key] = value
            self._news.notify_all()

    def set_first(self, key: str, value: str) -> bool:
        """Write a text unless there is one; returns whether it was written."""
        with self._news:
            written = self._texts.setdefault(key, value) is value
            self._news.notify_all()
        return written

    def get(self, key: str) -> str | None:
        """Read a text; None where there is none."""
        with self._news:
            return self._texts.get(key)

    def wait(self, key: str, seconds: float) -> str:
        """Read a text as soon as it is there; raises TimeoutError."""
        with self._news:
            if not self._news.wait_for(lambda: key in self._texts, seconds):
                raise TimeoutError(key)
            return self._texts[key]

    def under(self, prefix: str) -> dict[str, str]:
        """Read all texts whose keys begin with `prefix/`, by the rest of their keys."""
        start = f"{prefix}/"
        with self._news:
            return {k.removeprefix(start): v for k, v in self._texts.items() if k.startswith(start)}

    def barrier(self, name: str, seconds: float) -> None:
        """Nobody is waited for."""


class Joined:
    """A run of several processes, through the key-value service of `jax.distributed`.

    The service has no public face in jax; what is used of it here is what jax's own
    `multihost_utils` and Orbax use. Keys and barriers live as long as process 0.
    """

    _SPACE = "shardtrain"

    def __init__(self, client: Any, index: int, count: int) -> None:
        self.index, self.count, self._client = index, count, client

    def _key(self, key: str) -> str:
        return f"{self._SPACE}/{key}"

    def set(self, key: str, value: str) -> None:
        """Write a text under a key, over what was there."""
        self._client.key_value_set(self._key(key), value, allow_overwrite=True)

    def set_first(self, key: str, value: str) -> bool:
        """Write a text unless there is one; returns whether it was written."""
        try:
            self._client.key_value_set(self._key(key), value)
        except RuntimeError as error:
            if "ALREADY_EXISTS" in str(error):
                return False
            raise
        return True

    def get(self, key: str) -> str | None:
        """Read a text; None where there is none."""
        try:
            found: str = self._client.key_value_try_get(self._key(key))
        except RuntimeError as error:
            if "NOT_FOUND" in str(error):
                return None
            raise
        return found

    def wait(self, key: str, seconds: float) -> str:
        """Read a text as soon as it is there; raises TimeoutError."""
        try:
            found: str = self._client.blocking_key_value_get(self._key(key), int(seconds * 1000))
        except RuntimeError as error:
            raise _timeout(error, key) from error
        return found

    def under(self, prefix: str) -> dict[str, str]:
        """Read all texts whose keys begin with `prefix/`, by the rest of their keys."""
        start = f"{self._key(prefix)}/"
        return {key.removeprefix(start): v for key, v in self._client.key_value_dir_get(start)}

    def barrier(self, name: str, seconds: float) -> None:
        """Wait until all processes are at the barrier of this name; raises TimeoutError."""
        try:
            self._client.wait_at_barrier(self._key(name), int(seconds * 1000))
        except RuntimeError as error:
            raise _timeout(error, name) from error


def _timeout(error: RuntimeError, what: str) -> Exception:
    return TimeoutError(what) if "DEADLINE_EXCEEDED" in str(error) else error


def told_by_all(peers: Processes, name: str, mine: object, seconds: float) -> list[Any]:
    """Tell the others something and learn what they have to say; all wait for all.

    Args:
        peers: The processes; each calls it.
        name: Each can be used once.
        mine: What JSON can hold.
        seconds: How long to wait; TimeoutError after that.

    Returns:
        What every process said, in the order of their numbers.
    """
    peers.set(f"{name}/{peers.index}", json.dumps(mine))
    peers.barrier(f"{name} told", seconds)
    told = peers.under(name)
    return [json.loads(told[index]) for index in sorted(told, key=int)]


def leave(code: int) -> NoReturn:
    """End this process at once, without the wait for all others that jax makes at its end.

    The store is process 0's, and jax aborts whoever loses it: so that one goes last, soon.

    Args:
        code: The exit code.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    peers = processes()
    with contextlib.suppress(RuntimeError):
        if peers.index:
            peers.set(f"left/{peers.index}", "")
        else:
            deadline = time.monotonic() + _LEAVE_SECONDS
            while len(peers.under("left")) < peers.count - 1 and time.monotonic() < deadline:
                time.sleep(0.05)
    os._exit(code)


_joined: Processes | None = None


def processes() -> Processes:
    """Return the processes of this run: those that were joined, or this one alone."""
    return _joined or Alone()


def find_peers(environ: Mapping[str, str] = os.environ) -> Peers | None:
    """Look for the peers that whoever started this process has named.

    Args:
        environ: The environment.

    Returns:
        The peers; None for a process by itself.

    Raises:
        ConfigError: Only some of our variables are there, or one is no number.
    """
    numbered = _numbered(environ)
    if COORDINATOR in environ and PROCESSES not in environ and PROCESS not in environ:
        if numbered is not None:
            return _several(replace(numbered, coordinator=environ[COORDINATOR], method=""))
        return _named(environ)
    if any(name in environ for name in (COORDINATOR, PROCESSES, PROCESS)):
        return _named(environ)
    return None if numbered is None else _several(numbered)


def _numbered(environ: Mapping[str, str]) -> Peers | None:
    """What an engine that starts processes says of them, without their coordinator."""
    for method, index, count in _ENGINES:
        if index in environ and _number(environ, count):
            return Peers(_number(environ, index), _number(environ, count), "", method)
    return None


def _named(environ: Mapping[str, str]) -> Peers | None:
    missing = [name for name in (COORDINATOR, PROCESSES, PROCESS) if name not in environ]
    index, count = _number(environ, PROCESS, -1), _number(environ, PROCESSES, -1)
    if missing or not 0 <= index < count:
        raise ConfigError(
            "the processes of this run are named in part or wrongly",
            where="the environment",
            value=", ".join(f"{n}={environ.get(n, '(not set)')}" for n in (PROCESS, PROCESSES)),
            allowed=f"{COORDINATOR}=host:port, {PROCESSES}=how many, {PROCESS}=0 to that less one",
            cure="set all three in every process, or none",
        )
    return _several(Peers(index, count, environ[COORDINATOR]))


def _several(peers: Peers) -> Peers | None:
    return peers if peers.count > 1 else None


def _number(environ: Mapping[str, str], name: str, default: int = 0) -> int:
    try:
        return int(environ.get(name, default))
    except ValueError:
        return default


def join(peers: Peers) -> Processes:
    """Meet the other processes; before anything asks jax for devices.

    Args:
        peers: From `find_peers`.

    Returns:
        The processes, which `processes()` gives from now on.

    Raises:
        ConfigError: They did not come within `START_SECONDS`.
    """
    global _joined  # noqa: PLW0603  # a process joins one run in its life, as jax does
    if _joined is not None:
        return _joined
    import jax
    from jax._src import distributed  # there is no public way to the key-value service

    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.config.update("jax_enable_preemption_service", False)  # it swallows SIGTERM
    begun = time.monotonic()
    try:
        jax.distributed.initialize(
            coordinator_address=peers.coordinator or None,
            num_processes=peers.count if peers.coordinator else None,
            process_id=peers.index if peers.coordinator else None,
            # else jax takes one GPU a process, by its number, wherever it sees Slurm or Open MPI
            cluster_detection_method=peers.method or "deactivate",
            initialization_timeout=START_SECONDS,
            heartbeat_timeout_seconds=_HEARTBEAT_SECONDS,
        )
    except RuntimeError as error:
        raise ConfigError(
            f"the {peers.count} processes of this run did not meet",
            where=f"process {peers.index}",
            value=f"after {time.monotonic() - begun:.0f} s: {str(error).splitlines()[0]}",
            cure=f"see whether all of them started and reach {peers.coordinator or 'process 0'}",
        ) from error
    state = distributed.global_state
    _joined = Joined(state.client, int(state.process_id), int(state.num_processes))
    return _joined
