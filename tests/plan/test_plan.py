"""Plans: what a device holds, how long a step takes, which layouts there are."""

import json
from pathlib import Path
from typing import Any

import jax
import pytest

from shardtrain.cli import main
from shardtrain.commands_plan import make_plan, other_layout
from shardtrain.config import load_config
from shardtrain.errors import EXIT_DOES_NOT_FIT, ConfigError
from shardtrain.plan.cost import cost
from shardtrain.plan.hardware import parse_cluster
from shardtrain.plan.memory import memory
from shardtrain.plan.search import search
from shardtrain.plan.workload import Layout, Workload
from shardtrain.run_program import make_program, make_report
from shardtrain.run_workload import layout_of, make_workload
from shardtrain.sharding.mesh import abstract_mesh
from shardtrain.strategies.schedules.simulate import simulate

LAYERS, EMBED, HEADS, VOCAB, LENGTH, BATCH = 8, 512, 8, 4096, 256, 64
BASE: dict[str, Any] = {
    "run": {"steps": 10},
    "model": {
        "num_layers": LAYERS,
        "embed_dim": EMBED,
        "num_heads": HEADS,
        "vocab_size": VOCAB,
        "bias": False,
        "norm_bias": False,
    },
    "data": {"sequence_length": LENGTH, "batch_size": BATCH, "separate_documents": False},
    "optimizer": {"learning_rate": 1e-3},
    "train": {"precision": "bfloat16"},
}


@pytest.fixture(scope="module")
def workload() -> Workload:
    return make_workload(load_config(BASE), VOCAB, "gpu")


# -- memory


LAYOUTS = [
    {},
    {"mesh.data": 8, "sharding.zero": 1},
    {"mesh.data": 8, "sharding.zero": 3, "train.microbatches": 2},
    {"mesh.data": 4, "mesh.tensor": 2, "sharding.zero": 2, "sharding.sequence_parallel": True},
    {"mesh.data": 2, "mesh.replica": 2, "mesh.tensor": 2, "sharding.zero": 3},
    {"mesh.pipeline": 4, "mesh.data": 2, "sharding.zero": 1, "train.microbatches": 8},
    {"mesh.pipeline": 3, "train.microbatches": 4, "pipeline.layout": "E3,3,2H"},
    {
        "mesh.pipeline": 2,
        "pipeline.schedule": "interleaved",
        "pipeline.virtual_stages": 2,
        "train.microbatches": 4,
        "sharding.zero": 2,
        "mesh.data": 2,
    },
]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("optimizer", ["adamw", "adafactor"])
def test_state_is_that_of_the_run(layout: dict[str, Any], optimizer: str) -> None:
    """The same tables, so the same bytes."""
    config = load_config(BASE, {**layout, "optimizer.name": optimizer})
    degrees = config.mesh.model_dump()
    degrees["data"] = max(degrees["data"], 1)
    count = 1
    for degree in degrees.values():
        count *= degree
    told = make_report(make_program(config, vocab_size=VOCAB, mesh=abstract_mesh(degrees)))
    held = memory(make_workload(config, VOCAB, "gpu"), layout_of(config, count))
    assert held.parameters == told.parameters
    assert held.master + held.moments == told.optimizer


@pytest.mark.parametrize("layout", [LAYOUTS[2], LAYOUTS[5]], ids=str)
def test_a_frozen_base_on_a_disk_is_only_read(layout: dict[str, Any]) -> None:
    """Twice a microbatch; what the plan has on the disk and on the device is what the run has."""
    config = load_config(BASE, {**layout, "lora.rank": 4, "offload.parameters": "disk"})
    workload, chosen = make_workload(config, VOCAB, "gpu"), layout_of(config, 8)
    program = make_program(config, vocab_size=VOCAB, mesh=abstract_mesh(config.mesh.model_dump()))
    rows, microbatches = program.disk.frozen, chosen.microbatches
    assert rows is not None
    assert program.disk.all == (rows,)
    held, travels = memory(workload, chosen), workload.to_disk(chosen)
    assert held.disk == rows.group.rows * sum(block.nbytes for block in rows.group.blocks) > 0
    versions = 4 * len(rows.paths)
    assert held.parameters == make_report(program).parameters - versions
    assert (travels.loaded, travels.stored) == (2 * microbatches * held.disk, 0)
    traffic = program.disk.traffic(microbatches, masters=program.policy.has_master)
    assert traffic == (2 * microbatches * rows.nbytes, 0)


