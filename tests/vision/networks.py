"""Tiny residual networks: a case, its program with batches, one device's answer to the same."""

import dataclasses
from functools import lru_cache
from typing import Any

import jax
import numpy as np

from shardtrain.config import load_config
from shardtrain.run_program import make_program
from shardtrain.train.build import Program
from shardtrain.verify.compare import Subject

CLASSES, SIZE, BATCH = 5, 8, 16


@dataclasses.dataclass(frozen=True)
class Case:
    """One layout of one run."""

    mesh: tuple[tuple[str, int], ...] = ()
    zero: int = 0
    microbatches: int = 1
    statistics: str = "global"
    precision: str = "float64"
    ema: float = 0.9
    guard: str = "stop"

    def __str__(self) -> str:
        mesh = " ".join(f"{axis}{size}" for axis, size in self.mesh) or "1"
        words = [mesh, f"zero{self.zero}"]
        words += [f"{self.microbatches} microbatches"] * (self.microbatches > 1)
        words += [self.statistics] * (self.statistics != "global")
        words += [self.precision] * (self.precision != "float64")
        return ",".join(words)

    def on_one_device(self) -> "Case":
        """The same run without a layout."""
        parts = self.microbatches if self.statistics == "microbatch" else 1
        return dataclasses.replace(self, mesh=(), zero=0, microbatches=parts)

    def sections(self) -> dict[str, Any]:
        """The case as a config."""
        degrees = dict.fromkeys(("pipeline", "replica", "data", "context", "tensor"), 1)
        return {
            "run": {"steps": 20, "seed": 3},
            "model": {
                "type": "resnet",
                "depth": 10,
                "width": 8,
                "stem": "small",
                "norm_statistics": self.statistics,
            },
            "task": {"label_smoothing": 0.1},
            "data": {"image_size": SIZE, "channels": 3, "batch_size": BATCH, "mixup": 0.2},
            "mesh": degrees | dict(self.mesh),
            "sharding": {"zero": self.zero},
            "train": {"microbatches": self.microbatches, "precision": self.precision},
            "guard": {"bad_numbers": self.guard},
            "optimizer": {
                "name": "sgd",
                "learning_rate": 0.1,
                "nesterov": True,
                "weight_decay": 0.01,
                "ema_decay": self.ema,
                "clip_norm": 0.0,
            },
        }


def rows(cursor: int, batch: int = BATCH) -> dict[str, np.ndarray]:
    """Random images; their mean and spread differ from row to row."""
    random = np.random.default_rng(cursor)
    light = random.integers(1, 255, (batch, 1, 1, 3))
    noise = random.integers(0, 255, (batch, SIZE, SIZE, 3))
    return {
        "image": ((light + noise) // 2).astype(np.uint8),
        "label": random.integers(0, CLASSES, batch, dtype=np.int32),
        "weights": np.ones(batch, np.float32),
        "other": random.integers(0, CLASSES, batch, dtype=np.int32),
        "share": random.random(batch, dtype=np.float32),
    }


def put(of: Program, batch: dict[str, np.ndarray]) -> dict[str, jax.Array]:
    """Cuts a global batch into the program's microbatches and places them."""

    def one(x: np.ndarray) -> jax.Array:
        x = x.reshape(of.layout.microbatches, -1, *x.shape[1:])
        return jax.device_put(x, of.batch_sharding(x.ndim))

    return {name: one(x) for name, x in batch.items()}


@lru_cache(maxsize=16)
def program_of(case: Case) -> Program:
    """The program of a case, on the first devices."""
    config = load_config(case.sections())
    count = int(np.prod(list(config.mesh.model_dump().values())))
    return make_program(config, vocab_size=CLASSES, devices=jax.devices()[:count])


def subject(case: Case) -> Subject:
    """The case as a program with batches."""
    program = program_of(case)
    return Subject(program, lambda cursor: put(program, rows(cursor)))
