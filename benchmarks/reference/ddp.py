"""One run twice: by shardtrain, and by PyTorch's DistributedDataParallel in gloo processes.

Owns: what goes from one side to the other (initial weights, batches, learning rates, in one file),
starting the processes, and the two columns of losses. Does not own: any model. A model is a module
of this package with

    def make(trial: Trial) -> tuple[torch.nn.Module, torch.optim.Optimizer]

whose model takes a batch (tensors by name) and returns the sum of the losses of its rows and their
weight. The sides may have different environments: this side needs no torch, the other no jax.
"""

import importlib
import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from shardtrain.run import Run

Arrays = dict[str, NDArray[Any]]
ROOT = Path(__file__).parents[2]
TORCH = "SHARDTRAIN_TORCH"
"""Environment variable: the interpreter that has torch. By default this one."""


@dataclass(frozen=True)
class Trial:
    """What both sides begin with."""

    weights: Arrays
    """Initial parameters by path, as "stem/kernel"."""
    batches: Arrays
    """Global batches by name, [step, row, ...]."""
    settings: Mapping[str, Any]
    """What else the other side has to know; JSON. `learning_rates` and `clip_norm` are read here,
    the rest by the model's module."""

    @property
    def steps(self) -> int:
        """Updates."""
        return len(self.settings["learning_rates"])

    def save(self, path: Path) -> None:
        """Writes a .npz."""
        trees = {"weights": self.weights, "batches": self.batches}
        arrays = {f"{tree}:{name}": x for tree, of in trees.items() for name, x in of.items()}
        settings = np.frombuffer(json.dumps(self.settings).encode(), np.uint8)
        np.savez(path, settings=settings, **arrays)  # type: ignore[arg-type]

    @classmethod
    def load(cls, path: Path) -> "Trial":
        """Reads what `save` wrote."""
        trees: dict[str, Arrays] = {"weights": {}, "batches": {}}
        with np.load(path) as file:
            settings = json.loads(file["settings"].tobytes())
            for key in file.files:
                tree, colon, name = key.partition(":")
                if colon:
                    trees[tree][name] = file[key]
        return cls(trees["weights"], trees["batches"], settings)


# -- our side


def ours(run: "Run", steps: int, settings: Mapping[str, Any]) -> tuple[Trial, list[float]]:
    """Trains with shardtrain, and notes what the other side needs to do the same.

    Args:
        run: from `shardtrain.run.build`, with one microbatch.
        steps: updates.
        settings: what the model's module wants to know.

    Returns:
        The trial, and the loss of each step.
    """
    import jax

    from shardtrain.sharding.placement import leaves_by_path

    state = run.init()
    first = run.program.in_model_order(jax.device_get(state.params))
    weights = {path: np.asarray(leaf) for path, leaf in leaves_by_path(first)}
    batches: list[Arrays] = []
    losses, rates = [], []
    for cursor in range(steps):
        batch = run.batch_at(cursor)
        # [microbatch, row, ...]: rows in the order of the devices
        host: Arrays = jax.device_get(batch)
        batches.append({name: x.reshape(-1, *x.shape[2:]) for name, x in host.items()})
        state, metrics = run.step(state, batch)
        losses.append(float(metrics["loss"]))
        rates.append(float(metrics["learning_rate"]))
    stacked = {name: np.stack([batch[name] for batch in batches]) for name in batches[0]}
    known = {"learning_rates": rates, "clip_norm": run.config.optimizer.clip_norm}
    return Trial(weights, stacked, {**known, **settings}), losses


def theirs(trial: Trial, module: str, ranks: int, python: str = "") -> list[float]:
    """Trains with PyTorch from the same weights on the same batches.

    Args:
        trial: from `ours`.
        module: the model's, such as "benchmarks.reference.resnet".
        ranks: gloo processes, each with an equal part of the rows; 1 is without DDP.
        python: the interpreter that has torch; "" = what `TORCH` names, or this one.

    Returns:
        The loss of each step, of the global batch.

    Raises:
        RuntimeError: it fails.
    """
    words = [python or os.environ.get(TORCH) or sys.executable, "-m", __name__, module]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trial.npz"
        trial.save(path)
        done = subprocess.run(
            [*words, str(path), str(ranks)],
            env=os.environ | {"PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            check=False,
        )
    lines = [line for line in done.stdout.splitlines() if line.startswith("[")]
    if done.returncode or not lines:
        raise RuntimeError(f"{' '.join(words)}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
    losses: list[float] = json.loads(lines[-1])
    return losses


def why_no_torch(python: str = "") -> str:
    """Why the other side cannot run; "" when it can."""
    python = python or os.environ.get(TORCH) or sys.executable
    words = [python, "-c", "import torch.distributed, numpy"]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if not done.returncode:
        return ""
    return (
        f"{python} cannot import torch: NOTHING WAS COMPARED WITH PYTORCH. "
        f"pip install 'shardtrain[reference]', or name an interpreter that has it in {TORCH}"
    )


def table(ours: list[float], theirs: list[float]) -> str:
    """Both columns and the largest gap."""
    lines = ["step  shardtrain    torch         gap"]
    lines += [
        f"{step:4}  {a:.8f}    {b:.8f}    {abs(a - b):.1e}"
        for step, (a, b) in enumerate(zip(ours, theirs, strict=True), 1)
    ]
    return "\n".join([*lines, f"largest gap {largest(ours, theirs):.1e}"])


def largest(ours: list[float], theirs: list[float]) -> float:
    """The largest difference of two columns; infinite where one is no number."""
    gap = float(np.max(np.abs(np.subtract(ours, theirs))))
    return gap if np.isfinite(gap) else float("inf")


# -- the side of torch


def main() -> None:
    """`python -m benchmarks.reference.ddp MODULE TRIAL RANKS` prints the losses as JSON."""
    import torch.multiprocessing

    module, path, ranks = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    os.environ.update(
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        OMP_NUM_THREADS="1",
        GLOO_SOCKET_IFNAME="lo",
    )
    torch.multiprocessing.spawn(rank_main, (module, path, ranks), nprocs=ranks, join=True)


def rank_main(rank: int, module: str, path: Path, ranks: int) -> None:
    """One process, with its part of every batch."""
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=ranks)
    trial = Trial.load(path)
    model, optimizer = importlib.import_module(module).make(trial)
    model.train()
    forward = DistributedDataParallel(model) if ranks > 1 else model
    losses = []
    for step, rate in enumerate(trial.settings["learning_rates"]):
        for group in optimizer.param_groups:
            group["lr"] = rate
        batch = {
            name: torch.from_numpy(np.array_split(rows[step], ranks)[rank].copy())
            for name, rows in trial.batches.items()
        }
        total, weight = forward(batch)
        sums = torch.stack([total.detach().double(), weight.detach().double()])
        dist.all_reduce(sums)
        # DDP takes the mean of the ranks' gradients; the loss is a mean over all rows.
        (total * (ranks / sums[1].item())).backward()
        if trial.settings["clip_norm"]:
            torch.nn.utils.clip_grad_norm_(model.parameters(), trial.settings["clip_norm"])
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append((sums[0] / sums[1]).item())
    if rank == 0:
        print(json.dumps(losses), flush=True)
    dist.barrier()
    dist.destroy_process_group()
    # Threads of gloo that still run would abort the process at its end, after all is said.
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
