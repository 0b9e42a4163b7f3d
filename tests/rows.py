"""Which rows of a test are in the default run."""

from collections.abc import Callable, Iterable
from typing import Any

import pytest


def shortened(rows: Iterable[Any], is_short: Callable[[Any], bool]) -> list[Any]:
    """Values of a test's parameter, or tuples of several, with those that are not short marked.

    Args:
        rows: all of them, for the marked run.
        is_short: whether a row is in the default run, or the short one, too.
    """

    def marked(row: Any) -> Any:
        values = row if isinstance(row, tuple) else (row,)
        return pytest.param(*values, marks=pytest.mark.campaign)

    return [row if is_short(row) else marked(row) for row in rows]
