"""Files of interactions: formats as published, and what is wrong with others."""

import gzip
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest

from shardtrain.data.config import InteractionsConfig
from shardtrain.data.interaction_files import open_interactions
from shardtrain.data.interactions import Interactions
from shardtrain.errors import ConfigError, DataError
from shardtrain.sharding.processes import Alone
from shardtrain.tasks.ranking import auc

RATINGS = [(1, 3, 5, 881250949), (2, 1, 3, 891717742), (3, 4, 4, 878887116), (1, 1, 1, 886397596)]
FORMS = {
    "u.data": ("\t", ""),
    "ratings.dat": ("::", ""),
    "ratings.csv": (",", "userId,movieId,rating,timestamp\n"),
}


def open_files(
    path: Path, sizes: tuple[int, ...], num_dense: int, **keys: Any
) -> tuple[Interactions, list[str]]:
    """All rows of some files in file order, and what was said."""
    said: list[str] = []
    settings = {"batch_size": 1, "validation_fraction": 0.0, "shuffle": False}
    config = InteractionsConfig(
        path=str(path), cache=str(path.parent / "cache"), **{**settings, **keys}
    )
    data, validation, _ = open_interactions(
        config,
        sizes=sizes,
        num_dense=num_dense,
        microbatches=1,
        seed=0,
        peers=Alone(),
        figure=auc,
        say=said.append,
    )
    assert validation is None
    assert isinstance(data, Interactions)
    return data, said


def all_rows(data: Interactions) -> np.ndarray:
    return data.source.take(np.arange(data.num_samples))


@pytest.mark.parametrize("name", FORMS)
def test_movielens_as_published(name: str, tmp_path: Path) -> None:
    mark, header = FORMS[name]
    lines = [mark.join(map(str, row)) + "\n" for row in RATINGS]
    folder = tmp_path / "ml"
    folder.mkdir()
    (folder / name).write_text(header + "".join(lines))
    (folder / "u.item").write_text("1|Toy Story (1995)|01-Jan-1995\n")
    (folder / "movies.csv").write_text("movieId,title,genres\n")
    (folder / "README.txt").write_text("words")
    rows = all_rows(open_files(folder, (4, 5), 1)[0])
    assert rows["ids"].tolist() == [[1, 3], [2, 1], [3, 4], [1, 1]]
    assert rows["label"].tolist() == [1, 0, 1, 0]
    np.testing.assert_allclose(rows["dense"][:, 0], [r[3] / 1e9 - 1 for r in RATINGS], rtol=1e-6)


def criteo_line(label: str, numbers: list[str], words: list[str]) -> str:
    return "\t".join([label, *numbers, *words])


def test_criteo_as_published_also_packed_and_with_gaps(tmp_path: Path) -> None:
    numbers = ["1", "", "-2", *["0"] * 10]
    words = ["68fd1e64", "", *["000000ff"] * 24]
    text = "\n".join([criteo_line("1", numbers, words), criteo_line("0", numbers, words), ""])
    (tmp_path / "day").mkdir()
    (tmp_path / "day" / "day_0").write_text(text)
    (tmp_path / "day" / "day_1.gz").write_bytes(gzip.compress(text.encode()))
    sizes = (1000, 10, 3, 1, *[64] * 22)
    rows = all_rows(open_files(tmp_path / "day", sizes, 13)[0])
    assert rows["label"].tolist() == [1, 0, 1, 0]
    np.testing.assert_allclose(rows["dense"][0, :4], [np.log(2), 0, 0, 0], rtol=1e-6)
    hashed = 1 + 0xFF % 63
    assert rows["ids"][0].tolist() == [1 + 0x68FD1E64 % 999, 0, 1 + 0xFF % 2, 0, *[hashed] * 22]
    assert (rows["ids"] == rows["ids"][0]).all()


def write_csv(folder: Path) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "a.csv").write_text('user,age,item,label,note\n3,0.5,2,1,"x, y"\n1,-1e3,4,0,\n')
    (folder / "b.csv").write_text("label,item,user,age\n1,0,0,7\n")
    return folder


NAMED = {"ids": ["user", "item"], "dense": ["age"]}


def test_csv_and_parquet_have_columns_by_name_and_shards_are_one(tmp_path: Path) -> None:
    rows = all_rows(open_files(write_csv(tmp_path / "csv"), (4, 5), 1, **NAMED)[0])
    assert rows["ids"].tolist() == [[3, 2], [1, 4], [0, 0]]
    assert rows["dense"][:, 0].tolist() == [0.5, -1000, 7]
    assert rows["label"].tolist() == [1, 0, 1]
    (tmp_path / "parquet").mkdir()
    table = pa.table({"user": [3, 1], "item": [2, 4], "age": [0.5, -1e3], "label": [True, False]})
    table = table.set_column(3, "label", pa.array([1, 0]))
    pyarrow.parquet.write_table(table, tmp_path / "parquet" / "a.parquet", row_group_size=1)
    packed = all_rows(open_files(tmp_path / "parquet", (4, 5), 1, **NAMED)[0])
    np.testing.assert_array_equal(packed, rows[:2])


