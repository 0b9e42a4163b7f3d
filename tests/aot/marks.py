"""The marks of tests that compile for GPUs that are not there."""

import pytest

from shardtrain.plan.targets import missing_parts


def needs_compiler(group: str = "") -> list[pytest.MarkDecorator]:
    """Skipped, with the reason, where the compiler is not complete.

    Args:
        group: tests of one group share programs, and so one worker; "" = none.
    """
    reason = "needs " + " and ".join(missing_parts())
    marks = [pytest.mark.aot, pytest.mark.skipif(bool(missing_parts()), reason=reason)]
    return [*marks, pytest.mark.xdist_group(group)] if group else marks
