"""What `data.path` may be, the cache, and what is refused."""

import json
import os
from pathlib import Path

import numpy as np
import pytest

from shardtrain.data import prepare
from shardtrain.data.cache import cache_folder
from shardtrain.data.config import DataConfig
from shardtrain.data.sources import open_data, require_vocabulary
from shardtrain.errors import DataError


def config(tmp_path: Path, path: Path | str = "", **changes: object) -> DataConfig:
    values = {"sequence_length": 16, "batch_size": 4, "cache": str(tmp_path / "cache")}
    return DataConfig.model_validate({"path": str(path), **values, **changes})


@pytest.fixture
def text(tmp_path: Path) -> Path:
    folder = tmp_path / "text"
    folder.mkdir()
    for number in range(60):
        (folder / f"{number:02}.txt").write_text(f"the text of document {number}\n" * 5)
    return folder


def test_standard_library_by_default(tmp_path: Path) -> None:
    said: list[str] = []
    train, validation, info = open_data(config(tmp_path), say=said.append)
    assert len(said) == 1
    assert said[0].startswith("preparing the source text of Python's standard library: ")
    assert info.folder.parent.parent == tmp_path / "cache"
    again, _, _ = open_data(config(tmp_path), say=said.append)
    assert len(said) == 1
    assert again.digest(5) == train.digest(5)
    assert validation is not None
    assert (train.vocab_size, info.vocab_size, info.tokenizer_name) == (256, 256, "bytes")
    assert "def " in info.tokenizer().decode(train.tokens[:100_000])
    assert 0.01 < len(validation.tokens) / len(train.tokens) < 0.12


def test_one_small_file_is_told_in_bytes(tmp_path: Path) -> None:
    said: list[str] = []
    (tmp_path / "a.txt").write_text("x" * 2000)
    open_data(config(tmp_path, tmp_path / "a.txt"), say=said.append)
    assert said[0].startswith(f"preparing {tmp_path / 'a.txt'}: 1 file, 2,000 bytes, once, into ")


def test_text_is_prepared_once_until_it_changes(tmp_path: Path, text: Path) -> None:
    said: list[str] = []
    first = open_data(config(tmp_path, text), say=said.append)[2]
    assert len(said) == 1
    assert f"preparing {text}: 60 files" in said[0]
    second = open_data(config(tmp_path, text), say=said.append)[2]
    assert len(said) == 1
    assert first.digest == second.digest
    (text / "00.txt").write_text("a change\n" * 10)
    third = open_data(config(tmp_path, text), say=said.append)[2]
    assert len(said) == 2
    assert third.digest != first.digest
    open_data(config(tmp_path, text, validation_fraction=0.3), say=said.append)
    assert len(said) == 3


def test_seed_changes_the_order_and_not_the_split(tmp_path: Path, text: Path) -> None:
    one, _, first = open_data(config(tmp_path, text), seed=1)
    two, _, second = open_data(config(tmp_path, text), seed=2)
    assert first.digest == second.digest
    assert one.digest(0) != two.digest(0)
    plain, _, _ = open_data(config(tmp_path, text, shuffle=False, separate_documents=False))
    assert plain.sample_ids(1).tolist() == [4, 5, 6, 7]
    assert "segments" not in plain.batch_at(0)


def test_prepared_folder_and_file(tmp_path: Path, text: Path) -> None:
    out = tmp_path / "out"
    prepare.prepare([text], out)
    said: list[str] = []
    train, validation, info = open_data(config(tmp_path, out), say=said.append)
    assert said == []
    assert validation is not None
    assert info.source == f"tokens in {out}"
    alone = open_data(config(tmp_path, out / "train.tokens"))[0]
    assert alone.digest(3) == train.digest(3)


@pytest.mark.parametrize("damage", ["truncated", "flipped", "no validation", "other"])
def test_damaged_cache_is_rebuilt(tmp_path: Path, text: Path, damage: str) -> None:
    """O-31."""
    train, _, info = open_data(config(tmp_path, text))
    digests = [train.digest(cursor) for cursor in range(20)]
    batch = train.batch_at(3)
    path = info.folder / "train.tokens"
    del train
    if damage == "no validation":
        (info.folder / "validation.tokens").unlink()
    elif damage == "truncated":
        os.truncate(path, path.stat().st_size - 1)
    elif damage == "flipped":
        content = bytearray(path.read_bytes())
        content[5000] ^= 1
        path.write_bytes(content)
    else:
        path.write_bytes(b"junk")
    said: list[str] = []
    train, validation, _ = open_data(config(tmp_path, text), say=said.append)
    assert said[0].startswith("preparing again: ")
    assert [train.digest(cursor) for cursor in range(20)] == digests
    np.testing.assert_array_equal(train.batch_at(3)["tokens"], batch["tokens"])
    assert validation is not None


