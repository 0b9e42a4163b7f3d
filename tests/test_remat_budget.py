"""`train.remat = "budget"`: what is chosen fits, and the next cheaper policy does not."""

from pathlib import Path
from typing import Any

import jax
import pytest

from shardtrain import cli
from shardtrain.commands_plan import make_plan
from shardtrain.config import RunConfig, load_config
from shardtrain.errors import ConfigError
from shardtrain.run_remat import (
    BudgetError,
    Choice,
    Policy,
    choose,
    choose_remat,
    compiled_bytes,
    policies,
    with_remat,
)
from shardtrain.run_workload import layout_of, make_workload
from tests.rows import shortened

VOCAB = 256
MODELS: dict[str, dict[str, Any]] = {
    "gpt": {},
    "llama": {
        "norm": "rmsnorm",
        "position": "rope",
        "activation": "swiglu",
        "num_kv_heads": 2,
        "bias": False,
    },
    "deep": {"num_layers": 12, "embed_dim": 64, "position": "alibi"},
}
BUDGETS = 5


def config(model: str, **changes: Any) -> RunConfig:
    sections = {
        "run": {"steps": 4},
        "model": {"num_layers": 4, "embed_dim": 128, "num_heads": 4, "layer_loop": "scan"}
        | MODELS[model],
        "data": {"sequence_length": 128, "batch_size": 16},
        "mesh": {"data": 2},
        "optimizer": {"learning_rate": 1e-3},
    }
    return load_config(sections, changes)


@pytest.mark.parametrize("model", shortened(MODELS, "llama".__eq__))
def test_the_choice_fits_and_the_next_cheaper_does_not(model: str) -> None:
    """Five budgets, from just what the leanest takes to more than the cheapest needs."""
    devices = jax.devices()[:2]
    plain = config(model)
    workload = make_workload(plain, VOCAB, "cpu")
    tried = policies(workload, layout_of(plain, 2))
    assert (tried[0].remat, tried[-1].remat) == ("none", "full")
    assert len(tried) >= 5
    found: dict[str, float] = {}

    def held(remat: str) -> float:
        if remat not in found:
            found[remat] = compiled_bytes(with_remat(plain, remat), VOCAB, devices)
        return found[remat]

    least, most = held("full"), held("none")
    assert least < 0.8 * most
    chosen = []
    for step in range(BUDGETS):
        budget = least + (most - least) * step / (BUDGETS - 1)
        choice = choose(tried, budget, lambda policy: held(policy.remat))
        assert held(choice.policy.remat) == choice.held <= budget
        index = tried.index(choice.policy)
        if index:
            assert choice.cheaper == (tried[index - 1], held(tried[index - 1].remat))
            assert choice.cheaper[1] > budget
        chosen.append(choice.policy.again)
    assert chosen == sorted(chosen, reverse=True), "more room is less work"
    assert chosen[-1] == 0.0
    assert len(set(chosen)) >= 3


def test_a_plan_that_is_wrong_is_mended_by_what_is_compiled() -> None:
    tried = [Policy("none", 0.0, 100), Policy("dots", 0.1, 60), Policy("full", 0.3, 20)]
    real = {"none": 90.0, "dots": 45.0, "full": 30.0}

    def chosen(budget: float) -> str:
        return choose(tried, budget, lambda policy: real[policy.remat]).policy.remat

    assert [chosen(b) for b in (95, 90, 60, 50, 45, 40, 30)] == [
        "none", "none", "dots", "dots", "dots", "full", "full",
    ]  # fmt: skip
    with pytest.raises(BudgetError, match="the step with remat full takes 30 B"):
        chosen(25)


def test_a_run_says_what_it_has_chosen_and_keeps_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """resolved.toml has the policy, so that the run goes on with it on whatever it finds."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text("all work and no play makes jack a dull boy\n" * 100)
    flags = ["--data.path", "text.txt", "--run.steps", "2", "--run.dir", "run"]
    flags += ["--eval.steps", "0", "--eval.sample_tokens", "0", "--model.num_layers", "2"]
    flags += ["--checkpoint.every", "1"]
    budget = ["--train.remat", "budget", "--train.memory_budget"]
    assert cli.main(["train", "quickstart", *flags, *budget, "1GiB", "--run.stop_at", "1"]) == 0
    assert "train.remat is none: " in capsys.readouterr().err
    resolved = (tmp_path / "run" / "resolved.toml").read_text()
    assert 'remat = "none"' in resolved
    assert cli.main(["train", "run", "--run.stop_at", "0"]) == 0
    assert cli.main(["train", "quickstart", *flags, *budget, "1MiB"]) == 4
    said = capsys.readouterr().err
    assert "train.memory_budget: the step with remat full takes" in said
    assert "value: 1.0 MiB" in said


def test_a_plan_takes_the_budget_by_its_own_figures() -> None:
    keys = {"train.remat": "budget", "train.memory_budget": "48GiB", "mesh.data": 128}
    made = load_config("llama3_8b", keys)
    plan = make_plan(made, "h100:16x8", search=False)
    assert plan.own.layout.remat not in ("none", "full", "budget")
    assert plan.own.memory.total <= 48 * 2**30
    assert any(note.startswith("by the plan, train.remat is ") for note in plan.notes)


def test_they_go_together() -> None:
    for keys in ({"train.remat": "budget"}, {"train.memory_budget": "1GiB"}):
        with pytest.raises(ConfigError, match="they go together"):
            load_config("quickstart", keys)
    with pytest.raises(ConfigError, match="must be a size such as"):
        load_config("quickstart", {"train.remat": "budget", "train.memory_budget": "much"})


def test_what_is_said_of_a_choice() -> None:
    cheap, lean = Policy("dots", 0.05, 60), Policy("mlp", 0.12, 40)
    text = str(Choice(lean, 2**30, 2**29, (cheap, 2**31)))
    assert text == (
        "mlp: 512.0 MiB of 1.0 GiB, 12.0% of the products are made again; "
        "dots (5.0%) would take 2.0 GiB"
    )


def test_nothing_is_chosen_where_nothing_is_asked() -> None:
    made = config("gpt")
    assert choose_remat(made, VOCAB, jax.devices()[:2]) == (made, None)
