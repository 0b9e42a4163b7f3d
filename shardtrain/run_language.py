"""Runs that learn from text, as functions: model, task, data and counts.

Owns: what is particular to them. Does not own: what all runs share (`run_program`, `run`), and the
interface (`run_work`).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from flax import nnx
from jax.sharding import AbstractMesh, Mesh

from shardtrain.config import LanguageRunConfig, known_vocab
from shardtrain.data.language import LanguageData, blank_batch
from shardtrain.data.loader import Rows
from shardtrain.data.sources import DataInfo, open_data, require_vocabulary
from shardtrain.models.config import TransformerConfig
from shardtrain.models.flops import training_flops_per_token
from shardtrain.models.transformer import Transformer
from shardtrain.run_text import TextWork
from shardtrain.sharding.rules import Table
from shardtrain.strategies.zigzag import Arrange, in_order, make_zigzag
from shardtrain.tasks.base import Task
from shardtrain.tasks.language_model import LanguageModel
from shardtrain.train.build import Create
from shardtrain.verify.shrink import shrunk


@dataclass(frozen=True)
class LanguageWork(TextWork):
    """A language model on text; see `run_work.Work`."""

    config: LanguageRunConfig

    samples = "sequences"

    @property
    def sample_tokens(self) -> int:
        """Tokens that the model writes at the end."""
        return self.config.eval.sample_tokens

    def known_size(self) -> int | None:
        """Tokens, where the config says how many."""
        return self.config.model.vocab_size or known_vocab(self.config)

    def open_data(
        self, say: Callable[[str], None]
    ) -> tuple[LanguageData, LanguageData | None, DataInfo]:
        """Text as tokens, prepared into the cache the first time."""
        config = self.config
        data, validation, info = open_data(config.data, seed=config.run.seed, say=say)
        if config.model.vocab_size:
            require_vocabulary(config.model.vocab_size, info)
        return data, validation, info

    def create(self, size: int) -> Create:
        """(dtype, rngs) -> the transformer."""
        model = self.config.model
        max_length = model.max_length or self.config.data.sequence_length

        def create(dtype: Any, rngs: nnx.Rngs) -> nnx.Module:
            return Transformer(
                model, vocab_size=size, max_length=max_length, dtype=dtype, rngs=rngs
            )

        return create

    def task(self, size: int) -> Task:
        """Predicting the next token."""
        return LanguageModel(self.config.task, size)

    @property
    def stack(self) -> TransformerConfig:
        """The model's section."""
        return self.config.model

    def scored(self, size: int) -> int:
        """Each token has a score for all."""
        return size

    def arrange(self, mesh: Mesh | AbstractMesh, compute: Table) -> Arrange:
        """In a ring each device has a chunk from the front and one from the back."""
        is_ring = mesh.shape["context"] > 1 and self.config.model.attention != "ulysses"
        return make_zigzag(compute, mesh) if is_ring else in_order

    def blank(self, rows: int) -> Rows:
        """Sequences that count for nothing."""
        data = self.config.data
        return blank_batch(rows, data.sequence_length, separate_documents=data.separate_documents)

    def shrunk(
        self, sections: Mapping[str, Any], degrees: Mapping[str, int]
    ) -> dict[str, dict[str, Any]]:
        """Every size the smallest that the mesh still divides."""
        return shrunk(sections, degrees)

    def flops(self, size: int) -> int:
        """FLOPs of forward and backward for a global batch."""
        return self.units * training_flops_per_token(
            self.config.model, vocab_size=size, length=self.config.data.sequence_length
        )
