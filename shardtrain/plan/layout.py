"""Which layouts are legal: sizes that must divide, named with the nearest sizes that would.

Owns: every check between a model, its data and a mesh that needs no device and no array; pure
functions of sections, so that the planner can ask for the faults of a layout that nobody runs.
Does not own: reading configs (`shardtrain.config`), tables (`shardtrain.sharding.rules`), bytes.
"""

import math
from collections.abc import Iterator, Mapping, Sequence

from shardtrain.data.config import DataConfig
from shardtrain.errors import ConfigError
from shardtrain.models.config import TransformerConfig
from shardtrain.sharding.config import ShardingConfig

Degrees = Mapping[str, int]
"""Degree of each mesh axis."""


def divisors(number: int, near: int, count: int = 4) -> list[int]:
    """Return the divisors of a number that are nearest to a value.

    Args:
        number: What is to be divided.
        near: The value that was asked for.
        count: How many to return at most.

    Returns:
        Divisors in ascending order.

    Example:
        >>> divisors(8, near=3)
        [1, 2, 4, 8]
    """
    return sorted(sorted(all_divisors(number), key=lambda d: abs(math.log(d / near)))[:count])


def all_divisors(number: int) -> list[int]:
    """Return the divisors of a number in ascending order.

    Example:
        >>> all_divisors(12)
        [1, 2, 3, 4, 6, 12]
    """
    small = [d for d in range(1, math.isqrt(number) + 1) if number % d == 0]
    return sorted({*small, *(number // d for d in small)})


def multiples(unit: int, near: int) -> list[int]:
    """Return the multiples of a unit on both sides of a value.

    Args:
        unit: What the value should be divisible by.
        near: The value that was asked for.

    Returns:
        One or two multiples in ascending order.

    Example:
        >>> multiples(4, near=10)
        [8, 12]
    """
    below = near // unit * unit
    return [value for value in (below, below + unit) if value > 0]


def listed(values: Sequence[object]) -> str:
    """Return values as a phrase.

    Example:
        >>> listed([1, 2, 4])
        '1, 2 or 4'
    """
    words = [str(value) for value in values]
    return " or ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)


def model_faults(
    model: TransformerConfig, data: DataConfig, *, settled: bool = False
) -> list[ConfigError]:
    """Return what is impossible about a model, whatever the mesh.

    Args:
        model: The model's section.
        data: The data's section; the sequence must fit the position table.
        settled: Whether the model is that of weights, so that only the data can change.

    Returns:
        One error per fault, none when all is well.
    """
    faults = []
    heads, kv_heads = model.num_heads, model.kv_heads
    if not model.head_dim and model.embed_dim % heads:
        faults.append(
            ConfigError(
                f"model.embed_dim={model.embed_dim} is not divisible by {heads}; "
                f"use {listed(divisors(model.embed_dim, heads))}, or set model.head_dim",
                where=f"model.num_heads={heads}",
            )
        )
    if heads % kv_heads:
        faults.append(
            ConfigError(
                f"model.num_heads={heads} is not divisible by {kv_heads}; "
                f"use {listed(divisors(heads, kv_heads))}",
                where=f"model.num_kv_heads={kv_heads}",
            )
        )
    if model.position == "rope" and model.head_size % 2:
        faults.append(
            ConfigError(
                f"rotations pair the entries of a head, and its width is {model.head_size}; "
                f"use {listed([model.head_size - 1, model.head_size + 1])} as model.head_dim",
                where='model.position="rope"',
            )
        )
    if model.rope_scaling == "llama3" and model.rope_high <= model.rope_low:
        faults.append(
            ConfigError(
                f"model.rope_low={model.rope_low} is not below it; Llama 3.1 has 1 and 4",
                where=f"model.rope_high={model.rope_high}",
            )
        )
    if model.attention == "cudnn" and model.attention_dropout:
        faults.append(
            ConfigError(
                f"model.attention_dropout={model.attention_dropout} is not made in that kernel; "
                'use 0, or model.attention="auto"',
                where='model.attention="cudnn"',
            )
        )
    if model.position == "learned" and 0 < model.max_length < data.sequence_length:
        faults.append(_too_long(model.max_length, data.sequence_length, settled=settled))
    return faults


def _too_long(positions: int, length: int, *, settled: bool) -> ConfigError:
    """A sequence that the table of positions does not have; the cure is what is still open."""
    if settled:
        return ConfigError(
            f"the weights have {positions} positions; use {positions} or less",
            where=f"data.sequence_length={length}",
        )
    return ConfigError(
        f"data.sequence_length={length} is longer than the position table; use {length} or more, "
        f"or 0 for just that; or data.sequence_length={positions} or less",
        where=f"model.max_length={positions}",
    )


def layout_faults(
    model: TransformerConfig,
    data: DataConfig,
    sharding: ShardingConfig,
    degrees: Degrees,
    microbatches: int,
    vocab_size: int | None,
) -> list[ConfigError]:
    """Return why a model cannot be laid out over a mesh.

    Args:
        model: The model's section.
        data: The data's section.
        sharding: Rules and sequence parallelism; a replaced rule counts with its own mesh axes.
        degrees: Degree of each mesh axis; `data = -1` (still open) is left out of account.
        microbatches: Parts that the global batch is worked off in.
        vocab_size: Tokens of the tokenizer, for when the model does not set its own; None when that
            is not known yet, which leaves the vocabulary out of account.

    Returns:
        One error per fault, none when the layout is legal.
    """
    tensor = ("tensor",)
    length = ("context", "tensor") if sharding.sequence_parallel else ("context",)

    def split(row: str, default: tuple[str, ...]) -> dict[str, int]:
        return _split(sharding, degrees, row, default)

    checks = (
        _divides(split("heads", tensor), "model.num_heads", model.num_heads),
        _divides(split("kv_heads", tensor), "model.num_kv_heads", model.kv_heads)
        if model.kv_heads != model.num_heads
        else None,
        _divides(split("mlp", tensor), "model.mlp_dim", model.mlp_size),
        _vocabulary(model, split("vocab", tensor), vocab_size),
        _stages(sharding, degrees),
        _sequence(split("length", ("context",)), data.sequence_length),
        _sequence(split("residual_length", length), data.sequence_length),
        *_context(model, data, sharding, degrees),
        _batch(data.batch_size, split("batch", ("replica", "data")), microbatches),
    )
    faults = [fault for fault in checks if fault is not None]
    return [fault for i, fault in enumerate(faults) if str(fault) not in map(str, faults[:i])]


def batch_faults(
    batch_size: int, sharding: ShardingConfig, degrees: Degrees, microbatches: int
) -> list[ConfigError]:
    """Return why a batch cannot be cut into microbatches and shared out over a mesh.

    Args:
        batch_size: Samples of a global batch.
        sharding: Rules that replace others.
        degrees: Degree of each mesh axis.
        microbatches: Parts that the batch is worked off in.

    Returns:
        One error, or none.
    """
    split = _split(sharding, degrees, "batch", ("replica", "data"))
    fault = _batch(batch_size, split, microbatches)
    return [] if fault is None else [fault]


def vocabulary_faults(
    model: TransformerConfig,
    sharding: ShardingConfig,
    degrees: Degrees,
    vocab_size: int,
    *,
    counted: bool = False,
) -> list[ConfigError]:
    """Return why a vocabulary that only the data has told cannot be split over a mesh.

    Args:
        model: The model's section.
        sharding: Rules that replace others.
        degrees: Degree of each mesh axis.
        vocab_size: Tokens of the data.
        counted: Whether that is the largest token there and one, since nobody knows the tokenizer.

    Returns:
        One error, or none.
    """
    fault = _vocabulary(model, _split(sharding, degrees, "vocab", ("tensor",)), vocab_size)
    if fault is None:
        return []
    if counted and not model.vocab_size:
        fault.message += (
            f". The data has no tokenizer, so its {vocab_size} tokens are the largest of them and "
            "one; data.tokenizer or model.vocab_size says how many there are"
        )
    return [fault]


def _split(
    sharding: ShardingConfig, degrees: Degrees, row: str, default: tuple[str, ...]
) -> dict[str, int]:
    axes = sharding.rules.get(row, list(default))
    names = [axes] if isinstance(axes, str) else list(axes or ())
    return {name: degrees[name] for name in names if degrees.get(name, 1) > 1}


def _product(split: Mapping[str, int]) -> int:
    return math.prod(split.values())


def _written(split: Mapping[str, int]) -> str:
    return " x ".join(f"mesh.{name}={degree}" for name, degree in split.items())


def _divides(split: Mapping[str, int], name: str, size: int) -> ConfigError | None:
    """A size that the mesh splits; the cure is another degree."""
    degree = _product(split)
    if size % degree == 0:
        return None
    return ConfigError(
        f"{name}={size} is not divisible by {degree}; use {listed(divisors(size, degree))}",
        where=_written(split),
    )


def _vocabulary(
    model: TransformerConfig, split: Mapping[str, int], vocab_size: int | None
) -> ConfigError | None:
    """The rows of the embedding; the cure is to pad them."""
    size, degree = model.vocab_size or vocab_size, _product(split)
    if size is None or model.padded_vocab(size) % degree == 0:
        return None
    whole = math.lcm(model.vocab_multiple, degree)
    rows = model.padded_vocab(size)
    return ConfigError(
        f"the vocabulary's {rows} rows are not divisible by {degree}; set model.vocab_multiple = "
        f"{whole} (pads to {-(-size // whole) * whole}), or use {listed(divisors(rows, degree))}",
        where=_written(split),
    )


def _stages(sharding: ShardingConfig, degrees: Degrees) -> ConfigError | None:
    """Rules that a pipeline cannot follow: it shares out layers and samples itself."""
    piped = degrees.get("pipeline", 1) > 1
    for name, axes in sharding.rules.items():
        names = {axes} if isinstance(axes, str) else set(axes or ())
        if name == "layers":
            legal = names == {"pipeline"}
        elif not piped:
            legal = True
        elif name == "batch":
            legal = names == {"replica", "data"}
        elif name in ("length", "residual_length"):
            legal = not names & {"pipeline", "replica", "data"}
        else:
            legal = not names & {"pipeline", "replica"}
        if not legal:
            return ConfigError(
                "a pipeline shares layers among stages and samples among data shards, and nothing "
                "else among either",
                where=f"sharding.rules.{name}",
                value=str(axes),
                cure="leave this rule out",
            )
    return None


def _sequence(split: Mapping[str, int], length: int) -> ConfigError | None:
    """The length of a sequence; the cure is another length."""
    degree = _product(split)
    if length % degree == 0:
        return None
    return ConfigError(
        f"data.sequence_length={length} is not divisible by {degree}; "
        f"use {listed(multiples(degree, length))}",
        where=_written(split),
    )


def _context(
    model: TransformerConfig, data: DataConfig, sharding: ShardingConfig, degrees: Degrees
) -> Iterator[ConfigError]:
    """What attention over a split sequence needs."""
    degree = degrees.get("context", 1)
    if degree == 1:
        return
    where = f"mesh.context={degree}"
    if model.attention not in ("auto", "ring", "ulysses"):
        yield ConfigError(
            f'model.attention="{model.attention}" needs whole sequences; use "auto", "ring" or '
            '"ulysses", or mesh.context=1',
            where=where,
        )
    for name, axes in sharding.rules.items():
        names = {axes} if isinstance(axes, str) else set(axes or ())
        if name in ("length", "residual_length") or "context" in names:
            yield ConfigError(
                "attention shares positions over `context` itself, and nothing else over it",
                where=f"sharding.rules.{name}",
                value=str(axes),
                cure="leave this rule out, or use mesh.context=1",
            )
    length, heads = data.sequence_length, model.kv_heads
    if model.attention != "ulysses":
        if length % degree == 0 and length % (2 * degree):
            yield ConfigError(
                f"data.sequence_length={length} is not divisible by {2 * degree}, and each device "
                f"of a ring has two chunks of it; use {listed(multiples(2 * degree, length))}",
                where=where,
            )
        if degree % 2 and degrees.get("pipeline", 1) > 1:
            yield ConfigError(
                "in a pipeline devices of a ring send in pairs; use an even degree, or "
                'model.attention="ulysses"',
                where=where,
            )
        return
    tensor = degrees.get("tensor", 1)
    each = heads // tensor
    if heads % tensor == 0 and each % degree:
        of = f"model.num_kv_heads={heads}" + (f" / mesh.tensor={tensor}" if tensor > 1 else "")
        yield ConfigError(
            f'{of} is not divisible by {degree}, and model.attention="ulysses" shares them out; '
            f'use {listed(divisors(each, degree))}, or model.attention="ring"',
            where=where,
        )


def _batch(batch_size: int, split: Mapping[str, int], microbatches: int) -> ConfigError | None:
    """A batch that is cut into microbatches and each of them over the mesh."""
    unit = microbatches * _product(split)
    if batch_size % unit == 0:
        return None
    parts = [f"train.microbatches={microbatches}"] if microbatches > 1 else []
    parts += [_written(split)] if split else []
    product = " x ".join(parts)
    return ConfigError(
        f"not divisible by {product}{f' = {unit}' if ' x ' in product else ''}; "
        f"use {listed(multiples(unit, batch_size))}",
        where=f"data.batch_size={batch_size}",
    )
