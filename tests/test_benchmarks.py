"""The scripts of docs/benchmarks.md: the same models as ours, the same names of figures."""

import json
import sys

import pytest

from benchmarks import common, compare
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
