"""A run on a Ray cluster, which goes on with the nodes that are left.

Owns: the driver. It takes one worker a process in a placement group, watches them, and when some
are lost starts the run again on as many as there is room for. Does not own: what a worker does
(`launch_ray_worker`), and the meaning of exit codes (`launch_ending`).

Fewer processes have fewer devices: `mesh.data` is set to take what is left. The global batch and
the order of samples do not depend on the mesh, so the run goes on with the same samples. Nodes that
have come back are taken at the next start.
"""

import os
import signal
import time
from collections.abc import Sequence
from typing import Any, Final

from shardtrain.config import RunConfig, resolve_mesh
from shardtrain.errors import ConfigError, UserError
from shardtrain.launch_ending import (
    AGAIN,
    AGREED,
    LOST,
    RESTARTS,
    SIGNAL_CODES,
    Ended,
    meaning,
    pause,
)
from shardtrain.launch_job import Job, LaunchOptions, need_processes
from shardtrain.launch_local import GRACE_SECONDS, Signals, say, tell
from shardtrain.sharding.devices import expected_devices
from shardtrain.sharding.processes import COORDINATOR, PROCESS, PROCESSES

USES: Final = frozenset(["processes", "restarts", "gpus", "address", "min_processes"])
_POLL_SECONDS: Final = 0.25
_ROOM_SECONDS: Final = 60.0
"""How long the cluster may take to give the places that it says it has."""


def launch_ray(job: Job, options: LaunchOptions) -> int:
    """Run a job on a cluster.

    Args:
        job: What is run.
        options: Workers and cluster.

    Returns:
        The exit code of the run; 76 where no legal layout is left.

    Raises:
        ConfigError: ray is not installed, there is no cluster, or the run does not fit it.
    """
    count = need_processes(options)
    if options.min_processes > count:
        raise ConfigError(
            f"more than the {count} processes of the run",
            where="--min_processes",
            value=str(options.min_processes),
        )
    devices = devices_of_worker(job.config, count, options.gpus)
    resolve_mesh(fitting(job.config, count, devices, wanted=count), count * devices)
    ray = _connect(options.address)
    try:
        with Signals() as signals:
            return _Driver(ray, job, options, devices, signals).run()
    finally:
        ray.shutdown()


def devices_of_worker(config: RunConfig, count: int, gpus: int) -> int:
    """Return how many devices each process of the run has.

    Args:
        config: The config.
        count: Processes.
        gpus: GPUs of each; 0 = CPU devices.

    Returns:
        At least 1.

    Raises:
        ConfigError: Virtual devices cannot be shared out equally.
    """
    cpu_devices = config.run.cpu_devices
    if gpus:
        return gpus
    if cpu_devices % count:
        raise ConfigError(
            f"cannot be shared out equally to {count} processes",
            where=f"run.cpu_devices={cpu_devices}",
            allowed=f"0, or a multiple of {count}",
        )
    return cpu_devices // count or expected_devices(0) or 1


def fitting(config: RunConfig, count: int, devices: int, *, wanted: int) -> RunConfig:
    """Return the config for a number of processes.

    Args:
        config: The config for all of them.
        count: Processes that there are.
        devices: Devices of each.
        wanted: Processes that the config is for.

    Returns:
        The config; with fewer processes, `mesh.data` takes what is left.
    """
    if count == wanted:
        return config
    cpu = count * devices if config.run.cpu_devices else 0
    return config.model_copy(
        update={
            "run": config.run.model_copy(update={"cpu_devices": cpu}),
            "mesh": config.mesh.model_copy(update={"data": -1}),
        }
    )


def largest_legal(config: RunConfig, room: int, devices: int, *, wanted: int, least: int) -> int:
    """Return how many processes to start where there may not be room for all.

    Args:
        config: The config for all of them.
        room: Processes that there is room for.
        devices: Devices of each.
        wanted: Processes that the config is for.
        least: The fewest that are wanted.

    Returns:
        A number; 0 where there is no legal layout.
    """
    for count in range(min(room, wanted), max(1, least) - 1, -1):
        try:
            resolve_mesh(fitting(config, count, devices, wanted=wanted), count * devices)
        except UserError:
            continue
        return count
    return 0


