"""What can only be seen on a GPU. Run with `pytest -m gpu`; minutes in all.

Skipped, with the reason, where jax finds no GPU.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from shardtrain.bench import bench
from shardtrain.commands import verify
from shardtrain.config import load_config
from shardtrain.ops.attention import attention
from shardtrain.run import Run, build
from shardtrain.train.flops import PEAK_FLOPS
from shardtrain.training import train
from shardtrain.verify.compare import BOUNDS, Subject, compare


def _reason() -> str:
    """Why there is nothing to do here."""
    try:
        platform = jax.default_backend()
    except RuntimeError as error:
        return f"jax does not start: {error}"
    return "" if platform == "gpu" else f"needs a GPU, and jax runs on {platform} devices here"


@pytest.fixture(autouse=True)
def _gpu() -> None:
    if reason := _reason():
        pytest.skip(reason)


pytestmark = pytest.mark.gpu

BFLOAT16_BOUND = 0.02
"""bfloat16 has 8 bits of mantissa; both kernels round each probability and each result to them."""


def sections(folder: Path, **train_: Any) -> dict[str, Any]:
    """A small run on words that can be learned by heart."""
    text = folder / "text.txt"
    text.write_text("the quick brown fox jumps over the lazy dog. " * 4000)
    return {
        "run": {"steps": 60, "dir": str(folder / "run")},
        "model": {"num_layers": 4, "embed_dim": 256, "num_heads": 4, "bias": False},
        "data": {"path": str(text), "sequence_length": 128, "batch_size": 64},
        "optimizer": {"learning_rate": 1e-3, "warmup_steps": 10},
        "train": train_,
        "log": {"trackers": []},
        "eval": {"steps": 4, "sample_tokens": 0},
    }


# -- attention


def one_document(rng: np.random.Generator, shape: tuple[int, int]) -> None:
    """No segments."""


def three_documents(rng: np.random.Generator, shape: tuple[int, int]) -> jax.Array:
    return jnp.asarray(np.sort(rng.integers(0, 3, shape), axis=1).astype(np.int32))


@pytest.mark.parametrize("documents", [one_document, three_documents])
@pytest.mark.parametrize("group", [1, 4])
@pytest.mark.parametrize("length", [128, 1024])
def test_cudnn_attention_equals_ours(
    documents: Callable[..., jax.Array | None], group: int, length: int
) -> None:
    """Results and gradients, against ours in float32."""
    rng = np.random.default_rng(0)
    batch, heads, size = 2, 4, 64

    def draw(*shape: int) -> jax.Array:
        return jnp.asarray(rng.standard_normal(shape), jnp.bfloat16)

    q = draw(batch, length, heads, group, size)
    k, v = draw(batch, length, heads, size), draw(batch, length, heads, size)
    weight = draw(*q.shape)
    segments = documents(rng, (batch, length))

    def value(q: jax.Array, k: jax.Array, v: jax.Array, implementation: str) -> Any:
        out = attention(q, k, v, segments=segments, implementation=implementation)
        return (out.astype(jnp.float32) * weight.astype(jnp.float32)).sum(), out

    run = jax.jit(jax.value_and_grad(value, argnums=(0, 1, 2), has_aux=True), static_argnums=3)
    (_, out), grads = run(q, k, v, "cudnn")
    with jax.default_matmul_precision("highest"):
        wide = (x.astype(jnp.float32) for x in (q, k, v))
        (_, right), right_grads = run(*wide, "xla")
    for found, wanted in zip((out, *grads), (right, *right_grads), strict=True):
        assert found.dtype == jnp.bfloat16
        distance = np.abs(np.asarray(found, np.float32) - np.asarray(wanted)).max()
        assert distance <= BFLOAT16_BOUND * np.abs(np.asarray(wanted)).max()


# -- the step


def on(devices: list[jax.Device], folder: Path) -> Run:
    config = load_config(sections(folder, precision="float32"), {"mesh.data": len(devices)})
    return build(config, devices=devices)


def test_a_step_equals_the_cpus(tmp_path: Path) -> None:
    """All GPUs as data parallel, ZeRO 0, against one CPU device, in float32."""
    gpus, cpu = on(jax.devices("gpu"), tmp_path), on(jax.devices("cpu")[:1], tmp_path)
    with jax.default_matmul_precision("highest"):
        found = compare(
            Subject(gpus.program, gpus.batch_at),
            Subject(cpu.program, cpu.batch_at),
            steps=2,
            bound=BOUNDS["float32"],
        )
    assert found.equal, found


def test_layouts_are_the_same_run(tmp_path: Path) -> None:
    """`shardtrain verify` on the GPUs; with one GPU, microbatches and remat are all there is."""
    config = load_config(
        sections(tmp_path, microbatches=4, remat="full"), {"sharding.zero": 3, "mesh.data": -1}
    )
    found = verify(config)
    assert found.equal, found


@pytest.mark.parametrize("implementation", ["xla", "cudnn"])
def test_a_run_learns(tmp_path: Path, implementation: str) -> None:
    """In bfloat16: from the loss of a guess over 256 bytes to nearly nothing."""
    config = load_config(
        sections(tmp_path, precision="bfloat16"), {"model.attention": implementation}
    )
    run = build(config)
    before = run.evaluate(run.init())["val_loss"]
    after = run.evaluate(train(run))["val_loss"]
    assert before > 5
    assert after < 1


# -- speed


def test_utilisation_is_known(tmp_path: Path) -> None:
    kind = jax.devices()[0].device_kind
    if "bfloat16" not in PEAK_FLOPS.get(kind, {}):
        pytest.skip(f"{kind} has no bfloat16 rate in the table of chips")
    figures = bench(load_config(sections(tmp_path, precision="bfloat16")), steps=5, warmup=2)
    assert 0 < figures["mfu"] < 1
    assert figures["peak_device_mb"] > 0
