"""The pipeline beside its parity: what is kept, saved, evaluated, refused; a schedule of one's own.

That every schedule trains like one device is shown in tests/layouts/test_pipelines.py.
"""

import dataclasses
import inspect
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from shardtrain.config import RunConfig, load_config
from shardtrain.errors import ConfigError, ShardingError
from shardtrain.run_program import abstract_batch, make_program
from shardtrain.run_work import work_of
from shardtrain.sharding.mesh import make_mesh
from shardtrain.strategies.layer_vjp import LayerVjp
from shardtrain.strategies.order import LayerOrder, model_order_sharding, take_rows
from shardtrain.strategies.pipeline import Pipeline
from shardtrain.strategies.schedules import kinds
from shardtrain.strategies.schedules.csv_file import write_table
from shardtrain.strategies.schedules.kinds import make_schedule
from shardtrain.strategies.schedules.layout import Layout
from shardtrain.strategies.schedules.table import Times
from shardtrain.train import step as step_module
from shardtrain.train.build import Program
from tests.layouts.harness import Case, difference, subject

UNEVEN = Case(
    mesh="pp2 dp2",
    microbatches=4,
    num_layers=5,
    schedule="interleaved",
    virtual_stages=2,
    stages="E1,1,2,1H",
    zero=1,
)


@pytest.fixture
def wide_types() -> Any:
    with jax.enable_x64(True):
        yield


# -- what is kept between a forward and its backward


