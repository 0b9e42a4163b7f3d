"""Prompts and completions: what is learned, how examples are packed, what a bad record does."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shardtrain import cli
from shardtrain.data.config import DataConfig
from shardtrain.data.language import pack
from shardtrain.data.prepare import prepare
from shardtrain.data.sources import open_data
from shardtrain.data.tokens import TokenFile
from shardtrain.errors import DataError

PAIRS = [("ask: ", "yes"), ("why? ", "because it is so"), ("", "alone"), ("a b c ", "d")]


def write(path: Path, rows: list[Any]) -> Path:
    lines = (row if isinstance(row, str) else json.dumps(row) for row in rows)
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def pairs_file(folder: Path, pairs: list[tuple[str, str]] = PAIRS) -> Path:
    rows = [{"prompt": prompt, "completion": completion} for prompt, completion in pairs]
    return write(folder / "pairs.jsonl", rows)


def section(path: Path, **keys: Any) -> DataConfig:
    chosen = {"sequence_length": 32, "batch_size": 1, "validation_fraction": 0.0, "shuffle": False}
    return DataConfig(path=str(path), cache=str(path.parent / "cache"), **(chosen | keys))


def learned_text(tokens: np.ndarray, weights: np.ndarray) -> str:
    return bytes(tokens[weights > 0].astype(np.uint8)).decode()


def test_only_completions_are_learned_and_the_shift_is_one(tmp_path: Path) -> None:
    """O-04: every byte of a completion is a target once, predicted from the byte before it."""
    data, _, info = open_data(section(pairs_file(tmp_path)))
    rows = [data.batch_at(cursor) for cursor in range(data.num_samples)]
    found = "".join(learned_text(r["targets"][0], r["weights"][0]) for r in rows)
    # The first byte of a document has nothing before it, so "alone" loses one.
    assert found == "yes" + "because it is so" + "lone" + "d"
    for batch in rows:
        inside = np.nonzero(batch["weights"][0])[0]
        for place in inside:
            if place + 1 < batch["tokens"].shape[1] and place + 1 in inside:
                assert batch["tokens"][0, place + 1] == batch["targets"][0, place]
    assert info.train.header.masked
    assert info.train.header.text_bytes == sum(len(p + c) for p, c in PAIRS)


def test_examples_are_packed_whole_and_never_see_each_other(tmp_path: Path) -> None:
    """O-25: a sequence of its own number and its own positions for each, none cut in two."""
    data, _, _ = open_data(section(pairs_file(tmp_path), sequence_length=28))
    texts = [(p + c).encode() for p, c in PAIRS]
    seen = []
    for cursor in range(data.num_samples):
        batch = data.batch_at(cursor)
        tokens, segments = batch["tokens"][0], batch["segments"][0]
        targets, positions = batch["targets"][0], batch["positions"][0]
        for number in range(segments.max() + 1):
            where = np.nonzero(segments == number)[0]
            if not batch["weights"][0][where].any():
                continue
            assert positions[where].tolist() == list(range(len(where)))
            last = where[batch["weights"][0][where] > 0][-1]
            seen.append(bytes([*tokens[where[0] : last + 1].tolist(), int(targets[last])]))
    assert seen == texts


def test_packing_takes_as_many_as_fit() -> None:
    offsets = np.array([0, 4, 10, 11, 30, 33], np.int64)
    packed, long = pack(offsets, 11)
    assert packed.tolist() == [[0, 11], [30, 33]]
    assert long == [(3, 19)]
    assert pack(offsets, 33)[0].tolist() == [[0, 33]]


def test_chats_learn_what_the_assistant_says(tmp_path: Path) -> None:
    chat = [
        {"role": "system", "content": "be short"},
        {"role": "user", "content": "1+1?"},
        {"role": "assistant", "content": "2"},
        {"role": "user", "content": "sure?"},
        {"role": "assistant", "content": "yes"},
    ]
    path = write(tmp_path / "chat.jsonl", [{"messages": chat}])
    data, _, _ = open_data(section(path, sequence_length=256))
    batch = data.batch_at(0)
    assert learned_text(batch["targets"][0], batch["weights"][0]) == "2<|im_end|>yes<|im_end|>"
    text = bytes(batch["tokens"][0].astype(np.uint8)).decode()
    assert text.startswith("<|im_start|>system\nbe short<|im_end|>\n<|im_start|>user\n1+1?")


BAD = {
    "missing": ({"prompt": "x"}, "the field completion is missing"),
    "empty": ({"prompt": "x", "completion": " "}, "the completion is empty"),
    "no text": ({"prompt": ["x"], "completion": "y"}, "the field prompt is no text"),
    "no json": ('{"prompt": "x"', "this line is not JSON"),
    "role": ({"messages": [{"role": "bot", "content": "x"}]}, "a message has no known role"),
    "silent": ({"messages": [{"role": "user", "content": "x"}]}, "the completion is empty"),
    "too long": ({"prompt": "x" * 40, "completion": "y"}, "the example is too long"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_record_is_named_or_skipped_and_counted(tmp_path: Path, name: str) -> None:
    record, words = BAD[name]
    good = {"prompt": "a", "completion": "b"}
    path = write(tmp_path / "some.jsonl", [good, "", record, good])
    with pytest.raises(DataError, match=words) as caught:
        open_data(section(path))
    assert f"{path}:3" in str(caught.value)
    assert "data.bad_records" in str(caught.value)
    said: list[str] = []
    data, _, info = open_data(section(path, bad_records="skip"), say=said.append)
    assert info.train.header.documents == 2
    assert data.num_samples == 1
    assert [line for line in said if line.startswith("skipped 1 bad records, first")]


def test_prepared_examples_keep_their_mask_and_are_checked(tmp_path: Path) -> None:
    many = [(f"question {n}? ", f"answer {n}") for n in range(40)]
    made = prepare([pairs_file(tmp_path, many)], tmp_path / "out", validation_fraction=0.2)
    assert made.validation is not None
    assert made.train.header.masked
    assert made.validation.header.masked
    for file in (made.train, made.validation):
        again = TokenFile.open(file.path, verify="always")
        text = bytes(np.asarray(again.tokens)[np.asarray(again.learned) > 0]).decode()
        assert text.count("answer") == again.header.documents
        assert "question" not in text
    raw = bytearray(made.train.path.read_bytes())
    raw[-1] ^= 1
    made.train.path.write_bytes(raw)
    with pytest.raises(DataError, match="bad checksum"):
        TokenFile.open(made.train.path, verify="always")


def test_one_example_alone_is_split_without_losing_its_mask(tmp_path: Path) -> None:
    """The tail that is kept for validation takes its part of the mask along."""
    same = [("q ", "a")] * 12
    made = prepare([pairs_file(tmp_path, same)], tmp_path / "out", validation_fraction=0.3)
    assert made.validation is not None
    for file in (made.train, made.validation):
        file.verify()
        assert np.asarray(file.learned).reshape(-1, 3).tolist() == (
            [[0, 0, 1]] * file.header.documents
        )


def test_prepare_says_what_it_skips(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path / "some.jsonl", [{"prompt": "a", "completion": "b"}, {"prompt": "c"}])
    words = ("prepare", str(path), "--out", str(tmp_path / "out"))
    assert cli.main(words) == 2
    assert f"{path}:2: the field completion is missing" in capsys.readouterr().err
    assert cli.main([*words, "--bad-records", "skip"]) == 0
    assert "skipped 1 bad records" in capsys.readouterr().err
    assert cli.main([*words, "--bad-records", "skip", "--megatron"]) == 2
    assert "cannot say which tokens are learned" in capsys.readouterr().err


def test_what_cannot_be_is_refused(tmp_path: Path) -> None:
    path = pairs_file(tmp_path)
    with pytest.raises(DataError, match="examples never see each other"):
        open_data(section(path, separate_documents=False))
    with pytest.raises(DataError, match="too few examples for one batch"):
        open_data(section(path, batch_size=64))
    (tmp_path / "plain.jsonl").write_text('{"text": "hello"}\n')
    with pytest.raises(DataError, match="are not read together"):
        open_data(section(tmp_path))
    made = prepare([path], tmp_path / "out", validation_fraction=0)
    with pytest.raises(DataError, match="too long") as caught:
        open_data(section(made.train.path, sequence_length=12))
    assert "example 2" in str(caught.value)
