"""The words of `run.chaos`: `kind@step`, `kind@step:process`, `kind@step:process:amount`.

Owns: reading them. Does not own: the faults. Imports no jax, for a config is checked with it.

Without a process a fault is process 0's; `nan` is in the batch and so everybody's. An amount has a
point (`slow@15:0.3`), so that a process may be left out before it. A step may be a range,
`kill@10-20`; which one it is is drawn from the run's seed.
"""

import random
import re
from dataclasses import dataclass
from typing import Final

from shardtrain.errors import ConfigError

KINDS: Final = {
    "kill": "the process dies by SIGKILL",
    "raise": "the process raises an error",
    "hang": "the process stands still, its threads go on",
    "slow": "from then on each step takes longer, by that part of it (0.3 = 30 %)",
    "corrupt": "a byte of the newest checkpoint changes",
    "nan": "the batch makes the loss no number",
    "diskfull": "the next save finds no space",
    "sigterm": "the process gets SIGTERM",
}
_WORD: Final = re.compile(r"([a-z]+)@(\d+)(?:-(\d+))?(?::(\d+))?(?::(\d*\.\d+))?")


@dataclass(frozen=True)
class Fault:
    """One fault."""

    kind: str
    step: int
    """The update before which it happens."""
    process: int | None
    """None = all of them."""
    amount: float = 0.0

    def __str__(self) -> str:
        """The fault in the words of the config."""
        process = "" if self.process is None else f":{self.process}"
        return f"{self.kind}@{self.step}{process}" + (f":{self.amount}" if self.amount else "")


def parse_chaos(text: str, seed: int, count: int | None = None) -> tuple[Fault, ...]:
    """Reads `run.chaos`.

    Args:
        text: faults with commas between them.
        seed: of the run, for steps that are drawn.
        count: processes of the run, where it is known.

    Returns:
        The faults.

    Raises:
        ConfigError: a kind, a step or a process that there is not.

    Example:
        >>> [str(fault) for fault in parse_chaos("kill@7, slow@15:0.3, raise@9:1", seed=0)]
        ['kill@7:0', 'slow@15:0:0.3', 'raise@9:1']
    """
    return tuple(
        _parse(word.strip(), f"{seed}/{place}", count)
        for place, word in enumerate(text.split(","))
        if word.strip()
    )


def _parse(word: str, seed: str, count: int | None) -> Fault:
    found = _WORD.fullmatch(word)
    if found is None or found[1] not in KINDS:
        raise _wrong(word, f"kind@step[:process][:amount] with a kind of {', '.join(KINDS)}")
    kind, first, last = found[1], int(found[2]), int(found[3] or found[2])
    if not 1 <= first <= last:
        raise _wrong(word, "a step from 1 on, or a range such as 10-20")
    if (kind == "slow") != bool(found[5]):
        raise _wrong(word, "slow@step:0.3 with an amount, and no amount for the others")
    process = int(found[4] or 0)
    if count is not None and process >= count:
        raise _wrong(word, f"a process from 0 to {count - 1}")
    step = random.Random(seed).randint(first, last)
    return Fault(kind, step, None if kind == "nan" else process, float(found[5] or 0))


def _wrong(word: str, allowed: str) -> ConfigError:
    return ConfigError(
        "this fault cannot be caused", where="run.chaos", value=word, allowed=allowed
    )
