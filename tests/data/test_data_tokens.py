"""The token file: what is written is read back, and everything damaged is refused."""

import os
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardtrain.data import cache as cache_module
from shardtrain.data.language import LanguageData, language_data
from shardtrain.data.tokens import (
    HEADER_BYTES,
    Header,
    TokenFile,
    TokenWriter,
    dtype_for,
    is_token_file,
    read_header,
)
from shardtrain.errors import DataError


def write(path: Path, documents: list[list[int]], vocab_size: int = 256) -> Header:
    with TokenWriter(path, vocab_size=vocab_size) as writer:
        for document in documents:
            writer.add(np.array(document, np.int64))
            writer.end_document()
        return writer.finish(path)


def age(path: Path) -> None:
    """Make a file old enough for its verification to be remembered."""
    past = time.time_ns() - 10**10
    os.utime(path, ns=(past, past))


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


@pytest.mark.parametrize(
    ("vocab_size", "dtype"),
    [(1, "uint8"), (256, "uint8"), (257, "uint16"), (65536, "uint16"), (65537, "uint32")],
)
def test_smallest_dtype(vocab_size: int, dtype: str) -> None:
    assert dtype_for(vocab_size) == np.dtype(dtype)


@pytest.mark.parametrize("vocab_size", [0, 2**31 + 1])
def test_impossible_vocabulary(vocab_size: int) -> None:
    with pytest.raises(DataError, match="impossible vocabulary size"):
        dtype_for(vocab_size)


def test_large_ids_are_not_wrapped(tmp_path: Path, cache: Path) -> None:
    """O-24."""
    ids = [65535, 65536, 70000, 128000]
    header = write(tmp_path / "a.tokens", [ids], vocab_size=128001)
    file = TokenFile.open(tmp_path / "a.tokens", cache=cache)
    assert header.dtype == "uint32"
    assert file.header == header
    assert file.tokens.tolist() == ids
    data = LanguageData(file.tokens, file.offsets, 128001, sequence_length=3, batch_size=1)
    assert data.batch_at(0)["targets"].tolist() == [ids[1:]]


def test_another_dtype_is_refused(tmp_path: Path, cache: Path) -> None:
    """O-24: reading with another dtype, and a header that names one we do not have."""
    path = tmp_path / "a.tokens"
    header = write(path, [[1, 2, 70000]], vocab_size=128001)
    with pytest.raises(DataError, match="another dtype") as error:
        TokenFile.open(path, dtype=np.dtype(np.uint16), cache=cache)
    assert (error.value.value, error.value.allowed) == ("uint32", "uint16")
    TokenFile.open(path, dtype=np.dtype(np.uint32), cache=cache)
    block = Header(**{**vars(header), "dtype": "uint8"})
    body = path.read_bytes()[HEADER_BYTES:]
    renamed = _with_text(block.pack(), '"uint8"', '"int64"')
    path.write_bytes(renamed + body)
    with pytest.raises(DataError, match="another dtype") as error:
        TokenFile.open(path, cache=cache)
    assert error.value.allowed == "uint8, uint16, uint32"


def _with_text(block: bytes, old: str, new: str) -> bytes:
    import hashlib

    assert len(old) == len(new)
    body = block[:-16].replace(old.encode(), new.encode())
    return body + hashlib.sha256(body).digest()[:16]


def test_tokens_outside_the_vocabulary(tmp_path: Path, cache: Path) -> None:
    path = tmp_path / "a.tokens"
    for bad in (-1, 10):
        with TokenWriter(path, vocab_size=10) as writer:
            with pytest.raises(DataError, match="outside the vocabulary") as error:
                writer.add(np.array([0, bad]))
            assert error.value.allowed == "0 to 9"
    assert list(tmp_path.iterdir()) == []
    header = write(path, [[1, 2, 9]], vocab_size=10)
    smaller = Header(**{**vars(header), "vocab_size": 9})
    path.write_bytes(smaller.pack() + path.read_bytes()[HEADER_BYTES:])
    with pytest.raises(DataError, match="tokens outside its vocabulary"):
        TokenFile.open(path, cache=cache)


