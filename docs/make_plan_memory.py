"""Writes `docs/plan_memory.md`: bytes as planned beside those of the compiled programs.

JAX_PLATFORMS=cpu python docs/make_plan_memory.py     needs the extra `plan`; some ten minutes
"""

import argparse
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

PAGE = Path(__file__).with_name("plan_memory.md")
INTRODUCTION = """\
# Memory as planned, and as compiled

<!-- Made by docs/make_plan_memory.py; do not edit. -->

Bytes on one device in GiB: what `shardtrain plan` says before anything is compiled, and XLA's own
peak of the run's step, compiled for the target with jax {version}. No GPU is needed for either.
The models are those below with their figures; a layout's keys are those of a config.

"""

MODELS: dict[str, dict[str, Any]] = {
    "gpt": {"num_layers": 24, "embed_dim": 2048, "num_heads": 16, "vocab_size": 50304},
    "llama": {
        "num_layers": 16,
        "embed_dim": 2048,
        "num_heads": 32,
        "num_kv_heads": 8,
        "mlp_dim": 8192,
        "vocab_size": 128256,
        "norm": "rmsnorm",
        "position": "rope",
        "activation": "swiglu",
        "bias": False,
    },
    "bloom": {
        "num_layers": 24,
        "embed_dim": 2560,
        "num_heads": 32,
        "vocab_size": 250880,
        "position": "alibi",
        "embed_norm": True,
        "activation": "gelu_tanh",
    },
    "wide": {
        "num_layers": 8,
        "embed_dim": 8192,
        "num_heads": 64,
        "vocab_size": 51200,
        "tied": False,
        "position": "rope",
    },
    "deep": {
        "num_layers": 48,
        "embed_dim": 1024,
        "num_heads": 16,
        "vocab_size": 32768,
        "position": "rope",
        "norm": "rmsnorm",
        "activation": "geglu",
    },
}
LENGTHS = {"gpt": 1024, "llama": 4096, "bloom": 2048, "wide": 2048, "deep": 2048}
LAYOUTS: dict[str, dict[str, Any]] = {
    "data 8": {"data.batch_size": 16, "train.remat": "full"},
    "data 8, zero 1, 4 microbatches": {
        "data.batch_size": 64,
        "sharding.zero": 1,
        "train.microbatches": 4,
        "train.remat": "full",
    },
    "data 8, zero 3": {"data.batch_size": 16, "sharding.zero": 3, "train.remat": "dots"},
    "data 8, zero 3, 2 microbatches": {
        "data.batch_size": 32,
        "sharding.zero": 3,
        "train.microbatches": 2,
    },
    "data 2 x tensor 4, zero 2, sequence parallel": {
        "data.batch_size": 8,
        "mesh.tensor": 4,
        "sharding.zero": 2,
        "sharding.sequence_parallel": True,
    },
    "pipeline 4 x tensor 2, zero 0": {
        "data.batch_size": 16,
        "mesh.pipeline": 4,
        "mesh.tensor": 2,
        "train.microbatches": 16,
        "train.remat": "full",
    },
    "pipeline 4 x data 2, zero 1": {
        "data.batch_size": 32,
        "mesh.pipeline": 4,
        "sharding.zero": 1,
        "train.microbatches": 16,
    },
}
TARGET = "h100:1x8"


def cases() -> Iterator[tuple[str, str, dict[str, Any], dict[str, Any]]]:
    """Every model with every layout, and their configs' sections and changes."""
    for model, keys in MODELS.items():
        sections = {
            "run": {"steps": 10},
            "model": keys,
            "data": {
                "sequence_length": LENGTHS[model],
                "batch_size": 16,
                "separate_documents": False,
            },
            "optimizer": {"learning_rate": 1e-3},
            "train": {"precision": "bfloat16"},
        }
        for layout, changes in LAYOUTS.items():
            yield model, layout, sections, changes


def main() -> None:
    """Compiles all, in two processes, and writes the page."""
    os.environ["JAX_PLATFORMS"] = "cpu"
    flags = argparse.ArgumentParser()
    flags.add_argument("--only", default="", help="a part of a model's or a layout's name")
    flags.add_argument("--out", default=str(PAGE))
    options = flags.parse_args()

    import jax

    from shardtrain.commands_plan import make_plan
    from shardtrain.config import load_config
    from shardtrain.plan.compiling import Compiled, Job, compile_for
    from shardtrain.plan.targets import parse_target
    from shardtrain.run_program import lower_step

    plans, jobs = {}, {}
    for model, layout, sections, changes in cases():
        name = f"{model}: {layout}"
        if options.only not in name:
            continue
        config = load_config(sections, changes)
        plans[name] = make_plan(config, TARGET, search=False)
        jobs[name] = Job(lower_step, (config, sections["model"]["vocab_size"]))

    def compiled(some: dict[str, Job]) -> dict[str, Compiled]:
        return compile_for(parse_target(TARGET), some, seconds=1800) if some else {}

    halves = [dict(list(jobs.items())[start::2]) for start in (0, 1)]
    with ThreadPoolExecutor(2) as pool:
        done = {name: c for part in pool.map(compiled, halves) for name, c in part.items()}

    lines = [INTRODUCTION.format(version=jax.__version__)]
    lines.append("| model and layout | planned | compiled | planned / compiled | activations |\n")
    lines.append("| --- | --- | --- | --- | --- |\n")
    ratios = []
    for name, plan in plans.items():
        memory, peak = plan.own.memory, done[name].memory["peak"]
        ratios.append(memory.total / peak)
        lines.append(
            f"| {name} | {memory.total / 2**30:.2f} | {peak / 2**30:.2f} | {ratios[-1]:.3f} | "
            f"{memory.activations / 2**30:.2f} |\n"
        )
        parts = {k: round(v / 2**30, 2) for k, v in memory.by_class().items() if v}
        found = {k: round(v / 2**30, 2) for k, v in done[name].memory.items() if v}
        print(f"{ratios[-1]:.3f} {name}\n      {parts}\n      {found}")
    within = sum(abs(ratio - 1) <= 0.1 for ratio in ratios)
    lines.append(f"\n{within} of {len(ratios)} are within 10 %; the models:\n\n")
    lines += [f"- {model}: {keys}, {LENGTHS[model]} tokens\n" for model, keys in MODELS.items()]
    Path(options.out).write_text("".join(lines), encoding="utf-8")


if __name__ == "__main__":
    main()
