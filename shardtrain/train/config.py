"""The sections of the run itself: `[run]`, `[log]`, `[eval]`, `[guard]`, `[watchdog]`, `[targets]`.

Owns: the keys, their types and their defaults. Does not own: the loop, trackers, evaluation.
"""

import re
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

_SECTION = ConfigDict(
    frozen=True,
    extra="forbid",
    strict=True,
    allow_inf_nan=False,
    use_attribute_docstrings=True,
)


class RunSection(BaseModel):
    """The run as a whole."""

    model_config = _SECTION

    name: str = ""
    """Name of the run. "" = the config file's name."""
    dir: str = ""
    """Folder of this run, made if missing; an existing run goes on. "" = runs/NAME."""
    seed: int = Field(0, ge=0, lt=2**32)
    """Seed of initial values, data order and dropout."""
    init: str = ""
    """Weights to begin with: a run folder, a checkpoint such as RUN/checkpoints/500, or a Hugging
    Face folder. [model] and the tokenizer come from there. "" = random ones."""
    steps: int = Field(ge=0)
    """Updates in the whole run; the schedule is laid out over them."""
    stop_at: int = Field(0, ge=0)
    """Stop after this many updates, the schedule unchanged. 0 = run.steps."""
    cpu_devices: int = Field(0, ge=0)
    """Virtual CPU devices when the machine has no accelerator. 0 = what there is."""
    deterministic: bool = False
    """Only kernels that give the same bits every time, slower on a GPU."""
    time_limit: str = ""
    """Wall-clock time after which the run saves and ends with 75, as "hours:minutes" such as
    "3:45"; saving takes a while, so less than the machine is yours for. "" = none."""
    chaos: str = ""
    """Faults to cause, to see what happens: "kill@7,raise@9:1,slow@15:0.3" (kind@step:process);
    docs/operations.md has the kinds. "" = none."""
    allow_changes: bool = False
    """Go on in an existing run although its data, model or schedule has changed."""

    @field_validator("time_limit")
    @classmethod
    def _is_a_time(cls, value: str) -> str:
        if value and re.fullmatch(r"\d+:[0-5]\d(:[0-5]\d)?", value) is None:
            raise ValueError('must be hours:minutes[:seconds], such as "3:45", or ""')
        return value


def limit_seconds(text: str) -> float:
    """The seconds of a `run.time_limit`.

    Example:
        >>> limit_seconds("3:45")
        13500.0
    """
    hours, minutes, *seconds = map(int, text.split(":"))
    return 3600.0 * hours + 60.0 * minutes + sum(seconds)


class LogConfig(BaseModel):
    """What is written down while training."""

    model_config = _SECTION

    every: int = Field(10, ge=1)
    """Steps between two lines on the screen. metrics.jsonl has every step."""
    trackers: list[Literal["tensorboard", "wandb", "mlflow"]] = Field(default=["tensorboard"])
    """Where metrics go besides metrics.jsonl: tensorboard, wandb, mlflow. [] = nowhere."""


class EvalConfig(BaseModel):
    """Validation loss, and a sample of text at the end."""

    model_config = _SECTION

    every: int = Field(0, ge=0)
    """Steps between two evaluations. 0 = only at the end."""
    steps: int = Field(8, ge=0)
    """Batches in one evaluation. 0 = no evaluation."""
    sample_tokens: int = Field(200, ge=0)
    """Tokens of text that the model writes after the last step. 0 = none."""


class GuardConfig(BaseModel):
    """What happens to numbers that are none, to a loss that jumps, and to silent faults."""

    model_config = _SECTION

    bad_numbers: Literal["stop", "skip", "rollback"] = "stop"
    """A loss or gradient that is no finite number: "stop" (exit code 3), "skip" its batch, or
    "rollback" to an earlier step. Parameters never take it in."""
    skip_limit: int = Field(10, ge=1)
    """Batches skipped in a row; one more, and the run stops."""
    spikes: Literal["ignore", "warn", "stop", "rollback"] = "warn"
    """A loss that jumps: what to do."""
    spike_sigmas: float = Field(10.0, gt=0)
    """A jump is that many standard deviations (from the median deviation) above the median loss."""
    spike_window: int = Field(128, ge=8)
    """Losses that the median is taken of."""
    rollback_steps: int = Field(100, ge=1)
    """Steps that a rollback goes back at least, to the newest checkpoint before."""
    rollback_batches: int = Field(200, ge=1)
    """Batches left out from there on; at least up to the one that it was about."""
    rollback_limit: int = Field(3, ge=1)
    """Rollbacks in one run of the command; one more, and it stops."""
    replicas_every: int = Field(0, ge=0)
    """Steps between two checks that copies of the state are equal on all devices. 0 = never."""
    rerun_every: int = Field(0, ge=0)
    """Steps between two that are computed twice and compared; they hold a second copy of the
    state. 0 = never."""


class WatchdogConfig(BaseModel):
    """Seconds that a phase may take before the run ends with 124. 0 = learned, or an hour."""

    model_config = _SECTION

    start: int = Field(0, ge=0)
    """Until compiling begins: devices, data. 0 = an hour."""
    compile: int = Field(0, ge=0)
    """Compiling the step. 0 = an hour."""
    restore: int = Field(0, ge=0)
    """Reading a checkpoint. 0 = an hour."""
    step: int = Field(0, ge=0)
    """One step, its batch included. 0 = 20 times the median so far and at least a minute; half an
    hour for the first."""
    eval: int = Field(0, ge=0)
    """One evaluation. 0 = an hour."""
    save: int = Field(0, ge=0)
    """How long a save may hold up the loop, or the end. 0 = an hour."""


class TargetsConfig(BaseModel):
    """What the run must reach; looked at every `log.every` steps."""

    model_config = _SECTION

    action: Literal["warn", "stop"] = "warn"
    """A target is missed: say so, or save and stop with exit code 3."""
    tokens_per_second: float = Field(0.0, ge=0)
    """Lowest throughput. 0 = any."""
    mfu: float = Field(0.0, ge=0, le=1)
    """Lowest share of the devices' arithmetic. 0 = any."""
    loss: float = Field(0.0, ge=0)
    """Highest mean loss over `log.every` steps at `targets.loss_step`. 0 = any."""
    loss_step: int = Field(0, ge=0)
    """The step at which the loss is looked at."""
    cost: float = Field(0.0, ge=0)
    """Most that the run may cost, all its attempts together. 0 = any."""
    device_hour: float = Field(0.0, ge=0)
    """What one device costs an hour, in the currency of `targets.cost`. 0 = unknown."""
