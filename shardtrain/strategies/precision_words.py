"""The words of `train.precision`: a name, or parts such as "params=float32,compute=bfloat16".

Owns: reading them, what each part is by default, and which parts go together. Does not own: the
dtypes (`precision`). Imports no jax, for a config is checked with it.

A name may come first, and parts after it change it: "bfloat16,moments=bfloat16".
"""

import difflib
import re
from collections.abc import Collection
from dataclasses import dataclass, fields, replace
from typing import Final

from shardtrain.errors import ConfigError

WHERE: Final = "train.precision"


@dataclass(frozen=True)
class Words:
    """What each part of a precision is, by name."""

    params: str
    """What parameters rest in."""
    compute: str
    """What activations are, and products are made of."""
    reduce: str
    """What gradients cross the network in between data shards; "" = as they are made."""
    accumulate: str
    """What gradients of several microbatches are added up in."""
    master: str
    """What an update moves; the optimizer holds it where `params` is another type."""
    moments: str
    """What the optimizer's moments rest in."""
    rounding: str = "nearest"
    """How what is updated comes to a 16-bit type: "nearest" or "stochastic"."""
    products: str = ""
    """What the layers' products with weights are made of: `compute` (""), or "fp8" (each tensor
    scaled by its own largest entry), or "fp8_delayed" (by the largest of the last steps)."""
    first: int = 0
    """Layers at the beginning whose products are not in fp8."""
    last: int = 0
    """Layers at the end whose products are not in fp8."""

    @property
    def kind(self) -> str:
        """What most products are made of, as the table of chips names it."""
        return "float8" if self.products else self.compute

    @property
    def has_master(self) -> bool:
        """Whether the optimizer keeps a wider copy of the parameters."""
        return self.params != self.master


def _of(compute: str) -> Words:
    """16 bits with float32 masters, or one type for all."""
    wide = "float64" if compute == "float64" else "float32"
    return Words(compute, compute, "", wide, wide, wide)


NAMES: Final = {
    "float32": _of("float32"),
    "bfloat16": _of("bfloat16"),
    "float16": _of("float16"),
    "fp8": replace(_of("bfloat16"), products="fp8"),
    "fp8_delayed": replace(_of("bfloat16"), products="fp8_delayed"),
    "float64": _of("float64"),
}
"""One row a named precision."""

ALLOWED: Final = {
    "params": ("float32", "bfloat16", "float16", "float64"),
    "compute": ("float32", "bfloat16", "float16", "float64"),
    "reduce": ("float32", "bfloat16", "float16", "float64"),
    "accumulate": ("float32", "bfloat16", "float64"),
    "master": ("float32", "bfloat16", "float64"),
    "moments": ("float32", "bfloat16", "float64"),
    "rounding": ("nearest", "stochastic"),
    "products": ("fp8", "fp8_delayed"),
    "first": ("0", "1", "2", "..."),
    "last": ("0", "1", "2", "..."),
}
"""Values of each part. What is left out cannot be: in float16 second moments and sums underflow."""
_SPELLINGS: Final = {
    **dict.fromkeys(("bf16", "brain"), "bfloat16"),
    **dict.fromkeys(("fp16", "f16", "half", "16"), "float16"),
    **dict.fromkeys(("fp32", "f32", "tf32", "float", "single", "full", "32"), "float32"),
    **dict.fromkeys(("fp64", "f64", "double", "64"), "float64"),
    **dict.fromkeys(("f8", "float8", "e4m3", "e5m2", "int8", "8"), "fp8"),
}
"""What other trainers write, such as "bf16-mixed" or "fp16"; int8 stands for 8 bits."""
_COUNTS: Final = ("first", "last")
_BYTES: Final = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
SLOWEST_DECAY: Final = 2.0**-8
"""Half a unit in the last place of bfloat16: what a moment must lose in a step to be seen to."""


def parse_precision(text: str) -> Words:
    """Reads `train.precision`.

    Args:
        text: a name of `NAMES`, parts `word=value`, or a name and parts, with commas between.

    Returns:
        Every part.

    Raises:
        ConfigError: a name, part or value that there is not, or parts that do not go together.

    Example:
        >>> parse_precision("params=float32,compute=bfloat16").master
        'float32'
    """
    name, given = _split(text)
    if name:
        words = NAMES[name]
    else:
        compute = given.get("compute", given.get("params", "float32"))
        # Without a name, parameters rest in what is computed with, as in the named ones.
        words = _of(compute)
    compute = given.get("compute", words.compute)
    if compute != words.compute:
        words = replace(_of(compute), products=words.products)
    found = replace(words, **{p: int(v) if p in _COUNTS else v for p, v in given.items()})  # type: ignore[arg-type]
    _refuse_senseless(found, text)
    return found


