"""A tokenizer of few WordPieces, and text for it."""

from pathlib import Path

import pytest
from few_words import document

from shardtrain.data.wordpiece import learn


@pytest.fixture(scope="session")
def tokenizer_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("tokenizers")
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    path.write_bytes(learn(lambda: map(document, range(100)), 90))
    return path


@pytest.fixture(scope="session")
def text_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A document a line."""
    path = tmp_path_factory.mktemp("text") / "text.jsonl"
    lines = (f'{{"text": "{document(number)}"}}' for number in range(120))
    path.write_text("\n".join(lines) + "\n")
    return path
