"""How a run of several processes ended: one exit code for all of theirs.

Owns: which process's end counts, what its code means in words, which ends are worth another start.
Does not own: starting, watching or ending processes (`launch_local`, `launch_ray`).

When one process fails, the others end because of it: by the run's own watchdog with 76, or by an
abort of jax, 134. Such an end says nothing; the code of the launch is that of the process that
began it.
"""

import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from shardtrain.errors import (
    EXIT_FAULT_OF_OURS,
    EXIT_HUNG,
    EXIT_INTERRUPTED,
    EXIT_PEER_LOST,
    EXIT_POLICY,
    EXIT_PREEMPTED,
    EXIT_WRONG_INPUT,
)
from shardtrain.train.interrupt import EXIT_CODES

LOST: Final = EXIT_PEER_LOST
ABORTED: Final = 134
AGAIN: Final = (LOST, EXIT_HUNG)
"""Ends after which the same run may be started again at once: nobody asked it to stop."""
RESTARTS: Final = 10
"""How often engines other than the local one start again where nobody says it."""
AGREED: Final = (EXIT_POLICY, EXIT_PREEMPTED, EXIT_INTERRUPTED)
"""Ends that all processes come to together, each in its own time: they may have a save to end."""
SIGNAL_CODES: Final = {**EXIT_CODES, signal.SIGHUP: EXIT_PREEMPTED}
"""What the launch ends with when nothing was under way that could be saved."""
_MEANINGS: Final = {
    0: "done",
    EXIT_WRONG_INPUT: "the input is wrong",
    EXIT_POLICY: "stopped by policy",
    EXIT_FAULT_OF_OURS: "a fault of ours",
    EXIT_PREEMPTED: "preempted and saved",
    LOST: "a peer was lost",
    EXIT_HUNG: "hung",
    EXIT_INTERRUPTED: "interrupted and saved",
    ABORTED: "aborted by jax",
}


@dataclass(frozen=True)
class Ended:
    """The end of one process."""

    index: int
    """Number of the process."""
    code: int
    """Its exit code; -N for signal N."""
    told: tuple[signal.Signals, ...] = ()
    """Signals that were passed on to it."""
    forced: bool = False
    """Whether it was ended by the launcher, because others had failed."""


def meaning(code: int) -> str:
    """Say an exit code in words.

    Args:
        code: An exit code; -N for signal N.

    Returns:
        A few words, with the code.
    """
    if code < 0:
        return f"killed by {signal.Signals(-code).name}"
    return f"{_MEANINGS.get(code, 'exit code')} ({code})"


def one_code(ended: Sequence[Ended]) -> int:
    """Return the exit code of a run from those of its processes.

    The first that applies:

    1. the code of the first process that failed by itself: neither 75, 130 nor a collateral end
    2. 76 when a process was killed by a signal that the launcher did not pass on
    3. 75 or 130 when a process ended with that
    4. 76 when there are only collateral ends: 76 and 134
    5. 0

    Args:
        ended: The ends of all processes, in the order in which they came.

    Returns:
        The code.

    Example:
        >>> one_code([Ended(1, 70), Ended(0, 76), Ended(2, -6)])
        70
        >>> one_code([Ended(1, -9), Ended(0, 76)])
        76
    """
    codes = [_own(end) for end in ended if not end.forced]
    for code in codes:
        if code not in (0, EXIT_PREEMPTED, EXIT_INTERRUPTED, LOST, ABORTED, None):
            return code
    if None in codes:
        return LOST
    for code in codes:
        if code in (EXIT_PREEMPTED, EXIT_INTERRUPTED):
            return code
    return LOST if any(codes) else 0


def _own(end: Ended) -> int | None:
    """The code that a process ended with; None when it was killed from outside."""
    number = -end.code if end.code < 0 else end.code - 128  # as shells and srun say it
    if number == signal.SIGABRT:
        return ABORTED
    if end.code < 0 and number in end.told:
        return SIGNAL_CODES.get(signal.Signals(number), 130)  # Ctrl-C until it was SIGKILL
    return None if number in signal.valid_signals() and end.code != 130 else end.code


def first_failure(ended: Sequence[Ended]) -> Ended | None:
    """Return the end that began the others.

    Args:
        ended: The ends of all processes, in the order in which they came.

    Returns:
        The end that decides `one_code`, the earliest if there are several; None when all is well.
    """
    code = one_code(ended)
    if not code:
        return None
    own = [(_own(end), end) for end in ended if not end.forced]
    killed = [end for found, end in own if found is None and code == LOST]
    same = [end for found, end in own if found == code]
    collateral = [end for found, end in own if found == ABORTED]
    return (killed or same or collateral)[0]


def pause(attempt: int) -> float:
    """Return how long to wait before another start.

    Args:
        attempt: 1 for the first start after the failed one.

    Returns:
        Seconds: 1, 2, 4 and so on to a minute.
    """
    return float(min(60, 2 ** (attempt - 1)))


if __name__ == "__main__":  # scripts of engines ask: exit codes in, in the order in which they came
    print(one_code([Ended(index, int(word)) for index, word in enumerate(sys.argv[1:])]))