def test_bad_checksum(tmp_path: Path, cache: Path) -> None:
    path = tmp_path / "a.tokens"
    write(path, [list(range(100)), list(range(50))])
    good = path.read_bytes()
    for place in (HEADER_BYTES, HEADER_BYTES + 149, len(good) - 10):
        damaged = bytearray(good)
        damaged[place] ^= 1
        path.write_bytes(damaged)
        with pytest.raises(DataError, match="damaged: bad checksum") as error:
            TokenFile.open(path, cache=cache)
        assert error.value.where == str(path)
        assert "prepare" in error.value.cure
    for place in (20, HEADER_BYTES - 1):
        damaged = bytearray(good)
        damaged[place] ^= 1
        path.write_bytes(damaged)
        with pytest.raises(DataError, match="header is damaged: bad checksum"):
            TokenFile.open(path, verify="never", cache=cache)


@given(cut=st.floats(0, 1, exclude_max=True))
def test_truncated_is_always_refused(tmp_path_factory: pytest.TempPathFactory, cut: float) -> None:
    path = tmp_path_factory.mktemp("truncated") / "a.tokens"
    write(path, [list(range(100))] * 3)
    content = path.read_bytes()
    path.write_bytes(content[: int(cut * len(content))])
    with pytest.raises(DataError, match=r"truncated|not a token file"):
        TokenFile.open(path, verify="never")


def test_longer_than_the_header_says(tmp_path: Path) -> None:
    path = tmp_path / "a.tokens"
    write(path, [[1, 2, 3]])
    path.write_bytes(path.read_bytes() + b"\0")
    with pytest.raises(DataError, match="longer than its header says"):
        read_header(path)


def test_other_files(tmp_path: Path) -> None:
    path = tmp_path / "a.tokens"
    with pytest.raises(DataError, match="cannot be read: No such file"):
        TokenFile.open(path)
    np.arange(5000, dtype=np.uint16).tofile(path)
    with pytest.raises(DataError, match="not a token file"):
        TokenFile.open(path)
    assert not is_token_file(path)
    write(path, [])
    with pytest.raises(DataError, match="token file is empty"):
        TokenFile.open(path)
    assert is_token_file(path)
    block = bytearray(path.read_bytes())
    block[8] = 2
    path.write_bytes(block)
    with pytest.raises(DataError, match="another format version"):
        TokenFile.open(path)


