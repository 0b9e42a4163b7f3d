"""What the other commands say of a BERT."""

import json

import pytest

from shardtrain import cli
from shardtrain.config import load_config
from shardtrain.run_bert import BertWork


def test_the_plan_has_the_bytes_of_a_large_one(capsys: pytest.CaptureFixture[str]) -> None:
    """bfloat16 parameters on every device; masters and moments in float32, split over 256."""
    assert cli.main(["plan", "bert_large_lamb", "--target", "h100:32x8", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    rows, embed = 30592, 1024
    count = 336_226_108 + (rows - 30522) * (embed + 1)  # with the padding of both tables
    assert said["count"] == 336_226_108
    assert said["bytes_per_device"]["parameters"] == 2 * count
    # A few biases do not divide by 256, and stay whole.
    assert 12 * count / 256 <= said["bytes_per_device"]["optimizer"] < 1.1 * 12 * count / 256


def test_flops_count_the_places_that_are_scored() -> None:
    """BERT-base, 128 tokens, 20 of them scored: by hand."""
    config = load_config("bert_base")
    embed, layers = 768, 12
    matrices = layers * (4 * embed**2 + 2 * embed * 4 * embed)
    attention = 2 * layers * embed * 128  # two products, for each token, of one multiply-add each
    heads = 20 * (embed**2 + embed * 30522) + embed * (embed + 2)
    sample = 6 * (128 * (matrices + attention) + heads)
    assert BertWork(config).flops(30522) == 256 * sample
