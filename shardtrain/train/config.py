"""The `[run]`, `[log]` and `[eval]` sections.

Owns: the keys, their types and their defaults. Does not own: the loop, trackers, evaluation.
"""

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

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
    steps: int = Field(ge=0)
    """Updates in the whole run; the schedule is laid out over them."""
    stop_at: int = Field(0, ge=0)
    """Stop after this many updates, the schedule unchanged. 0 = run.steps."""
    cpu_devices: int = Field(0, ge=0)
    """Virtual CPU devices when the machine has no accelerator. 0 = what there is."""
    deterministic: bool = False
    """Only kernels that give the same bits every time, slower on a GPU."""
    allow_changes: bool = False
    """Go on in an existing run although its data, model or schedule has changed."""


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