def test_a_layer_keeps_what_its_formula_says(workload: Workload) -> None:
    """Of a sample: both norms' inputs and results, q, k, v, attention's result, the MLP before its
    activation and after; a few numbers a position beside them.
    """
    width = 2 * LENGTH * EMBED  # bytes of one array as wide as the model
    layer = workload.pieces(Layout()).layer
    expected = (2 + 2 + 3 + 1 + 4) * width
    assert expected <= layer.kept <= 1.1 * (expected + 4 * width)


def test_full_remat_keeps_the_input_alone(workload: Workload) -> None:
    pieces = workload.pieces(Layout(remat="full"))
    assert pieces.layer.kept == pieces.activation == 2 * LENGTH * EMBED


def test_remat_shows_in_the_flops(workload: Workload) -> None:
    """Backward is twice the forward; full remat adds all of it but the last product."""
    whole, again = (workload.pieces(Layout(remat=remat)).layer for remat in ("none", "full"))
    assert whole.backward.flops == pytest.approx(2 * whole.forward.flops, rel=0.03)
    last = 2 * LENGTH * EMBED * 4 * EMBED
    added = again.backward.flops - whole.backward.flops
    assert added == pytest.approx(whole.forward.flops - last, rel=0.01)


def test_sequence_parallel_splits_the_residual_stream(workload: Workload) -> None:
    apart = workload.pieces(Layout(tensor=4, sequence_parallel=True))
    whole = workload.pieces(Layout(tensor=4))
    assert apart.activation == whole.activation // 4
    assert apart.layer.kept < whole.layer.kept
    assert apart.layer.forward.flops == whole.layer.forward.flops


def test_tensor_shards_divide_work_and_logits(workload: Workload) -> None:
    one, four = workload.pieces(Layout()), workload.pieces(Layout(tensor=4))
    assert four.layer.forward.flops == one.layer.forward.flops / 4
    assert four.logits == one.logits / 4 == LENGTH * VOCAB


def test_a_pipeline_holds_its_slots(workload: Workload) -> None:
    """1f1b: as much at 16 microbatches as at 32 of the same size; gpipe: twice."""
    base = Layout(pipeline=4, remat="full")
    held = {}
    for schedule in ("1f1b", "gpipe"):
        for count in (16, 32):
            many = Workload(**{**vars_of(workload), "batch_size": count})
            layout = Layout(**{**vars(base), "schedule": schedule, "microbatches": count})
            held[schedule, count] = memory(many, layout).activations
    assert held["1f1b", 16] == held["1f1b", 32]
    assert held["gpipe", 32] > 1.8 * held["gpipe", 16]


def vars_of(workload: Workload) -> dict[str, Any]:
    return {name: getattr(workload, name) for name in Workload.__dataclass_fields__}


# -- cost


def test_flops_are_the_models(workload: Workload) -> None:
    """6 for each matrix parameter and token, and attention's 12 x length x width."""
    matrices = LAYERS * 12 * EMBED**2 + VOCAB * EMBED
    expected = (6 * matrices + 12 * LAYERS * LENGTH * EMBED) * LENGTH * BATCH
    found = cost(workload, Layout(), parse_cluster("h100:1x1"))
    assert found.model_flops == pytest.approx(expected, rel=0.02)
    assert found.flops == found.model_flops


def test_bubble_is_the_schedules(workload: Workload) -> None:
    layout = Layout(pipeline=4, microbatches=16, remat="full")
    found = cost(workload, layout, parse_cluster("h100:1x4")).low
    schedule, _ = workload.stages(layout, 16)
    work = found.products + found.other + found.tensor
    ratio = (work + found.bubble) / work
    # The head makes the last stage longer than the others.
    assert ratio == pytest.approx(simulate(schedule).ratio, rel=0.15)


def test_gradients_are_sent_once_with_zero_1_and_each_time_with_zero_2(workload: Workload) -> None:
    cluster = parse_cluster("a100-80:8x1")
    once, each = (
        cost(workload, Layout(data=8, zero=zero, microbatches=8), cluster).high.data
        for zero in (1, 2)
    )
    assert each > 2 * once