def flags_for(flags: Sequence[str], config: RunConfig) -> list[str]:
    """Return the flags of `train` for a config that was made to fit.

    Args:
        flags: As the user wrote them.
        config: From `fitting`.

    Returns:
        Those flags, with the devices and the mesh of the config in place of the user's.
    """
    ours = {"--run.cpu_devices": config.run.cpu_devices, "--mesh.data": config.mesh.data}
    kept: list[str] = []
    skip = False
    for word in flags:
        if word.startswith("--"):
            skip = word.partition("=")[0] in ours
        if not skip:
            kept.append(word)
    return [*kept, *(f"{flag}={value}" for flag, value in ours.items())]


def _connect(address: str) -> Any:
    try:
        import ray
    except ImportError:
        raise ConfigError(
            "ray is not installed here",
            where="--engine ray",
            cure="pip install 'shardtrain[ray]', on every node of the cluster too",
        ) from None
    os.environ.setdefault("RAY_DEDUP_LOGS", "0")
    try:
        ray.init(address=address or None, log_to_driver=False, logging_level="ERROR")
    except (ConnectionError, ValueError, RuntimeError) as error:
        raise ConfigError(
            f"there is no cluster to reach: {str(error).splitlines()[0]}",
            where="--address",
            value=address or os.environ.get("RAY_ADDRESS", ""),
            cure="give the address that `ray start` printed, or none for a new one here",
        ) from None
    return ray