def test_words_are_hashed_to_their_table(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text("user,item,label,age\nanna,x,1,0\nbert,x,0,0\nanna,y,0,0\n")
    with pytest.raises(DataError, match="a row cannot be used"):
        open_files(path, (50, 60), 1, **NAMED)
    ids = all_rows(open_files(path, (50, 60), 1, **NAMED, hash_ids=True)[0])["ids"]
    assert ids[0, 0] == ids[2, 0] != ids[1, 0]
    assert ids[0, 1] == ids[1, 1] != ids[2, 1]
    assert (ids < [50, 60]).all()


BAD = {
    "an id out of its table": ("4,1,1,0", "id 4 in column user is out of its table of 4 rows"),
    "a negative id": ("-1,1,1,0", "id -1 in column user is out of its table of 4 rows"),
    "an id that is none": ("1.5,1,1,0", '"1.5" in column user is no whole number'),
    "a missing value": ("1,,1,0", "a missing value in column item"),
    "a column too few": ("1,1,1", "3 columns, not 4"),
    "a label that is none": ("1,1,2,0", '"2" in column label is neither 0 nor 1'),
    "a number that is none": ("1,1,1,nan", '"nan" in column age is no finite number'),
}


@pytest.mark.parametrize("case", BAD)
def test_a_bad_row_names_file_and_line_or_is_counted(case: str, tmp_path: Path) -> None:
    line, why = BAD[case]
    path = tmp_path / "a.csv"
    path.write_text(f"user,item,label,age\n1,1,1,0\n{line}\n2,2,0,0\n")
    with pytest.raises(DataError) as caught:
        open_files(path, (4, 5), 1, **NAMED)
    assert (caught.value.where, caught.value.value) == (f"{path}, line 3", why)
    data, said = open_files(path, (4, 5), 1, **NAMED, bad_rows="skip")
    assert all_rows(data)["ids"].tolist() == [[1, 1], [2, 2]]
    assert data.remarks() == {"skipped_rows": 1}
    assert f"skipped 1 rows of {path}: line 3: {why}" in said
    again, said = open_files(path, (4, 5), 1, **NAMED, bad_rows="skip")  # from the cache
    assert again.remarks() == {"skipped_rows": 1}
    assert not [line for line in said if line.startswith("reading")]


def test_a_file_without_a_column_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text("user,movie,label,age\n1,1,1,0\n")
    with pytest.raises(DataError) as caught:
        open_files(path, (4, 5), 1, **NAMED, bad_rows="skip")
    assert (caught.value.message, caught.value.value) == ("there is no such column", "item")
    assert caught.value.where == f"{path}, line 1"


def test_a_shard_that_is_cut_off_is_said_or_used_up_to_there(tmp_path: Path) -> None:
    packed, rows = tmp_path / "day_0.gz", [criteo_line("1", ["1"] * 13, ["ff"] * 26)] * 4000
    random = np.random.default_rng(0)
    lines = [row + f"{random.integers(2**30):x}" for row in rows]
    packed.write_bytes(gzip.compress("\n".join(lines).encode())[:-2000])
    sizes = (1000,) * 26
    with pytest.raises(DataError, match="a row cannot be used") as caught:
        open_files(packed, sizes, 13, format="criteo")
    assert "the file is cut off" in caught.value.value
    assert str(packed) in caught.value.where
    data, _ = open_files(packed, sizes, 13, format="criteo", bad_rows="skip")
    assert 1000 < data.num_samples < 4000
    assert data.remarks()["skipped_rows"] in (1, 2)
    torn = tmp_path / "a.parquet"
    pyarrow.parquet.write_table(
        pa.table({"user": [1], "item": [1], "age": [0.0], "label": [1]}), torn
    )
    torn.write_bytes(torn.read_bytes()[:-10])
    with pytest.raises(DataError) as caught:
        open_files(torn, (4, 5), 1, **NAMED)
    assert "the file is cut off or damaged" in caught.value.value
    assert str(torn) in caught.value.where


def test_rows_that_are_not_what_the_model_reads_are_refused(tmp_path: Path) -> None:
    (tmp_path / "u.data").write_text("1\t1\t5\t0\n")
    with pytest.raises(ConfigError, match="such rows have 2 ids and 0 or 1 numbers"):
        open_files(tmp_path / "u.data", (4, 5, 6), 1)
    with pytest.raises(ConfigError, match=r"model\.table_sizes wants 3 of them"):
        open_files(write_csv(tmp_path / "csv"), (4, 5, 6), 1, **NAMED)


def test_what_is_not_there_is_said(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no such file or folder") as caught:
        open_files(tmp_path / "nowhere", (4, 5), 1)
    assert caught.value.cure.startswith("check the path")
    (tmp_path / "words.md").write_text("")
    with pytest.raises(DataError, match="no file of a known name"):
        open_files(tmp_path, (4, 5), 1)
    (tmp_path / "u.data").write_text("1\t1\t5\t0\n")
    with pytest.raises(DataError, match="too few interactions for one batch of 2"):
        open_files(tmp_path / "u.data", (4, 5), 1, batch_size=2)
