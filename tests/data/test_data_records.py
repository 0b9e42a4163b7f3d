"""MDS of MosaicML's own writer, and ArrayRecord: the same documents, and damage by its place."""

import json
import shutil
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shardtrain.config import load_config
from shardtrain.data.documents import find_files, read_pieces
from shardtrain.data.mds import read_index
from shardtrain.data.prepare import Prepared, prepare
from shardtrain.data.sources import open_data
from shardtrain.errors import DataError

RECORDS = Path(__file__).parent / "records"
TEXTS: list[str] = json.loads((RECORDS / "texts.json").read_text("utf-8"))


def documents(path: Path, column: str = "") -> list[str]:
    found, text = [], b""
    for file in find_files([path]):
        for piece, last in read_pieces(file, column=column):
            text += piece
            if last:
                found.append(text.decode())
                text = b""
    return found


def copied(name: str, folder: Path) -> Path:
    return Path(shutil.copytree(RECORDS / name, folder / name))


def change(index: Path, key: str, value: Any) -> None:
    """Says something else of the first shard."""
    found = json.loads(index.read_text())
    found["shards"][0][key] = value
    index.write_text(json.dumps(found))


@pytest.mark.parametrize(
    ("name", "column"),
    [("text", ""), ("text", "text"), ("gz", ""), ("json", "row")],
)
def test_documents_are_those_that_were_written(name: str, column: str) -> None:
    assert len(read_index(RECORDS / name / "index.json")) == 3
    assert documents(RECORDS / name, column) == TEXTS


def test_the_index_alone_or_a_folder_above_will_do(tmp_path: Path) -> None:
    assert documents(RECORDS / "text" / "index.json") == TEXTS
    copied("text", tmp_path)
    (tmp_path / "index.json").write_text('{"pages": []}')  # somebody's own
    assert documents(tmp_path) == ['{"pages": []}', *TEXTS]


def test_a_run_reads_them(tmp_path: Path) -> None:
    keys = {"data.path": str(RECORDS / "text"), "data.cache": str(tmp_path)}
    keys |= {"data.sequence_length": 8, "data.batch_size": 2}
    train, _, info = open_data(load_config("quickstart", keys).data)  # type: ignore[arg-type]
    assert info.tokenizer_name == "bytes"
    assert train.num_samples > 10


def all_tokens(made: Prepared) -> list[int]:
    return [int(token) for token in made.train.tokens]


@pytest.mark.parametrize("name", ["tokens", "tokens_free"])
def test_tokens_are_copied(name: str, tmp_path: Path) -> None:
    made = prepare([RECORDS / name], tmp_path, validation_fraction=0.0)
    wanted = [7 * i for number in range(9) for i in range(number + 1)]
    assert all_tokens(made) == wanted
    assert made.train.header.documents == 9


def test_tokens_of_a_fixed_shape(tmp_path: Path) -> None:
    made = prepare([RECORDS / "tokens_fixed"], tmp_path, validation_fraction=0.0)
    assert all_tokens(made) == [0, 1, 2, 3] * 3


def test_tokens_of_no_type_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="do not say of what type") as caught:
        prepare([RECORDS / "tokens_bytes"], tmp_path)
    assert "shard.00000.mds: sample 0" in str(caught.value.where)


def test_what_cannot_be_unpacked_is_refused_with_a_cure() -> None:
    with pytest.raises(DataError, match="packed with zstd") as caught:
        documents(RECORDS / "zstd")
    assert caught.value.where.endswith("shard.00000.mds.zstd")
    assert "without .zstd" in caught.value.cure


def test_an_unpacked_file_beside_the_packed_one_is_read(tmp_path: Path) -> None:
    folder = copied("zstd", tmp_path)
    source = read_index(RECORDS / "text" / "index.json")[0]
    shutil.copy(source.path, folder / "shard.00000.mds")
    change(folder / "index.json", "raw_data", {"basename": "shard.00000.mds", "bytes": source.size})
    change(folder / "index.json", "samples", source.samples)
    assert documents(folder) == TEXTS[: source.samples]


def cut_off(folder: Path) -> str:
    path = folder / "shard.00001.mds"
    path.write_bytes(path.read_bytes()[:-7])
    index = json.loads((folder / "index.json").read_text())
    index["shards"][1]["raw_data"]["hashes"] = {}
    (folder / "index.json").write_text(json.dumps(index))
    return r"shard\.00001\.mds: the shard is cut off"


def one_byte(folder: Path) -> str:
    path = folder / "shard.00001.mds"
    path.write_bytes(path.read_bytes()[:-1] + b"#")
    return r"shard\.00001\.mds: its sha1 is not that of the index"


def missing(folder: Path) -> str:
    (folder / "shard.00002.mds").unlink()
    return r"index\.json: shard 2: a shard is missing"