class _Driver:
    """Starts the run, and starts it again."""

    def __init__(
        self, ray: Any, job: Job, options: LaunchOptions, devices: int, signals: Signals
    ) -> None:
        self._ray, self._job, self._devices, self._signals = ray, job, devices, signals
        self._wanted, self._least = options.processes, options.min_processes or 1
        self._restarts = RESTARTS if options.restarts < 0 else options.restarts
        self._share = {"CPU": 1.0} | ({"GPU": float(options.gpus)} if options.gpus else {})

    def run(self) -> int:
        """Run to the end; returns the exit code."""
        attempt = 0
        if self._room() < self._wanted:
            raise ConfigError(
                f"the cluster has room for {self._room()}",
                where=f"-n {self._wanted}",
                allowed="each process takes "
                + " and ".join(f"{number:g} {name}" for name, number in self._share.items()),
                cure="add nodes, or change -n",
            )
        while True:
            count = largest_legal(
                self._job.config,
                self._room(),
                self._devices,
                wanted=self._wanted,
                least=self._least,
            )
            if not count:
                say(self._no_layout())
                return LOST
            code = self._start(count)
            if code not in AGAIN or attempt == self._restarts or self._signals.taken:
                return code
            attempt += 1
            seconds = pause(attempt)
            say(f"{meaning(code)}; start {attempt} of {self._restarts} follows in {seconds:.0f} s")
            if self._signals.wait(seconds):
                return SIGNAL_CODES[self._signals.taken[0]]

    def _room(self) -> int:
        """How many processes the nodes that are alive have room for."""
        alive = [node["Resources"] for node in self._ray.nodes() if node["Alive"]]
        return sum(
            int(min(node.get(name, 0) // number for name, number in self._share.items()))
            for node in alive
        )

    def _no_layout(self) -> str:
        others = {name: d for name, d in self._job.config.mesh.model_dump().items() if d > 1}
        mesh = " x ".join(f"{name} {degree}" for name, degree in others.items() if name != "data")
        return (
            f"no legal layout is left: there is room for {self._room()} processes of "
            f"{self._devices} devices, --min_processes is {self._least}, the mesh needs "
            f"{mesh or 'data'} and data.batch_size={self._job.config.data.batch_size} has to be "
            "divisible; the same command goes on when nodes are back"
        )

    def _start(self, count: int) -> int:
        from ray.util.placement_group import placement_group, remove_placement_group

        config = fitting(self._job.config, count, self._devices, wanted=self._wanted)
        flags = self._job.flags if count == self._wanted else flags_for(self._job.flags, config)
        words = Job(config, self._job.source, tuple(flags)).words()
        if count < self._wanted:
            say(
                f"goes on with {count} of {self._wanted} processes, {count * self._devices} devices"
            )
        group = placement_group([self._share] * count, strategy="SPREAD")
        try:
            if not group.wait(_ROOM_SECONDS):
                say(f"the cluster gave no room for {count} processes in {_ROOM_SECONDS:.0f} s")
                return LOST
            return _Start(self._ray, group, self._share, words, count, self._signals).run()
        finally:
            remove_placement_group(group)


class _Start:
    """One start of the run: its workers, to the end of all."""

    def __init__(
        self,
        ray: Any,
        group: Any,
        share: dict[str, float],
        words: Sequence[str],
        count: int,
        signals: Signals,
    ) -> None:
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        from shardtrain.launch_ray_worker import Worker

        self._ray, self._signals = ray, signals
        self._errors = (ray.exceptions.RayActorError, ray.exceptions.RayTaskError)
        self._words, self._folder = words, os.getcwd()
        kind = ray.remote(Worker)
        self._workers = {
            index: kind.options(
                num_cpus=share["CPU"],
                num_gpus=share.get("GPU", 0),
                max_restarts=0,
                scheduling_strategy=PlacementGroupSchedulingStrategy(
                    group, placement_group_bundle_index=index
                ),
            ).remote(index)
            for index in range(count)
        }
        self._told: list[signal.Signals] = []
        self._ended: list[Ended] = []
        self._deadline = float("inf")

    def run(self) -> int:
        """Start the processes, and watch them; returns one exit code."""
        try:
            self._begin()
            self._watch()
        except self._errors as error:
            say(f"a worker was lost before it had started: {str(error).splitlines()[0]}")
            return LOST
        finally:
            for worker in self._workers.values():
                self._ray.kill(worker)
        return tell(self._ended)

    def _begin(self) -> None:
        count = len(self._workers)
        coordinator = self._ray.get(self._workers[0].address.remote())
        peers = {COORDINATOR: coordinator, PROCESSES: str(count)}
        self._ray.get(
            [
                worker.start.remote(self._words, self._folder, peers | {PROCESS: str(index)})
                for index, worker in self._workers.items()
            ]
        )

    def _watch(self) -> None:
        asked = {worker.poll.remote(): index for index, worker in self._workers.items()}
        while asked:
            for number in self._signals.read():
                self._forward(number)
            if time.monotonic() > self._deadline:
                for index in asked.values():
                    self._ended.append(Ended(index, -signal.SIGKILL, forced=True))
                say(f"killed: {', '.join(str(index) for index in asked.values())}")
                return
            ready, _ = self._ray.wait(list(asked), num_returns=len(asked), timeout=_POLL_SECONDS)
            for answer in ready:
                index = asked.pop(answer)
                if not self._take(index, answer):
                    asked[self._workers[index].poll.remote()] = index

    def _take(self, index: int, answer: Any) -> bool:
        """Print what a worker said; returns whether its process has ended."""
        try:
            lines, code = self._ray.get(answer)
        except self._errors:
            lines, code = ["(its node or its worker is gone)"], -signal.SIGKILL
        for line in lines:
            print(f"[{index}] {line}" if index else line, flush=True)
        if code is None:
            return False
        self._ended.append(Ended(index, code, tuple(self._told)))
        if code not in (0, *AGREED) and self._deadline == float("inf"):
            self._deadline = time.monotonic() + GRACE_SECONDS
            say(f"process {index}: {meaning(code)}; the others have {GRACE_SECONDS:.0f} s to end")
        return True

    def _forward(self, number: signal.Signals) -> None:
        number = signal.SIGTERM if number is signal.SIGHUP else number
        self._told.append(number)
        for worker in self._workers.values():
            worker.send.remote(int(number))