def test_verification_is_remembered(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.tokens"
    write(path, [[1, 2, 3]])
    calls: list[Path] = []
    verify = TokenFile.verify
    monkeypatch.setattr(TokenFile, "verify", lambda file: (calls.append(file.path), verify(file)))
    TokenFile.open(path, cache=cache)
    TokenFile.open(path, cache=cache)
    assert len(calls) == 2  # too young to be told from a file written again in the same instant
    age(path)
    TokenFile.open(path, cache=cache)
    TokenFile.open(path, cache=cache)
    assert len(calls) == 3
    TokenFile.open(path, verify="always", cache=cache)
    assert len(calls) == 4
    content = bytearray(path.read_bytes())
    content[HEADER_BYTES] ^= 1
    path.write_bytes(content)
    with pytest.raises(DataError, match="bad checksum"):
        TokenFile.open(path, cache=cache)


def test_a_cache_that_cannot_be_written_is_no_fault(tmp_path: Path) -> None:
    path = tmp_path / "a.tokens"
    write(path, [[1, 2, 3]])
    age(path)
    blocked = tmp_path / "file"
    blocked.write_text("in the way")
    assert TokenFile.open(path, cache=blocked).tokens.tolist() == [1, 2, 3]


def test_unfinished_leaves_nothing(tmp_path: Path) -> None:
    def fail() -> None:
        with TokenWriter(tmp_path / "a.tokens", vocab_size=256) as writer:
            writer.add(np.arange(10))
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert list(tmp_path.iterdir()) == []


def test_old_leftovers_are_swept(tmp_path: Path) -> None:
    old = cache_module.temporary_name(tmp_path / "a.tokens")
    young = cache_module.temporary_name(tmp_path / "a.tokens")
    other = tmp_path / "mine.tmp"
    for path in (old, young, other):
        path.write_text("x")
    for path in (old, other):
        os.utime(path, (0, 0))
    cache_module.sweep(tmp_path)
    assert set(tmp_path.iterdir()) == {young, other}


@given(
    sizes=st.lists(st.integers(0, 9), min_size=1, max_size=12),
    vocab_size=st.sampled_from([256, 60000, 100000]),
    data=st.data(),
)
def test_moving_the_tail(
    tmp_path_factory: pytest.TempPathFactory,
    sizes: list[int],
    vocab_size: int,
    data: st.DataObject,
) -> None:
    folder = tmp_path_factory.mktemp("tail")
    total = sum(sizes)
    if total < 2:
        return
    start = data.draw(st.integers(1, total - 1))
    bounds = np.unique(np.cumsum([0, *sizes]))
    with (
        TokenWriter(folder / "a", vocab_size=vocab_size) as left,
        TokenWriter(folder / "b", vocab_size=vocab_size) as right,
    ):
        for begin, size in zip(np.cumsum([0, *sizes])[:-1], sizes, strict=True):
            left.add(np.arange(begin, begin + size))
            left.end_document()
        left.move_tail(right, start)
        left.add(np.array([7]))
        left.end_document()
        left.finish(folder / "a")
        right.finish(folder / "b")
    one, two = (TokenFile.open(folder / name, verify="always") for name in "ab")
    assert one.tokens.tolist() == [*range(start), 7]
    assert one.offsets.tolist() == [*bounds[bounds < start].tolist(), start, start + 1]
    assert two.tokens.tolist() == list(range(start, total))
    assert two.offsets.tolist() == [0, *(bounds[bounds > start] - start).tolist()]


def test_beyond_two_to_the_31(tmp_path: Path) -> None:
    """O-23: a sparse file of 2**31 + 4096 tokens; the sample that straddles 2**31 is right."""
    tokens = 2**31 + 4096
    path = tmp_path / "a.tokens"
    header = Header("uint16", 60000, tokens, documents=3, content="")
    boundary = 2**31 + 5
    with path.open("wb") as handle:
        handle.write(header.pack())
        handle.truncate(header.file_bytes)
        handle.seek(HEADER_BYTES + 2 * (2**31 - 4096))
        handle.write((np.arange(8192) + 1).astype("<u2").tobytes())
        handle.seek(header.offsets_at)
        handle.write(np.array([0, 2**31 - 100, boundary, tokens], "<i8").tobytes())
    file = TokenFile.open(path, verify="never")
    length = 1000
    data = language_data(file, sequence_length=length, batch_size=1, shuffle=False)
    sample = 2**31 // length
    first = sample * length
    assert first < 2**31 < first + length
    batch = data.batch_at(sample)
    assert data.sample_ids(sample).tolist() == [sample]
    assert data.sample_ids(sample).dtype == np.int64
    expected = np.arange(first, first + length + 1) - (2**31 - 4096) + 1
    np.testing.assert_array_equal(batch["tokens"][0], expected[:-1])
    np.testing.assert_array_equal(batch["targets"][0], expected[1:])
    places = np.arange(first, first + length)
    starts = (2**31 - 100, boundary)
    segments = sum((places >= start).astype(int) for start in starts)
    np.testing.assert_array_equal(batch["segments"][0], segments)
    masked = [start - 1 - first for start in starts]
    np.testing.assert_array_equal(np.flatnonzero(batch["weights"][0] == 0), masked)
    assert batch["positions"][0, boundary - first] == 0
    assert data.num_samples == (tokens - 1) // length
    assert data.batch_at(data.num_samples - 1)["targets"].shape == (1, length)
    shuffled = language_data(file, sequence_length=1, batch_size=64)
    ids = shuffled.sample_ids(2**33)  # some epochs on
    assert ids.max() < shuffled.num_samples == tokens - 1
    assert shuffled.batch_at(2**33)["sample"].dtype == np.uint32
