"""From the `[data]` section of a recommender to training and validation data.

Owns: what `data.path` may be, which process reads what, and the split. Does not own: files
(`interaction_shards`), what is generated (`interaction_generator`), batches (`interactions`).
"""

import hashlib
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np

from shardtrain.data.config import InteractionsConfig
from shardtrain.data.interaction_formats import Schema, misfits
from shardtrain.data.interaction_generator import Generated, generate
from shardtrain.data.interaction_shards import Shard, open_shard
from shardtrain.data.interactions import Interactions, LocalInteractions, Shards, split
from shardtrain.errors import DataError, raise_all
from shardtrain.sharding.processes import Processes, told_by_all

Say = Callable[[str], None]
Data = Interactions | LocalInteractions
Figure = Callable[[Any, Any], float]
"""(scores, labels) -> how good the order is."""
_PATIENCE: Final = 24 * 3600.0
"""Seconds to wait for a process that reads larger shards."""
_NAMES: Final = {
    "movielens": r"(u.*\.data|ratings.*\.(dat|csv))",
    "parquet": r".*\.parquet",
    "csv": r".*\.csv(\.gz)?",
    "criteo": r"(day_\d+|.*\.(txt|tsv))(\.gz)?",
}
"""Files of each format, the first that any matches goes."""


@dataclass(frozen=True)
class InteractionInfo:
    """What the data is."""

    source: str
    digest: str
    vocab_size: int = 1
    """One number is predicted."""


def open_interactions(
    config: InteractionsConfig,
    *,
    sizes: tuple[int, ...],
    num_dense: int,
    microbatches: int,
    seed: int,
    peers: Processes,
    figure: Figure,
    say: Say,
) -> tuple[Data, Data | None, InteractionInfo]:
    """Open a run's interactions.

    Args:
        config: the `[data]` section.
        sizes: rows of each field's table.
        num_dense: numbers of a row that are no ids.
        microbatches: into how many parts a batch is cut.
        seed: decides the order of samples; not which are kept for validation.
        peers: the processes of the run.
        figure: what is said of the best of all models, where it is known.
        say: told what takes long, and what is skipped.

    Returns:
        Training data, validation data (None if there is none) and what they are.

    Raises:
        DataError: the path is missing, empty or damaged, or has too few rows for one batch.
    """
    if config.path:
        source, digest, words, skipped = _read(config, Schema(sizes, num_dense, config), peers, say)
    else:
        made = generate(config.generated, sizes, num_dense)
        source, skipped = Shards([made.records]), 0
        digest = _digest([config.generated, *sizes, num_dense])
        words = f"generated interactions{_best(made, config.validation_fraction, figure)}"
    train, held = split(len(source), config.validation_fraction, shuffle=config.shuffle)
    shown = (config.batch_size, seed, config.shuffle, skipped)
    data: Data = Interactions(source, train, *shown)
    validation: Data | None = replace(data, part=held) if held.count else None
    if config.path and config.shards == "local":
        mine = [train.count, held.count, digest]
        counts = told_by_all(peers, "interactions", mine, _PATIENCE)
        digest = _digest([count[2] for count in counts])
        each, each_held = (tuple(count[use] for count in counts) for use in range(2))
        own = LocalInteractions(source, train, *shown, each, peers.index, microbatches)
        data, validation = own, None
        if any(each_held):
            validation = replace(own, part=held, counts=each_held)
    if data.num_samples < config.batch_size:
        raise DataError(
            f"too few interactions for one batch of {config.batch_size}",
            where=f'data.path="{config.path}"',
            value=f"{data.num_samples}",
            cure="use more, or a smaller data.batch_size",
        )
    return data, validation, InteractionInfo(words, digest)


def _read(
    config: InteractionsConfig, schema: Schema, peers: Processes, say: Say
) -> tuple[Shards, str, str, int]:
    """Rows of files, their digest, what they are in words, and how many could not be used."""
    files = _files(config)
    kind = _format(config, files)
    raise_all(misfits(kind, config, fields=len(schema.sizes), num_dense=schema.num_dense))
    if config.shards == "local":
        files = _own(files, peers)
    # Each begins elsewhere, so that processes that share a cache share out the reading.
    turn = 0 if config.shards == "local" else len(files) * peers.index // peers.count
    opened = {f: open_shard(f, kind, schema, say) for f in (*files[turn:], *files[:turn])}
    shards = [opened[file] for file in files]
    skipped = _tell(files, shards, say)
    digest = _digest([shard.digest for shard in shards])
    return Shards([shard.records for shard in shards]), digest, f"{kind}, {config.path}", skipped


def _digest(values: list[Any]) -> str:
    return hashlib.blake2b(repr(values).encode(), digest_size=16).hexdigest()


def _best(made: Generated, fraction: float, figure: Figure) -> str:
    """How well the truth itself does on what is held out, in words."""
    held = split(len(made.records), fraction, shuffle=True)[1]
    if not held.count:
        return ""
    rows = held.at(np.arange(held.count, dtype=np.int64))
    best = figure(made.odds[rows], made.records["label"][rows])
    return f"; the true probabilities have an AUC of {best:.4f} on those for validation"


def _files(config: InteractionsConfig) -> list[Path]:
    path = Path(config.path).expanduser()
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise DataError(
            "there is no such file or folder",
            where="data.path",
            value=str(path),
            cure="check the path; relative paths start at the current folder",
        )
    return sorted(file for file in path.rglob("*") if file.is_file())


def _format(config: InteractionsConfig, files: list[Path]) -> str:
    """The format; `files` keeps those that have it."""
    single = len(files) == 1 and files[0] == Path(config.path).expanduser()
    if config.format != "auto" and single:
        return config.format
    for kind, pattern in _NAMES.items():
        found = [file for file in files if re.fullmatch(pattern, file.name)]
        if found and config.format in ("auto", kind):
            files[:] = found
            return kind
    raise DataError(
        "there is no file of a known name",
        where="data.path",
        value=config.path,
        allowed="u.data, ratings.dat, ratings.csv; .csv; .parquet; .tsv, .txt or day_0",
        cure="say data.format, and give one file",
    )


def _own(files: list[Path], peers: Processes) -> list[Path]:
    if len(files) < peers.count:
        raise DataError(
            f"there are fewer shards than processes, {peers.count}",
            where='data.shards="local"',
            value=str(len(files)),
            cure='cut the data into more files, or use "global"',
        )
    return files[peers.index :: peers.count]


def _tell(files: list[Path], shards: list[Shard], say: Say) -> int:
    """Says what was skipped, and counts it."""
    for file, shard in zip(files, shards, strict=True):
        if shard.skipped:
            told = "; ".join(shard.told)
            more = "" if shard.skipped <= len(shard.told) else "; ..."
            say(f"skipped {shard.skipped:,} rows of {file}: {told}{more}")
    return sum(shard.skipped for shard in shards)
