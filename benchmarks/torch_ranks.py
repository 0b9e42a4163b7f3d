"""A float32 step of PyTorch in two processes of one thread each: DDP, FSDP2 or DeepSpeed.

They talk over gloo. The global batch is the size's; CPU seconds and memory are sums over the ranks.
"""

import argparse
import os
import socket
import statistics
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing
from torch import Tensor

from benchmarks import common
from benchmarks.common import SIZES, Size
from benchmarks.torch_model import Model, adamw, tensors

RANKS = 2
Step = Callable[[list[Tensor]], Tensor]


def main() -> None:
    """Starts the ranks."""
    flags = common.parser(__doc__)
    flags.add_argument("--kind", default="ddp", choices=["ddp", "fsdp2", "deepspeed"])
    flags.add_argument("--stage", type=int, default=1, help="ZeRO stage of DeepSpeed")
    options = flags.parse_args()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    os.environ.update(
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        OMP_NUM_THREADS="1",
        GLOO_SOCKET_IFNAME="lo",
        DS_ACCELERATOR="cpu",
    )
    torch.multiprocessing.spawn(rank_main, (options,), nprocs=RANKS, join=True)


def rank_main(rank: int, options: argparse.Namespace) -> None:
    """One rank, on a core of its own."""
    places = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": RANKS, "LOCAL_SIZE": RANKS}
    os.environ.update({name: str(value) for name, value in places.items()})
    torch.set_num_threads(1)
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[rank % len(cores)]})
    torch.manual_seed(0)
    dist.init_process_group("gloo", rank=rank, world_size=RANKS)
    size = SIZES[options.size]
    make = {"ddp": _ddp, "fsdp2": _fsdp2, "deepspeed": _deepspeed}[options.kind]
    step = make(size, options)
    data = tensors(common.batches(size, options.warmup + options.steps), rank, RANKS)
    timings = common.measure(lambda i: float(step(data[i]).item()), options, dist.barrier)
    _report(rank, options, timings)
    dist.barrier()
    dist.destroy_process_group()
    # Threads of gloo or of the optimizer's hooks that still run would abort the process at its end,
    # after all is measured and said.
    sys.stdout.flush()
    os._exit(0)


def _report(rank: int, options: argparse.Namespace, timings: common.Timings) -> None:
    cpu = statistics.median(timings.cpu_seconds)
    sums = torch.tensor(
        [timings.loss0, timings.loss, common.peak_rss_mb(), cpu], dtype=torch.float64
    )
    dist.all_reduce(sums)
    if rank == 0:
        loss0, loss, rss, cpu = sums.tolist()
        timings.loss0, timings.loss = loss0 / RANKS, loss / RANKS
        stage = str(options.stage) if options.kind == "deepspeed" else ""
        peer = f"torch_{options.kind}{stage}"
        common.report(peer, options, timings, rss=rss, cpu_s_step=cpu, ranks=RANKS)


def _plain(forward: Callable[..., Tensor], model: Model) -> Step:
    optimizer = adamw(model)

    def step(batch: list[Tensor]) -> Tensor:
        loss = forward(*batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), common.CLIP)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss

    return step


def _ddp(size: Size, _: argparse.Namespace) -> Step:
    model = Model(size)
    return _plain(torch.nn.parallel.DistributedDataParallel(model), model)


def _fsdp2(size: Size, _: argparse.Namespace) -> Step:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model, mesh = Model(size), init_device_mesh("cpu", (RANKS,))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return _plain(model, model)


def _deepspeed(size: Size, options: argparse.Namespace) -> Step:
    import deepspeed

    model = Model(size)
    config: dict[str, Any] = {
        "train_batch_size": size.batch,
        "train_micro_batch_size_per_gpu": size.batch // RANKS,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": common.CLIP,
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 10**9,
        "zero_optimization": {
            "stage": options.stage,
            "overlap_comm": False,
            "contiguous_gradients": True,
            "reduce_bucket_size": 50_000_000,
        },
    }
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=adamw(model), config=config, dist_init_required=False
    )

    def step(batch: list[Tensor]) -> Tensor:
        loss: Tensor = engine(*batch)
        engine.backward(loss)
        engine.step()
        return loss

    return step


if __name__ == "__main__":
    main()