def test_many_microbatches_are_worked_out_from_few(workload: Workload) -> None:
    cluster = parse_cluster("h100:1x4")
    many = Workload(**{**vars_of(workload), "batch_size": 64})
    layout = Layout(pipeline=4, microbatches=64, remat="full")
    short = cost(many, layout, cluster).low.total
    schedule, _ = many.stages(layout, 64)
    assert schedule.work.num_ticks == 64 + 2 * 3
    tick = (short - cost(many, layout, cluster).low.update) / schedule.work.num_ticks
    assert tick > 0


# -- search


def test_the_best_is_first_and_others_have_reasons(workload: Workload) -> None:
    found = search(workload, parse_cluster("a100-80:2x8"), keep=5)
    times = [candidate.cost.middle for candidate in found.best]
    assert times == sorted(times)
    assert len(found.best) == 5
    assert found.tried > 100
    reasons = {rejected.family: rejected.reason for rejected in found.rejected}
    assert "crosses the domain of the fast link" in reasons["tensor 16"] or (
        "not divisible" in reasons["tensor 16"]
    )
    assert reasons["pipeline 16"] == f"the model has {LAYERS} layers"


def test_a_model_too_large_says_what_it_lacks() -> None:
    config = load_config({**BASE, "model": {**BASE["model"], "embed_dim": 16384, "num_heads": 128}})
    found = search(make_workload(config, VOCAB, "gpu"), parse_cluster("rtx4090:1x2"))
    assert found.best == ()
    assert any("does not fit: at least" in rejected.reason for rejected in found.rejected)


def test_memory_as_the_objective(workload: Workload) -> None:
    cluster = parse_cluster("a100-80:1x8")
    fast, small = (
        search(workload, cluster, objective=objective, keep=1).best[0]
        for objective in ("time", "memory")
    )
    assert small.memory.total < fast.memory.total
    assert small.cost.middle > fast.cost.middle


# -- published runs


