"""A row of the table of chips, measured on this machine."""

from pathlib import Path

import jax
import pytest

from shardtrain.commands_plan import make_plan
from shardtrain.config import load_config
from shardtrain.plan.calibrate import measure
from shardtrain.plan.hardware import read_chips
from shardtrain.plan.links import REACHED
from tests.plan.test_plan import BASE


def test_a_plan_can_be_made_for_this_machine(tmp_path: Path) -> None:
    measured = measure(side=32, megabytes=1)
    path = tmp_path / "chips.toml"
    path.write_text(measured.toml("here"), encoding="utf-8")
    chips = read_chips(path)
    chip = chips["here"]
    assert chip.flops["float32"] == pytest.approx(measured.flops["float32"], rel=1e-3)
    assert chip.fast_link is not None
    assert chip.fast_link.bandwidth * REACHED == pytest.approx(measured.link, rel=1e-3)
    count = jax.device_count()
    plan = make_plan(load_config(BASE), f"here:1x{count}", chips=chips, search=False)
    assert plan.own.cost.middle > 0
