"""Layouts as data: a case, the program that runs it, and one device's answer to the same."""

import dataclasses
from functools import lru_cache
from typing import Any

import jax
import numpy as np

from shardtrain.config import load_config
from shardtrain.run_program import make_program
from shardtrain.train.build import Program
from shardtrain.verify.compare import Comparison, Subject, compare

LENGTH, VOCAB = 16, 32
STEPS = 3
BFLOAT16_BOUND = 0.05
"""bfloat16 rounds to 2^-8; a gradient is a sum over hundreds of terms in another order."""

STYLES = {
    "gpt": {"norm": "layernorm", "position": "learned", "activation": "gelu"},
    "llama": {
        "norm": "rmsnorm",
        "position": "rope",
        "activation": "swiglu",
        "bias": False,
        "num_heads": 8,
        "num_kv_heads": 4,
        "head_dim": 4,
    },
    "bloom": {"position": "alibi", "activation": "gelu_tanh", "embed_norm": True},
}
MESHES = {
    "1": {},
    "8x1": {"data": 8},
    "4x2": {"data": 4, "tensor": 2},
    "2x4": {"data": 2, "tensor": 4},
    "2x2x2": {"replica": 2, "data": 2, "tensor": 2},
    "c4 dp2": {"context": 4, "data": 2},
    "c2 dp2 tp2": {"context": 2, "data": 2, "tensor": 2},
}
PIPELINES = {
    "pp2": {"pipeline": 2},
    "pp4": {"pipeline": 4},
    "pp2 tp2": {"pipeline": 2, "tensor": 2},
    "pp2 dp2": {"pipeline": 2, "data": 2},
    "pp2 dp2 tp2": {"pipeline": 2, "data": 2, "tensor": 2},
    "pp2 r2 dp2": {"pipeline": 2, "replica": 2, "data": 2},
    "pp4 dp2": {"pipeline": 4, "data": 2},
    "pp2 c4": {"pipeline": 2, "context": 4},
    "pp2 c2 tp2": {"pipeline": 2, "context": 2, "tensor": 2},
    "pp2 dp2 c2": {"pipeline": 2, "data": 2, "context": 2},
}


@dataclasses.dataclass(frozen=True)
class Case:
    """One layout of one run."""

    mesh: str = "1"
    zero: int = 0
    sequence_parallel: bool = False
    microbatches: int = 1
    remat: str = "none"
    dropout: float = 0.0
    style: str = "gpt"
    tied: bool = True
    documents: bool = False
    loop: str = "scan"
    attention: str = "auto"
    loss_chunks: int = 1
    optimizer: str = "adamw"
    precision: str = "float64"
    schedule: str = "1f1b"
    virtual_stages: int = 1
    stages: str = ""
    table: str = ""
    rules: tuple[tuple[str, str], ...] = ()
    num_layers: int = 2
    batch: int = 16
    lora: int = 0
    lora_targets: str = "qkv,out,up,down"

    def __str__(self) -> str:
        default = Case()
        parts = [f"mesh={self.mesh}", f"zero={self.zero}"]
        for field in dataclasses.fields(self)[2:]:
            value = getattr(self, field.name)
            if value != getattr(default, field.name):
                parts.append(f"{field.name}={value}")
        return ",".join(parts)

    def on_one_device(self) -> "Case":
        """The same run without a layout."""
        return dataclasses.replace(
            self,
            mesh="1",
            zero=0,
            sequence_parallel=False,
            microbatches=1,
            remat="none",
            loop="scan",
            attention="auto",
            loss_chunks=1,
            schedule="1f1b",
            virtual_stages=1,
            stages="",
            table="",
            rules=(),
        )

    def sections(self) -> dict[str, Any]:
        """The case as a config."""
        model = {
            "num_layers": self.num_layers,
            "embed_dim": 16,
            "num_heads": 4,
            "vocab_size": VOCAB,
        }
        loop = "scan" if self.loop == "peel" else self.loop
        model |= {"dropout": self.dropout, "attention_dropout": self.dropout}
        model |= {"tied": self.tied, "layer_loop": loop}
        model |= {"attention": self.attention}
        degrees = (
            dict.fromkeys(("pipeline", "replica", "data", "context", "tensor"), 1)
            | (MESHES | PIPELINES)[self.mesh]
        )
        return {
            "run": {"steps": 20, "seed": 3},
            "model": model | STYLES[self.style],
            "data": {
                "sequence_length": LENGTH,
                "batch_size": self.batch,
                "path": "synthetic.tokens",
            },
            "mesh": degrees,
            "sharding": {
                "zero": self.zero,
                "sequence_parallel": self.sequence_parallel,
                "rules": dict(self.rules),
            },
            "train": {
                "microbatches": self.microbatches,
                "remat": self.remat,
                "precision": self.precision,
                "overlap": self.loop == "peel",
            },
            "pipeline": {
                "schedule": self.schedule,
                "virtual_stages": self.virtual_stages,
                "layout": self.stages,
                "table": self.table,
            },
            "optimizer": {
                "name": self.optimizer,
                "learning_rate": 0.01,
                "clip_norm": 0.5,
                "warmup_steps": 2,
            },
            "task": {"z_loss": 1e-3, "loss_chunks": self.loss_chunks},
            "lora": {"rank": self.lora, "targets": self.lora_targets},
        }


