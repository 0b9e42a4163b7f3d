"""The child that compiles: what comes back when it does not end well. Needs the extra `plan`."""

import os
import time
from collections.abc import Callable
from typing import Any

import pytest

from shardtrain.errors import ConfigError, UserError
from shardtrain.plan.compiling import Job, compile_for
from shardtrain.plan.targets import CHIPS, Target, descriptions, require_compiler
from tests.aot.marks import needs_compiler

pytestmark = needs_compiler()

TARGET = Target("h100", hosts=2, per_host=4)


def refuses(devices: list[Any]) -> Any:
    assert len(devices) == 8
    assert os.environ["JAX_PLATFORMS"] == "cpu"
    raise ConfigError("too small", where="mesh.data=8", cure="use 4")


def fails(devices: list[Any]) -> Any:
    raise RuntimeError("no such luck")


def aborts(devices: list[Any]) -> Any:
    os.abort()


def sleeps(devices: list[Any]) -> Any:
    time.sleep(600)


@pytest.mark.parametrize(
    ("lower", "seconds", "words"),
    [
        (refuses, 100, r"mesh\.data=8: too small\n  to do: use 4$"),
        (fails, 100, r"compiling for h100:2x4: the compiler failed[\s\S]*no such luck"),
        (aborts, 100, r"the compiler aborted \(SIGABRT\)"),
        (sleeps, 8, r"not done after 8 s"),
    ],
)
def test_how_it_ends(lower: Callable[..., Any], seconds: float, words: str) -> None:
    with pytest.raises(UserError, match=words):
        compile_for(TARGET, {"step": Job(lower)}, seconds=seconds)


def test_every_chip_of_the_table_is_described() -> None:
    assert set(CHIPS.values()) <= set(descriptions(require_compiler()))
