"""A `config.json` read key by key, so that none is ignored.

Owns: which keys were asked for, and the faults: a value that we have no counterpart of, a key that
nobody knows. Does not own: what the keys of a family mean (each family's own file).
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shardtrain.errors import ConfigError, unreadable

_NAMES = """
architectures model_type transformers_version torch_dtype dtype name_or_path tokenizer_class
finetuning_task task_specific_params problem_type id2label label2id prefix
"""
_CALLS = """
return_dict output_hidden_states output_attentions output_scores use_cache torchscript
return_dict_in_generate attn_implementation chunk_size_feed_forward
"""
_DRAWING = """
bos_token_id eos_token_id pad_token_id sep_token_id unk_token_id decoder_start_token_id max_length
min_length do_sample early_stopping num_beams num_beam_groups diversity_penalty temperature top_k
top_p typical_p repetition_penalty length_penalty no_repeat_ngram_size num_return_sequences
encoder_no_repeat_ngram_size bad_words_ids forced_bos_token_id forced_eos_token_id
remove_invalid_values exponential_decay_length_penalty suppress_tokens begin_suppress_tokens
"""
_FREE = frozenset((_NAMES + _CALLS + _DRAWING).split()) | {"initializer_range"}
"""Keys that do not change what a model computes from given weights."""
_REQUIRED: Any = object()


class Keys:
    """The keys of one `config.json`; faults are gathered, so that one run shows them all."""

    def __init__(self, values: Mapping[str, Any], where: str) -> None:
        """Begin to read.

        Args:
            values: the file's content, or a table in it.
            where: how it is called in messages.
        """
        self.where = where
        self.faults: list[ConfigError] = []
        self._values = values
        self._seen: set[str] = set()

    @classmethod
    def read(cls, path: Path) -> "Keys":
        """Read a file.

        Raises:
            ConfigError: there is none, or it is not a JSON object.
        """
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            if not path.parent.is_dir():
                raise ConfigError("there is no such folder", where=str(path.parent)) from None
            raise ConfigError(
                "this folder has no config.json",
                where=str(path.parent),
                cure="give the folder of a model as `save_pretrained` of transformers writes it",
            ) from None
        except (OSError, ValueError) as error:
            raise unreadable(path, error) from None
        if not isinstance(values, dict):
            raise ConfigError("is no JSON object", where=str(path))
        return cls(values, str(path))

    def get(self, *names: str, default: Any = _REQUIRED) -> Any:
        """Return a value.

        Args:
            names: the key, and others that mean the same.
            default: what a missing key means; without one the key must be there.
        """
        self._seen.update(names)
        for name in names:
            if name in self._values:
                return self._values[name]
        if default is _REQUIRED:
            self.faults.append(ConfigError("is missing", where=f"{self.where}: {names[0]}"))
            return None
        return default

    def number(self, *names: str, default: Any = _REQUIRED, whole: bool = True) -> Any:
        """Return a number above zero; 1 stands for one that is wrong, which is a fault."""
        value = self.get(*names, default=default)
        if value is None and default is None:
            return None
        good = isinstance(value, int if whole else int | float) and not isinstance(value, bool)
        if good and value > 0:
            return value if whole else float(value)
        if any(name in self._values for name in names):
            what = "a whole number" if whole else "a number"
            self.fault(names[0], value, f"{what} above 0")
        return 1

    def fraction(self, *names: str, default: float) -> float:
        """Return a number from 0 up to 1."""
        value = self.get(*names, default=default)
        if isinstance(value, int | float) and 0 <= value < 1:
            return float(value)
        self.fault(names[0], value, "a number from 0 up to 1")
        return 0.0

    def choice(self, *names: str, default: Any, allowed: Mapping[Any, Any]) -> Any:
        """Return what a value stands for, of those that we have."""
        value = self.get(*names, default=default)
        if isinstance(value, str | int | bool | None) and value in allowed:
            return allowed[value]
        self.fault(names[0], value, ", ".join(json.dumps(word) for word in allowed))
        return next(iter(allowed.values()))

    def must_be(self, name: str, *allowed: Any) -> None:
        """Refuse a key that has another value than these; missing is as good as the first."""
        value = self.get(name, default=allowed[0])
        if not any(value == one and type(value) is type(one) for one in allowed):
            self.fault(name, value, ", ".join(json.dumps(one) for one in allowed))

    def pass_over(self, *names: str) -> None:
        """Take note of keys that do not change what the model computes."""
        self._seen.update(names)

    def table(self, name: str) -> "Keys | None":
        """Return a table in the file; None where it is missing or null."""
        value = self.get(name, default=None)
        if value is None:
            return None
        if not isinstance(value, dict):
            self.fault(name, value, "a table, or null")
            return None
        inner = Keys(value, f"{self.where}: {name}")
        inner.faults = self.faults
        return inner

    def fault(self, name: str, value: Any, allowed: str) -> None:
        """Note a value that we have no counterpart of."""
        self.faults.append(
            ConfigError(
                "this model cannot be expressed here",
                where=f"{self.where}: {name}",
                value=json.dumps(value),
                allowed=allowed,
            )
        )

    def finish(self) -> None:
        """Note every key that nobody has asked for and that says something."""
        for name, value in self._values.items():
            known = name in self._seen or name in _FREE or name.startswith("_")
            if not known and value not in (None, False, 0, "", [], {}):
                self.faults.append(
                    ConfigError(
                        "is not known, so it may change what the model computes",
                        where=f"{self.where}: {name}",
                        value=json.dumps(value),
                        cure="take it out of the file if it does not",
                    )
                )
