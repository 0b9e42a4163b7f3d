"""A DeepSpeed config as keys of ours.

Owns: which keys have a counterpart, and for every other one why it has none. Does not own: reading
files, the text of a config. Facts from DeepSpeed's documentation of its configuration JSON.
"""

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from shardtrain.errors import ConfigError
from shardtrain.interop.deepspeed_reasons import REASONS, UNKNOWN

_ALIKE: Final = 0.85
"""How like a known key another one is that is taken for a mistyped one; 1 = equal."""
_AUTO: Final = "auto"
_IS_AUTO: Final = '"auto" is filled in by the program that starts DeepSpeed: give the number'
_OPTIMIZERS: Final = {"adam": "adamw", "adamw": "adamw", "lion": "lion", "muon": "muon"}
_BETAS: Final = {"lion": [0.9, 0.99]}
_MAX_LR: Final = 0.001
"""What `warmup_max_lr` is where it is not given."""
_TRACKERS: Final = ("tensorboard", "wandb")


@dataclass
class Mapped:
    """What was found: sections of ours, and what has no counterpart."""

    sections: dict[str, dict[str, Any]] = field(default_factory=dict)
    left: list[tuple[str, str]] = field(default_factory=list)
    """Key and reason."""

    def put(self, key: str, value: Any) -> None:
        """Set a key of ours."""
        section, name = key.split(".")
        self.sections.setdefault(section, {})[name] = value

    def leave(self, key: str, reason: str) -> None:
        """Note a key of theirs without counterpart."""
        self.left.append((key, reason))


class _Reader:
    """A table of a DeepSpeed config; what nobody takes is left, with its reason."""

    def __init__(self, values: Mapping[str, Any], path: str, mapped: Mapped) -> None:
        self.values = dict(values)
        self.path = path
        self.mapped = mapped
        self._known = {
            key.removeprefix(path)
            for key in REASONS
            if key.startswith(path) and "." not in key.removeprefix(path)
        }

    def take(self, name: str, kind: type | tuple[type, ...], default: Any = None) -> Any:
        """A value of that kind; what is "auto" or missing is the default."""
        self._known.add(name)
        if name not in self.values:
            return default
        value = self.values.pop(name)
        if value == _AUTO:
            self.mapped.leave(self.path + name, _IS_AUTO)
            return default
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            raise ConfigError(
                "is of the wrong kind",
                where=self.path + name,
                value=repr(value),
                allowed=" or ".join(
                    k.__name__ for k in (kind if isinstance(kind, tuple) else (kind,))
                ),
            )
        return value

    def table(self, name: str) -> "_Reader":
        """A table in this one; empty where it is missing."""
        return _Reader(self.take(name, dict, {}), f"{self.path}{name}.", self.mapped)

    def leave(self, name: str, reason: str) -> None:
        """Notes a key of this table without counterpart, if it is there."""
        self._known.add(name)
        if name in self.values:
            del self.values[name]
            self.mapped.leave(self.path + name, reason)

    def finish(self) -> None:
        """Leaves the rest."""
        for name in list(self.values):
            path = self.path + name
            near = difflib.get_close_matches(name, self._known, n=1, cutoff=_ALIKE)
            if path in REASONS or not near:
                self.leave(name, REASONS.get(path, REASONS.get(self.path + "*", UNKNOWN)))
            else:  # mistyped, so what the rest of its table is for is no reason
                self.leave(name, f'{UNKNOWN}; did you mean "{near[0]}"?')


def map_config(values: Mapping[str, Any], *, devices: int = 0) -> Mapped:
    """Turn a DeepSpeed config into sections of ours.

    Args:
        values: the JSON.
        devices: data-parallel devices of the run, where they are known.

    Returns:
        Sections, and every key without counterpart, with the reason.

    Raises:
        ConfigError: a value is of the wrong kind.

    Example:
        >>> found = map_config({"train_batch_size": 32, "zero_optimization": {"stage": 2}})
        >>> found.sections["data"], found.sections["sharding"]
        ({'batch_size': 32}, {'zero': 2})
    """
    mapped = Mapped()
    top = _Reader(values, "", mapped)
    _batch(top, devices)
    _precision(top)
    _zero(top.table("zero_optimization"), devices)
    _optimizer(top)
    _scheduler(top.table("scheduler"))
    _rest(top)
    top.finish()
    return mapped


