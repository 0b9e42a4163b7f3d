"""fp8 on every layout: scales are powers of two and global, so losses agree as in float32."""

from functools import cache
from typing import Any

import jax
import numpy as np
import pytest
from fault_programs import program, put, text
from test_precision_grid import cosine

LAYOUTS: dict[str, dict[str, Any]] = {
    "data, microbatches": {"mesh.data": 2, "train.microbatches": 2},
    "zero 3, remat": {"mesh.data": 2, "sharding.zero": 3, "train.remat": "full"},
    "tensor, scan": {"mesh.tensor": 2, "mesh.data": 2, "model.layer_loop": "scan"},
    "pipeline": {"mesh.pipeline": 2, "mesh.data": 2, "train.microbatches": 2, "sharding.zero": 2},
}


@cache
def first(precision: str, layout: str = "") -> tuple[float, Any]:
    """The first loss and gradient, in model order."""
    keys = {"train.precision": precision, "model.num_layers": 4}
    of = program({**keys, **LAYOUTS.get(layout, {})})
    _, metrics, grads = of.step_with_gradients(of.init(), put(of, text()))
    return float(metrics["loss"]), jax.device_get(of.in_model_order(grads))


@pytest.mark.campaign  # by default: below with a pipeline, and delayed scales on other layouts
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_agree(layout: str) -> None:
    """With products of float32 numbers rounded to 8 bits, nothing but those is rounded."""
    want, found = first("float32,products=fp8"), first("float32,products=fp8", layout)
    np.testing.assert_allclose(found[0], want[0], rtol=1e-6)
    assert cosine(found[1], want[1]) > 1 - 1e-6


@pytest.mark.parametrize(
    "layout", ["pipeline", pytest.param("data, microbatches", marks=pytest.mark.campaign)]
)
def test_layers_that_are_kept_out_are_so_on_every_layout(layout: str) -> None:
    """Layers 1 and 2 of 4 are in fp8; the gradient is nearer to float32's than with all in fp8."""
    precision = "float32,products=fp8,first=1,last=1"
    want, found = first(precision), first(precision, layout)
    np.testing.assert_allclose(found[0], want[0], rtol=1e-6)
    assert cosine(found[1], want[1]) > 1 - 1e-6
    right = first("float32")[1]
    assert cosine(first("float32,products=fp8")[1], right) < cosine(found[1], right) < 1 - 1e-7
