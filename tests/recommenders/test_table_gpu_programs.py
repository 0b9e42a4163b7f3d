"""The step of Criteo's run, compiled for 8 H100s that are not here."""

import re

import numpy as np
import pytest

from shardtrain.config import load_config
from shardtrain.plan.compiling import Job, compile_for
from shardtrain.plan.targets import missing_parts, parse_target
from shardtrain.run_program import lower_step

pytestmark = [
    pytest.mark.campaign,
    pytest.mark.skipif(bool(missing_parts()), reason="needs " + " and ".join(missing_parts())),
]
WIDTH = 16
"""Columns of a device."""


def test_24_billion_entries_are_updated_in_place_and_never_sent() -> None:
    """Entries beyond 32 bits (O-23); temporaries are those of a batch's rows."""
    config = load_config("dlrm_criteo_8gpu")
    compiled = compile_for(parse_target("h100:1x8"), {"step": Job(lower_step, (config, 1))})["step"]
    table = (sum(config.model.table_sizes) - 2912) * WIDTH * 4
    rows = config.data.batch_size * 16 * WIDTH * 4
    memory = compiled.memory
    assert memory["arguments"] > table
    assert memory["aliased"] > table
    assert memory["temporaries"] < 8 * rows < table / 20
    sent = [
        line
        for line in compiled.text.splitlines()
        if re.search(r" (all-gather|all-reduce|reduce-scatter|all-to-all)(-start)?\(", line)
    ]
    assert any("all-to-all" in line for line in sent)
    shapes = [s for line in sent for s in re.findall(r"[fsu]\d+\[([\d,]*)\]", line)]
    largest = max(int(np.prod([int(n) for n in s.split(",") if n] or [1])) for s in shapes)
    assert largest <= config.data.batch_size * 16 * WIDTH
