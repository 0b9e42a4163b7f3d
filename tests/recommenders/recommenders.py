"""Tiny recommenders: a case, its program with batches, one device's answer to the same."""

import dataclasses
from functools import lru_cache
from typing import Any

import jax
import numpy as np

from shardtrain.config import load_config
from shardtrain.run_program import make_program
from shardtrain.train.build import Program
from shardtrain.verify.compare import Subject

SIZES, BATCH, WIDTH = [40, 24, 5, 31, 17, 9], 32, 16


@dataclasses.dataclass(frozen=True)
class Case:
    """One layout of one run."""

    mesh: tuple[tuple[str, int], ...] = ()
    zero: int = 0
    placement: str = "rows"
    microbatches: int = 1
    model: str = "dlrm"
    precision: str = "float64"
    table_optimizer: str = "rowwise_adagrad"
    clip: float = 0.01
    freeze: bool = False
    guard: str = "stop"

    def __str__(self) -> str:
        words = [" ".join(f"{axis}{size}" for axis, size in self.mesh) or "1"]
        words += [self.model, self.placement, f"zero{self.zero}"]
        words += [f"{self.microbatches} microbatches"] * (self.microbatches > 1)
        words += [self.precision] * (self.precision != "float64")
        return ",".join(words)

    def on_one_device(self) -> "Case":
        """The same run without a layout."""
        parts = self.microbatches if self.model == "two_tower" else 1
        return dataclasses.replace(self, mesh=(), zero=0, microbatches=parts)

    def sections(self) -> dict[str, Any]:
        """The case as a config."""
        degrees = dict.fromkeys(("pipeline", "replica", "data", "context", "tensor"), 1)
        layers = {"bottom": [8], "top": [8]} if self.model == "dlrm" else {"tower": [8, 8]}
        return {
            "run": {"steps": 20, "seed": 3},
            "model": {
                "type": self.model,
                "table_sizes": SIZES,
                "num_dense": 2,
                "embed_dim": WIDTH,
                "dense_rows": 8,
                "placement": self.placement,
                "table_optimizer": self.table_optimizer,
                "table_rate": 10.0,
                "freeze_tables": self.freeze,
                **layers,
            },
            "data": {"batch_size": BATCH, "generated": 500},
            "mesh": degrees | dict(self.mesh),
            "sharding": {"zero": self.zero},
            "train": {"microbatches": self.microbatches, "precision": self.precision},
            "guard": {"bad_numbers": self.guard},
            "optimizer": {"learning_rate": 0.01, "clip_norm": self.clip},
        }


def rows(cursor: int, batch: int = BATCH) -> dict[str, np.ndarray]:
    """Random interactions; most ids occur more than once, and some rows count for nothing."""
    random = np.random.default_rng(cursor)
    ids = [random.integers(0, size, batch) // 2 for size in SIZES]
    return {
        "ids": np.stack(ids, 1).astype(np.int32),
        "dense": random.standard_normal((batch, 2)).astype(np.float32),
        "label": random.integers(0, 2, batch).astype(np.float32),
        "weights": (random.random(batch) < 0.9).astype(np.float32),
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
    return make_program(config, vocab_size=1, devices=jax.devices()[:count])


def subject(case: Case) -> Subject:
    """The case as a program with batches."""
    program = program_of(case)
    return Subject(program, lambda cursor: put(program, rows(cursor)))