def words_of(text: str) -> Words | None:
    """The same; None for a precision that is none, for whoever leaves that to another."""
    try:
        return parse_precision(text)
    except ConfigError:
        return None


def _split(text: str) -> tuple[str, dict[str, str]]:
    """The name, perhaps none, and the parts."""
    parts = [part.strip() for part in text.split(",")]
    named = "=" not in parts[0]
    name = parts.pop(0) if named else ""
    if named and name not in NAMES:
        raise ConfigError(
            "unknown precision",
            where=WHERE,
            value=f'"{name}"',
            allowed=f"{_or(NAMES)}, or parts such as params=float32,compute=bfloat16",
            cure=_near(name, NAMES),
        )
    given: dict[str, str] = {}
    for part in parts:
        word, _, value = (piece.strip() for piece in part.partition("="))
        if word not in ALLOWED:
            raise ConfigError(
                "unknown part",
                where=WHERE,
                value=f'"{part}"',
                allowed=f"{_or(ALLOWED)}, then =",
                cure=_near(word, ALLOWED),
            )
        if word in given:
            raise ConfigError(f"{word} is said twice", where=WHERE, value=f'"{text}"')
        if not (value.isdecimal() if word in _COUNTS else value in ALLOWED[word]):
            raise ConfigError(
                f"{word} cannot be that",
                where=WHERE,
                value=f'"{part}"',
                allowed=_or(ALLOWED[word]),
                cure=_near(value, ALLOWED[word]),
            )
        given[word] = value
    return name, given


def _near(text: str, known: Collection[str]) -> str:
    """The cure for a word that is none of the known ones, where one of them is meant."""
    for word in re.findall(r"[a-z0-9]+", text.lower()):
        meant = word if word in known else _SPELLINGS.get(word, "")
        if meant in known:
            return f'did you mean "{meant}"?'
    near = difflib.get_close_matches(text.lower(), known, n=1)
    return f'did you mean "{near[0]}"?' if near else ""


def _refuse_senseless(words: Words, text: str) -> None:
    """Refuses parts that do not go together."""

    def refuse(message: str, cure: str) -> None:
        raise ConfigError(message, where=WHERE, value=f'"{text}"', cure=cure)

    size = _BYTES
    wide = {part.name: getattr(words, part.name) for part in fields(Words)[:6]}
    floats = {kind for kind in wide.values() if kind}
    if "float64" in floats and len(floats) > 1:
        refuse("float64 is for checks and goes with no other type", 'use "float64" alone')
    if size[words.params] < size[words.compute]:
        refuse("parameters rest in fewer bits than are computed with", f"params={words.compute}")
    if size[words.params] == size[words.compute] and words.params != words.compute:
        refuse("each of these types lacks numbers of the other", f"params={words.compute}")
    if size[words.master] < size[words.params]:
        refuse("an update would move fewer bits than rest", f"master={words.params}")
    if words.master == "bfloat16" and words.params == "float16":
        refuse("each of these types lacks numbers of the other", "master=float32")
    if size[words.accumulate] < size[words.compute]:
        refuse("sums have fewer bits than what is summed", f"accumulate={words.compute}")
    if words.accumulate == "bfloat16" and words.compute == "float16":
        refuse("each of these types lacks numbers of the other", "accumulate=float32")
    if words.reduce not in ("", words.compute, words.accumulate):
        refuse(
            "gradients are made in compute or added up in accumulate, and cross the network so",
            f"reduce={words.compute} or reduce={words.accumulate}",
        )
    if words.rounding == "stochastic" and "bfloat16" not in (words.master, words.moments):
        refuse("nothing that is updated rests in 16 bits", "moments=bfloat16 or master=bfloat16")
    if words.products and words.compute not in ("bfloat16", "float32"):
        refuse("fp8 stands for bfloat16 or float32 products", "compute=bfloat16")
    if not words.products and (words.first or words.last):
        refuse("no layer is in fp8", "products=fp8")


def decay_fault(words: Words, beta2: float) -> ConfigError | None:
    """Why a narrow second moment would never decay; None where it does.

    Args:
        words: the precision.
        beta2: the optimizer's; 0 where it has none.
    """
    if words.moments != "bfloat16" or words.rounding == "stochastic":
        return None
    if not 0 < 1 - beta2 < SLOWEST_DECAY:
        return None
    return ConfigError(
        f"in bfloat16 a moment times {beta2:g} rounds to itself, so it would never decay",
        where=f"{WHERE}, optimizer.beta2={beta2:g}",
        value="moments=bfloat16",
        cure="add rounding=stochastic, or optimizer.beta2=0.99",
    )


def _or(words: object) -> str:
    *most, last = list(words)  # type: ignore[call-overload]
    return f"{', '.join(most)} or {last}"
