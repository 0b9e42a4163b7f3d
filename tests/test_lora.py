"""LoRA on one device and in memory: what is trained, what rests, what is computed."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from shardtrain.config import load_config
from shardtrain.config_effects import ineffective_settings
from shardtrain.errors import ConfigError
from shardtrain.models.lora import Lora, Matrix, merge
from shardtrain.ops.dense import LowRank, dense
from shardtrain.plan.collectives import collectives
from shardtrain.plan.hlo import parse_hlo
from shardtrain.plan.memory import memory
from shardtrain.run_program import abstract_batch, count_parameters, make_program, make_report
from shardtrain.run_workload import layout_of, make_workload
from shardtrain.sharding.placement import leaves_by_path
from shardtrain.train.build import Program

ALL = "qkv,out,up,down"
VOCAB = 64


def program_of(**keys: Any) -> tuple[Program, Any]:
    sections = {
        "run": {"steps": 10},
        "model": {"num_layers": 2, "embed_dim": 32, "num_heads": 4, "vocab_size": VOCAB},
        "data": {"sequence_length": 16, "batch_size": 8, "path": "synthetic.tokens"},
        "mesh": {"data": 1},
        "optimizer": {"learning_rate": 0.01},
    }
    config = load_config(sections, keys)
    count = int(np.prod(list(config.mesh.model_dump().values())))
    return make_program(config, vocab_size=VOCAB, devices=jax.devices()[:count]), config


def batch_of(program: Program, config: Any) -> dict[str, jax.Array]:
    rng = np.random.default_rng(0)

    def fill(leaf: Any) -> Any:
        if leaf.dtype == jnp.float32:
            return jax.device_put(np.ones(leaf.shape, np.float32), leaf.sharding)
        values = rng.integers(0, VOCAB, leaf.shape).astype(leaf.dtype)
        return jax.device_put(values, leaf.sharding)

    batch = jax.tree.map(fill, abstract_batch(config, program))
    segments = jax.device_put(np.ones(batch["segments"].shape, np.int32))
    return batch | {"segments": segments}


def nats(program: Program, state: Any, batch: Any) -> Any:
    sums, _ = program.evaluate(state.params, batch, state.model_state, state.frozen)
    return np.asarray(sums["nll"])


def test_before_the_first_update_it_is_the_base_to_the_bit() -> None:
    plain, config = program_of()
    lora, _ = program_of(**{"lora.rank": 4, "lora.targets": ALL})
    batch = batch_of(plain, config)
    base, adapted = plain.init(), lora.init()
    frozen = dict(leaves_by_path(lora.training.weights(adapted.params, adapted.frozen)))
    for path, leaf in leaves_by_path(base.params):
        np.testing.assert_array_equal(leaf, frozen[path], err_msg=path)
    assert nats(plain, base, batch) == nats(lora, adapted, batch)
    assert count_parameters(plain, VOCAB) == count_parameters(lora, VOCAB)


def test_off_adds_nothing_to_the_state() -> None:
    program, _ = program_of()
    assert program.shapes.frozen == ()
    assert not [path for path, _ in leaves_by_path(program.abstract_saved) if "frozen" in path]


def test_only_adapters_move_and_only_they_have_optimizer_state() -> None:
    program, config = program_of(**{"lora.rank": 4, "train.precision": "bfloat16"})
    state = program.init()
    before = jax.device_get(state.frozen)
    assert {leaf.dtype for leaf in jax.tree.leaves(before)} == {jnp.dtype(jnp.bfloat16)}
    trained = {path for path, _ in leaves_by_path(state.params)}
    assert {path.rpartition("/")[2] for path in trained} == {"lora_a", "lora_b"}
    for path, leaf in leaves_by_path(state.opt_state):
        assert not leaf.ndim or path.endswith(("lora_a", "lora_b")), path
    batch = batch_of(program, config)
    for _ in range(2):  # B is zero at first, and so is the gradient of A
        held = jax.device_get(state.params)
        state, _ = program.step(state, batch)
    jax.tree.map(np.testing.assert_array_equal, before, jax.device_get(state.frozen))
    moved = jax.tree.map(lambda a, b: bool((a != b).any()), held, jax.device_get(state.params))
    assert all(jax.tree.leaves(moved))


@pytest.mark.parametrize(
    ("contract", "transposed", "inner", "outer"),
    [(1, False, (6,), (2, 3)), (3, False, (2, 3, 4), (6,)), (1, True, (8,), (6,))],
)
def test_the_product_is_that_of_the_merged_weight(
    contract: int, transposed: bool, inner: tuple[int, ...], outer: tuple[int, ...]
) -> None:
    with jax.enable_x64(True):
        keys = jax.random.split(jax.random.key(0), 4)
        shapes = (
            (2, 5, *inner),
            (*outer, *inner) if transposed else (*inner, *outer),
            (*inner, 3),
            (3, *outer),
        )
        x, base, down, up = (
            jax.random.normal(key, shape, jnp.float64)
            for key, shape in zip(keys, shapes, strict=True)
        )
        matrix = Matrix(contract, transposed)
        whole = merge(base[None], down[None], up[None], matrix, 0.5)[0]
        how = {"contract": contract, "transposed": transposed}
        merged = dense(x, whole, **how)

        def loss(base: Any, down: Any, up: Any) -> Any:
            return jnp.sum(jnp.sin(dense(x, LowRank(base, down, up, 0.5), **how)))

        def wanted(down: Any, up: Any) -> Any:
            w = merge(base[None], down[None], up[None], matrix, 0.5)[0]
            return jnp.sum(jnp.sin(dense(x, w, **how)))

        np.testing.assert_allclose(dense(x, LowRank(base, down, up, 0.5), **how), merged, 1e-12)
        found = jax.grad(loss, argnums=(0, 1, 2))(base, down, up)
        assert not found[0].any(), "the frozen weight has a gradient"
        for a, b in zip(found[1:], jax.grad(wanted, argnums=(0, 1))(down, up), strict=True):
            np.testing.assert_allclose(a, b, 1e-9, 1e-9)


def test_no_gradient_of_a_frozen_weight_is_computed() -> None:
    """A step costs two products of each matrix and not three; and nothing keeps a copy of all."""
    keys = {"model.embed_dim": 128, "model.num_layers": 4, "model.layer_loop": "unroll"}
    figures = {}
    for rank in (0, 2):
        program, config = program_of(**keys, **{"lora.rank": rank, "lora.targets": ALL})
        step = program.compile_step(abstract_batch(config, program))
        figures[rank] = step.cost_analysis()["flops"]
    assert 0.6 < figures[2] / figures[0] < 0.75


def test_nothing_of_a_weights_size_is_reduced_over_data() -> None:
    program, config = program_of(
        **{"lora.rank": 2, "lora.targets": ALL, "mesh.data": 4, "model.layer_loop": "scan"}
    )
    text = program.compile_step(abstract_batch(config, program)).as_text()
    degrees = dict.fromkeys(("pipeline", "replica", "context", "tensor"), 1) | {"data": 4}
    sent = [a.size for c in collectives(parse_hlo(text), degrees) for a in c.arrays]
    adapters = max(leaf.size for leaf in jax.tree.leaves(program.shapes.params))
    assert 1 < max(sent) <= adapters < 32 * 32


@pytest.mark.parametrize("zero", [0, 3])
def test_plan_and_report_count_frozen_bytes_and_no_moments(zero: int) -> None:
    program, config = program_of(
        **{"mesh.data": 4, "sharding.zero": zero, "model.embed_dim": 64},
        **{"lora.rank": 8, "lora.targets": ALL},
    )
    step = program.compile_step(abstract_batch(config, program)).memory_analysis()
    planned = memory(make_workload(config, VOCAB, "cpu"), layout_of(config, 4))
    report = make_report(program)
    assert planned.state == report.state
    held = sum(leaf.size for leaf in jax.tree.leaves(program.abstract_saved.params)) * 4
    assert planned.moments == pytest.approx(2 * held / (4 if zero else 1), rel=0.01)
    assert planned.state + planned.batch == pytest.approx(step.argument_size_in_bytes, rel=0.01)


def test_unknown_targets_are_refused_and_idle_keys_are_said() -> None:
    with pytest.raises(ConfigError, match=r"lora\.targets: there is no such weight"):
        program_of(**{"lora.rank": 2, "lora.targets": "qkv,head"})
    with pytest.raises(ConfigError, match="promises are those of training all weights"):
        program_of(**{"lora.rank": 2, "train.audit": True})
    _, config = program_of(**{"lora.targets": "qkv"})
    assert any("lora.targets=qkv has no effect" in line for line in ineffective_settings(config))
    assert Lora(4, 16.0, {}).scale == 4.0


@pytest.mark.campaign
def test_moments_of_adapters_rest_on_the_host() -> None:
    """The update streams adapters layer by layer; frozen weights stay on the devices."""
    keys = {"lora.rank": 4, "lora.targets": ALL, "mesh.data": 2, "sharding.zero": 2}
    keys |= {"train.precision": "bfloat16"}
    plain, config = program_of(**keys)
    host = {"offload.optimizer": "host", "offload.master": "host"}
    offloaded, _ = program_of(**keys, **host)
    batch, states = batch_of(plain, config), []
    for program in (plain, offloaded):
        state = program.init()
        for _ in range(2):
            state, _ = program.step(state, batch)
        states.append(state)
    kinds = [
        leaf.sharding.memory_kind for leaf in jax.tree.leaves(states[1].opt_state) if leaf.ndim
    ]
    assert set(kinds) == {"pinned_host"}
    assert all(
        leaf.sharding.memory_kind != "pinned_host" for leaf in jax.tree.leaves(states[1].frozen)
    )
    for ours, theirs in zip(*(jax.tree.leaves(state.params) for state in states), strict=True):
        np.testing.assert_allclose(
            np.asarray(ours, np.float32), np.asarray(theirs, np.float32), atol=2e-3
        )


FROM_THE_HOST: dict[str, dict[str, Any]] = {
    "data 2, zero 3, 2 microbatches": {
        "mesh.data": 2,
        "sharding.zero": 3,
        "train.microbatches": 2,
        "train.remat": "full",
    },
    "pipeline 2": {"mesh.pipeline": 2, "train.microbatches": 2},
}


@pytest.mark.parametrize(
    "layout",
    [
        "data 2, zero 3, 2 microbatches",
        pytest.param("pipeline 2", marks=pytest.mark.campaign),
    ],
)
def test_frozen_weights_come_from_the_host_layer_by_layer(layout: str) -> None:
    """The same run, begun with the same weights; adapters stay on the devices."""
    keys = {"lora.rank": 4, "lora.targets": ALL, "model.layer_loop": "scan"}
    keys |= FROM_THE_HOST[layout]
    plain, config = program_of(**keys)
    away, _ = program_of(**keys, **{"offload.parameters": "host"})
    batch, found = batch_of(plain, config), []
    for program in (plain, away):
        weights = jax.tree.map(
            lambda leaf: jax.device_put(
                np.random.default_rng(leaf.size).normal(0, 0.1, leaf.shape).astype(leaf.dtype),
                leaf.sharding,
            ),
            program.abstract_weights,
        )
        state = program.init_from(weights)
        for _ in range(2):
            state, metrics = program.step(state, batch)
        sums, _ = program.evaluate(state.params, batch, state.model_state, state.frozen)
        found.append((state, float(metrics["loss"]), float(sum(sums.values()))))
    (state, *wanted), (other, *numbers) = found
    assert numbers == pytest.approx(wanted, rel=1e-6)
    for ours, theirs in zip(*map(jax.tree.leaves, (other.params, state.params)), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)
    layers = jax.tree.leaves(other.frozen["layers"])
    assert {leaf.sharding.memory_kind for leaf in layers} == {"pinned_host"}
    assert {leaf.sharding.memory_kind for leaf in jax.tree.leaves(other.params)} == {"device"}
