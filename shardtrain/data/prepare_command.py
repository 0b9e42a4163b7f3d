"""The command `prepare`: a progress bar and a summary around `prepare`."""

from collections.abc import Sequence
from pathlib import Path

from shardtrain.data.examples import BadRecordPolicy
from shardtrain.data.megatron import write_megatron
from shardtrain.data.prepare import Prepared, prepare
from shardtrain.errors import DataError


def prepare_command(
    paths: Sequence[Path | str],
    out: Path | str,
    tokenizer: str,
    validation_fraction: float,
    seed: int,
    column: str = "",
    *,
    megatron: bool = False,
    bad_records: BadRecordPolicy = "stop",
    max_tokens: int = 0,
) -> Prepared:
    """Prepare with a progress bar and a summary on standard error: `shardtrain prepare`.

    Args:
        paths: text files, JSONL, Parquet, MDS, ArrayRecord, folders of them; or arrays of tokens.
        out: the folder to write to.
        tokenizer: `bytes`, the path of a `tokenizer.json`, or `wordpiece:N`.
        validation_fraction: part of the documents kept for validation.
        seed: decides which documents those are.
        column: the field that holds the text, where there are fields.
        megatron: write each file for Megatron-LM too, as `.bin` and `.idx` beside it.
        bad_records: see `prepare`.
        max_tokens: see `prepare`.

    Returns:
        The open token files.

    Raises:
        DataError: see `prepare`.
    """
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    columns = (TextColumn("preparing"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console) as bar:
        task = bar.add_task("prepare", total=None)
        prepared = prepare(
            paths,
            out,
            tokenizer=tokenizer,
            validation_fraction=validation_fraction,
            seed=seed,
            progress=lambda done, total: bar.update(task, completed=done, total=total),
            say=lambda message: bar.console.print(message, markup=False, soft_wrap=True),
            column=column,
            bad_records=bad_records,
            max_tokens=max_tokens,
        )
    for file in (prepared.train, prepared.validation):
        if file is not None:
            if megatron and file.header.masked:
                raise DataError(
                    "Megatron-LM's files cannot say which tokens are learned",
                    where="--megatron",
                    cure="leave it out",
                )
            if megatron:
                write_megatron(file, file.path.with_suffix(".idx"))
            header = file.header
            console.print(
                f"{file.path}: {header.tokens:,} tokens in {header.documents:,} documents, "
                f"{header.dtype}, vocabulary {header.vocab_size:,}",
                markup=False,
                highlight=False,
                soft_wrap=True,
            )
    return prepared
