"""Preparation: the split, bounded memory, tokenizers, and what is refused."""

import errno
import json
import os
import sys
import tracemalloc
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from shardtrain.data import documents, prepare
from shardtrain.data.prepare import open_prepared
from shardtrain.data.prepare_command import prepare_command
from shardtrain.data.tokenizer import (
    ByteTokenizer,
    encode_text,
    load_tokenizer,
    tokenizer_beside,
)
from shardtrain.data.tokens import Header, TokenFile
from shardtrain.errors import DataError


def read(file: TokenFile | None) -> list[bytes]:
    assert file is not None
    bounds = file.offsets.tolist()
    return [file.tokens[a:b].tobytes() for a, b in pairwise(bounds)]


def corpus(path: Path, count: int) -> list[bytes]:
    rows = [f"document {i} " * (i % 7 + 1) for i in range(count)]
    path.write_text("".join(json.dumps({"text": row}) + "\n" for row in rows))
    return [row.encode() for row in rows]


def test_split_by_document(tmp_path: Path) -> None:
    rows = corpus(tmp_path / "a.jsonl", 400)
    done: list[tuple[int, int]] = []
    prepared = prepare.prepare(
        [tmp_path / "a.jsonl"],
        tmp_path / "out",
        validation_fraction=0.25,
        progress=lambda *numbers: done.append(numbers),
    )
    train, validation = read(prepared.train), read(prepared.validation)
    assert sorted(train + validation) == sorted(rows)
    assert train == [row for row in rows if row in set(train)]
    assert 60 < len(validation) < 140
    size = (tmp_path / "a.jsonl").stat().st_size
    assert done[-1] == (size, size)
    other = prepare.prepare(
        [tmp_path / "a.jsonl"], tmp_path / "other", validation_fraction=0.25, seed=1
    )
    assert read(other.validation) != validation
    again = prepare.prepare([tmp_path / "a.jsonl"], tmp_path / "again", validation_fraction=0.25)
    assert again.train.header == prepared.train.header
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert names == {".lock", "train.tokens", "validation.tokens"}


def test_equal_documents_are_on_one_side(tmp_path: Path) -> None:
    rows = corpus(tmp_path / "a.jsonl", 60)
    text = (tmp_path / "a.jsonl").read_text()
    (tmp_path / "a.jsonl").write_text(text * 3)
    prepared = prepare.prepare([tmp_path / "a.jsonl"], tmp_path / "out", validation_fraction=0.3)
    train, validation = read(prepared.train), read(prepared.validation)
    assert not set(train) & set(validation)
    assert sorted(train + validation) == sorted(rows * 3)


def test_one_document_gives_its_tail(tmp_path: Path) -> None:
    text = b"0123456789" * 100
    (tmp_path / "a.txt").write_bytes(text)
    for seed in range(5):  # whichever side the document falls to
        prepared = prepare.prepare(
            [tmp_path / "a.txt"], tmp_path / "out", validation_fraction=0.3, seed=seed
        )
        assert read(prepared.train) == [text[:700]]
        assert read(prepared.validation) == [text[700:]]


def test_few_documents_stay_whole(tmp_path: Path) -> None:
    rows = [b"a" * 100, b"b" * 50, b"c" * 60, b"d" * 30]
    for number, row in enumerate(rows):
        (tmp_path / f"{number}.txt").write_bytes(row)
    files = documents.find_files([tmp_path])
    out = tmp_path / "out"
    out.mkdir()
    split = prepare.Split(ByteTokenizer(), 1e-9)
    prepared = prepare.prepare_files(files, out, split, reuse=False)
    assert read(prepared.train) == rows[:3]
    assert read(prepared.validation) == rows[3:]


def test_no_validation(tmp_path: Path) -> None:
    rows = corpus(tmp_path / "a.jsonl", 50)
    out = tmp_path / "out"
    prepare.prepare([tmp_path / "a.jsonl"], out, validation_fraction=0.5)
    prepared = prepare.prepare([tmp_path / "a.jsonl"], out, validation_fraction=0.0)
    assert prepared.validation is None
    assert read(prepared.train) == rows
    assert not (out / "validation.tokens").exists()
    for fraction in (-0.1, 1.0):
        with pytest.raises(DataError, match="impossible part of the documents"):
            prepare.prepare([tmp_path / "a.jsonl"], out, validation_fraction=fraction)


