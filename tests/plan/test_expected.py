"""What layouts lead one to expect, against the run's own report and formulas from the papers."""

from typing import Any

import pytest

from shardtrain.config import RunConfig, load_config
from shardtrain.models.flops import matrix_parameters
from shardtrain.plan.expected import Expected, expect
from shardtrain.plan.recompute import Passes, expected_products, kept_entries, layer_products
from shardtrain.run_program import make_program, make_report
from shardtrain.sharding.mesh import abstract_mesh
from shardtrain.strategies.pipeline import Pipeline
from shardtrain.train.build import Program

LAYERS, EMBED, VOCAB, LENGTH, BATCH = 4, 64, 256, 32, 64
SECTIONS: dict[str, Any] = {
    "run": {"steps": 2},
    "model": {"num_layers": LAYERS, "embed_dim": EMBED, "num_heads": 4, "vocab_size": VOCAB},
    "data": {"sequence_length": LENGTH, "batch_size": BATCH},
    "optimizer": {"learning_rate": 1e-3},
    "train": {"precision": "bfloat16"},
}
LAYOUTS: dict[str, dict[str, Any]] = {
    "data": {"mesh.data": 8},
    "zero 3, tensor": {"mesh.data": 4, "mesh.tensor": 2, "sharding.zero": 3},
    "hybrid": {"mesh.replica": 2, "mesh.data": 4, "sharding.zero": 1, "train.microbatches": 2},
    "pipeline": {"mesh.pipeline": 2, "mesh.data": 4, "sharding.zero": 2, "train.microbatches": 4},
}


def facts(overrides: dict[str, Any]) -> tuple[RunConfig, Program, Expected]:
    config = load_config(SECTIONS, overrides)
    program = make_program(config, vocab_size=VOCAB, mesh=abstract_mesh(config.mesh.model_dump()))
    expected = expect(
        program,
        model=config.model,
        vocab_size=VOCAB,
        length=LENGTH,
        batch_size=BATCH,
        remat=config.train.remat,
        domain=8,
    )
    return config, program, expected


@pytest.mark.parametrize("name", LAYOUTS)
def test_state_is_that_of_the_report(name: str) -> None:
    _, program, expected = facts(LAYOUTS[name])
    assert expected.state_bytes == make_report(program).state + 4 + 4 + 8 + 4  # step, cursor, key
    assert expected.state["state.key"] == ((2,), 8)
    assert "state.opt_state['master']['layers']['mlp']['up']" in expected.state


def test_parameters_as_a_device_computes_with_them() -> None:
    _, _, expected = facts(LAYOUTS["zero 3, tensor"])
    leaves = {leaf.path: leaf for leaf in expected.leaves}
    up = leaves["layers/mlp/up"]
    assert (up.dims, up.layers, up.layer_size) == ((LAYERS, EMBED, 2 * EMBED), LAYERS, 2 * EMBED**2)
    assert up.tensor_split
    assert up.data_split
    assert not leaves["norm/scale"].tensor_split
    assert expected.by_argument["state.params['layers']['mlp']['up']"] is up
    assert expected.owners(up.size) == ("layers/mlp/down", "layers/mlp/up")
    assert expected.owners(7) == ()
    assert expected.data_axes == ("data",)


@pytest.mark.parametrize(
    ("name", "parameter", "gradient"),
    [("data", 2, 2), ("hybrid", 2, 4), ("zero 3, tensor", 2, 2), ("pipeline", 2, 2)],
)
def test_widths(name: str, parameter: int, gradient: int) -> None:
    """Float32 sums of several microbatches; single gradients in the compute dtype."""
    _, _, expected = facts(LAYOUTS[name])
    assert (expected.parameter_width, expected.gradient_width) == (parameter, gradient)


@pytest.mark.parametrize("name", ["data", "zero 3, tensor", "hybrid"])
def test_products_are_shared_out(name: str) -> None:
    """6 FLOPs a parameter and token, and attention's two products with their five backwards."""
    config, _, expected = facts(LAYOUTS[name])
    product = 2 * LAYERS * EMBED * LENGTH
    each = 6 * matrix_parameters(config.model, VOCAB) + 7 * product
    assert expected.products.model == pytest.approx(each * BATCH * LENGTH / 8)
    assert expected.products.again == (0.0, 0.0)
    assert expected.products_in_kernels.model == pytest.approx(
        (each - 7 * product) * BATCH * LENGTH / 8
    )
    assert expected.model_flops == pytest.approx((each - product) * BATCH * LENGTH / 8)


def test_products_of_a_pipeline_count_every_tick() -> None:
    config, program, expected = facts(LAYOUTS["pipeline"])
    runner = program.layout.runner
    assert isinstance(runner, Pipeline)
    per_tick = BATCH * LENGTH / 4 / 4  # of a microbatch and data shard
    ticks, slots = runner.schedule.work.num_ticks, runner.layout.num_slots
    layer = 6 * (matrix_parameters(config.model, 0) / LAYERS) + 7 * 2 * EMBED * LENGTH
    assert expected.products.model == pytest.approx(
        ticks * per_tick * (slots * layer + 6 * VOCAB * EMBED)
    )
    assert expected.is_pipeline


def again(remat: str) -> tuple[float, float]:
    """What a layer does again of each product of its forward, and of attention's two together."""
    config = load_config(SECTIONS)
    products = expected_products(
        config.model,
        rows=VOCAB,
        length=LENGTH,
        remat=remat,
        passes=Passes(layer_tokens=1, head_tokens=0),
        split={"kv_heads": 1, "mlp": 1, "vocab": 1},
    )
    return products.again


@pytest.mark.parametrize(
    ("remat", "products", "attention"),
    [
        ("none", (), (0, 0)),
        ("full", ("qkv", "attention_out", "mlp"), (1, 2)),
        ("dots", (), (1, 2)),
        ("qkv", ("attention_out", "mlp"), (1, 2)),
        ("attention,mlp", ("qkv", "attention_out"), (0, 2)),
        ("attention_out,mlp_out", ("qkv", "mlp"), (1, 2)),
    ],
)
def test_what_remat_does_again(
    remat: str, products: tuple[str, ...], attention: tuple[int, int]
) -> None:
    each = layer_products(load_config(SECTIONS).model, LENGTH)
    least, most = (sum(each[p] for p in products) + n * each["attention"] for n in attention)
    assert again(remat) == (pytest.approx(least), pytest.approx(most))


def test_what_remat_keeps() -> None:
    model = load_config(SECTIONS).model
    assert kept_entries(model, "none") is None
    assert kept_entries(model, "full") == (EMBED, 0, 0)
    assert kept_entries(model, "qkv,mlp,attention_out") == (2 * EMBED, 3 * EMBED, 4 * EMBED)
    _, _, expected = facts({**LAYOUTS["data"], "train.remat": "full", "train.microbatches": 2})
    assert expected.kept_bytes == 2 * LAYERS * (BATCH / 8 / 2) * LENGTH * EMBED
