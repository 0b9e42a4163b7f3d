"""Sizes that do not divide: refused before anything is compiled, or padded without effect."""

import jax
import numpy as np
import pytest
from fault_programs import (
    STYLES,
    assert_trees_near,
    config,
    gradients,
    initial,
    program,
    put,
    state_of,
    text,
)
from flax import nnx

from shardtrain.config import resolve_mesh
from shardtrain.errors import UserError
from shardtrain.run import build
from shardtrain.strategies.stack import make_stack

LARGE = {"model.embed_dim": 64, "model.num_heads": 8}


@pytest.mark.parametrize(
    ("overrides", "devices", "numbers", "nearest"),
    [
        (
            {"model.num_heads": 6, "model.head_dim": 8, "mesh.tensor": 4},
            4,
            ("num_heads=6", "tensor=4"),
            "use 1, 2, 3 or 6",
        ),
        ({"data.batch_size": 10, "mesh.data": -1}, 4, ("batch_size=10", "data=4"), "use 8 or 12"),
        (
            LARGE | {"mesh.tensor": 2, "mesh.data": -1},
            5,
            ("2 does not divide 5 devices",),
            "4 or 6",
        ),
        (
            {"model.num_layers": 7, "mesh.pipeline": 8},
            8,
            ("num_layers=7", "8 parts"),
            "at most 7 parts",
        ),
        (
            {"data.sequence_length": 100, "mesh.context": 8},
            8,
            ("sequence_length=100", "context=8"),
            "use 96 or 104",
        ),
        (
            LARGE
            | {
                "data.sequence_length": 100,
                "mesh.tensor": 8,
                "sharding.sequence_parallel": True,
            },
            8,
            ("sequence_length=100", "tensor=8"),
            "use 96 or 104",
        ),
    ],
    ids=["heads", "batch", "devices", "layers", "context", "sequence-parallel"],
)
def test_o17_refused_before_anything_is_compiled(overrides, devices, numbers, nearest) -> None:
    """O-17: both numbers and the nearest choices.

    Seven layers on two stages are not refused but padded, with equal results
    (tests/layouts/test_pipelines.py).
    """
    with pytest.raises(UserError) as caught:
        resolve_mesh(config(overrides), devices)
    message = str(caught.value)
    assert all(number in message for number in numbers), message
    assert nearest in message


def test_o17_build_checks_the_mesh_first(monkeypatch) -> None:
    """O-17: data is not even opened for a batch that the devices cannot share out."""

    def opened(*_args: object, **_options: object) -> None:
        pytest.fail("data was opened")

    monkeypatch.setattr("shardtrain.run_language.open_data", opened)
    made = config({"data.batch_size": 10, "mesh.data": -1})
    with pytest.raises(UserError, match=r"not divisible by mesh\.data=4; use 8 or 12"):
        build(made, devices=jax.devices()[:4])


# -- a padded vocabulary

UNTIED = {**STYLES["llama"], "model.num_kv_heads": 0, "model.num_layers": 1}
UNTIED |= {"optimizer.name": "adamw"}
PADDED = {"model.vocab_multiple": 4, "mesh.tensor": 4}


@pytest.fixture(scope="module")
def plain():
    return gradients(program(UNTIED, vocab_size=101), drawn(), batch())


def drawn(**padding: int):
    keys = {**UNTIED, **{f"model.{name}": size for name, size in padding.items()}}
    return initial({k: v for k, v in keys.items() if k.startswith("model.")}, vocab_size=101)


def batch() -> dict[str, np.ndarray]:
    return text(vocab_size=101)


def test_o18_the_padding_has_no_effect(plain) -> None:
    """O-18: vocabulary 101 as 104 rows over 4 devices: the loss is equal within 1e-6, gradients
    too, and those of the padding are zero."""
    of = program(UNTIED | PADDED, vocab_size=101)
    metrics, grads = gradients(of, drawn(vocab_multiple=4), batch())
    assert metrics["loss"] == pytest.approx(float(plain[0]["loss"]), rel=1e-6)
    for name in ("embedding", "head"):
        assert grads[name].shape == (104, 16)
        assert not grads[name][101:].any()
        grads[name] = grads[name][:101]
    assert_trees_near(grads, plain[1], 1e-5)


def test_o18_the_padding_stays_what_it_is() -> None:
    """O-18: no drift by decay or by moments: after 5 steps the padding is still zero."""
    of = program(UNTIED | PADDED, vocab_size=101)
    state = state_of(of, drawn(vocab_multiple=4))
    for step in range(5):
        state, _, _ = of.step_with_gradients(state, put(of, text(vocab_size=101, seed=step)))
    for name in ("embedding", "head"):
        assert not np.asarray(state.params[name])[101:].any()
        assert np.asarray(state.params[name])[:101].any(axis=1).all()


def test_o18_the_padding_has_no_probability() -> None:
    """O-18: the probabilities of 101 tokens add up to 1 whatever stands in the padding's rows."""
    of = program(UNTIED | PADDED, vocab_size=101)
    params = jax.tree.map(np.copy, drawn(vocab_multiple=4))
    params["head"][101:] = 7.0
    one = {name: x[:1] for name, x in batch().items()}
    every = {name: np.repeat(x, 101, axis=0) for name, x in one.items()}
    every["targets"][:] = np.arange(101)[:, None]
    weights = np.zeros_like(every["weights"])
    weights[:, 3] = 1

    def losses(params, batch, weights):
        def loss(weights):
            model = nnx.merge(of.graph, params)
            stack = make_stack(loop=of.layout.runner.loop)
            return of.task.terms(model, batch | {"weights": weights}, None, stack)["nll"]

        return jax.grad(loss)(weights)

    found = np.asarray(jax.jit(losses)(params, every, weights))[:, 3]
    assert np.exp(-found).sum() == pytest.approx(1.0, rel=1e-5)
