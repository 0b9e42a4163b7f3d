"""Compiling for a target in a child process, under a time limit.

Owns: the child, its environment, what comes back. A child because the compiler aborts the process
on some programs, and because JAX_PLATFORMS must be set before jax starts.
Does not own: what is compiled: a function of the target's devices, named by the caller.
"""

import os
import pickle
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardtrain.errors import EXIT_DOES_NOT_FIT, UserError
from shardtrain.plan.elsewhere import compile_elsewhere
from shardtrain.plan.targets import Target, require_compiler_of, target_devices
from shardtrain.sharding.mesh import lowering_for
from shardtrain.sharding.xla_flags import missing_flags

Lower = Callable[..., Any]
"""(devices, *arguments) -> `jax.stages.Lowered`; found by its name, so a module's own function."""

_REMATERIALIZED = "Involuntary full rematerialization"
_STAMP = re.compile(r"^[IWEF]\d{4} [\d:.]+ +\d+ ")
"""Time and process of a message, by which the same one would differ."""
_DEVICE_FLAG = "--xla_force_host_platform_device_count"
_LAST, _WIDEST = 12, 160
"""Lines of the child's own words that are told when it fails, and characters of each."""
_TUNING = "--xla_gpu_autotune_level"
_LIBRARY_SORT = "--xla_gpu_enable_cub_radix_sort"
_CODE = "from shardtrain.plan.compiling import child_main; child_main()"


@dataclass(frozen=True)
class Compiled:
    """A compiled program, as text, and what it takes on one device."""

    text: str
    """Scheduled HLO."""
    memory: Mapping[str, int]
    """Bytes by class: arguments, outputs, aliased (donated), temporaries, peak, host."""
    seconds: float
    """Time that lowering and compiling took."""
    rematerialized: tuple[str, ...] | None
    """XLA's words on tensors that it gathered whole because it found no better way; None where
    nobody listened."""


_MEMORY = {
    "arguments": "argument_size_in_bytes",
    "outputs": "output_size_in_bytes",
    "aliased": "alias_size_in_bytes",
    "temporaries": "temp_size_in_bytes",
    "peak": "peak_memory_in_bytes",
    "host_arguments": "host_argument_size_in_bytes",
    "host_temporaries": "host_temp_size_in_bytes",
}


class DoesNotFitError(UserError):
    """The compiler for TPUs ends with a program that is too large; that for GPUs does not."""

    exit_code = EXIT_DOES_NOT_FIT


@dataclass(frozen=True)
class Job:
    """One program to compile."""

    lower: Lower
    arguments: tuple[Any, ...] = ()
    uses_host: bool = False
    """Whether some of its arrays are in the memory of the host; see `elsewhere`."""


def compile_for(
    target: Target,
    jobs: Mapping[str, Job],
    *,
    seconds: float = 300.0,
    overlap: bool = False,
    xla_flags: Sequence[str] = (),
) -> dict[str, Compiled]:
    """Compiles programs for a target in one child process.

    Args:
        target: the cluster.
        jobs: what to compile, by name.
        seconds: time limit for all of them together.
        overlap: `train.overlap`.
        xla_flags: for the child's XLA_FLAGS, besides those of this process and those of
            a run on such devices.

    Returns:
        The compiled programs, by name.

    Raises:
        DoesNotFitError: the compiler refuses a program that is too large for its target.
        UserError: the plug-in is missing, the time is over, or the compiler failed.
    """
    require_compiler_of(target)
    with tempfile.TemporaryDirectory(prefix="shardtrain-plan-") as folder:
        request, answer, log = (Path(folder) / name for name in ("request", "answer", "log"))
        request.write_bytes(pickle.dumps((target, dict(jobs))))
        environment = _environment(target, xla_flags, overlap)
        if any(job.uses_host for job in jobs.values()):
            environment["XLA_FLAGS"] += f" {_DEVICE_FLAG}={target.num_devices}"
        code = _run([request, answer, log], environment, seconds)
        words = log.read_text(encoding="utf-8", errors="replace")
        if code == 0:
            compiled: dict[str, Compiled] | UserError = pickle.loads(answer.read_bytes())
            if isinstance(compiled, UserError):
                raise compiled
            return compiled
    raise _fault(code, words, where=f"compiling for {target}", seconds=seconds)


