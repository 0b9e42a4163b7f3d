"""Runs that pre-train BERT, as functions: model, task, data and counts.

Owns: what is particular to them. Does not own: what all runs share (`run_program`, `run`), and the
interface (`run_work`).
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flax import nnx

from shardtrain.checkpoint.folder import complete_steps
from shardtrain.config import BertRunConfig
from shardtrain.data.loader import Rows
from shardtrain.data.masked_sources import open_masked
from shardtrain.data.masked_text import MaskedText, blank_masked
from shardtrain.data.masking import num_predicted
from shardtrain.data.sources import DataInfo, open_tokens, require_vocabulary
from shardtrain.data.tokenizer import TOKENIZER_FILE, Tokenizer, load_tokenizer
from shardtrain.data.wordpiece import is_learned
from shardtrain.models.bert import Bert
from shardtrain.models.config import TransformerConfig
from shardtrain.models.flops import training_flops_per_masked_sample
from shardtrain.run_text import TextWork
from shardtrain.tasks.base import Task
from shardtrain.tasks.masked_lm import MaskedLanguageModel
from shardtrain.train.build import Create
from shardtrain.train.rundir import checkpoints_in


@dataclass(frozen=True)
class BertWork(TextWork):
    """A masked language model on text; see `run_work.Work`."""

    config: BertRunConfig

    samples = "samples"

    def known_size(self) -> int | None:
        """Tokens, where the config says how many."""
        return self.config.model.vocab_size or None

    def open_data(
        self, say: Callable[[str], None]
    ) -> tuple[MaskedText, MaskedText | None, DataInfo]:
        """Text as tokens, prepared into the cache the first time."""
        config, section = self.config, self.config.data
        if kept := kept_tokenizer(config):
            # What the weights were trained with, also where other text is read now.
            section = section.model_copy(update={"tokenizer": str(kept)})
        pairs, seed = config.model.next_sentence, config.run.seed
        data, validation, info = open_masked(section, pairs=pairs, seed=seed, say=say)
        if config.model.vocab_size:
            require_vocabulary(config.model.vocab_size, info)
        return data, validation, info

    def create(self, size: int) -> Create:
        """(dtype, rngs) -> the encoder."""
        model = self.config.model

        def create(dtype: Any, rngs: nnx.Rngs) -> nnx.Module:
            return Bert(model, vocab_size=size, dtype=dtype, rngs=rngs)

        return create

    def task(self, size: int) -> Task:
        """Predicting hidden tokens, and whether one part follows the other."""
        return MaskedLanguageModel(size, self.config.model.next_sentence)

    @property
    def stack(self) -> TransformerConfig:
        """The encoder in the words of a transformer's section."""
        return self.config.model.as_transformer

    def scored(self, size: int) -> int:
        """Only hidden tokens are scored."""
        return math.ceil(size * self.config.data.mask_fraction)

    def blank(self, rows: int) -> Rows:
        """Samples that count for nothing."""
        data = self.config.data
        pairs = self.config.model.next_sentence
        return blank_masked(rows, data.sequence_length, data.mask_fraction, pairs=pairs)

    def leave(self, folder: Path) -> None:
        """A tokenizer that was learned from the text: the next phase, and an export, want it."""
        if is_learned(self.config.data.tokenizer) and not kept_tokenizer(self.config):
            open_tokens(self.config.data.as_text).tokenizer().save(folder)

    def shrunk(
        self, sections: Mapping[str, Any], degrees: Mapping[str, int]
    ) -> dict[str, dict[str, Any]]:
        """Every size the smallest that the mesh still divides."""
        model, data, pipeline = sections["model"], sections["data"], sections["pipeline"]
        layers = model["num_layers"]
        parts = degrees["pipeline"] * pipeline["virtual_stages"]
        if not (pipeline["layout"] or pipeline["table"]):  # these say how many layers, or parts
            layers = min(layers, 2 * parts - (-layers % parts))
        heads = max(2, degrees["tensor"])
        width = math.lcm(8 * heads, degrees["data"])
        length = math.lcm(16, degrees["tensor"])
        rows = degrees["replica"] * degrees["data"] * sections["train"]["microbatches"]
        sizes = {"embed_dim": width, "num_heads": heads, "mlp_dim": 2 * width}
        small = {
            "sequence_length": min(data["sequence_length"], length),
            "batch_size": min(data["batch_size"], 2 * rows),
        }
        lengths = {"max_length": length, "layer_loop": "scan", "num_layers": layers}
        return {**sections, "model": {**model, **sizes, **lengths}, "data": {**data, **small}}

    def flops(self, size: int) -> int:
        """FLOPs of forward and backward for a global batch."""
        data = self.config.data
        return data.batch_size * training_flops_per_masked_sample(
            self.config.model,
            vocab_size=size,
            length=data.sequence_length,
            predicted=num_predicted(data.sequence_length, data.mask_fraction),
        )


def tokenizer_of(config: BertRunConfig) -> Tokenizer:
    """The tokenizer of a run; text need not be there any more.

    Raises:
        DataError: it cannot be found or read.
    """
    kept = kept_tokenizer(config)
    if is_learned(config.data.tokenizer) and kept is None:
        return open_tokens(config.data.as_text).tokenizer()
    return load_tokenizer(str(kept or config.data.tokenizer))


def kept_tokenizer(config: BertRunConfig) -> Path | None:
    """The tokenizer that a run has learned, once it has weights that were trained with it.

    The file of a folder without weights is of no account: the text may have been another one.
    """
    run = Path(config.run.dir)
    path = run / TOKENIZER_FILE
    if not is_learned(config.data.tokenizer) or not complete_steps(checkpoints_in(run)):
        return None
    return path if path.exists() else None