def _batch(top: _Reader, devices: int) -> None:
    whole = top.take("train_batch_size", int)
    micro = top.take("train_micro_batch_size_per_gpu", int)
    parts = top.take("gradient_accumulation_steps", int)
    mapped = top.mapped
    if whole is None and micro and devices:
        whole = micro * (parts or 1) * devices
    if parts is None and whole and micro and devices:
        parts = whole // (micro * devices)
    if whole is not None:
        mapped.put("data.batch_size", whole)
    elif micro is not None:
        mapped.leave(
            "train_micro_batch_size_per_gpu",
            "data.batch_size counts the sequences of a step on all devices, and their number is not"
            " in this file: --devices",
        )
    if parts is not None:
        mapped.put("train.microbatches", parts)
    elif whole is not None and micro is not None:
        mapped.leave(
            "train_micro_batch_size_per_gpu",
            "train.microbatches is train_batch_size / (this x data-parallel devices): --devices",
        )


def _precision(top: _Reader) -> None:
    bfloat16 = next((n for n in ("bf16", "bfloat16") if n in top.values), "bf16")
    part = top.table(bfloat16)
    if part.take("enabled", bool, False):
        top.mapped.put("train.precision", "bfloat16")
    part.finish()
    _half(top.table("fp16"))


def _half(part: _Reader) -> None:
    if not part.take("enabled", bool, False):
        for name in list(part.values):
            part.leave(name, "fp16.enabled is false")
        return
    put = part.mapped.put
    put("train.precision", "float16")
    fixed = part.take("loss_scale", (int, float), 0)
    power = part.take("initial_scale_power", int, 16)
    window = part.take("loss_scale_window", int, 1000)
    put("train.loss_scale", float(fixed or 2**power))
    put("train.loss_scale_window", 0 if fixed else window)
    if fixed:
        part.mapped.leave("fp16.loss_scale", "is where the scale begins; an overflow halves it")
    hysteresis = part.take("hysteresis", int, 2)
    if hysteresis != 1:
        part.mapped.leave("fp16.hysteresis", "an overflow retries its batch, so 1 is enough")
    put("train.loss_scale_floor", float(part.take("min_loss_scale", (int, float), 1)))
    part.finish()


