"""LoRA under layouts is the run of one device; frozen weights are split like trained ones."""

import pytest

from tests.layouts.harness import Case, difference

CASES = [
    Case(mesh="pp2 dp2 tp2", zero=3, microbatches=4, schedule="zero_bubble", lora=3),
]
MORE = [
    Case(mesh="2x2x2", zero=3, microbatches=2, remat="full", lora=3),
    Case(mesh="c2 dp2 tp2", zero=2, dropout=0.2, documents=True, lora=3, lora_targets="out,down"),
    Case(mesh="8x1", zero=0, microbatches=2, remat="dots", style="llama", lora=3),
    Case(mesh="8x1", zero=1, loop="peel", style="bloom", lora=3, lora_targets="qkv"),
    Case(mesh="4x2", zero=2, sequence_parallel=True, loss_chunks=3, tied=False, lora=3),
    Case(mesh="2x4", zero=3, loop="unroll", style="llama", lora=5),
    Case(mesh="c4 dp2", zero=1, attention="ulysses", microbatches=2, lora=3),
    Case(mesh="pp4 dp2", zero=1, microbatches=8, num_layers=6, schedule="gpipe", lora=3),
    Case(mesh="pp2 c2 tp2", microbatches=4, virtual_stages=2, num_layers=4, lora=3,
         schedule="interleaved", remat="full"),
    Case(mesh="4x2", zero=3, optimizer="muon", style="llama", lora=3),
]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=str)
def test_lora_equals_one_device(case: Case) -> None:
    result = difference(case)
    assert result.equal, result
    assert all(path.endswith(("lora_a", "lora_b")) for path in result.gradients)


@pytest.mark.campaign
@pytest.mark.parametrize("case", MORE, ids=str)
def test_lora_equals_one_device_in_more_layouts(case: Case) -> None:
    result = difference(case)
    assert result.equal, result
