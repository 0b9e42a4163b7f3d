"""The arithmetic of a table's rows: there and back, and any piece by itself."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardtrain.interop.hf_config import FAMILIES
from shardtrain.interop.tensors import Parameter, Tensor

SHAPES = {
    "layers": 3,
    "embed": 4,
    "kv_heads": 2,
    "group": 3,
    "head_dim": 2,
    "gate": 2,
    "mlp": 5,
    "vocab": 8,
    "position": 6,
    "segment": 2,
    "features": 6,
    "classes": 2,
}
QKV = ("layers", "embed", "kv_heads", "group", "head_dim")
AXES = {
    "embedding": ("vocab", "embed"),
    "positions": ("position", "embed"),
    "head": ("vocab", "embed"),
    "layers/attention/qkv": QKV,
    "layers/attention/qkv_bias": ("layers", *QKV[2:]),
    "layers/attention/out": ("layers", *QKV[2:], "embed"),
    "layers/mlp/up": ("layers", "embed", "mlp"),
    "layers/mlp/up_bias": ("layers", "mlp"),
    "layers/mlp/down": ("layers", "embed", "mlp"),
    "segments": ("segment", "embed"),
    "transform": ("features", "embed"),
    "decoder_bias": ("vocab",),
    "next/pooler": ("features", "embed"),
    "next/kernel": ("embed", "classes"),
    "next/bias": ("classes",),
}
GATED = {
    "layers/mlp/up": ("layers", "embed", "gate", "mlp"),
    "layers/mlp/up_bias": ("layers", "gate", "mlp"),
}
ROWS = [(family, path) for family in FAMILIES for path in FAMILIES[family].table]


def parameter(family: str, path: str) -> Parameter:
    usual = ("layers", "embed") if path.startswith("layers") else ("embed",)
    axes = AXES.get(path, usual)
    if family == "llama":
        axes = GATED.get(path, axes)
    return Parameter(path, axes, tuple(SHAPES[axis] for axis in axes), vocab_size=7)


def whole(own: Parameter) -> np.ndarray:
    values = np.arange(1.0, 1 + np.prod(own.shape)).reshape(own.shape)
    if "vocab" in own.axes:
        values[7:] = 0
    return values


@pytest.mark.parametrize(("family", "path"), ROWS)
@settings(max_examples=30)
@given(data=st.data())
def test_every_piece_of_every_row(family: str, path: str, data: st.DataObject) -> None:
    """What is taken apart and put together again is the same, also piece by piece."""
    own, row = parameter(family, path), FAMILIES[family].row(path)
    values = whole(own)
    tensors = dict(own.scatter(row, values))
    assert len(tensors) == len(row) * (3 if own.is_stacked else 1)
    assert sum(tensor.size for tensor in tensors.values()) == np.count_nonzero(values)
    index = []
    for size in own.shape:
        start = data.draw(st.integers(0, size - 1))
        index.append(slice(start, data.draw(st.integers(start + 1, size))))
    piece = own.gather(row, tensors.__getitem__, tuple(index), np.float64)
    np.testing.assert_array_equal(piece, values[tuple(index)])


def test_only_what_is_needed_is_read() -> None:
    """A shard of a stage reads the tensors of its own layers and heads, and no others."""
    own, row = (
        parameter("llama", "layers/attention/qkv"),
        FAMILIES["llama"].row("layers/attention/qkv"),
    )
    tensors, seen = dict(own.scatter(row, whole(own))), []

    def read(name: str) -> np.ndarray:
        seen.append(name)
        return tensors[name]

    index = (slice(1, 2), *[slice(None)] * 2, slice(2, 3), slice(None))
    own.gather(row, read, index, np.float32)
    assert seen == ["model.layers.1.self_attn.v_proj.weight"]


def test_the_fused_matrix_by_hand() -> None:
    """One group of two queries: rows of q, k and v in the file are columns of ours."""
    own = Parameter("qkv", ("embed", "kv_heads", "group", "head_dim"), (2, 1, 4, 1), 1)
    heads = "kv_heads group head_dim, embed"
    row = (
        Tensor("q", heads, "group", 0, -2),
        Tensor("k", heads, "group", -2, -1),
        Tensor("v", heads, "group", -1),
    )
    files = {"q": [[1, 2], [3, 4]], "k": [[5, 6]], "v": [[7, 8]]}
    assert own.tensor_shape(row[0]) == (2, 2)
    found = own.gather(row, lambda name: np.array(files[name]), (slice(None),) * 4, np.int64)
    assert found[:, 0, :, 0].tolist() == [[1, 3, 5, 7], [2, 4, 6, 8]]