def _zero(part: _Reader, devices: int) -> None:
    stage = part.take("stage", int)
    if stage is not None:
        part.mapped.put("sharding.zero", stage)
    overlap = part.take("overlap_comm", bool)
    if overlap is not None:
        part.mapped.put("train.overlap", overlap)
    _offload(part)
    shard = part.take("mics_shard_size", int)
    if shard and shard > 0:
        if devices and devices % shard == 0:
            part.mapped.put("mesh.replica", devices // shard)
        else:
            part.mapped.leave(
                part.path + "mics_shard_size", "mesh.replica is devices / this: --devices"
            )
    part.finish()


def _offload(zero: _Reader) -> None:
    part = zero.table("offload_optimizer")
    if _tier(part, "offload.optimizer", "offload.master"):
        ratio = part.take("ratio", (int, float), 1.0)
        part.mapped.put("offload.fraction", float(ratio))
    part.finish()
    part = zero.table("offload_param")
    _tier(part, "offload.parameters")
    part.finish()


def _tier(part: _Reader, *keys: str) -> bool:
    """Maps `device` and `nvme_path`; whether there is an offload."""
    device = part.take("device", str, "none")
    tier = {"cpu": "host", "nvme": "disk"}.get(device, "")
    for key in keys if tier else ():
        part.mapped.put(key, tier)
    if tier == "disk" and (path := part.take("nvme_path", str, "")):
        part.mapped.put("offload.disk_path", path)
    if not tier and device != "none":
        part.mapped.leave(f"{part.path}device", f"there is no offload to {device}")
    return bool(tier)


def _optimizer(top: _Reader) -> None:
    clip = top.take("gradient_clipping", (int, float), 0.0)
    top.mapped.put("optimizer.clip_norm", float(clip))  # theirs is off unless it is set
    part = top.table("optimizer")
    kind = part.take("type", str)
    if kind is None:
        part.finish()
        return
    values = part.table("params")
    name = _OPTIMIZERS.get(kind.lower())
    if name is None:
        part.mapped.leave(
            "optimizer.type", f"there is no {kind}; {', '.join(_OPTIMIZERS)} are here"
        )
        for key in values.values:
            part.mapped.leave(f"optimizer.params.{key}", f"a parameter of {kind}")
        return
    decoupled = values.take("adam_w_mode", bool, True)
    if name == "adamw" and kind.lower() == "adam" and not decoupled:
        name = "adam"
    top.mapped.put("optimizer.name", name)
    rate = values.take("lr", (int, float))
    if rate is not None:
        top.mapped.put("optimizer.learning_rate", float(rate))
    betas = values.take("betas", list, _BETAS.get(name, [0.9, 0.999]))
    if len(betas) != 2 or not all(isinstance(beta, int | float) for beta in betas):
        raise ConfigError(
            "is of the wrong kind",
            where=f"{values.path}betas",
            value=repr(betas),
            allowed="two numbers",
        )
    top.mapped.put("optimizer.beta1", float(betas[0]))
    top.mapped.put("optimizer.beta2", float(betas[1]))
    if name != "lion":
        epsilon = values.take("eps", (int, float), 1e-8)
        top.mapped.put("optimizer.epsilon", float(epsilon))
    decay = values.take("weight_decay", (int, float), 0.0)
    top.mapped.put("optimizer.weight_decay", float(decay))
    if name == "muon" and (momentum := values.take("momentum", (int, float))) is not None:
        top.mapped.put("optimizer.momentum", float(momentum))
    values.finish()
    part.finish()


def _scheduler(part: _Reader) -> None:
    kind = part.take("type", str)
    values = part.table("params")
    shapes = {"WarmupLR": "constant", "WarmupDecayLR": "linear", "WarmupCosineLR": "cosine"}
    if kind is None:
        return
    if kind not in shapes:
        part.mapped.leave("scheduler.type", f"there is no {kind}; {', '.join(shapes)} are here")
        for key in values.values:
            part.mapped.leave(f"scheduler.params.{key}", f"a parameter of {kind}")
        return
    put = part.mapped.put
    put("optimizer.schedule", shapes[kind])
    put("optimizer.warmup_steps", values.take("warmup_num_steps", int, 1000))
    total = values.take("total_num_steps", int)
    if total is not None:
        put("run.steps", total)
    if kind == "WarmupDecayLR":
        put("optimizer.final_ratio", 0.0)
    if kind == "WarmupCosineLR":
        put("optimizer.final_ratio", float(values.take("cos_min_ratio", (int, float), 0.0001)))
        start = values.take("warmup_min_ratio", (int, float), 0.0)
    else:
        start = values.take("warmup_min_lr", (int, float), 0.0)
        peak = values.take("warmup_max_lr", (int, float))
        rate = part.mapped.sections.get("optimizer", {}).get("learning_rate")
        if peak is None and rate not in (None, _MAX_LR):
            part.mapped.leave(
                "optimizer.params.lr", f"{kind} puts its warmup_max_lr in place of it"
            )
        put("optimizer.learning_rate", float(_MAX_LR if peak is None else peak))
    if start:
        name = "warmup_min_ratio" if kind == "WarmupCosineLR" else "warmup_min_lr"
        part.mapped.leave(values.path + name, "the rise begins at 0 here")
    rise = values.take("warmup_type", str, "log")
    if rise != "linear":
        part.mapped.leave(values.path + "warmup_type", f"the rise is linear here, not {rise}")
    values.finish()
    part.finish()


def _rest(top: _Reader) -> None:
    every = top.take("steps_per_print", int)
    if every is not None:
        top.mapped.put("log.every", every)
    degree = top.table("tensor_parallel")
    size = degree.take("autotp_size", int)
    if size:
        top.mapped.put("mesh.tensor", size)
    degree.finish()
    trackers = []
    for name in _TRACKERS:
        part = top.table(name)
        if part.take("enabled", bool, False):
            trackers.append(name)
        part.finish()
    if trackers:
        top.mapped.put("log.trackers", trackers)
