"""Tables in CSV files, and timelines in text, SVG and PNG."""

import itertools
import re
import sys
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
from schedule_machine import is_right

from shardtrain.errors import ConfigError
from shardtrain.strategies.schedules.csv_file import read_table, write_table
from shardtrain.strategies.schedules.kinds import make_schedule
from shardtrain.strategies.schedules.picture import save, svg
from shardtrain.strategies.schedules.simulate import even, make_costs, simulate
from shardtrain.strategies.schedules.timeline import Timeline, draw, legend, make_timeline

DOCS = Path(__file__).parents[2] / "docs" / "pipeline.md"
SCHEDULES = [
    ("gpipe", 3, 4),
    ("1f1b", 1, 2),
    ("1f1b", 4, 6),
    ("interleaved", 2, 6, 3),
    ("zero_bubble", 3, 5),
]
FILE = "stage 0,stage 1\nF0,\nF1,F0 B0\nB0,F1 B1\nB1,\n"


def timeline_of(*sizes) -> Timeline:
    schedule = make_schedule(*sizes)
    share = even(schedule.work.num_stages, schedule.work.num_virtual)
    return make_timeline(schedule, make_costs(share))


# -- CSV


@pytest.mark.parametrize("sizes", SCHEDULES)
def test_a_table_comes_back_from_its_file(sizes: tuple, tmp_path: Path) -> None:
    written = make_schedule(*sizes)
    write_table(written, tmp_path / "table.csv")
    found = read_table(tmp_path / "table.csv")
    for name, column in written.columns().items():
        assert np.array_equal(found.columns()[name], column), name
    assert is_right(found)


def test_the_file_in_the_docs_is_1f1b(tmp_path: Path) -> None:
    block = re.search(r"```\n(stage 0,.*?)```", DOCS.read_text(encoding="utf-8"), re.S)
    assert block is not None
    assert block[1] == FILE
    (tmp_path / "docs.csv").write_text(block[1])
    assert simulate(read_table(tmp_path / "docs.csv", 2, 2)).ratio == 3 / 2
    write_table(make_schedule("1f1b", 2, 2), tmp_path / "ours.csv")
    assert (tmp_path / "ours.csv").read_text() == FILE


@pytest.mark.smoke312
def test_spreadsheets_leave_their_marks(tmp_path: Path) -> None:
    text = "\ufeff" + FILE.replace("\n", "\r\n").replace("F0 B0", '" F0  B0 "') + "\r\n"
    (tmp_path / "table.csv").write_bytes(text.encode())
    assert read_table(tmp_path / "table.csv").work.num_ticks == 4


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "has no ticks"),
        ("stage 0,stage 1\n", "has no ticks"),
        ("stage 0,stage 1\n,\n", "does nothing at all"),
        (FILE.split("\n", 1)[1], "has work in its first line, which names the stages"),
        (FILE.replace("F1,F0 B0", "F1"), "line 3: has 1 cells, but there are 2 stages"),
        (FILE.replace("F0 B0", "F0 X0"), 'line 3, stage 1: cannot read "X0"'),
        (FILE.replace("F0 B0", "F0,B0"), "line 3: has 3 cells"),
        (FILE.replace("F0 B0", "F-1"), 'cannot read "F-1"'),
        (FILE.replace("F0 B0", "F0 F1"), "line 3, stage 1: has two forwards in one tick"),
        (FILE.replace("F0 B0", "B0 F0"), "has its parts in another order than they run in"),
        (FILE.replace("F1,", "B0,"), "tick 2, stage 0: backward of microbatch 0 again"),
        (FILE.replace("\nB1,", ""), "tick 2, stage 0: the table ends without backward of"),
        (FILE.replace("F0,\n", ",\n"), "table ends without forward of microbatch 0"),
        (FILE.replace("F1", "F9"), "table ends without forward of microbatch 1"),
        (FILE.replace("F1 B1", "F1 B1 W1"), "table ends without weight of microbatch 0"),
    ],
)
def test_a_faulty_file_is_refused(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "table.csv").write_text(text)
    with pytest.raises(ConfigError, match=re.escape(message)):
        read_table(tmp_path / "table.csv")


def test_the_fault_in_the_docs_is_told_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.csv").write_text("stage 0,stage 1\nF0,\nF1 B0,F0 B0\n,F1 B1\nB1,\n")
    with pytest.raises(ConfigError) as fault:
        read_table("mine.csv")
    assert str(fault.value) in DOCS.read_text(encoding="utf-8")