def _fault(code: int | None, words: str, *, where: str, seconds: float) -> UserError:
    """How a child ended that has no answer, on one screen.

    Args:
        code: its exit code, negative for a signal; None = it was ended when its time was over.
        words: all that it wrote; the last lines are told.
        where: what it did.
        seconds: its time.
    """
    last = "\n".join(line[:_WIDEST] for line in words.strip().splitlines()[-_LAST:])
    if code is None:
        return UserError(
            f"not done after {seconds:.0f} s",
            where=where,
            value=last,
            cure="give it more time with --seconds",
        )
    if code >= 0:
        return UserError(f"the compiler failed (exit code {code})", where=where, value=last)
    name = signal.Signals(-code).name
    if -code == signal.SIGKILL:
        return UserError(
            f"the compiler was ended from outside ({name})",
            where=where,
            value=last,
            cure="see whether this machine ran out of memory; compile on one with more, or a "
            "smaller layout",
        )
    return UserError(f"the compiler aborted ({name})", where=where, value=last)


def _run(files: Sequence[Path], environment: Mapping[str, str], seconds: float) -> int | None:
    """Runs the child in a session of its own, so that nothing that it started outlives it.

    Returns its exit code, or None when the time was over.
    """
    with files[-1].open("ab") as log:
        child = subprocess.Popen(
            [sys.executable, "-c", _CODE, *map(str, files)],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    try:
        return child.wait(seconds)
    except subprocess.TimeoutExpired:
        return None
    finally:
        if child.poll() is None:
            os.killpg(child.pid, signal.SIGKILL)
            child.wait()


def _environment(target: Target, xla_flags: Sequence[str], overlap: bool) -> dict[str, str]:
    """Without virtual devices, without a search for GPUs, with XLA's warnings."""
    own = [f for f in os.environ.get("XLA_FLAGS", "").split() if not f.startswith(_DEVICE_FLAG)]
    given = [*own, *xla_flags]
    tuned = [] if target.is_tpu else _target_flags(given, overlap)  # the flags are of GPUs
    return {
        **os.environ,
        **target.environment,
        "JAX_PLATFORMS": "cpu",
        "JAX_ENABLE_COMPILATION_CACHE": "false",  # a program from the cache has no messages
        "TF_CPP_MIN_LOG_LEVEL": "1",
        "XLA_FLAGS": " ".join([*given, *tuned]),
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
    }


def _target_flags(given: Sequence[str], overlap: bool) -> list[str]:
    """Those of a run on such devices, and none of what needs a device while it compiles.

    That is the search for tiles, and the library's sort, which asks a device for its room.
    """
    here = ((_TUNING, "0"), (_LIBRARY_SORT, "false"))
    return [
        *missing_flags(overlap=overlap, given=" ".join(given)),
        *(f"{name}={value}" for name, value in here if not any(f.startswith(name) for f in given)),
    ]


def child_main() -> None:
    """The child: reads a request, writes an answer. Its files are its arguments."""
    request, answer, log = map(Path, sys.argv[1:])
    target, jobs = pickle.loads(request.read_bytes())
    try:
        devices = target_devices(target)
        reply: Any = {name: _compile(job, devices, log) for name, job in jobs.items()}
    except UserError as error:
        reply = error
    answer.write_bytes(pickle.dumps(reply))


def _compile(job: Job, devices: Sequence[Any], log: Path) -> Compiled:
    start, written = time.perf_counter(), log.stat().st_size
    try:
        compiled = _compiled(job, devices)
    except RuntimeError as error:  # jax's
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        first = str(error).splitlines()[0]
        raise DoesNotFitError("the step does not fit", where="compiling", value=first) from None
    seconds = time.perf_counter() - start
    messages = log.read_bytes()[written:].decode("utf-8", "replace").splitlines()
    found = tuple(_STAMP.sub("", line) for line in messages if _REMATERIALIZED in line)
    return read_program(compiled, seconds=seconds, rematerialized=found)


def _compiled(job: Job, devices: Sequence[Any]) -> Any:
    if not job.uses_host or devices[0].platform == "tpu":
        return job.lower(devices, *job.arguments).compile()
    import jax

    with lowering_for(devices[0].platform):
        lowered = job.lower(jax.devices("cpu"), *job.arguments)
    return compile_elsewhere(lowered, devices)


def read_program(
    program: Any, *, seconds: float = 0.0, rematerialized: tuple[str, ...] | None
) -> Compiled:
    """What is read of a program of jax, compiled here or for a target.

    Args:
        program: a `jax.stages.Compiled`.
        seconds: time that it took.
        rematerialized: as `Compiled.rematerialized`.
    """
    found = program.memory_analysis()
    memory = {ours: int(getattr(found, theirs)) for ours, theirs in _MEMORY.items()}
    # XLA counts the host's arguments, and what of its temporaries is there when most is.
    on_device = memory["arguments"] + memory["temporaries"]
    memory["peak"] = min(memory["peak"] - memory["host_arguments"], on_device)
    return Compiled(
        text=program.as_text(),
        memory=memory,
        seconds=seconds,
        rematerialized=rematerialized,
    )
