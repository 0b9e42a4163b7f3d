"""Writes `docs/plan_tables.md`: plans beside published runs, and weak scaling to 512 devices.

python docs/make_plan_tables.py       a minute; the plans are made anew, so it says what they say
"""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

PAGE = Path(__file__).with_name("plan_tables.md")
INTRODUCTION = """\
# What plans say

<!-- Made by docs/make_plan_tables.py; do not edit. -->

Figures of `shardtrain plan`, made anew by the command above. None was measured by us on a GPU.

## Beside published runs

Each config has the layout that its paper published, but for what the notes say. "Planned" is the
range of the plan; the ratio is its middle over the published time.

"""
SCALING = """
## Weak scaling

A GPT of 1.3 billion parameters (24 layers, width 2048, 2048 tokens) on H100s, 8 a host, with 8
sequences on each device whatever their number, in bfloat16, recomputing in full. Seconds of a step
as a range; efficiency is the time on one device over that on so many, from the middle of the
ranges; "exposed" is the wire time of data collectives that nothing hides, at the range's two ends.

"""

PUBLISHED: dict[str, tuple[str, float, str]] = {
    "bloom_176b": (
        "a100-80:48x8",
        105.0,
        "arXiv 2211.05100, section 3.4: 105 s a step",
    ),
    "megatron_turing_530b": (
        "a100-80:280x8",
        60.1,
        "arXiv 2201.11990, section 2.3: 60.1 s a step on 280 hosts",
    ),
    "gpt3_175b": (
        "a100-80:48x8",
        84 * 86400 * 1536 * 2048 / 300e9,
        "arXiv 2104.04473, table 2: 84 days for 300 billion tokens",
    ),
    "gpt_1t": (
        "a100-80:384x8",
        96
        * 3072
        * 2048
        * 128
        * 25600**2
        * (1 + 2048 / (6 * 25600) + 51200 / (16 * 128 * 25600))
        / (3072 * 163e12),
        "arXiv 2104.04473, table 1: 163 TFLOP/s a GPU, by its formula",
    ),
    "llama3_405b": (
        "h100:2048x8",
        (6 * 405e9 + 12 * 126 * 16384 * 8192) * 2048 * 8192 / (16384 * 400e12),
        "arXiv 2407.21783, table 4: 400 TFLOP/s a GPU, by the FLOPs of model and attention",
    ),
}
NOTES = """
- The plan of `llama3_405b` is above the published time by what it computes again (published
  without recomputation, which our table of the schedule has no memory for), by attention that XLA
  does not fuse (scores of 8192 x 8192 are written and read: the "other" part), and, at the high
  end, by data collectives that Meta hides.
- All five are planned with the same four assumptions ([plan.md](plan.md#time)).
"""


def published() -> Iterator[str]:
    """A line for each published run."""
    from shardtrain.commands_plan import make_plan
    from shardtrain.config import load_config

    yield "| config | target | GiB of room | planned, s | published, s | ratio | best found, s |\n"
    yield "| --- | --- | --- | --- | --- | --- | --- |\n"
    sources, reasons = [], []
    for name, (target, seconds, source) in PUBLISHED.items():
        plan = make_plan(load_config(name), target, keep=1)
        own, best = plan.own, plan.found.best[0] if plan.found else plan.own
        room = f"{own.memory.total / 2**30:.1f} of {plan.room / 2**30:.1f}"
        low, high = own.cost.low.total, own.cost.high.total
        ratio = own.cost.middle / seconds
        yield (
            f"| `{name}` | `{target}` | {room} | {low:.3g} to {high:.3g} | {seconds:.3g} | "
            f"{ratio:.2f} | {best.cost.low.total:.3g} to {best.cost.high.total:.3g} |\n"
        )
        sources.append(f"- `{name}`: {source}\n")
        why = plan.why(own) or "within a twentieth of the best found"
        reasons.append(f"- `{name}`: {why}. Best found: {best.layout}\n")
    yield "\n"
    yield from sources
    yield NOTES
    yield "\nBeside the best that the search finds:\n\n"
    yield from reasons


def scaling() -> Iterator[str]:
    """A line for each number of devices."""
    from shardtrain.commands_plan import make_plan
    from shardtrain.config import load_config

    columns = [f"ZeRO {zero}, s | efficiency | exposed, s" for zero in (1, 3)]
    yield f"| devices | {' | '.join(columns)} |\n"
    yield "| --- | --- | --- | --- | --- | --- | --- |\n"
    first: dict[int, float] = {}
    for devices in (1, 2, 4, 8, 16, 32, 64, 128, 256, 512):
        cells = [str(devices)]
        for zero in (1, 3):
            sections: dict[str, Any] = {
                "run": {"steps": 10},
                "model": {
                    "num_layers": 24,
                    "embed_dim": 2048,
                    "num_heads": 16,
                    "vocab_size": 50304,
                },
                "data": {
                    "sequence_length": 2048,
                    "batch_size": 8 * devices,
                    "separate_documents": False,
                },
                "optimizer": {"learning_rate": 1e-3},
                "train": {"precision": "bfloat16", "remat": "full"},
                "sharding": {"zero": zero},
            }
            hosts, each = max(devices // 8, 1), min(devices, 8)
            plan = make_plan(load_config(sections), f"h100:{hosts}x{each}", search=False)
            cost = plan.own.cost
            first.setdefault(zero, cost.middle)
            cells += [
                f"{cost.low.total:.3f} to {cost.high.total:.3f}",
                f"{first[zero] / cost.middle:.0%}",
                f"{cost.low.data:.3f} to {cost.high.data:.3f}",
            ]
        yield "| " + " | ".join(cells) + " |\n"


def main() -> None:
    """Writes the page."""
    os.environ["JAX_PLATFORMS"] = "cpu"
    text = INTRODUCTION + "".join(published()) + SCALING + "".join(scaling())
    PAGE.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
