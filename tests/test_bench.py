"""The figures of `shardtrain bench`: their names, which other scripts share, and what they mean."""

import json
from pathlib import Path
from typing import Any

import jax
import pytest

from shardtrain import bench as bench_module
from shardtrain.bench import bench
from shardtrain.cli import main
from shardtrain.config import load_config
from shardtrain.errors import ConfigError
from shardtrain.train.flops import PEAK_FLOPS, utilisation

SHARED = (
    *("peer", "size", "tokens_per_s", "ms_step_median", "peak_rss_mb", "mfu", "first_step_s"),
    *("final_loss", "dtype", "gflops", "ms_step_min", "ms_step_max", "steps", "loss0", "tag"),
    "cpu_s_step",
)
"""Names that scripts for other trainers print too, in their order."""


@pytest.fixture
def flags(tmp_path: Path) -> dict[str, Any]:
    text = tmp_path / "text.txt"
    text.write_text("a horse, a horse, my kingdom for a horse\n" * 200)
    return {
        "data.path": str(text),
        "data.batch_size": 8,
        "data.sequence_length": 32,
        "model.num_layers": 2,
        "model.embed_dim": 32,
        "model.num_heads": 2,
        "mesh.tensor": 2,
        "sharding.zero": 1,
    }


def test_one_line_of_json(flags: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    words = [word for name, value in flags.items() for word in (f"--{name}", str(value))]
    assert main(["bench", "bench_small", "--steps", "3", "--json", *words]) == 0
    line = capsys.readouterr().out
    assert line.count("\n") == 1
    figures = json.loads(line)
    assert tuple(figures)[: len(SHARED)] == SHARED
    assert (figures["peer"], figures["size"], figures["dtype"]) == ("shardtrain", "small", "f32")
    assert (figures["steps"], figures["devices"]) == (3, 8)
    assert figures["tag"] == "data 4, tensor 2, zero 1"
    assert figures["mfu"] is None  # an unknown chip
    assert figures["ms_step_min"] <= figures["ms_step_median"] <= figures["ms_step_max"]
    assert figures["tokens_per_s"] == pytest.approx(
        8 * 32 / figures["ms_step_median"] * 1e3, rel=0.1
    )
    assert figures["final_loss"] < figures["loss0"]


def test_warm_up_is_not_timed(flags: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    batches = bench_module._batches
    monkeypatch.setattr(
        bench_module, "_batches", lambda run, count: seen.append(count) or batches(run, count)
    )
    figures = bench(load_config("bench_small", flags), steps=2, warmup=1)
    assert seen == [3]
    assert figures["steps"] == 2
    assert figures["first_step_s"] * 1e3 > figures["ms_step_max"]


@pytest.mark.parametrize(("steps", "warmup"), [(0, 1), (1, 0)])
def test_nothing_to_time(flags: dict[str, Any], steps: int, warmup: int) -> None:
    with pytest.raises(ConfigError, match="at least one"):
        bench(load_config("bench_small", flags), steps=steps, warmup=warmup)


class Chip:
    """A device of some kind."""

    def __init__(self, kind: str) -> None:
        self.device_kind = kind


@pytest.mark.parametrize("kind", PEAK_FLOPS)
def test_utilisation_of_known_chips(kind: str) -> None:
    chips: list[Any] = [Chip(kind)] * 4
    for products, peak in PEAK_FLOPS[kind].items():
        if products != "tf32":  # no precision of a run
            precision = "fp8" if products == "float8" else products
            assert utilisation(peak, chips, precision) == 0.25


def test_utilisation_of_an_unknown_chip_is_unknown() -> None:
    assert utilisation(1e12, jax.devices(), "float32") is None