def test_refusals(tmp_path: Path, text: Path) -> None:
    """Each names the key or the file, the value and a cure."""
    empty = tmp_path / "empty"
    empty.mkdir()
    (tmp_path / "nothing.txt").write_text("")
    (tmp_path / "other.tokens").write_bytes(np.arange(9999, dtype=np.uint16).tobytes())
    (tmp_path / "other.bin").write_bytes(np.arange(9999, dtype=np.uint16).tobytes())
    (tmp_path / "short.txt").write_text("too short")
    for path, message, where in [
        ("absent.txt", "there is no such file or folder", "data.path"),
        ("empty", "there are no text files in it", "data.path"),
        ("nothing.txt", "there is no text in it", "data.path"),
        ("other.tokens", "not a token file of shardtrain", str(tmp_path / "other.tokens")),
        ("other.bin", "this is not text in UTF-8", "data.path"),
        ("short.txt", "too few tokens for one batch of 4 x 16", str(tmp_path / "short.txt")),
    ]:
        with pytest.raises(DataError, match=message) as error:
            open_data(config(tmp_path, tmp_path / path))
        assert error.value.where == where
        assert error.value.cure
    assert error.value.value == "8 tokens, 0 sequences; 1 more tokens held out for validation"
    assert error.value.cure.endswith("or hold out less: data.validation_fraction")
    assert error.value.allowed == "at least 65 tokens"
    with pytest.raises(DataError, match="too few tokens") as error:
        open_data(config(tmp_path, tmp_path / "short.txt", validation_fraction=0.0))
    assert error.value.value == "9 tokens, 0 sequences"


def test_too_little_for_validation_is_said(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("x" * 200)
    said: list[str] = []
    train, validation, info = open_data(config(tmp_path, tmp_path / "a.txt"), say=said.append)
    assert validation is None
    assert info.validation is not None
    assert said[-1] == "no validation: 10 tokens are too few for a sequence of 16"
    assert train.num_samples == 11
    said.clear()
    none = config(tmp_path, tmp_path / "a.txt", validation_fraction=0.0)
    assert open_data(none, say=said.append)[1] is None
    assert len(said) == 1


def test_vocabulary_smaller_than_the_tokens(tmp_path: Path, text: Path) -> None:
    info = open_data(config(tmp_path, text))[2]
    require_vocabulary(256, info)
    with pytest.raises(DataError, match="vocabulary is smaller than the tokens") as error:
        require_vocabulary(255, info)
    assert error.value.where == "model.vocab_size"
    assert error.value.allowed == "at least 256 (tokenizer bytes)"


def test_prepared_with_another_tokenizer(tmp_path: Path, text: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    path = tmp_path / "tokenizer.json"
    tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0}, unk_token="a")).save(str(path))
    out = tmp_path / "out"
    prepare.prepare([text], out)
    with pytest.raises(DataError, match="made with another tokenizer"):
        open_data(config(tmp_path, out, tokenizer=str(path)))


def test_cache_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, text: Path) -> None:
    monkeypatch.setenv("SHARDTRAIN_CACHE", "/a")
    monkeypatch.setenv("XDG_CACHE_HOME", "/b")
    assert cache_folder("/c") == Path("/c")
    assert cache_folder() == Path("/a")
    monkeypatch.delenv("SHARDTRAIN_CACHE")
    assert cache_folder() == Path("/b/shardtrain")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_folder() == Path.home() / ".cache" / "shardtrain"
    blocked = tmp_path / "file"
    blocked.write_text("in the way")
    with pytest.raises(DataError, match="folder cannot be created") as error:
        open_data(config(tmp_path, text, cache=str(blocked)))
    assert error.value.where == "data.cache"
    assert "SHARDTRAIN_CACHE" in error.value.cure


def test_shards_are_one_index(tmp_path: Path) -> None:
    """O-30: 8 shards, some empty: the samples are those of the joined text."""
    folder = tmp_path / "shards"
    folder.mkdir()
    number = 0
    for shard in range(8):
        rows = []
        for _ in range(shard % 3 * 7):
            rows.append(json.dumps({"text": f"document {number:3} of many"}))
            number += 1
        (folder / f"{shard}.jsonl").write_text("\n".join(rows))
    train, _, info = open_data(config(tmp_path, folder, validation_fraction=0.0))
    assert info.train.header.documents == number
    assert train.tokens.tobytes() == b"".join(b"document %3d of many" % i for i in range(number))
