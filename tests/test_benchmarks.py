"""The scripts of docs/benchmarks.md: the same models as ours, the same names of figures."""

import json
import math
import sys
from pathlib import Path

import numpy as np
import pytest

from benchmarks import common, compare, same_losses
from benchmarks.reference import ddp
from shardtrain.config import load_config
from shardtrain.models.flops import training_flops_per_token

FIGURES = {"cpu_s_step": 2.0, "ms_step_median": 10.0, "peak_rss_mb": 5, "first_step_s": 1.0}


@pytest.mark.parametrize("size", ["small", "medium"])
def test_sizes_are_those_of_the_shipped_configs(size: str) -> None:
    config, ours = load_config(f"bench_{size}"), common.SIZES[size]
    model, data = config.model, config.data
    assert (model.num_layers, model.embed_dim, model.num_heads) == (
        ours.layers,
        ours.embed,
        ours.heads,
    )
    assert (data.sequence_length, data.batch_size, model.vocab_size) == (
        ours.length,
        ours.batch,
        ours.vocab,
    )
    per_token = training_flops_per_token(model, vocab_size=ours.vocab, length=ours.length)
    assert ours.flops == ours.tokens * per_token


def test_batches_are_shifted_by_one_and_repeat() -> None:
    size = common.SIZES["tiny"]
    (x, y), _ = common.batches(size, 2)
    assert x.shape == y.shape == (size.batch, size.length)
    assert (x[:, 1:] == y[:, :-1]).all()
    assert (common.batches(size, 1)[0][0] == x).all()


def test_the_line_of_figures(capsys: pytest.CaptureFixture[str]) -> None:
    options = common.parser(None).parse_args(["--size", "tiny", "--steps", "2"])
    losses = iter([3.0, 2.5, 2.0, 1.5])
    common.report("mine", options, common.measure(lambda _: next(losses), options))
    figures = json.loads(capsys.readouterr().out)
    assert (figures["loss0"], figures["final_loss"], figures["steps"]) == (3.0, 1.5, 2)


def test_a_run_is_the_last_line_of_json() -> None:
    code = "print('compiling'); print('{\"peer\": \"one\"}')"
    assert compare.run([sys.executable, "-c", code], {}) == {"peer": "one"}
    with pytest.raises(SystemExit, match="broken"):
        compare.run([sys.executable, "-c", "raise ValueError('broken')"], {})


def test_the_ratio_is_that_of_medians() -> None:
    runs = {
        "ours": [{"peer": "one", **FIGURES, "cpu_s_step": cpu} for cpu in (1.0, 9.0, 3.0)],
        "peer": [{"peer": "two", **FIGURES}] * 3,
    }
    result = compare.summary(runs)
    assert (result["cpu_ratio"], result["wall_ratio"]) == (1.5, 1.0)
    assert result["ours"]["cpu_s_step_span"] == [1.0, 9.0]


def test_a_trial_comes_back_as_it_was(tmp_path: Path) -> None:
    kernel, images = np.ones((3, 2), np.float32), np.arange(8, dtype=np.uint8).reshape(2, 4)
    settings = {"learning_rates": [0.1, 0.2], "clip_norm": 0.0}
    trial = ddp.Trial({"stem/kernel": kernel}, {"image": images}, settings)
    trial.save(tmp_path / "trial.npz")
    again = ddp.Trial.load(tmp_path / "trial.npz")
    assert (again.settings, again.steps) == (settings, 2)
    np.testing.assert_array_equal(again.weights["stem/kernel"], kernel)
    np.testing.assert_array_equal(again.batches["image"], images)
    assert again.batches["image"].dtype == np.uint8


def test_a_loss_that_is_no_number_is_the_largest_gap() -> None:
    assert ddp.largest([1.0, 2.0], [1.5, 2.0]) == 0.5
    assert ddp.largest([1.0, math.nan], [1.0, 2.0]) == math.inf
    assert same_losses.gap([2.0, 4.0], [2.0, 5.0]) == 0.25
    assert same_losses.gap([2.0], [math.nan]) == math.inf


def test_losses_are_read_between_events(tmp_path: Path) -> None:
    lines = [
        '{"event": "compile", "step": 0}',
        '{"step": 1, "loss": 2.0}',
        '{"step": 2, "loss": 1}',
    ]
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    assert same_losses.read_losses(tmp_path / "metrics.jsonl") == [2.0, 1]
    rows = same_losses.table([2.0, 1.0], [[2.0, 1.1]], ["data 2"]).splitlines()
    assert rows[-1] == "| 2 | 1.000000 | 1.100000 | 1.0e-01 |"