def test_other_sizes_than_the_runs_are_refused(tmp_path: Path) -> None:
    (tmp_path / "table.csv").write_text(FILE)
    with pytest.raises(ConfigError, match="has 2 stages, but there are 4"):
        read_table(tmp_path / "table.csv", stages=4)
    with pytest.raises(ConfigError, match="tick 1, stage 0: forward of an unknown microbatch, 1"):
        read_table(tmp_path / "table.csv", microbatches=1)
    with pytest.raises(ConfigError, match="ends without forward of microbatch 2"):
        read_table(tmp_path / "table.csv", microbatches=3)


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no such file"):
        read_table(tmp_path / "nowhere.csv")
    (tmp_path / "binary.csv").write_bytes(b"\x89PNG\xff\xfe\x00")
    with pytest.raises(ConfigError, match="is no CSV file in UTF-8"):
        read_table(tmp_path / "binary.csv")


# -- pictures


@pytest.mark.parametrize("sizes", SCHEDULES)
def test_pieces_fill_ticks_and_do_not_overlap(sizes: tuple) -> None:
    schedule, timeline = make_schedule(*sizes), timeline_of(*sizes)
    work = schedule.work
    parts = 3 if work.split else 2
    assert len(timeline.pieces) == parts * work.num_stages * work.num_virtual * sizes[2]
    assert timeline.ticks[-1] == pytest.approx(simulate(schedule).time)
    for stage in range(work.num_stages):
        mine = sorted((p for p in timeline.pieces if p.stage == stage), key=lambda p: p.begin)
        for one, other in itertools.pairwise(mine):
            assert one.end <= other.begin + 1e-9


def test_the_timeline_in_text() -> None:
    lines = [line.plain for line in draw(timeline_of("1f1b", 2, 3), 9 + 24)]
    assert lines == [
        "stage 0  F0F1....F2B0--B1--..B2--",
        "stage 1  ..F0B0--F1B1--F2B2--....",
    ]


@pytest.mark.parametrize("sizes", SCHEDULES)
@pytest.mark.parametrize("width", [1, 20, 60, 200])
def test_the_timeline_has_the_width_of_the_terminal(sizes: tuple, width: int) -> None:
    timeline = timeline_of(*sizes)
    lines = draw(timeline, width)
    assert {len(line.plain) for line in lines} == {max(width, 10)}
    assert all(re.fullmatch(r"stage \d  [FBW\d.-]+", line.plain) for line in lines)
    assert legend(timeline).plain.endswith("- goes on   . waits")


@pytest.mark.parametrize("sizes", SCHEDULES)
def test_svg_has_every_piece(sizes: tuple) -> None:
    timeline = timeline_of(*sizes)
    root = ElementTree.fromstring(svg(timeline))
    space = "{http://www.w3.org/2000/svg}"
    groups = root.findall(f"{space}g")
    assert len(groups) == len(timeline.pieces)
    width = float(root.attrib["width"])
    for group in groups:
        box = group.find(f"{space}rect")
        assert box is not None
        assert 0 < float(box.attrib["x"]) + float(box.attrib["width"]) < width
    titles = {title.text for title in root.iter(f"{space}title")}
    assert len(titles) == len({(p.part, p.micro, p.virtual, p.begin) for p in timeline.pieces})


def test_names_are_escaped_in_svg(tmp_path: Path) -> None:
    (tmp_path / "a<b&c.csv").write_text(FILE)
    schedule = read_table(tmp_path / "a<b&c.csv")
    save(make_timeline(schedule, make_costs(even(2))), tmp_path / "out.svg")
    assert "a<b&c.csv" in "".join(ElementTree.parse(tmp_path / "out.svg").getroot().itertext())


def test_png_is_written(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    save(timeline_of("interleaved", 2, 4, 2), tmp_path / "out.PNG")
    assert (tmp_path / "out.PNG").read_bytes().startswith(b"\x89PNG")


def test_png_without_matplotlib_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ConfigError, match=r'pip install "shardtrain\[plots\]"'):
        save(timeline_of("1f1b", 2, 2), tmp_path / "out.png")


def test_other_pictures_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"allowed: \.svg, \.png"):
        save(timeline_of("1f1b", 2, 2), tmp_path / "out.jpg")


def test_work_that_takes_no_time_can_be_drawn() -> None:
    timeline = make_timeline(make_schedule("1f1b", 2, 2), make_costs(even(2), 0.0, 0.0))
    assert [line.plain for line in draw(timeline, 15)] == ["stage 0  ......", "stage 1  ......"]
    assert ElementTree.fromstring(svg(timeline)).tag.endswith("svg")
