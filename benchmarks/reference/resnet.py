"""A residual network in plain PyTorch beside ours: same weights, batches and SGD, same losses.

    python -m benchmarks.reference.resnet                          # per_replica, 2 processes of DDP
    python -m benchmarks.reference.resnet --statistics global      # one process of torch

With `per_replica` each of two devices normalises by its own images, which is what DDP does with
BatchNorm2d. With `global` two devices are one process with the whole batch. The images are the
handwritten digits of scikit-learn. It ends with 1 if a loss differs by more than the bound.
"""

import argparse
import sys
from typing import TYPE_CHECKING, Any

from benchmarks.reference.ddp import Trial, largest, ours, table, theirs

if TYPE_CHECKING:
    import torch
    from numpy.typing import NDArray

    from shardtrain.run import Run

MODULE = "benchmarks.reference.resnet"
DEVICES = 2
RANKS = {"per_replica": DEVICES, "global": 1}
"""Processes of torch that are the same run, by `model.norm_statistics`."""
BOUND = 1e-4
KEYS = {
    "model.depth": 18,
    "model.width": 8,
    "data.batch_size": 32,
    "data.mixup": 0.2,
    "mesh.data": DEVICES,
    "optimizer.warmup_steps": 5,
    "optimizer.ema_decay": 0.0,
}


def main() -> int:
    """The command line."""
    flags = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    flags.add_argument("--statistics", default="per_replica", choices=list(RANKS))
    flags.add_argument("--steps", type=int, default=10)
    flags.add_argument("--torch", default="", help="the interpreter that has torch")
    options = flags.parse_args()
    from shardtrain.sharding.devices import prepare_devices

    prepare_devices(DEVICES)
    trial, mine = train(options.statistics, options.steps)
    other = theirs(trial, MODULE, RANKS[options.statistics], options.torch)
    print(table(mine, other))
    return 0 if largest(mine, other) <= BOUND else 1


def train(statistics: str, steps: int) -> tuple[Trial, list[float]]:
    """Our side, on the first devices.

    Args:
        statistics: of batch norm; a key of `RANKS`.
        steps: updates.

    Returns:
        What the other side needs, and the losses.
    """
    import jax

    from shardtrain.config import load_config
    from shardtrain.run import build

    config = load_config("resnet18_digits", {**KEYS, "model.norm_statistics": statistics})
    run = build(config, devices=jax.devices()[:DEVICES])
    return ours(run, steps, settings_of(run))


def settings_of(run: "Run") -> dict[str, Any]:
    """What `make` has to know of a run."""
    config: Any = run.config
    return {
        "model": config.model.model_dump(),
        "channels": config.data.channels,
        "classes": run.size,
        "mean": config.data.mean,
        "deviation": config.data.deviation,
        "smoothing": config.task.label_smoothing,
        "momentum": config.optimizer.momentum,
        "nesterov": config.optimizer.nesterov,
        "decay": config.optimizer.weight_decay,
    }


# -- the side of torch


def make(trial: Trial) -> "tuple[torch.nn.Module, torch.optim.Optimizer]":
    """The model with our initial weights, and SGD that decays kernels alone."""
    import torch

    from benchmarks.reference.resnet_torch import Classifier

    settings = trial.settings
    model = Classifier(settings)
    mine = model.network.state_dict()
    for path, value in trial.weights.items():
        name, array = renamed(path, value)
        assert mine[name].shape == array.shape, (name, mine[name].shape, array.shape)
        mine[name] = torch.from_numpy(array.copy())
    model.network.load_state_dict(mine)
    named = dict(model.network.named_parameters())
    missing = named.keys() - {renamed(path, value)[0] for path, value in trial.weights.items()}
    assert not missing, f"begun with weights of its own: {missing}"
    groups = [
        {"params": [p for p in named.values() if p.dim() > 1], "weight_decay": settings["decay"]},
        {"params": [p for p in named.values() if p.dim() == 1], "weight_decay": 0.0},
    ]
    momentum, nesterov = settings["momentum"], settings["nesterov"]
    return model, torch.optim.SGD(groups, lr=0.0, momentum=momentum, nesterov=nesterov)


def renamed(path: str, value: "NDArray[Any]") -> "tuple[str, NDArray[Any]]":
    """Torch's name and order of dims of one of our parameters."""
    *names, last = path.split("/")
    if path == "head":
        return "head.weight", value.T
    if path == "head_bias":
        return "head.bias", value
    if last == "kernel":  # [height, width, in, out]
        return ".".join([*names, "weight"]), value.transpose(3, 2, 0, 1)
    return ".".join([*names, {"scale": "weight", "bias": "bias"}[last]]), value


if __name__ == "__main__":
    sys.exit(main())