def synthetic_rows(cursor: int, batch: int, *, documents: bool) -> dict[str, np.ndarray]:
    """A ragged batch: some targets do not count, some rows hold several documents."""
    rng = np.random.default_rng(cursor)
    shape = (batch, LENGTH)
    rows = {
        "tokens": rng.integers(0, VOCAB, shape, dtype=np.int32),
        "targets": rng.integers(0, VOCAB, shape, dtype=np.int32),
        "weights": (rng.random(shape) < rng.random((batch, 1))).astype(np.float32),
        "sample": np.arange(batch, dtype=np.uint32) + np.uint32(cursor * batch),
    }
    if documents:
        starts = rng.random(shape) < 0.2
        starts[:, 0] = True
        places = np.arange(LENGTH, dtype=np.int32)
        rows["segments"] = np.cumsum(starts, axis=1, dtype=np.int32)
        rows["positions"] = places - np.maximum.accumulate(np.where(starts, places, 0), axis=1)
    return rows


def one_document(rows: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The same rows, where nothing is said of documents with one to each row."""
    shape = rows["tokens"].shape
    whole = {
        "segments": np.ones(shape, np.int32),
        "positions": np.broadcast_to(np.arange(LENGTH, dtype=np.int32), shape),
    }
    return whole | rows


def subject(case: Case) -> Subject:
    """The case as a program with batches."""
    program = program_of(case)

    def batch_at(cursor: int) -> dict[str, jax.Array]:
        return put(synthetic_rows(cursor, case.batch, documents=case.documents), program)

    return Subject(program, batch_at)


def program_of(case: Case) -> Program:
    """The program of a case, on the first devices."""
    config = load_config(case.sections())
    count = int(np.prod(list(config.mesh.model_dump().values())))
    return make_program(config, vocab_size=VOCAB, devices=jax.devices()[:count])


def put(rows: dict[str, np.ndarray], program: Program) -> dict[str, jax.Array]:
    """Rows as a batch on the program's devices."""
    microbatches = program.layout.microbatches
    cut = {k: v.reshape(microbatches, -1, *v.shape[1:]) for k, v in rows.items()}
    return {k: jax.device_put(v, program.batch_sharding(v.ndim)) for k, v in cut.items()}


_reference = lru_cache(maxsize=64)(program_of)


def reference(case: Case) -> Subject:
    """One device's answer. One program serves rows of one and of several documents."""
    program = _reference(dataclasses.replace(case.on_one_device(), documents=True))

    def batch_at(cursor: int) -> dict[str, jax.Array]:
        rows = synthetic_rows(cursor, case.batch, documents=case.documents)
        return put(one_document(rows), program)

    return Subject(program, batch_at)


def difference(case: Case) -> Comparison:
    """The case against one device, over `STEPS` updates."""
    bound = {"float64": 1e-9, "float32": 1e-5, "bfloat16": BFLOAT16_BOUND}[case.precision]
    with jax.enable_x64(case.precision == "float64"):
        return compare(subject(case), reference(case), steps=STEPS, bound=bound)
