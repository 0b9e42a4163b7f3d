"""What a family of published models is: a table of tensors, and a config both ways.

Owns: the interface. Does not own: the families, each in a file of its own.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from shardtrain.errors import ConfigError
from shardtrain.interop.hf_keys import Keys
from shardtrain.interop.tensors import Table, Tensor
from shardtrain.models.config import BertConfig, TransformerConfig

Model = TransformerConfig | BertConfig
"""The sections of models that are published in some family."""
EMBEDDING = "embedding"
HEAD = "head"


@dataclass(frozen=True)
class Sizes:
    """What an exported config says besides the model's section."""

    vocab_size: int
    """Tokens, without padding."""
    length: int
    """Tokens of the longest sequence that the model knows."""


@dataclass(frozen=True)
class Family:
    """A family of models on Hugging Face's hub."""

    model_type: str
    """As `config.json` has it."""
    architecture: str
    """The class in transformers that has the head."""
    prefix: str
    """Before the name of every tensor but the head's; files of the model without head lack it."""
    table: Table
    buffers: str
    """A regular expression for tensors in older files that are computed and not learned."""
    read: Callable[[Keys], dict[str, Any]]
    """`config.json` -> keys of our `[model]`; notes faults."""
    max_length: Callable[[Keys], int]
    """`config.json` -> tokens of the longest sequence."""
    write: Callable[[Any, Sizes], dict[str, Any]]
    """Our `[model]` -> what `config.json` says of it."""
    needs: Callable[[Any], Mapping[str, tuple[Any, ...]]]
    """Our `[model]` -> those keys of it that must have one of a few values."""
    notes: Callable[[Keys], list[str]] = lambda _: []
    """What `config.json` says about training that has no counterpart, a line each."""
    kind: str = "transformer"
    """`model.type` of ours."""
    renamed: Mapping[str, str] = field(default_factory=dict)
    """Ends of names in older files, and what transformers has made of them since."""

    def current_name(self, name: str) -> str:
        """Return the name that transformers gives a tensor today."""
        old = next((end for end in self.renamed if name.endswith(end)), "")
        return name.removesuffix(old) + self.renamed[old] if old else name

    def faults(self, model: Model) -> list[ConfigError]:
        """Return why a model of ours is none of this family; empty where it is one."""
        values = model.model_dump()
        return [
            ConfigError(
                f"{self.model_type} has no counterpart",
                where=f"model.{key}={values[key]!r}",
                allowed=", ".join(map(repr, allowed)),
            )
            for key, allowed in self.needs(model).items()
            if values[key] not in allowed
        ]

    def row(self, path: str) -> tuple[Tensor, ...]:
        """Return the tensors of a parameter, by the names that transformers writes."""
        return tuple(
            tensor if path == HEAD else replace(tensor, name=self.prefix + tensor.name)
            for tensor in self.table[path]
        )
