"""Which field of a record is its text: the same rule for JSONL, Parquet, MDS and ArrayRecord.

Owns: the rule. Does not own: reading records.
"""

from collections.abc import Container, Sequence
from typing import Any, Final

from shardtrain.errors import DataError

COLUMNS: Final = ("text", "content")
"""Names that text usually has."""


def text_columns(all_names: Container[str], strings: Sequence[str]) -> list[str]:
    """Return the columns that could be the text: one, if it is clear which.

    Args:
        all_names: every column.
        strings: those of text.

    Example:
        >>> text_columns(["id", "content"], ["id", "content"]), text_columns(["a"], ["a"])
        (['content'], ['a'])
    """
    usual = [name for name in COLUMNS if name in all_names]
    return usual[:1] or list(strings)


def text_of(row: Any, column: str, where: str) -> str:
    """Return the text of a record that was JSON.

    Args:
        row: what the JSON says: an object, or a string that is the text itself.
        column: the field that holds the text; "" = `text`, `content` or the only string.
        where: file and place, for messages.

    Raises:
        DataError: there is no such field, or it is no text.
    """
    if isinstance(row, str) and not column:
        return row
    if not isinstance(row, dict):
        raise DataError("this line is not a JSON object", where=where, value=str(row)[:80])
    strings = [name for name, value in row.items() if type(value) is str]
    names = [column] if column else text_columns(row, strings)
    text = row.get(names[0]) if len(names) == 1 else None
    if text is None and len(names) == 1 and names[0] in row:
        return ""  # null
    if not isinstance(text, str):
        raise DataError(
            "this line has no text",
            where=where,
            value=f"fields {', '.join(row)}",
            allowed=column or f"a field {' or '.join(COLUMNS)}, or a single string",
            cure="name the field with --column",
        )
    return text
