"""Tiny BERTs: a case, its program with batches, one device's answer to the same."""

import dataclasses
from functools import lru_cache
from typing import Any

import jax
import numpy as np

from shardtrain.config import load_config
from shardtrain.run_program import make_program
from shardtrain.train.build import Program
from shardtrain.verify.compare import Subject

VOCAB, LENGTH, BATCH, PLACES = 37, 16, 16, 3


@dataclasses.dataclass(frozen=True)
class Case:
    """One layout of one run."""

    mesh: tuple[tuple[str, int], ...] = ()
    zero: int = 0
    microbatches: int = 1
    sequence_parallel: bool = False
    remat: str = "none"
    next_sentence: bool = True
    dropout: float = 0.1
    precision: str = "float64"
    optimizer: str = "lamb"

    def __str__(self) -> str:
        mesh = " ".join(f"{axis}{size}" for axis, size in self.mesh) or "1"
        words = [mesh, f"zero{self.zero}", self.optimizer]
        words += [f"{self.microbatches} microbatches"] * (self.microbatches > 1)
        words += ["sequence parallel"] * self.sequence_parallel
        words += ["no pairs"] * (not self.next_sentence)
        words += [self.remat] * (self.remat != "none")
        words += [self.precision] * (self.precision != "float64")
        return ",".join(words)

    def on_one_device(self) -> "Case":
        """The same run without a layout."""
        plain = {"mesh": (), "zero": 0, "microbatches": 1, "remat": "none"}
        return dataclasses.replace(self, **plain, sequence_parallel=False)

    def sections(self) -> dict[str, Any]:
        """The case as a config."""
        degrees = dict.fromkeys(("pipeline", "replica", "data", "context", "tensor"), 1)
        return {
            "run": {"steps": 20, "seed": 3},
            "model": {
                "type": "bert",
                "num_layers": 2,
                "embed_dim": 16,
                "num_heads": 2,
                "max_length": LENGTH,
                "vocab_size": VOCAB,
                "vocab_multiple": 4,
                "dropout": self.dropout,
                "attention_dropout": self.dropout,
                "next_sentence": self.next_sentence,
                "layer_loop": "scan",
            },
            "data": {
                "tokenizer": "none.json",
                "sequence_length": LENGTH,
                "batch_size": BATCH,
                "mask_fraction": PLACES / LENGTH,
            },
            "mesh": degrees | dict(self.mesh),
            "sharding": {"zero": self.zero, "sequence_parallel": self.sequence_parallel},
            "train": {
                "microbatches": self.microbatches,
                "precision": self.precision,
                "remat": self.remat,
            },
            "optimizer": {
                "name": self.optimizer,
                "learning_rate": 1e-3,
                "weight_decay": 0.01,
                "schedule": "constant",
            },
        }


def rows(cursor: int, *, pairs: bool = True, batch: int = BATCH) -> dict[str, np.ndarray]:
    """Random samples of many lengths, each with 0 to `PLACES` hidden tokens."""
    random = np.random.default_rng(cursor)
    long = random.integers(LENGTH // 2, LENGTH + 1, batch)[:, None]
    places = np.arange(LENGTH)
    there = (places < long).astype(np.int32)
    count = random.integers(0, PLACES + 1, batch)[:, None]
    predicted = np.sort(random.integers(1, LENGTH // 2, (batch, PLACES)), -1)
    found = {
        "tokens": random.integers(4, VOCAB, (batch, LENGTH)) * there,
        "parts": (places >= long // 2) * there,
        "segments": there,
        "predicted": predicted,
        "targets": random.integers(4, VOCAB, (batch, PLACES)),
        "weights": (np.arange(PLACES) < count).astype(np.float32),
        "sample": (cursor * batch + np.arange(batch)).astype(np.uint32),
    }
    if pairs:
        found["next"] = random.integers(0, 2, batch)
        found["next_weights"] = (np.arange(batch) % 5 > 0).astype(np.float32)
    else:
        found["positions"] = np.broadcast_to(places, (batch, LENGTH))
    wide = {name: a.astype(np.int32) for name, a in found.items() if a.dtype == np.int64}
    return found | wide


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
    return make_program(config, vocab_size=VOCAB, devices=jax.devices()[:count])


def subject(case: Case) -> Subject:
    """The case as a program with batches."""
    program = program_of(case)
    pairs = case.next_sentence
    return Subject(program, lambda cursor: put(program, rows(cursor, pairs=pairs)))
