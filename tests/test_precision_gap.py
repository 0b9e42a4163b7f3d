"""`verify --precision`: both runs, the gap of their losses, and the limit."""

import json
from typing import Any

import pytest

from shardtrain.cli import main
from shardtrain.commands_precision import precision_gap
from shardtrain.config import load_config
from shardtrain.strategies.precision_words import NAMES, parse_precision
from shardtrain.verify.precision_gap import LIMITS, Gap, limit_of

SMALL = {
    "model.num_layers": 1,
    "model.embed_dim": 32,
    "data.sequence_length": 16,
    "data.batch_size": 8,
    "mesh.data": 8,
    "mesh.tensor": 1,
    "run.steps": 60,
    "optimizer.learning_rate": 1e-3,
    "optimizer.warmup_steps": 0,
}
NARROW = "bfloat16,master=bfloat16"


def flags(**others: Any) -> list[str]:
    keys = {**SMALL, **{key.replace("__", "."): value for key, value in others.items()}}
    return [word for key, value in keys.items() for word in (f"--{key}", str(value))]


def test_figures_are_those_of_the_losses() -> None:
    """The last tenth is 2 of 20 steps; smoothed, the first step counts as it is."""
    gap = Gap("x", LIMITS["fp8"], [4.0] * 18 + [3.0, 5.0], [4.0] * 18 + [3.9, 4.0])
    assert gap.final == pytest.approx(0.1 / 7.9)
    assert not gap.within
    assert gap.smoothed[0] == 0
    assert gap.largest == max(map(abs, gap.smoothed)) > 0
    assert gap.step == 1 + [abs(g) for g in gap.smoothed].index(gap.largest)
    better = Gap("x", LIMITS["fp8"], [3.0] * 20, [4.0] * 20)
    assert better.within
    assert better.largest == pytest.approx(0.25)


def test_a_loss_that_is_no_number_is_not_within() -> None:
    assert not Gap("x", LIMITS["fp8"], [1.0, float("nan")], [1.0, 1.0]).within


@pytest.mark.parametrize("name", NAMES)
def test_every_named_precision_has_a_limit(name: str) -> None:
    if name != "float64":
        limit = limit_of(parse_precision(name))
        assert "arXiv" in limit.source or name == "float32"


def test_both_runs_begin_alike() -> None:
    """The first losses differ by rounding alone; what is compared is not one run twice."""
    config = load_config("quickstart", {**SMALL, "train.precision": NARROW})
    gap = precision_gap(config, steps=3)
    assert len(gap.found) == len(gap.float32) == 3
    assert 0 < abs(gap.found[0] - gap.float32[0]) < 2e-3


def test_the_command_says_within_or_beyond(capsys: pytest.CaptureFixture[str]) -> None:
    """With a learning rate that bfloat16 masters round away, nothing is learned: exit 1."""
    words = flags(train__precision=NARROW)
    code = main(["verify", "quickstart", "--precision", "--json", *words])
    found = json.loads(capsys.readouterr().out)
    assert code == (0 if found["within"] else 1)
    assert found["steps"] == len(found["losses"]) == len(found["float32"]) == 60
    assert code == 1, found["final"]


def test_what_cannot_be_compared_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", "quickstart", "--precision", *flags()]) == 2
    assert "is what others are compared with" in capsys.readouterr().err
    assert main(["verify", "quickstart", "--precision", "--shrink", *flags()]) == 2
    assert "--shrink" in capsys.readouterr().err