def other_version(folder: Path) -> str:
    change(folder / "index.json", "version", 3)
    return r"index\.json: shard 0: a shard of another kind"


def half_an_entry(folder: Path) -> str:
    change(folder / "index.json", "raw_data", None)
    return r"index\.json: shard 0: the index is damaged"


def no_index(folder: Path) -> str:
    (folder / "index.json").unlink()
    return r"index\.json: the index cannot be read"


def unhashed(folder: Path, place: int, number: int) -> None:
    """Writes a number of 32 bits into the first shard, of which no hash is known then."""
    path = folder / "shard.00000.mds"
    data = bytearray(path.read_bytes())
    struct.pack_into("<I", data, place, number)
    path.write_bytes(data)
    raw = {"basename": path.name, "bytes": len(data), "hashes": {}}
    change(folder / "index.json", "raw_data", raw)


def other_count(folder: Path) -> str:
    unhashed(folder, 0, 5)
    return r"shard\.00000\.mds: it has another number of samples"


def other_offset(folder: Path) -> str:
    unhashed(folder, 8, 1)
    return r"shard\.00000\.mds: its samples do not lie one after another"


def other_size(folder: Path) -> str:
    first = struct.unpack_from("<I", (folder / "shard.00000.mds").read_bytes(), 4)[0]
    unhashed(folder, first, 10_000)
    return r"shard\.00000\.mds: sample 0 is not as long as it says"


@pytest.mark.parametrize(
    "damage",
    [
        *(cut_off, one_byte, missing, other_version, half_an_entry, no_index),
        *(other_count, other_offset, other_size),
    ],
)
def test_damage_is_told_with_file_and_place(damage: Any, tmp_path: Path) -> None:
    folder = copied("text", tmp_path)
    said = damage(folder)
    with pytest.raises(DataError, match=said):
        documents(folder)


def test_a_column_that_is_not_there_is_named() -> None:
    with pytest.raises(DataError, match=r"no column body") as caught:
        documents(RECORDS / "text", "body")
    assert "id (int), meta (json), text (str)" in caught.value.value
    with pytest.raises(DataError, match=r"no column that is clearly the text"):
        documents(RECORDS / "text", "id")
    with pytest.raises(DataError, match=r"this line has no text"):
        documents(RECORDS / "text", "meta")


# -- ArrayRecord


def write_records(path: Path, records: list[bytes]) -> Path:
    module = pytest.importorskip("array_record.python.array_record_module")
    writer = module.ArrayRecordWriter(str(path), "group_size:2")
    for record in records:
        writer.write(record)
    writer.close()
    return path


def test_records_are_text_or_objects(tmp_path: Path) -> None:
    texts = [text.encode() for text in TEXTS]
    assert documents(write_records(tmp_path / "a.array_record", texts)) == TEXTS
    rows = [json.dumps({"id": "x", "text": text, "note": "n"}).encode() for text in TEXTS]
    path = write_records(tmp_path / "b.array_record-00000-of-00001", rows)
    assert documents(path) == TEXTS
    assert documents(path, "note") == ["n"] * len(TEXTS)
    assert sorted(documents(tmp_path)) == sorted(TEXTS * 2)


def test_many_records_are_read_in_groups(tmp_path: Path) -> None:
    path = write_records(tmp_path / "a.array_record", [b"%d" % n for n in range(600)])
    assert documents(path) == [str(n) for n in range(600)]


def test_a_record_that_is_no_text_is_named(tmp_path: Path) -> None:
    path = write_records(tmp_path / "a.array_record", [b"fine", np.arange(9).tobytes() + b"\xff"])
    with pytest.raises(DataError, match=r"record 1: this record is not text in UTF-8"):
        documents(path)
    path = write_records(tmp_path / "b.array_record", [b'{"text": "a"}', b"not JSON"])
    with pytest.raises(DataError, match=r"record 1: this record is not JSON"):
        documents(path)
    with pytest.raises(DataError, match=r"record 0: this line has no text"):
        documents(path, "body")


@pytest.mark.parametrize("part", [0.5, 0.0])
def test_a_file_that_is_cut_off_is_refused(part: float, tmp_path: Path) -> None:
    path = write_records(tmp_path / "a.array_record", [text.encode() for text in TEXTS])
    data = path.read_bytes()
    path.write_bytes(data[: int(len(data) * part)] or b"x")
    with pytest.raises(DataError, match=r"a\.array_record: this is no whole ArrayRecord file"):
        documents(path)


def test_damage_inside_is_told_with_its_place(tmp_path: Path) -> None:
    path = write_records(tmp_path / "a.array_record", [text.encode() for text in TEXTS])
    data = bytearray(path.read_bytes())
    data[107] ^= 0xFF  # in the first records
    path.write_bytes(data)
    with pytest.raises(DataError, match=r"records from 0 on: this is no whole ArrayRecord file"):
        documents(path)
