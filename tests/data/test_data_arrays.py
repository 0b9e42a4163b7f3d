"""Tokens of others: NumPy arrays and Megatron-LM's files, read, written, and refused when wrong."""

import struct
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shardtrain import cli
from shardtrain.config import known_vocab, load_config
from shardtrain.data.config import DataConfig
from shardtrain.data.megatron import read_megatron, write_megatron
from shardtrain.data.prepare import prepare
from shardtrain.data.sources import open_data, open_tokenizer
from shardtrain.data.token_arrays import array_path
from shardtrain.data.tokens import TokenFile, TokenWriter
from shardtrain.errors import DataError

DOCUMENTS = [[65535, 65536, 70000], [128000], [5, 6], list(range(900, 1000))]


def token_file(folder: Path, documents: list[list[int]], vocab_size: int) -> TokenFile:
    with TokenWriter(folder / "a.tokens", vocab_size=vocab_size) as writer:
        for document in documents:
            writer.add(np.array(document, np.int64))
            writer.end_document()
        writer.finish(folder / "a.tokens")
    return TokenFile.open(folder / "a.tokens", verify="never")


def joined(documents: list[list[int]]) -> list[int]:
    return list(chain.from_iterable(documents))


def by_hand(
    folder: Path, dtype: str, code: int, sequences: list[list[int]], bounds: list[int]
) -> Path:
    """The files as Megatron Core's documentation describes them."""
    lengths = np.array([len(s) for s in sequences], "<i4")
    places = (np.cumsum(lengths) - lengths).astype("<i8") * np.dtype(dtype).itemsize
    head = b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, code, len(sequences), len(bounds))
    body = lengths.tobytes() + places.tobytes() + np.array(bounds, "<i8").tobytes()
    (folder / "corpus.idx").write_bytes(head + body)
    (folder / "corpus.bin").write_bytes(np.array(joined(sequences), dtype).tobytes())
    return folder / "corpus.idx"


@pytest.mark.parametrize(("dtype", "code"), [("<u2", 8), ("<i4", 4), ("<i8", 5), ("<u1", 1)])
def test_documents_of_several_sequences(tmp_path: Path, dtype: str, code: int) -> None:
    index = by_hand(tmp_path, dtype, code, [[1, 2], [3], [4, 5, 6]], [0, 2, 3])
    tokens, offsets = read_megatron(index)
    assert tokens.tolist() == [1, 2, 3, 4, 5, 6]
    assert (tokens.dtype, offsets.tolist()) == (np.dtype(dtype), [0, 3, 6])


@pytest.mark.parametrize(("vocab_size", "code", "dtype"), [(65499, 8, "<u2"), (128001, 4, "<i4")])
def test_written_files(tmp_path: Path, vocab_size: int, code: int, dtype: str) -> None:
    """O-24: the type follows the vocabulary; what is written is read back, byte for byte."""
    documents = [[t % vocab_size for t in document] for document in DOCUMENTS]
    file = token_file(tmp_path, documents, vocab_size)
    write_megatron(file, tmp_path / "out.idx")
    tokens, offsets = read_megatron(tmp_path / "out.idx")
    assert tokens.tolist() == joined(documents)
    np.testing.assert_array_equal(offsets, file.offsets)
    expected = by_hand(tmp_path, dtype, code, documents, [0, 1, 2, 3, 4])
    for suffix in (".idx", ".bin"):
        written = (tmp_path / "out").with_suffix(suffix).read_bytes()
        assert written == expected.with_suffix(suffix).read_bytes()


def test_long_documents_are_several_sequences(tmp_path: Path) -> None:
    """A length is 32 bits there."""
    file = token_file(tmp_path, DOCUMENTS, 128001)
    write_megatron(file, tmp_path / "out.idx", longest=40)
    tokens, offsets = read_megatron(tmp_path / "out.idx")
    assert struct.unpack_from("<QQ", (tmp_path / "out.idx").read_bytes(), 18) == (6, 5)
    assert tokens.tolist() == joined(DOCUMENTS)
    np.testing.assert_array_equal(offsets, file.offsets)


