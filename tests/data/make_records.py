"""Makes the MDS folders of tests/data/records with MosaicML's own writer.

    pip install mosaicml-streaming numpy     # in an environment of its own
    python tests/data/make_records.py

Not needed to run the tests: the folders are committed, a few KB.
"""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np

FOLDER = Path(__file__).parent / "records"
TEXTS = [f"document {number}: naïve {'words ' * number}".rstrip() for number in range(9)]


def write(name: str, columns: dict[str, str], rows: list[dict[str, Any]], **how: Any) -> None:
    """Writes a folder, in shards of some 400 bytes."""
    from streaming.base.format.mds.writer import MDSWriter

    folder = FOLDER / name
    shutil.rmtree(folder, ignore_errors=True)
    with MDSWriter(out=str(folder), columns=columns, size_limit=500, **how) as writer:
        for row in rows:
            writer.write(row)


def main() -> None:
    """Makes all of them."""
    texts = [
        {"text": text, "id": number, "meta": {"n": number}} for number, text in enumerate(TEXTS)
    ]
    columns = {"text": "str", "id": "int", "meta": "json"}
    write("text", columns, texts, hashes=["sha1", "xxh64"])
    write("gz", columns, texts, hashes=["sha1"], compression="gz")
    write("zstd", columns, texts[:2], compression="zstd:3")
    write("json", {"row": "json"}, [{"row": {"content": text}} for text in TEXTS])
    tokens = [np.arange(number + 1, dtype=np.uint16) * 7 for number in range(9)]
    for name, encoding in (("tokens", "ndarray:uint16"), ("tokens_free", "ndarray")):
        write(name, {"tokens": encoding}, [{"tokens": row} for row in tokens])
    write(
        "tokens_fixed",
        {"input_ids": "ndarray:int32:4"},
        [{"input_ids": np.arange(4, dtype=np.int32)}] * 3,
    )
    write("tokens_bytes", {"tokens": "bytes"}, [{"tokens": row.tobytes()} for row in tokens])
    (FOLDER / "texts.json").write_text(json.dumps(TEXTS, ensure_ascii=False))


if __name__ == "__main__":
    main()
