"""A run as a Slurm job.

Owns: the script for sbatch, and handing it in. Does not own: what the processes are (`launch_job`),
nor the rule for their exit codes (`launch_ending`), which the script asks.

Slurm warns the processes with SIGUSR1 two minutes before the time limit; they save and end with 75,
and the script puts the job back into the queue. So it does on 76 and 124, a limited number of
times. Every start goes on from the newest checkpoint, so the run's folder lies on a disk that all
nodes have.
"""

import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from shardtrain.config import resolve_mesh
from shardtrain.errors import ConfigError
from shardtrain.launch_ending import RESTARTS
from shardtrain.launch_job import Job, LaunchOptions, check_devices, write_text
from shardtrain.launch_local import say

USES: Final = frozenset(
    ["restarts", "gpus", "out", "submit", "nodes", "tasks", "time", "partition", "account", "lines"]
)
_WARNING_SECONDS: Final = 120
_SCRIPT: Final = """\
{header}

# What began the end of a start is asked of the codes of all processes, in the order of their ends.
codes=$SLURM_JOB_NAME-$SLURM_JOB_ID.codes
failures=$SLURM_JOB_NAME-$SLURM_JOB_ID.failures
: > "$codes"
{lines}
# The port is another one after each requeue, for the old one may be in use for a while.
first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
starts=$((SLURM_JOB_ID + 97 * ${{SLURM_RESTART_COUNT:-0}}))
export SHARDTRAIN_COORDINATOR=$first:$((15000 + starts % 15000))
export SHARDTRAIN_CODES=$PWD/$codes
export PYTHONUNBUFFERED=1

task='
trap : USR1 TERM
"$@"
code=$?
echo "$code" >> "$SHARDTRAIN_CODES"
exit "$code"
'
srun {srun} \\
  bash -c "$task" task \\
  {command}
step=$?

code=0
if [ "$step" -ne 0 ]; then
  # shellcheck disable=SC2046  # one word a code
  code=$({python} -m shardtrain.launch_ending $(cat "$codes"))
  [ "$code" = 0 ] && code=76  # srun failed, and no process lived to say why
fi
case $code in
  75) again=yes ;;
  76 | 124)
    echo "$code" >> "$failures"
    [ "$(wc -l < "$failures")" -le {restarts} ] && again=yes ;;
esac
echo "launch: the run ended with $code${{again:+; the job goes back into the queue}}"
[ -n "${{again:-}}" ] && scontrol requeue "$SLURM_JOB_ID"
exit "$code"
"""


def launch_slurm(job: Job, options: LaunchOptions) -> int:
    """Write the script of a job, and submit it if that was asked for.

    Args:
        job: What is run.
        options: The job's size and limits.

    Returns:
        0.

    Raises:
        ConfigError: The job cannot be, the script cannot be written, or sbatch refuses it.
    """
    _check(job, options)
    text = slurm_script(job, options)
    if options.out:
        write_text(options.out, text)
        say(f"wrote {options.out}" + ("" if options.submit else f"; sbatch {options.out}"))
    if options.submit:
        print(_submit(text))
    elif not options.out:
        print(text, end="")
    return 0


def slurm_script(job: Job, options: LaunchOptions) -> str:
    """Return the script of a job.

    Args:
        job: What is run.
        options: The job's size and limits.

    Returns:
        A script for sbatch.
    """
    restarts = RESTARTS if options.restarts < 0 else options.restarts
    tasks = options.tasks or 1
    srun = ["--kill-on-bad-exit=1"]
    if options.gpus and tasks > 1:
        srun.append(f"--gpus-per-task={options.gpus // tasks}")
    body = [line for line in options.lines if not line.startswith("#SBATCH")]
    return _SCRIPT.format(
        header="\n".join(["#!/bin/bash", *_header(job, options)]),
        lines="\n".join(["", *body, ""]) if body else "",
        srun=" ".join(srun),
        command=shlex.join(job.words()),
        python=shlex.quote(sys.executable),
        restarts=restarts,
    )


def _header(job: Job, options: LaunchOptions) -> list[str]:
    values: Sequence[tuple[str, str | int]] = (
        ("job-name", job.name),
        ("nodes", options.nodes or 1),
        ("ntasks-per-node", options.tasks or 1),
        ("gpus-per-node", options.gpus),
        ("time", options.time),
        ("partition", options.partition),
        ("account", options.account),
        ("chdir", str(Path.cwd())),
        ("output", "%x-%j.out"),
        ("open-mode", "append"),
        ("signal", f"USR1@{_WARNING_SECONDS}"),
    )
    lines = [f"#SBATCH --{name}={value}" for name, value in values if value]
    return [*lines, "#SBATCH --requeue", *(ln for ln in options.lines if ln.startswith("#SBATCH"))]


def _check(job: Job, options: LaunchOptions) -> None:
    nodes, tasks = options.nodes or 1, options.tasks or 1
    for name in ("time", "partition", "account"):
        value = getattr(options, name)
        if len(value.split()) > 1:
            raise ConfigError("must be one word", where=f"--{name}", value=value)
    if any("\n" in line for line in options.lines):
        raise ConfigError("each must be one line", where="--lines", value=repr(options.lines))
    if " " in str(Path.cwd()):
        raise ConfigError(
            "sbatch cannot have a blank in a folder's name",
            where="the current folder",
            value=str(Path.cwd()),
        )
    if options.gpus % tasks:
        raise ConfigError(
            f"the node's GPUs cannot be shared out equally to {tasks} processes",
            where="--gpus",
            value=str(options.gpus),
            allowed=f"a multiple of --tasks {tasks}",
        )
    if options.gpus:
        resolve_mesh(job.config, nodes * options.gpus)
    elif job.config.run.cpu_devices:
        check_devices(job.config, nodes * tasks)


def _submit(text: str) -> str:
    if shutil.which("sbatch") is None:
        raise ConfigError(
            "there is no sbatch here",
            where="--submit",
            cure="run this on a machine that submits jobs, or write the script with --out",
        )
    done = subprocess.run(
        ["sbatch", "--parsable"], input=text, capture_output=True, text=True, check=False
    )
    if done.returncode:
        reason = (done.stderr.strip() or f"exit code {done.returncode}").splitlines()[-1]
        raise ConfigError(f"sbatch refused the job: {reason}", where="--submit")
    return done.stdout.strip()