def test_paths_that_stand_for_an_array(tmp_path: Path) -> None:
    index = by_hand(tmp_path, "<u2", 8, [[1]], [0, 1])
    for name in ("corpus", "corpus.bin", "corpus.idx"):
        assert array_path(tmp_path / name) == index
    (tmp_path / "corpus").write_text("a text of that name")
    assert array_path(tmp_path / "corpus") is None
    assert array_path(tmp_path / "other.bin") is None


def megatron(folder: Path) -> Path:
    by_hand(folder, "<i4", 4, DOCUMENTS, [0, 1, 2, 3, 4])
    return folder / "corpus"


def numpy(folder: Path) -> Path:
    np.save(folder / "ids.npy", np.array(joined(DOCUMENTS), np.int64))
    return folder / "ids.npy"


@pytest.mark.parametrize("make", [megatron, numpy])
def test_a_run_reads_them(tmp_path: Path, make: Callable[[Path], Path]) -> None:
    """O-24: ids above 16 bits reach the batch; the vocabulary is as large as it must be."""
    path = str(make(tmp_path))
    config = DataConfig(path=path, sequence_length=2, batch_size=4, validation_fraction=0.0)
    config = config.model_copy(update={"cache": str(tmp_path / "cache"), "shuffle": False})
    data, validation, info = open_data(config)
    assert validation is None
    assert (info.vocab_size, info.tokenizer_name) == (128001, "")
    assert data.batch_at(0)["targets"].ravel()[:4].tolist() == [65536, 70000, 128000, 5]
    with pytest.raises(DataError, match="these tokens came without their tokenizer"):
        open_tokenizer(config)
    sections: dict[str, Any] = {
        "run": {"steps": 1},
        "model": {"num_layers": 1, "embed_dim": 16, "num_heads": 2},
        "data": {"path": path, "sequence_length": 2, "batch_size": 8},
        "optimizer": {"learning_rate": 0.1},
    }
    assert known_vocab(load_config(sections)) is None


def test_rows_of_an_array_are_documents(tmp_path: Path) -> None:
    """Bytes are the default tokenizer, and tokens that are bytes may be read as text."""
    rows = np.frombuffer(b"abcdefgh", np.uint8).reshape(2, 4)
    np.save(tmp_path / "ids.npy", rows)
    prepared = prepare([tmp_path / "ids.npy"], tmp_path / "out", validation_fraction=0.0)
    assert prepared.train.offsets.tolist() == [0, 4, 8]
    assert (prepared.train.header.tokenizer, prepared.train.header.vocab_size) == ("bytes", 256)


