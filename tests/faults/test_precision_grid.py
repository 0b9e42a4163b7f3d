"""Every precision at every ZeRO stage: the direction of the first step, dtypes, and a resume."""

import math
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from fault_programs import program, put, text

from shardtrain.checkpoint.checkpointer import Checkpointer
from shardtrain.sharding.placement import leaves_by_path
from shardtrain.train.build import Program
from tests.rows import shortened

BF16, F16, F32 = "bfloat16", "float16", "float32"
LEAST: dict[str, float] = {
    "float32": 1 - 1e-9,
    "bfloat16": 0.999,
    "float16": 0.999,
    "params=float32,compute=bfloat16": 0.999,
    "bfloat16,master=bfloat16,moments=bfloat16,rounding=stochastic": 0.999,
    "bfloat16,reduce=float32": 0.999,
    "fp8": 0.999,
    "fp8_delayed": 0.999,
}
"""Least cosine of the first gradient with that of float32. fp8 reaches it too: each entry of an
operand is off by 2 % on average and at random, which sums over many entries average out."""
RESTS = {
    "float32": (F32, None, F32),
    "bfloat16": (BF16, F32, F32),
    "float16": (F16, F32, F32),
    "params=float32,compute=bfloat16": (F32, None, F32),
    "bfloat16,master=bfloat16,moments=bfloat16,rounding=stochastic": (BF16, None, BF16),
    "bfloat16,reduce=float32": (BF16, F32, F32),
    "fp8": (BF16, F32, F32),
    "fp8_delayed": (BF16, F32, F32),
}
"""What parameters, masters and moments rest in."""
ELSEWHERE = {"params=float32,compute=bfloat16", "bfloat16,reduce=float32", "fp8_delayed"}
SHORT = {(p, number % 4) for number, p in enumerate(LEAST) if p not in ELSEWHERE}
"""By default each precision with a name, and the mix with most words, at one stage."""
CASES = [(p, zero) for p in LEAST for zero in range(4) if "reduce" not in p or zero <= 1]


def made(precision: str, zero: int = 0, **others: Any) -> Program:
    keys = {"mesh.data": 2, "sharding.zero": zero, "train.precision": precision}
    return program({**keys, "optimizer.name": "adamw", **others})


def kinds(of: Any) -> tuple[str | None, ...]:
    """What parameters, masters and moments of a state are; one each, or None."""
    found: list[set[str]] = [set(), set(), set()]
    for path, leaf in leaves_by_path({"params": of.params, "opt_state": of.opt_state}):
        if leaf.ndim:
            found[0 if path.startswith("params") else 1 if "/master/" in path else 2].add(
                str(leaf.dtype)
            )
    assert all(len(some) <= 1 for some in found), found
    return tuple(next(iter(some), None) for some in found)


def cosine(found: Any, wanted: Any) -> float:
    a, b = (
        np.concatenate([np.ravel(leaf).astype(np.float64) for leaf in jax.tree.leaves(tree)])
        for tree in (found, wanted)
    )
    return float(a @ b / math.sqrt((a @ a) * (b @ b)))


@pytest.fixture(scope="module")
def right() -> Any:
    """The first gradient in float32."""
    of = made("float32")
    return jax.device_get(of.step_with_gradients(of.init(), put(of, text()))[2])


@pytest.mark.parametrize(("precision", "zero"), shortened(CASES, SHORT.__contains__))
def test_first_direction_dtypes_and_resume(
    precision: str, zero: int, right: Any, tmp_path: Path
) -> None:
    of = made(precision, zero)
    state = of.init()
    assert kinds(state) == RESTS[precision]
    assert bool(jax.tree.leaves(state.loss_scale)) is (precision == "float16")
    assert bool(jax.tree.leaves(state.model_state)) is (precision == "fp8_delayed")
    batch = put(of, text())
    first, _, grads = of.step_with_gradients(state, batch)
    # A loss scale is no direction.
    assert cosine(jax.device_get(grads), right) > LEAST[precision]
    with Checkpointer(tmp_path, keep=1) as checkpoints:
        checkpoints.save(1, first, {})
        checkpoints.wait()
        restored = checkpoints.restore(1, of.abstract_state)
    assert kinds(restored) == RESTS[precision]
    second, again = (of.step_with_gradients(s, batch)[0] for s in (first, restored))
    assert int(second.step) == 2
    jax.tree.map(
        lambda a, b: np.testing.assert_array_equal(
            np.frombuffer(np.asarray(a).tobytes(), np.uint8),
            np.frombuffer(np.asarray(b).tobytes(), np.uint8),
        ),
        *(jax.device_get((s.params, s.opt_state, s.model_state)) for s in (second, again)),
    )
