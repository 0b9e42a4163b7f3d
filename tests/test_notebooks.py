"""Every notebook runs from its first cell to its last, and what is committed of it is small."""

import json
import tempfile
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent.parent / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
LARGEST = 300_000  # bytes, pictures included
SECONDS = 240  # for one cell, on a machine that has other work


def names(path: Path) -> str:
    return path.stem


def test_there_is_one() -> None:
    assert NOTEBOOKS


@pytest.mark.parametrize("path", NOTEBOOKS, ids=names)
def test_runs(path: Path, tmp_path: Path) -> None:
    """In a kernel of its own, with this process's environment, from a folder of its own."""
    nbformat = pytest.importorskip("nbformat")
    nbclient = pytest.importorskip("nbclient")
    notebook = nbformat.read(path, as_version=4)
    client = nbclient.NotebookClient(
        notebook,
        timeout=SECONDS,
        kernel_name="python3",
        resources={"metadata": {"path": str(tmp_path)}},
    )
    client.execute()  # raises the error of a cell
    assert not list(tmp_path.iterdir()), "it leaves something where it is started"


@pytest.mark.parametrize("path", NOTEBOOKS, ids=names)
def test_what_is_committed(path: Path) -> None:
    """It was run from top to bottom, without an error, and shows no folder of whoever ran it."""
    assert path.stat().st_size < LARGEST
    cells = [c for c in json.loads(path.read_text("utf-8"))["cells"] if c["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1))
    outputs = [output for cell in cells for output in cell["outputs"]]
    assert not [output for output in outputs if output["output_type"] == "error"]
    places = (tempfile.gettempdir(), str(Path.home()), str(FOLDER.parent))
    assert not [place for place in places if f"{place}/" in json.dumps(outputs)]