def test_prepare_writes_them_and_keeps_some_for_validation(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """There and back through the command line, with every document on one side."""
    rows = np.arange(400, dtype=np.int32).reshape(40, 10)
    np.save(tmp_path / "ids.npy", rows)
    words = ["prepare", str(tmp_path / "ids.npy"), "--out", str(tmp_path / "out"), "--megatron"]
    assert cli.main([*words, "--validation_fraction", "0.3"]) == 0
    found = []
    for name in ("train", "validation"):
        tokens, offsets = read_megatron(tmp_path / "out" / f"{name}.idx")
        assert np.all(np.diff(offsets) == 10)
        found.append(tokens.reshape(-1, 10))
    assert 0 < len(found[1]) < 25
    np.testing.assert_array_equal(np.sort(np.concatenate(found), axis=0), rows)
    again = prepare([tmp_path / "out" / "train"], tmp_path / "again", validation_fraction=0.0)
    np.testing.assert_array_equal(again.train.tokens, found[0].ravel())


def corrupt(index: Path, at: int, value: bytes) -> None:
    content = bytearray(index.read_bytes())
    content[at : at + len(value)] = value
    index.write_bytes(content)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda i: i.with_suffix(".bin").unlink(), "the file of its tokens is missing"),
        (lambda i: i.write_bytes(i.read_bytes()[:60]), "this index is cut off"),
        (lambda i: i.write_bytes(i.read_bytes()[:20]), "this is no index of Megatron-LM"),
        (lambda i: i.write_bytes(b"TNTIDX" + bytes(90)), "this is no index of Megatron-LM"),
        (lambda i: i.write_bytes(i.read_bytes() + b"0"), "longer than its head says"),
        (lambda i: corrupt(i, 9, b"\2"), "tokens of another kind"),
        (lambda i: corrupt(i, 17, b"\7"), "tokens of another kind"),
        (lambda i: corrupt(i, 34, b"\xff\xff\xff\xff"), "do not lie one after another"),
        (lambda i: corrupt(i, 34 + 12, b"\1"), "do not lie one after another"),
        (lambda i: corrupt(i, 34 + 36, b"\1"), "its documents do not follow one another"),
        (lambda i: i.with_suffix(".bin").write_bytes(b"12"), "corpus.bin: this file is not what"),
    ],
)
def test_damaged_files_are_refused(
    tmp_path: Path, change: Callable[[Path], Any], words: str
) -> None:
    index = by_hand(tmp_path, "<u2", 8, [[1, 2], [3], [4, 5, 6]], [0, 2, 3])
    change(index)
    with pytest.raises(DataError) as error:
        prepare([index], tmp_path / "out")
    assert words in str(error.value)
    assert str(index.with_suffix("")) in error.value.where


@pytest.mark.parametrize(
    ("array", "words"),
    [
        (np.array([1, -2]), "a token is negative\n  value: -2, at index 1 of all tokens"),
        (np.array([[1, 2], [3, -3]]), "a token is negative\n  value: -3, at index 3 of"),
        (np.array([1.0, 2.0]), "this is no array of tokens\n  value: float64 [2]"),
        (np.zeros((2, 2, 2), int), "this is no array of tokens"),
        (np.array([], int), "this is no array of tokens"),
        (np.array([{}]), "the array cannot be read"),
    ],
)
def test_arrays_that_are_no_tokens(tmp_path: Path, array: np.ndarray, words: str) -> None:
    np.save(tmp_path / "ids.npy", array)
    with pytest.raises(DataError) as error:
        prepare([tmp_path / "ids.npy"], tmp_path / "out")
    assert f"{tmp_path / 'ids.npy'}: {words}" in str(error.value)


@pytest.mark.parametrize("left", [-8, 120, 0])
def test_an_array_that_is_cut_off(tmp_path: Path, left: int) -> None:
    path = tmp_path / "ids.npy"
    np.save(path, np.arange(20))
    path.write_bytes(path.read_bytes()[:left])
    with pytest.raises(DataError, match="the file is shorter than its header says") as error:
        prepare([path], tmp_path / "out")
    assert error.value.where == str(path)
    assert "copy it again" in error.value.cure


def test_text_and_tokens_do_not_mix(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("text")
    np.save(tmp_path / "ids.npy", np.arange(10))
    with pytest.raises(DataError, match="text and arrays of tokens are not read together"):
        prepare([tmp_path / "a.txt", tmp_path / "ids.npy"], tmp_path / "out")


def test_another_tokenizer_is_found_out(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    path = tmp_path / "tokenizer.json"
    words = {"a": 0, "b": 1}
    tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="a")).save(str(path))
    np.save(tmp_path / "ids.npy", np.array([0, 1, 7]))
    with pytest.raises(DataError, match="a token lies outside the vocabulary") as error:
        prepare([tmp_path / "ids.npy"], tmp_path / "out", tokenizer=str(path))
    assert (error.value.value, error.value.allowed) == ("7", "0 to 1 (tokenizer.json)")
    np.save(tmp_path / "ids.npy", np.array([0, 1, 1]))
    out = tmp_path / "out"
    prepared = prepare([tmp_path / "ids.npy"], out, tokenizer=str(path), validation_fraction=0.0)
    assert prepared.train.header.tokenizer == "tokenizer.json"
    assert (out / "tokenizer.json").is_file()
