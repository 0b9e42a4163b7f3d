"""The step compiled for TPUs that are not here. Needs libtpu (extra `plan-tpu`) alone."""

import json
import runpy
from pathlib import Path

import pytest

import shardtrain
from shardtrain.cli import main
from shardtrain.config import load_config, to_toml
from shardtrain.plan.targets_tpu import missing_tpu_parts

pytestmark = [
    pytest.mark.aot,
    pytest.mark.skipif(bool(missing_tpu_parts()), reason="needs libtpu"),
    pytest.mark.xdist_group("tpu"),
]


PAGE = runpy.run_path(str(Path(shardtrain.__file__).parents[1] / "docs" / "make_plan_memory.py"))
CASES = {(model, layout): (sections, keys) for model, layout, sections, keys in PAGE["cases"]()}


@pytest.fixture
def words(tmp_path: Path) -> list[str]:
    """A row of docs/plan_memory.md."""
    path = tmp_path / "row.toml"
    path.write_text(to_toml(load_config(*CASES["gpt", "data 8, zero 3"])), "utf-8")
    return ["plan", str(path), "--no-search", "--json", "--compile"]


def test_a_step_is_compiled_and_takes_what_was_planned(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*words, "--target", "tpu-v5p:2x4"]) == 0
    answer = json.loads(capsys.readouterr().out)
    planned, compiled = answer["bytes_per_device"], answer["compiled"]["bytes_per_device"]
    state = sum(planned[name] for name in ("parameters", "master", "moments", "batch"))
    assert compiled["arguments"] == pytest.approx(state, rel=0.01)
    assert planned["total"] == pytest.approx(compiled["total"], rel=0.1)
    assert "promises" not in answer["compiled"]


def test_a_program_that_the_compiler_finds_too_large_ends_with_4(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*words, "--target", "tpu-v5e:1x8", "--data.batch_size", "256"]) == 4
    told = capsys.readouterr().err
    assert told.startswith("compiling: the step does not fit")
    assert "the cheapest changes" in told
    assert "Traceback" not in told
