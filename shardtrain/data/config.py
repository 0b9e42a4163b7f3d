"""The `[data]` section.

Owns: the keys, their types and their defaults. Does not own: reading, tokenizers, the cache.
"""

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field


class DataConfig(BaseModel):
    """What is learned from, and in what portions."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        strict=True,
        allow_inf_nan=False,
        use_attribute_docstrings=True,
    )

    path: str = ""
    """Text file, folder of text, JSONL of text or of prompts and completions, Parquet, a prepared
    folder, or tokens as .npy or as Megatron-LM's .bin and .idx. "" = the source text of Python's
    own standard library."""
    tokenizer: str = "bytes"
    """How text becomes tokens: a tokenizer.json, or bytes = one token a byte, 256 in all."""
    sequence_length: int = Field(ge=1)
    """Tokens predicted per sequence."""
    batch_size: int = Field(ge=1)
    """Sequences per step, over all devices."""
    separate_documents: bool = True
    """Whether documents in one sequence are hidden from each other. False = one stream."""
    bad_records: Literal["stop", "skip"] = "stop"
    """A record of prompt and completion that lacks one, or is too long for a sequence: stop = the
    run does not start; skip = it is left out and counted."""
    shuffle: bool = True
    """Whether every epoch has an order of its own. False = file order."""
    validation_fraction: float = Field(0.05, ge=0.0, lt=1.0)
    """Part of the documents kept for validation. 0 = none."""
    cache: str = ""
    """Folder for prepared tokens. "" = $SHARDTRAIN_CACHE, else the user's cache folder."""
    prefetch: int = Field(2, ge=0)
    """Batches read ahead of the step. 0 = none."""
