"""`train.audit` on programs for two hosts of H100s: the check that a run makes of its own step.

All that a run does of it happens in the child, on the devices of the target.
"""

from collections.abc import Sequence
from typing import Any

import jax
import pytest

from shardtrain.config import RunConfig, load_config
from shardtrain.plan.compiling import Job, compile_for
from shardtrain.plan.promises import PROMISES
from shardtrain.plan.targets import Target
from shardtrain.run_audit import PromiseError, check_step, require_auditable
from shardtrain.run_program import abstract_batch, make_program
from shardtrain.sharding.mesh import make_mesh
from tests.aot.marks import needs_compiler
from tests.aot.sections import model_sections

pytestmark = needs_compiler("audit at start")

TARGET = Target("h100", hosts=2, per_host=8)
VOCAB = 512
BASE = model_sections(2, 128, VOCAB, 64, 32)
BASE["model"]["num_heads"] = 16
BASE["train"]["audit"] = True
WORDS = "what check_step said: "


class Checked:
    """A step that is checked once it is compiled; what was said stands in its text."""

    def __init__(self, config: RunConfig, devices: Sequence[jax.Device]) -> None:
        require_auditable(config, make_mesh(devices=devices))
        self.config = config
        self.program = make_program(config, vocab_size=VOCAB, devices=devices)

    def compile(self) -> "Checked":
        self.step = self.program.compile_step(abstract_batch(self.config, self.program))
        self.said = check_step(self.config, self.program, VOCAB, self.step)
        return self

    def as_text(self) -> str:
        return WORDS + self.said

    def memory_analysis(self) -> Any:
        return self.step.memory_analysis()


def lower(devices: Sequence[jax.Device], config: RunConfig) -> Checked:
    return Checked(config, devices)


def checked(**changes: Any) -> str:
    config = load_config(BASE, {key.replace("__", "."): value for key, value in changes.items()})
    return compile_for(TARGET, {"step": Job(lower, (config,))})["step"].text


@pytest.mark.campaign
def test_a_good_layout_goes_on() -> None:
    said = checked(sharding__zero=3, mesh__tensor=2)
    assert said.startswith(f"{WORDS}audit: ")
    kept, unchecked = (int(word) for word in said.split() if word.isdigit())
    assert kept >= 6
    assert kept + unchecked == len(PROMISES)


def test_a_broken_promise_ends_the_run_with_5() -> None:
    with pytest.raises(PromiseError) as refused:
        checked(mesh__tensor=16)
    told = str(refused.value)
    assert refused.value.exit_code == 5
    assert told.startswith("train.audit=True: the compiled step breaks 1 promise of its layout")
    assert "tensor groups are in one domain: a device sends" in told
    assert "2, 1 expected domains of" in told
    assert "all-reduce" in told
    assert len(told.splitlines()) < 24