def layers_of(overrides: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> list[LayerVjp]:
    """The layers that a program cuts, with sizes that tell activations from parameters."""
    found: list[LayerVjp] = []
    cut = LayerVjp.__post_init__
    monkeypatch.setattr(LayerVjp, "__post_init__", lambda self: (cut(self), found.append(self)))
    config = load_config(
        {
            "run": {"steps": 2},
            "model": {
                "num_layers": 4,
                "embed_dim": 48,
                "num_heads": 4,
                "mlp_dim": 80,
                "vocab_size": 512,
                "dropout": 0.1,
            },
            "data": {"sequence_length": 20, "batch_size": 24, "path": "some.tokens"},
            "mesh": {"pipeline": 2, "data": 2},
            "train": {"microbatches": 4},
            "optimizer": {"learning_rate": 1e-3},
        },
        overrides,
    )
    program = make_program(config, vocab_size=512, devices=jax.devices()[:4])
    program.step.lower(program.abstract_state, abstract_batch(config, program))
    return found


TOKENS = 3 * 20
"""Of one microbatch on one data shard."""
KEPT = {
    "full": {TOKENS * 48},  # the layer's input
    "dots": {TOKENS * 48, TOKENS * 144, TOKENS * 80},  # and products: queries to values, the MLP
}


@pytest.mark.parametrize("remat", ["none", "full", "dots", "attention,mlp"])
@pytest.mark.parametrize("schedule", ["1f1b", "zero_bubble"])
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_no_weight_is_kept_for_the_backward(remat, schedule, precision, monkeypatch) -> None:
    """Weights are there again, casts and other shapes of them are made again."""
    layers = layers_of(
        {"train.remat": remat, "pipeline.schedule": schedule, "train.precision": precision},
        monkeypatch,
    )
    assert layers
    for layer in layers:
        weights = {leaf.size for leaf in jax.tree.leaves(layer.weights) if leaf.ndim > 1}
        kept = {leaf.size for leaf in (*layer.kept, *layer.pending)}
        assert kept, "nothing was kept at all"
        assert all(size % TOKENS == 0 or size < TOKENS * 4 for size in kept)
        assert not kept & weights
        assert max(kept) < TOKENS * 512
        if remat in KEPT:
            assert {leaf.size for leaf in layer.kept} == KEPT[remat]
        assert bool(layer.late) == (schedule == "zero_bubble")


def test_the_weight_part_makes_the_gradients_of_all_matrices(monkeypatch) -> None:
    (layer,) = layers_of({"pipeline.schedule": "zero_bubble"}, monkeypatch)
    paths = [
        jax.tree_util.keystr(path, simple=True, separator="/")
        for path, _ in jax.tree.leaves_with_path(layer.weights)
    ]
    assert {paths[leaf] for leaf in layer.late} == {
        "attention/qkv", "attention/out", "mlp/up", "mlp/down"
    }  # fmt: skip


# -- states in model order


@pytest.mark.parametrize(
    "optimizer",
    [
        pytest.param("adamw", marks=pytest.mark.campaign),
        "adafactor",
        pytest.param("muon", marks=pytest.mark.campaign),
    ],
)
@pytest.mark.usefixtures("wide_types")
def test_a_state_is_saved_in_model_order_and_comes_back(optimizer) -> None:
    """Bit for bit; padding is zero, is not saved, and no layer is twice in the stack."""
    case = dataclasses.replace(UNEVEN, optimizer=optimizer, style="llama")
    piped, plain = (subject(c).program for c in (case, case.on_one_device()))
    state, wanted = piped.init(), plain.init()
    saved = piped.saved.save(state)
    shapes = [jax.tree.map(lambda a: (a.shape, a.dtype), tree) for tree in (saved, wanted)]
    assert shapes[0] == shapes[1]
    jax.tree.map(
        np.testing.assert_array_equal, *(jax.device_get(t.params) for t in (saved, wanted))
    )
    back = piped.saved.rest(piped.saved.save(state))
    jax.tree.map(
        lambda a, b: np.testing.assert_array_equal(*map(np.asarray, (a, b))),
        dataclasses.replace(state, key=0),
        dataclasses.replace(back, key=0),
    )
    rows = piped.order.rows
    assert sorted(row for row in rows if row >= 0) == list(range(5))
    empty = [place for place, row in enumerate(rows) if row < 0]
    assert len(rows) == 8
    assert len(empty) == 3
    for leaf in jax.tree.leaves(state.params["layers"]):
        assert not np.asarray(leaf)[empty].any()


@pytest.mark.usefixtures("wide_types")
def test_padding_stays_zero_while_the_model_trains() -> None:
    of = subject(dataclasses.replace(UNEVEN, zero=3))
    state = of.program.init()
    for cursor in range(3):
        state, _ = of.program.step(state, of.batch_at(cursor))
    empty = [place for place, row in enumerate(of.program.order.rows) if row < 0]
    assert empty
    moved = 0
    for leaf in jax.tree.leaves((state.params["layers"], state.opt_state)):
        if leaf.ndim and leaf.shape[0] == len(of.program.order.rows):
            assert not np.asarray(leaf)[empty].any()
            moved += bool(np.asarray(leaf).any())
    assert moved


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int32"])
@pytest.mark.parametrize("layout", ["interleaved", "uneven"])
def test_a_stack_is_moved_one_layer_at_a_time(layout, dtype) -> None:
    """Bit for bit, both ways; and no device ever holds the whole stack."""
    layers = {"interleaved": Layout(4, 2, (1,) * 8), "uneven": Layout(4, 1, (2, 2, 2, 1))}[layout]
    order = LayerOrder.of(layers.rows())
    width = 64
    mesh = make_mesh(pipeline=4, data=2)
    piped = NamedSharding(mesh, PartitionSpec("pipeline"))
    rng = np.random.default_rng(0)
    bits = rng.integers(0, 2**16, (len(order.places), width, width)).astype(np.uint16)
    values = bits.view(jnp.bfloat16).astype(dtype) if dtype != "int32" else bits.astype(dtype)
    model = model_order_sharding(piped, values.shape)
    leaf = jax.device_put(values, model)
    bytes_each = width * width * leaf.dtype.itemsize

    def moved(leaf, rows, source, target):
        move = (
            jax.jit(lambda leaf: take_rows(leaf, rows, source, target), out_shardings=target)
            .lower(leaf)
            .compile()
        )
        assert move.memory_analysis().temp_size_in_bytes <= 6 * bytes_each
        assert f"[{len(order.rows)},{width},{width}]" not in move.as_text()
        return move(leaf)

    stacked = moved(leaf, order.rows, model, piped)
    on_host = np.asarray(stacked)
    for place, row in enumerate(order.rows):
        want = values[row] if row >= 0 else np.zeros_like(values[0])
        assert on_host[place].tobytes() == want.tobytes()
    back = moved(stacked, order.places, piped, model)
    assert np.asarray(back).tobytes() == values.tobytes()


# -- evaluation


@pytest.mark.usefixtures("wide_types")
@pytest.mark.parametrize(
    "schedule", [pytest.param("gpipe", marks=pytest.mark.campaign), "interleaved", "zero_bubble"]
)
def test_evaluation_goes_through_the_same_stages(schedule) -> None:
    virtual = 2 if schedule == "interleaved" else 1
    stages = UNEVEN.stages if virtual == 2 else "E3,2H"
    case = dataclasses.replace(
        UNEVEN, schedule=schedule, virtual_stages=virtual, stages=stages, dropout=0.2
    )
    piped, plain = subject(case), subject(case.on_one_device())
    found = piped.program.evaluate(piped.program.init().params, piped.batch_at(0))
    wanted = plain.program.evaluate(plain.program.init().params, plain.batch_at(0))
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-12)


# -- faults of the field


@pytest.mark.parametrize("zero", [pytest.param(1, marks=pytest.mark.campaign), 2])
def test_o20_both_ends_hold_the_same_tied_table(zero) -> None:
    """O-20: bit-equal on all devices after each of ten steps."""
    of = subject(Case(mesh="pp2 dp2", zero=zero, microbatches=4, num_layers=2, precision="float32"))
    state = of.program.init()
    first = np.asarray(state.params["embedding"])
    for cursor in range(10):
        state, _ = of.program.step(state, of.batch_at(cursor))
        copies = [np.asarray(s.data) for s in state.params["embedding"].addressable_shards]
        assert len(copies) == 4
        assert all(np.array_equal(copies[0], copy) for copy in copies)
    assert not np.array_equal(copies[0], first)


