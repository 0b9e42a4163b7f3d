"""Documents out of text, JSONL and Parquet: which files, what order, what is refused."""

import gzip
import json
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardtrain.data import documents
from shardtrain.data.documents import SourceFile, find_files, read_pieces, standard_library
from shardtrain.errors import DataError


def texts(files: list[SourceFile], column: str = "") -> list[bytes]:
    found, text = [], b""
    for file in files:
        for piece, last in read_pieces(file, column=column):
            text += piece
            if last:
                found.append(text)
                text = b""
    assert text == b""
    return found


def test_folder_in_a_fixed_order(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    (tmp_path / ".hidden").mkdir()
    (tmp_path / "b" / "x.txt").write_text("two")
    (tmp_path / "a.md").write_bytes(b"\xef\xbb\xbfone")
    (tmp_path / "c.jsonl").write_text('{"text": "three"}\n\n{"text": "four"}\n')
    (tmp_path / "d.txt.gz").write_bytes(gzip.compress(b"five"))
    (tmp_path / ".hidden" / "y.txt").write_text("no")
    (tmp_path / ".z").write_text("no")
    (tmp_path / "picture.png").write_bytes(b"\x89PNG\0\0")
    (tmp_path / "latin.txt").write_bytes("caf\xe9".encode("latin-1"))
    said: list[str] = []
    files = find_files([tmp_path], say=said.append)
    assert texts(files) == [b"one", b"two", b"three", b"four", b"five"]
    assert len(said) == 1
    assert said[0].startswith("skipped 2 files that are not UTF-8 text, such as")
    again = find_files([tmp_path / "b", tmp_path, tmp_path / "b" / "x.txt"])
    assert texts(again) == [b"two", b"one", b"three", b"four", b"five"]


def test_missing_empty_and_binary(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no such file or folder") as error:
        find_files([tmp_path / "absent"])
    assert error.value.where == "data.path"
    with pytest.raises(DataError, match="there are no text files in it"):
        find_files([tmp_path])
    (tmp_path / "empty.txt").write_text("")
    for path in (tmp_path, tmp_path / "empty.txt"):
        with pytest.raises(DataError, match="there is no text in it"):
            find_files([path])
    (tmp_path / "binary").write_bytes(b"\0\1")
    with pytest.raises(DataError, match="not text in UTF-8"):
        find_files([tmp_path / "binary"])
    (tmp_path / "broken.txt.gz").write_bytes(b"no gzip")
    with pytest.raises(DataError, match="cannot be read"):
        find_files([tmp_path / "broken.txt.gz"])


@given(
    text=st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=200),
    piece=st.integers(4, 16),
)
def test_pieces_make_up_the_text(
    tmp_path_factory: pytest.TempPathFactory, text: str, piece: int
) -> None:
    """Whatever the size of a piece, no byte is lost and no character is cut."""
    folder = tmp_path_factory.mktemp("pieces")
    content = text.encode().removeprefix(b"\xef\xbb\xbf")
    (folder / "a.txt").write_bytes(content)
    (folder / "b.jsonl").write_text(json.dumps({"text": text}), encoding="utf-8")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(documents, "PIECE", piece)
        files = [SourceFile(folder / "a.txt", "text", len(content), 0)]
        pieces = list(read_pieces(files[0]))
        assert b"".join(p for p, _ in pieces) == content
        assert [last for _, last in pieces] == [False] * (len(pieces) - 1) + [True]
        for part, _ in pieces:
            part.decode()
        record = SourceFile(folder / "b.jsonl", "jsonl", 1, 0)
        assert texts([record]) == [text.encode()]
        for part, _ in read_pieces(record):
            assert len(part) <= piece
            part.decode()


def test_uneven_and_empty_shards(tmp_path: Path) -> None:
    """O-30: shard sizes [0, 5, 0, 1]: every document, once, in order; no shards are refused."""
    number = 0
    for shard, size in enumerate([0, 5, 0, 1]):
        with (tmp_path / f"{shard}.jsonl").open("w") as handle:
            for _ in range(size):
                handle.write(json.dumps({"text": f"document {number}"}) + "\n")
                number += 1
    assert texts(find_files([tmp_path])) == [f"document {i}".encode() for i in range(6)]
    none = tmp_path / "none"
    none.mkdir()
    with pytest.raises(DataError, match="there are no text files in it"):
        find_files([none])


def test_jsonl_fields(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"

    def read(*lines: object, column: str = "") -> list[bytes]:
        path.write_text("\n".join(x if isinstance(x, str) else json.dumps(x) for x in lines))
        return texts(find_files([path]), column)

    assert read({"id": "7", "text": "a"}, {"text": None}, {"content": "b", "id": "8"}) == [
        b"a",
        b"",
        b"b",
    ]
    assert read({"body": "a", "n": 1}, '"bare"') == [b"a", b"bare"]
    assert read({"body": "a", "title": "t"}, column="title") == [b"t"]
    with pytest.raises(DataError, match="this line has no text") as error:
        read({"text": "a"}, {"body": "a", "title": "t"})
    assert error.value.where == f"{path}:2"
    assert "body, title" in error.value.value
    with pytest.raises(DataError, match="this line has no text"):
        read({"text": 3})
    with pytest.raises(DataError, match="this line has no text"):
        read({"text": "a"}, column="body")
    with pytest.raises(DataError, match="this line is not JSON"):
        read("{")
    with pytest.raises(DataError, match="not a JSON object"):
        read("[1]")


def test_parquet(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    import pyarrow.parquet as parquet

    path = tmp_path / "a.parquet"
    rows = [f"document {i}" for i in range(600)] + [None, ""]
    table = pyarrow.table({"id": list(range(602)), "text": rows, "url": ["u"] * 602})
    parquet.write_table(table, path, row_group_size=100)
    (file,) = find_files([tmp_path])
    positions: list[int] = []
    pieces = [p for p, _ in read_pieces(file, reached=positions.append)]
    assert pieces == [(row or "").encode() for row in rows]
    assert positions == sorted(positions)
    assert positions[-1] == file.size
    assert texts([file], "url") == [b"u"] * 602
    with pytest.raises(DataError, match="no column that is clearly the text") as error:
        texts([file], "id")
    assert error.value.value == "columns id, text, url; strings: text, url"
    parquet.write_table(pyarrow.table({"a": ["x"], "b": ["y"]}), path)
    with pytest.raises(DataError, match="no column that is clearly the text"):
        texts([file])
    path.write_bytes(b"nothing")
    with pytest.raises(DataError, match="not a Parquet file"):
        texts([file])


def test_parquet_without_pyarrow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.parquet").write_bytes(b"PAR1")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(DataError, match="needs the package `pyarrow`") as error:
        texts(find_files([tmp_path]))
    assert error.value.cure == 'pip install "shardtrain[parquet]"'


def test_standard_library() -> None:
    files = standard_library()
    names = {file.path.name for file in files}
    assert {"argparse.py", "ast.py", "functools.py"} <= names
    assert not any({"test", "site-packages", "idlelib"} & set(f.path.parts[-3:]) for f in files)
    assert 5e6 < sum(file.size for file in files) < 2e7
    assert [f.path for f in files] == [f.path for f in standard_library()]


def test_python_without_its_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(documents.sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path)})
    with pytest.raises(DataError, match="without the source of its standard library") as error:
        standard_library()
    assert "data.path" in error.value.cure