def test_memory_is_bounded(tmp_path: Path) -> None:
    """One text file and one with many rows, 40 MB each, in the memory of a few pieces."""
    line = b"a line of text that is long enough to be one\n"
    block = line * ((1 << 20) // len(line))
    with (tmp_path / "a.txt").open("wb") as one, (tmp_path / "b.jsonl").open("wb") as many:
        for _ in range(40):
            one.write(block)
            many.write(json.dumps({"text": block.decode()}).encode() + b"\n")
    tracemalloc.start()
    try:
        prepared = prepare.prepare([tmp_path], tmp_path / "out", validation_fraction=0.0)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert prepared.train.header.tokens == 80 * len(block)
    assert prepared.train.header.documents == 41
    assert peak < 40 * documents.PIECE


def test_files_of_two_preparations_are_not_mixed(tmp_path: Path) -> None:
    corpus(tmp_path / "a.jsonl", 100)
    one, two = tmp_path / "one", tmp_path / "two"
    prepare.prepare([tmp_path / "a.jsonl"], one, validation_fraction=0.3)
    prepare.prepare([tmp_path / "a.jsonl"], two, validation_fraction=0.3, seed=1)
    (two / "validation.tokens").replace(one / "validation.tokens")
    with pytest.raises(DataError, match="not made together with"):
        open_prepared(one)
    (one / "validation.tokens").unlink()
    with pytest.raises(DataError, match="cannot be read"):
        open_prepared(one)


def test_no_text(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": ""}\n{"text": null}\n')
    with pytest.raises(DataError, match="there is no text in it") as error:
        prepare.prepare([tmp_path / "a.jsonl"], tmp_path / "out")
    assert "1 files without a document" in error.value.value
    assert {path.name for path in (tmp_path / "out").iterdir()} == {".lock"}


def test_a_folder_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    corpus(tmp_path / "a.jsonl", 3)
    with pytest.raises(DataError, match="folder cannot be created") as error:
        prepare.prepare([tmp_path / "a.jsonl"], tmp_path / "a.jsonl" / "out")
    assert error.value.where == "out"
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    with pytest.raises(DataError, match="folder cannot be written"):
        prepare.prepare([tmp_path / "a.jsonl"], tmp_path / "out")


def test_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    corpus(tmp_path / "a.jsonl", 30)

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(prepare.TokenWriter, "add", full)
    with pytest.raises(DataError, match="No space left on device") as error:
        prepare.prepare([tmp_path / "a.jsonl"], tmp_path / "out")
    assert "make room" in error.value.cure
    assert {path.name for path in (tmp_path / "out").iterdir()} == {".lock"}


def test_command_shows_a_bar_and_a_summary(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "400")
    corpus(tmp_path / "a.jsonl", 30)
    (tmp_path / "b.bin").write_bytes(b"\0")
    prepared = prepare_command([tmp_path], tmp_path / "out", "bytes", 0.2, 0)
    out, err = capsys.readouterr()
    assert out == ""
    assert "skipped 1 files" in err
    header = prepared.train.header
    assert f"{header.tokens:,} tokens in {header.documents} documents, uint8" in err


def test_bytes_round_trip(tmp_path: Path) -> None:
    tokenizer = load_tokenizer("bytes")
    tokens = encode_text(tokenizer, "zoë\n")
    assert tokens.tolist() == list("zoë\n".encode())
    assert tokenizer.decode(tokens) == "zoë\n"
    assert tokenizer.decode([0xC3, 300, 0x61]) == "\ufffda"
    header = Header("uint8", 256, 1, 1, "", tokenizer="bytes")
    assert tokenizer_beside(tmp_path / "train.tokens", header) == tokenizer


def test_unknown_tokenizer(tmp_path: Path) -> None:
    for name in ("gpt2", str(tmp_path)):
        with pytest.raises(DataError, match="no such tokenizer") as error:
            load_tokenizer(name)
        assert error.value.where == "data.tokenizer"
        assert error.value.allowed == "bytes, or the path of a tokenizer.json"


def test_tokenizers_not_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(DataError, match="needs the package `tokenizers`") as error:
        load_tokenizer(str(tmp_path))
    assert 'pip install "shardtrain[hf]"' in error.value.cure


@pytest.fixture
def tokenizer_file(tmp_path: Path) -> Path:
    tokenizers = pytest.importorskip("tokenizers")
    words = ["<unk>", "<s>", "</s>", *(f"w{i}" for i in range(400))]
    tokenizer = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>")
    )
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 1)]
    )
    tokenizer.add_special_tokens(["<s>", "</s>"])
    path = tmp_path / "given" / "tokenizer.json"
    path.parent.mkdir()
    tokenizer.save(str(path))
    return path


def test_tokenizer_json(tmp_path: Path, tokenizer_file: Path) -> None:
    tokenizer = load_tokenizer(str(tokenizer_file.parent))
    assert (tokenizer.vocab_size, tokenizer.begin, tokenizer.end) == (403, (1,), (2,))
    assert encode_text(tokenizer, "w0 w5").tolist() == [1, 3, 8]
    assert tokenizer.decode([3, 8, 5000]) == "w0 w5"
    source = tmp_path / "a.jsonl"
    source.write_text('{"text": "w0 w1"}\n{"text": ""}\n{"text": "w399"}\n')
    out = tmp_path / "out"
    prepared = prepare.prepare(
        [source], out, tokenizer=str(tokenizer_file), validation_fraction=0.0
    )
    assert prepared.train.tokens.tolist() == [1, 3, 4, 2, 1, 402, 2]
    assert prepared.train.offsets.tolist() == [0, 4, 7]
    assert prepared.train.header.dtype == "uint16"
    beside = tokenizer_beside(prepared.train.path, prepared.train.header)
    assert beside.decode(prepared.train.tokens[:4]) == "w0 w1"
    (out / "tokenizer.json").write_text(tokenizer_file.read_text() + "\n")
    with pytest.raises(DataError, match="not the tokenizer that made"):
        tokenizer_beside(prepared.train.path, prepared.train.header)
    tokenizer_file.write_text("{}")
    with pytest.raises(DataError, match="tokenizer cannot be read"):
        load_tokenizer(str(tokenizer_file))


def test_a_text_in_pieces_begins_and_ends_once(
    tmp_path: Path, tokenizer_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(documents, "PIECE", 16)
    source = tmp_path / "a.txt"
    source.write_text("w0 w1\n" * 50)
    prepared = prepare.prepare(
        [source], tmp_path / "out", tokenizer=str(tokenizer_file), validation_fraction=0.0
    )
    np.testing.assert_array_equal(prepared.train.tokens, [1, *[3, 4] * 50, 2])
