"""The sections `[train]` and `[pipeline]`: how the step is computed.

Owns: the keys, their types and their defaults. Does not own: the wrappers they choose.
"""

import re
from typing import Final, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

SAVEABLE = ("qkv", "attention", "attention_out", "mlp", "mlp_out")
"""The tensors of a block that `remat` can keep by name."""
INPUT: Final = "input"
"""A block's input: kept under every policy, so it has a name only to be kept on the host."""
ON_HOST: Final = ":host"
"""After a name: it is kept on the host."""


_SECTION = ConfigDict(
    frozen=True,
    extra="forbid",
    strict=True,
    allow_inf_nan=False,
    use_attribute_docstrings=True,
)


BUDGET: Final = "budget"
"""The `remat` that is chosen by the bytes of compiled steps."""

WHOLE: Final = ("none", "full", "dots", BUDGET)
"""Policies that are no lists of names."""

_UNITS: Final = {"MiB": 2**20, "GiB": 2**30, "MB": 10**6, "GB": 10**9}


def host_names(remat: str) -> tuple[str, ...]:
    """The tensors that a policy keeps on the host."""
    names = (name.strip() for name in remat.split(","))
    return tuple(name.removesuffix(ON_HOST) for name in names if name.endswith(ON_HOST))


def device_names(remat: str) -> tuple[str, ...]:
    """The tensors that a policy keeps by name on the device."""
    if remat in WHOLE:
        return ()
    names = (name.strip() for name in remat.split(","))
    return tuple(name for name in names if not name.endswith(ON_HOST))


def all_on_device(remat: str) -> str:
    """The policy that keeps the same, all of it on the device."""
    if remat in WHOLE:
        return remat
    names = (*device_names(remat), *host_names(remat))
    return ",".join(name for name in SAVEABLE if name in names) or "full"


def parse_bytes(text: str) -> float:
    """The bytes of a size.

    Raises:
        ValueError: it is written otherwise.

    Example:
        >>> parse_bytes("1.5GiB")
        1610612736.0
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?) ?(MiB|GiB|MB|GB)", text)
    if found is None:
        raise ValueError('must be a size such as "70GiB", in MiB, GiB, MB or GB')
    return float(found[1]) * _UNITS[found[2]]


class TrainConfig(BaseModel):
    """How one step is computed. No choice here changes what is computed, but `precision`."""

    model_config = _SECTION

    microbatches: int = Field(1, ge=1)
    """Parts that the global batch is worked off in, one after another. 1 = all at once."""
    remat: str = "none"
    """What the backward pass computes again: "none", "full" (the whole layer), "dots" (all but
    matrix products), or the tensors to keep, by name: "attention,mlp". "mlp:host" keeps one in the
    host's memory, "input:host" the layer's input. "budget" is the cheapest of those on the device
    that fits `train.memory_budget`."""
    memory_budget: str = ""
    """Bytes that the compiled step may take on one device, such as "70GiB", for `train.remat` =
    "budget"."""
    overlap: bool = False
    """Whether to hide as much communication behind products as can be on GPUs, for more memory;
    docs/plan.md has figures. False = as far as it costs no memory."""
    audit: bool = False
    """Whether `shardtrain train` checks the program that it has compiled on NVIDIA GPUs against
    what the layout promises, and stops with exit code 5 if a promise is broken; docs/plan.md."""
    precision: str = "float32"
    """Number types: "float32", "bfloat16", "float16", "fp8", "fp8_delayed", "float64" (for checks),
    or parts such as "params=float32,compute=bfloat16", perhaps after a name:
    "bfloat16,moments=bfloat16,rounding=stochastic"; docs/precision.md has all."""
    loss_scale: float = Field(65536.0, ge=1.0, le=2.0**32)
    """What the loss is first multiplied by in float16. An overflow halves it, and the batch is
    tried again."""
    loss_scale_window: int = Field(1000, ge=0)
    """Steps in a row without an overflow that double the loss scale. 0 = never."""
    loss_scale_hysteresis: int = Field(1, ge=1)
    """Overflows that halve the loss scale; above 1 the same batch overflows as often."""
    loss_scale_floor: float = Field(1.0, gt=0.0, le=2.0**32)
    """Smallest loss scale; an overflow there is for `guard.bad_numbers`."""

    @field_validator("remat")
    @classmethod
    def _remat_names(cls, value: str) -> str:
        if value in WHOLE:
            return value
        on_device, on_host = device_names(value), host_names(value)
        known = set(on_device) <= set(SAVEABLE) and set(on_host) <= {*SAVEABLE, INPUT}
        if not known or len({*on_device, *on_host}) < len(on_device) + len(on_host):
            kept = ", ".join(SAVEABLE)
            raise ValueError(
                f'must be "none", "full", "dots", "budget", or names among {kept}, each once; with '
                f'"{ON_HOST}" after it one is kept on the host, and so may be "{INPUT}"'
            )
        return ",".join(name.strip() for name in value.split(","))

    @field_validator("memory_budget")
    @classmethod
    def _is_a_size(cls, value: str) -> str:
        if value:
            parse_bytes(value)
        return value


class OffloadConfig(BaseModel):
    """What rests in the host's memory or on a disk, and costs copies in every step."""

    model_config = _SECTION

    optimizer: Literal["device", "host", "disk"] = "device"
    """Where the optimizer's moments rest. From the host or the disk they come to the device layer
    by layer, for their update only."""
    master: Literal["device", "host", "disk"] = "device"
    """Where the float32 masters rest that bfloat16 and float16 have."""
    parameters: Literal["device", "host", "disk"] = "device"
    """Where the parameters of the layers rest. From the host or the disk a layer comes for its
    forward and again for its backward; gradients stay on the device."""
    update: Literal["device", "host"] = "device"
    """Who computes the update of what rests on the host. On the host gradients go there and new
    parameters come back, instead of moments and masters both ways."""
    fraction: float = Field(1.0, gt=0.0, le=1.0)
    """Part of those bytes that rests there at least; the largest tensors go first."""
    disk_path: str = ""
    """Folder for what rests on a disk, best a local NVMe: scratch files, gone when the run ends.
    Empty = the folder `disk` of the run."""


class PipelineConfig(BaseModel):
    """How stages share the layers and the microbatches; their number is `mesh.pipeline`."""

    model_config = _SECTION

    schedule: str = "1f1b"
    """When each stage does what: "gpipe", "1f1b", "interleaved" or "zero_bubble"; see
    `shardtrain schedule`."""
    virtual_stages: int = Field(1, ge=1)
    """Parts of the model that each stage holds; more than 1 with "interleaved" or a table."""
    layout: str = ""
    """Layers of each part in model order, such as "E,4,4,4,3H": E is the embedding, H the head.
    Empty = as even as can be, the head's cost counted in."""
    table: str = ""
    """A CSV file with a table of your own, in place of `schedule`; `shardtrain schedule --out`
    writes one to start from."""