PUBLISHED = {
    # Le Scao et al. 2022 (arXiv 2211.05100), section 3.4: seconds of a step
    "bloom_176b": ("a100-80:48x8", 105.0),
    # Smith et al. 2022 (arXiv 2201.11990), section 2.3
    "megatron_turing_530b": ("a100-80:280x8", 60.1),
    # Narayanan et al. 2021 (arXiv 2104.04473), table 2: 84 days for 300 billion tokens
    "gpt3_175b": ("a100-80:48x8", 84 * 86400 * 1536 * 2048 / 300e9),
    # the same, table 1: 163 TFLOP/s on each GPU, by its formula of FLOPs
    "gpt_1t": (
        "a100-80:384x8",
        96
        * 3072
        * 2048
        * 128
        * 25600**2
        * (1 + 2048 / (6 * 25600) + 51200 / (16 * 128 * 25600))
        / (3072 * 163e12),
    ),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_runs_fit_and_take_their_time(name: str) -> None:
    target, seconds = PUBLISHED[name]
    plan = make_plan(load_config(name), target, search=False)
    assert plan.fits
    assert plan.own.cost.middle == pytest.approx(seconds, rel=0.2)


def test_llama_fits_its_cluster() -> None:
    plan = make_plan(load_config("llama3_405b"), "h100:2048x8", search=False)
    assert plan.fits
    assert plan.workload.num_parameters == pytest.approx(405e9, rel=0.01)


# -- the command


def written(tmp_path: Path, **changes: Any) -> str:
    path = tmp_path / "mine.toml"
    from shardtrain.config import to_toml

    path.write_text(to_toml(load_config(BASE, changes)), encoding="utf-8")
    return str(path)


def test_json_has_what_scripts_need(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config, out, picture = written(tmp_path), tmp_path / "best.toml", tmp_path / "plan.svg"
    words = ["plan", config, "--target", "a100-80:1x8", "--json", "--out", str(out)]
    words += ["--sweep", "batch_size=64,128", "--explain", "tensor=2, zero=3"]
    assert main([*words, "--picture", str(picture), "--price", "2"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["fits"] is True
    assert answer["bytes_per_device"]["total"] == pytest.approx(
        sum(v for k, v in answer["bytes_per_device"].items() if k != "total"), rel=1e-6
    )
    low, high = answer["step_seconds"]
    assert 0 < low <= high
    assert answer["bottleneck"] in answer["seconds"]["high"]
    assert answer["parameters"] == sum(leaf.size for leaf in jax.tree.leaves(make_shapes()))
    assert answer["price_per_billion_tokens"] > 0
    assert [point["batch_size"] for point in answer["sweep"]] == [64, 128]
    assert answer["explained"][0]["layout"]["zero"] == 3
    assert answer["explained"][0]["layout"]["data"] == 4
    best = load_config(out)
    assert layout_of(best, 8) == Layout(**answer["best"][0]["layout"])
    assert picture.read_text(encoding="utf-8").startswith("<?xml")


def make_shapes() -> Any:
    return make_program(
        load_config(BASE), vocab_size=VOCAB, mesh=abstract_mesh({}, "gpu")
    ).placement.shapes


def test_text_for_the_eye(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", written(tmp_path), "--target", "h100:1x8"]) == 0
    text = capsys.readouterr().out
    for word in ("bytes on a device", "seconds of a step", "best layouts", "not among them"):
        assert word in text


@pytest.mark.parametrize(
    ("keys", "said", "unit"),
    [
        (
            {"model.num_layers": 1, "model.embed_dim": 64, "model.vocab_size": 512},
            " thousand parameters on h100:1x8",
            "MiB",
        ),
        ({"model.num_layers": 48, "model.embed_dim": 2048}, " billion parameters on", "GiB"),
    ],
)
def test_units_that_fit(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], keys: dict[str, Any], said: str, unit: str
) -> None:
    words = ["plan", written(tmp_path, **keys), "--target", "h100:1x8", "--no-search"]
    assert main(words) == 0
    text = capsys.readouterr().out
    assert said in text.splitlines()[0]
    (head,) = (line for line in text.splitlines() if line.startswith(" bytes on a device"))
    assert head.split()[-1] == unit


def test_what_does_not_fit_ends_with_4(tmp_path: Path) -> None:
    config = written(tmp_path, **{"model.num_layers": 400, "model.embed_dim": 8192})
    assert main(["plan", config, "--target", "l4:1x1", "--no-search"]) == 4


def test_what_does_not_fit_has_cures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = written(tmp_path, **{"model.num_layers": 48, "model.embed_dim": 2048})
    words = ["plan", config, "--target", "l4:1x8", "--no-search", "--json"]
    assert main(words) == 4
    answer = json.loads(capsys.readouterr().out)
    sizes = [large["nbytes"] for large in answer["largest"]]
    assert sizes == sorted(sizes, reverse=True)
    assert any("layers/mlp/up" in large["name"] for large in answer["largest"])
    assert 1 <= len(answer["cures"]) <= 3
    for cure in answer["cures"]:
        assert cure["bytes_per_device"]["total"] <= answer["memory"]["room"]
        explained = ", ".join(f"{key}={cure['layout'][key]}" for key in ("zero", "remat"))
        flags = ["--train.microbatches", str(cure["layout"]["microbatches"])]
        flags += ["--mesh.tensor", str(cure["layout"]["tensor"])]
        flags += ["--sharding.zero", str(cure["layout"]["zero"])]
        flags += ["--train.remat", cure["layout"]["remat"]]
        assert main([*words, *flags]) == 0, explained
    capsys.readouterr()


def test_a_run_that_is_out_of_memory_is_told_what_would_do(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(_: Any) -> int:
        raise RuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 123 bytes.\nmore")

    monkeypatch.setattr("shardtrain.training.train_command", fails)
    assert main(["train", written(tmp_path), "--mesh.data", "8", "--sharding.zero", "1"]) == 4
    text = capsys.readouterr().err
    assert "largest on a device" in text
    assert "the cheapest changes" in text
    assert "Traceback" not in text


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--target", "h101:1x8"], "there is no such chip"),
        (["--target", "h100"], "not a cluster"),
        (["--target", "h100:1x8", "--mesh.data", "4"], "but there are 8 devices"),
        (["--target", "cpu:1x8"], "the row of cpu has no"),
        (["--target", "h100:1x8", "--explain", "colour=2"], "is no choice of a layout"),
        (["--target", "h100:1x8", "--explain", "tensor=16"], "tensor"),
        (["--target", "h100:1x8", "--sweep", "width=3"], "is not a sweep"),
        (["--target", "h100:16x8", "--explain", "colour=2"], "is no choice of a layout"),
        (["--target", "h100:16x8", "--sweep", "width=3"], "is not a sweep"),
        (["--target", "h100:1x8", "--objective", "cost"], "is not known"),
        (["--target", "h100:1x8", "--picture", "plan.gif"], "is no kind of picture"),
        (["--target", "h100:1x8", "--keep", "kept"], "there is no program to keep"),
        (["--target", "h100:16x8"], "not divisible by mesh.data=128"),
        (["--target", "h100:4x8", "--mesh.tensor", "16"], "model.num_heads=8 is not divisible"),
        (["--target", "h100:2x8", "--mesh.pipeline", "16"], "too few for 16 parts"),
        (["--target", "h101:1x8", "--audit"], "there is no such chip"),
        (["--target", "tpu-v5e:1x8", "--audit"], "read in programs for GPUs alone"),
        (["--target", "tpu-v5e:1x2", "--compile"], "tpu-v5e:HOSTSx4 or tpu-v5e:HOSTSx8"),
    ],
)
def test_bad_input_ends_with_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], message: str
) -> None:
    assert main(["plan", written(tmp_path), "--no-search", *words]) == 2
    told = capsys.readouterr()
    assert message in told.err
    assert len(told.err.splitlines()) < 24
    assert "Traceback" not in told.err
    assert told.out == ""


def test_the_own_layout_need_not_be_legal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What is best does not depend on it; the reason is said, and the best is written."""
    out = tmp_path / "best.toml"
    config = written(tmp_path, **{"mesh.data": 4, "sharding.zero": 1})
    words = ["plan", config, "--target", "h100:1x8", "--top", "1"]
    asked = ["--explain", "tensor=2", "--sweep", "batch_size=1", "--out", str(out)]
    assert main([*words, *asked, "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["refused"] == "mesh: the product is 4, but there are 8 devices"
    assert answer["fits"] is True
    assert answer["layout"] == answer["best"][0]["layout"]
    assert layout_of(load_config(out), 8) == Layout(**answer["layout"])
    # what is explained are changes to the config's own choices
    explained = Layout(**answer["explained"][0]["layout"])
    assert explained == Layout(data=4, tensor=2, zero=1)
    # a batch of one goes through a pipeline or one model split over all
    assert all(point["fits"] for point in answer["sweep"])
    # as it is it cannot run there
    assert main([*words, "--json"]) == EXIT_DOES_NOT_FIT
    capsys.readouterr()
    # the same work with a layout that is legal has the same answer
    assert main([*words, "--mesh.data", "8", "--json"]) == 0
    legal = json.loads(capsys.readouterr().out)
    assert (legal["refused"], legal["layout"]["data"]) == ("", 8)
    assert legal["best"] == answer["best"]


def test_no_layout_of_so_small_a_batch(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """8 heads and 8 layers leave 512 / 8 / 8 data shards at least, whatever the layout."""
    words = ["plan", written(tmp_path, **{"data.batch_size": 4}), "--target", "h100:64x8"]
    assert main(words) == 2
    told = "over 512 devices: as far as the model divides, at least 8 data shards are left; use 8"
    assert told in capsys.readouterr().err


def test_neither_legal_nor_fitting_ends_with_4(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = written(tmp_path, **{"model.embed_dim": 16384, "mesh.data": 4})
    assert main(["plan", config, "--target", "l4:1x2"]) == 4
    text = capsys.readouterr().out
    assert "not this config's own layout: mesh: the product is 4, but there are 2 devices" in text
    assert "the smallest layout instead" in text
    assert "(this config)" not in text
    assert "does NOT fit" in text


def test_a_program_is_that_of_the_own_layout(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["plan", written(tmp_path, **{"mesh.data": 4}), "--target", "h100:1x8", "--compile"]
    assert main(words) == 2
    assert "the product is 4, but there are 8 devices" in capsys.readouterr().err


def test_explained_layouts_are_read_or_refused() -> None:
    plan = make_plan(load_config(BASE), "h100:1x8", search=False)
    assert other_layout(plan, "tensor=4,remat=full").data == 2
    with pytest.raises(ConfigError, match="is no value"):
        other_layout(plan, "tensor=many")