@pytest.mark.usefixtures("wide_types")
@pytest.mark.parametrize("microbatches", [1, pytest.param(2, marks=pytest.mark.campaign), 4])
def test_o02_the_number_of_microbatches_changes_nothing(microbatches) -> None:
    """O-02: accumulation and the pipeline's microbatches are one number, and scale nothing."""
    result = difference(Case(mesh="pp2", microbatches=microbatches))
    assert result.equal, result


# -- a schedule of one's own, and what is refused


def one_at_a_time(stages: int, microbatches: int, virtual_stages: int) -> Times:
    """Each microbatch all the way and back before the next."""
    assert virtual_stages == 1
    stage, _, micro = np.indices((stages, 1, microbatches))
    begin = micro * (2 * stages - 1)
    return Times(forward=begin + stage, backward=begin + 2 * (stages - 1) - stage)


@pytest.mark.usefixtures("wide_types")
def test_a_new_schedule_is_one_function_and_one_row(monkeypatch) -> None:
    monkeypatch.setitem(kinds.SCHEDULES, "one_at_a_time", one_at_a_time)
    case = Case(mesh="pp2", microbatches=4, schedule="one_at_a_time")
    assert make_schedule("one_at_a_time", 2, 4).slots.size("residual") == 1
    result = difference(case)
    assert result.equal, result


@pytest.mark.usefixtures("wide_types")
def test_a_table_from_a_file_is_run(tmp_path: Path) -> None:
    """Also one with virtual stages, which the table itself says."""
    path = tmp_path / "mine.csv"
    write_table(make_schedule("interleaved", 2, 4, 2), path)
    case = Case(mesh="pp2", microbatches=4, num_layers=4, table=str(path))
    result = difference(case)
    assert result.equal, result


def sections(**pipeline: Any) -> RunConfig:
    case = Case(mesh="pp2", microbatches=4, num_layers=4)
    return load_config(case.sections() | {"pipeline": pipeline})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("F0", ""), "tick 5, stage 0: the table ends without forward of microbatch 0"),
        (("B3", ""), "microbatch 3"),
        (("F0", "F9"), "microbatch"),
    ],
)
def test_a_faulty_table_never_reaches_the_executor(change, message, tmp_path, monkeypatch) -> None:
    """It is refused with the config, before there is any program."""
    path = tmp_path / "mine.csv"
    write_table(make_schedule("1f1b", 2, 4), path)
    path.write_text(path.read_text().replace(*change, 1))
    monkeypatch.setattr(Pipeline, "gradients", lambda *_: pytest.fail("it was run"))
    with pytest.raises(ConfigError) as caught:
        make_program(sections(table=str(path)), vocab_size=32, devices=jax.devices()[:2])
    assert message in str(caught.value)
    assert "mine.csv" in str(caught.value)


@pytest.mark.usefixtures("wide_types")
def test_another_number_of_microbatches_is_refused() -> None:
    """A table has each once; more would be left out, fewer done twice."""
    of = subject(Case(mesh="pp2", microbatches=4))
    batch = jax.tree.map(lambda leaf: leaf[:2], of.batch_at(0))
    with pytest.raises(ShardingError, match=r"train\.microbatches: the batch has 2 microbatches"):
        of.program.evaluate(of.program.init().params, batch)


@pytest.mark.usefixtures("wide_types")
def test_a_model_that_is_no_stack_is_refused() -> None:
    program = subject(Case(mesh="pp2", microbatches=4)).program
    whole = dataclasses.replace(program.parts, cut=None)
    with pytest.raises(ShardingError, match=r"mesh\.pipeline: this model is no stack"):
        program.layout.runner.gradients(whole, program.placement, program.policy)


@pytest.mark.usefixtures("wide_types")
def test_a_rule_over_samples_is_still_the_same_run() -> None:
    """Weights that rest split over `data` by a rule are gathered, as at ZeRO 3."""
    result = difference(Case(mesh="pp2 dp2", microbatches=4, rules=(("mlp", "data"),)))
    assert result.equal, result


def test_the_step_knows_no_pipeline() -> None:
    assert "pipeline" not in inspect.getsource(step_module).lower()


@pytest.mark.usefixtures("wide_types")
def test_one_stage_is_no_pipeline() -> None:
    config = load_config(Case(microbatches=4).sections())
    mesh = subject(Case(microbatches=4)).program.layout.mesh
    assert not isinstance(work_of(config).runner(mesh, 32), Pipeline)


def test_the_parameters_that_are_counted_are_the_models() -> None:
    """Padding is nobody's parameter."""
    counts = set()
    for case in (UNEVEN, UNEVEN.on_one_device()):
        program: Program = subject(dataclasses.replace(case, precision="float32")).program
        counts.add(sum(leaf.size for leaf in jax.tree.leaves(program.abstract_saved.params)))
    assert len(counts) == 1
