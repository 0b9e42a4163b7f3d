"""Training a run: who holds its folder, and how it ends when one of its processes fails.

Owns: the order of start and end for one process or several. Does not own: what an attempt does
(`training_attempt`), what a run is made of (`shardtrain.run`).
"""

import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import jax

from shardtrain.config import RunConfig
from shardtrain.errors import EXIT_PEER_LOST, EXIT_PREEMPTED, PeerEndError, UserError
from shardtrain.run import Run, build
from shardtrain.sharding.processes import START_SECONDS, Processes, processes
from shardtrain.train.chaos_words import parse_chaos
from shardtrain.train.phases import Phases, process_age
from shardtrain.train.rundir import RunDirectory
from shardtrain.train.state import TrainState
from shardtrain.train.trackers import check_trackers
from shardtrain.train.watchdog import LOST_AFTER, Limits, Watchdog
from shardtrain.training_attempt import Attempt


def train(run: Run) -> TrainState:
    """Trains a run to its last update, from its newest checkpoint if it has one.

    Args:
        run: from `build`. Its `run.dir` gets checkpoints, `metrics.jsonl`, `timeline.jsonl`,
            tracker files and `resolved.toml`.

    Returns:
        The state after the last update, or after the one at which the run was interrupted.

    Raises:
        PolicyError: the run was stopped by `guard` (bad numbers, a spike, a silent fault).
        UserError: the folder cannot be used, or holds another run.
    """
    peers, phases, limits = processes(), Phases(), Limits(run.config.watchdog)
    with ExitStack() as stack:
        if peers.count > 1:  # alone, a hung notebook is interrupted by hand
            stack.enter_context(_watched(run.config, peers, phases, limits))
        directory = stack.enter_context(_directory(run.config, peers))
        return Attempt(run, directory, peers, phases, limits).train()[0]


def train_command(config: RunConfig) -> int:
    """`shardtrain train`: the exit code."""
    peers = processes()
    check_trackers(config.log.trackers)
    parse_chaos(config.run.chaos, config.run.seed, peers.count)
    phases = Phases(begun=time.monotonic() - process_age())
    limits = Limits(config.watchdog)
    with (
        _watched(config, peers, phases, limits),
        _directory(config, peers) as directory,  # before data is prepared, perhaps for hours
    ):
        run = build(config)
        return Attempt(run, directory, peers, phases, limits).train()[1]


@contextmanager
def _directory(config: RunConfig, peers: Processes) -> Iterator[RunDirectory]:
    """The run's folder, which process 0 holds for all."""
    with RunDirectory(config.run.dir, hold=peers.index == 0) as directory:
        peers.barrier("the run directory is held", START_SECONDS)
        yield directory


@contextmanager
def _watched(config: RunConfig, peers: Processes, phases: Phases, limits: Limits) -> Iterator[None]:
    """Whatever happens inside in one process, the others learn of it."""
    stacks = Path(config.run.dir) / "stacks"
    with Watchdog(peers, phases, limits, stacks=stacks) as watchdog:
        try:
            yield
        except UserError as error:
            first = watchdog.tell(error.exit_code, f"process {peers.index}: {error.message}")
            if not first:
                _raise_theirs(watchdog, peers)
            raise
        except SystemExit:  # a signal before there was anything to save
            watchdog.tell(EXIT_PREEMPTED, f"process {peers.index} was told to end")
            raise
        except jax.errors.JaxRuntimeError as error:
            _raise_theirs(
                watchdog, peers, LOST_AFTER + 5
            )  # a collective fails where a peer is gone
            watchdog.tell(EXIT_PEER_LOST, f"process {peers.index} failed: {error}")
            raise
        except Exception as error:
            words = f"process {peers.index} failed: {type(error).__name__}: {error}"
            if not watchdog.tell(EXIT_PEER_LOST, words):
                _raise_theirs(watchdog, peers)
            raise


def _raise_theirs(watchdog: Watchdog, peers: Processes, seconds: float = 1.0) -> None:
    """Raises the reason that another process has given, if there is one; process 0 shows it."""
    end = watchdog.reason(seconds)
    if end is not None:
        if peers.index == 0:
            print(end.words, file=sys.stderr)
        raise PeerEndError(end.code, end.words) from None
