"""A step of PyTorch in one process: eager, or through torch.compile."""

import torch

from benchmarks import common
from benchmarks.common import SIZES
from benchmarks.torch_model import Model, adamw, tensors


def main() -> None:
    """Times the step."""
    flags = common.parser(__doc__)
    flags.add_argument("--dtype", default="f32", choices=["f32", "bf16"])
    flags.add_argument("--compile", action="store_true")
    options = flags.parse_args()
    torch.manual_seed(0)
    size = SIZES[options.size]
    model = Model(size)
    optimizer = adamw(model)
    forward = torch.compile(model) if options.compile else model
    data = tensors(common.batches(size, options.warmup + options.steps))

    def step(index: int) -> float:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=options.dtype == "bf16"):
            loss = forward(*data[index])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), common.CLIP)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return float(loss.item())

    common.report(
        "torch_compile" if options.compile else "torch_eager",
        options,
        common.measure(step, options),
        dtype=options.dtype,
        threads=torch.get_num_threads(),
        torch=torch.__version__,
    )


if __name__ == "__main__":
    main()
