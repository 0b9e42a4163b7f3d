"""Token ids above 16 bits stay what they are, from a file of others to a row of the embedding."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from shardtrain.data.config import DataConfig
from shardtrain.data.megatron import write_megatron
from shardtrain.data.prepare import prepare
from shardtrain.data.sources import open_data
from shardtrain.ops.embedding import embedding
from shardtrain.sharding.mesh import make_mesh
from shardtrain.sharding.rules import compute_table, use_rules

IDS = [65535, 65536, 70000, 128000, 5]
VOCAB = 128004


@pytest.mark.parametrize("source", ["npy", "megatron", "tokens"])
@pytest.mark.parametrize("tensor", [1, 2])
def test_o24_ids_reach_their_row(tmp_path: Path, source: str, tensor: int) -> None:
    """O-24: 65536 would be 0, 70000 would be 4464 and 128000 would be 62464 in 16 bits."""
    np.save(tmp_path / "ids.npy", np.array(IDS, np.int64))
    path = tmp_path / "ids.npy"
    if source != "npy":
        prepared = prepare([path], tmp_path / "out", validation_fraction=0.0)
        path = tmp_path / "out"
        if source == "megatron":
            write_megatron(prepared.train, tmp_path / "corpus.idx")
            path = tmp_path / "corpus"
    config = DataConfig(
        path=str(path),
        sequence_length=4,
        batch_size=1,
        validation_fraction=0.0,
        cache=str(tmp_path / "cache"),
    )
    batch = open_data(config)[0].batch_at(0)
    assert batch["tokens"].tolist() == [IDS[:4]]
    assert batch["targets"].tolist() == [IDS[1:]]
    table = jnp.asarray(np.arange(VOCAB, dtype=np.float32)[:, None])
    devices = jax.devices()[:tensor]
    mesh = make_mesh(pipeline=1, replica=1, data=1, context=1, tensor=tensor, devices=devices)

    @jax.jit
    def rows(table: jax.Array, tokens: jax.Array) -> jax.Array:
        with use_rules(compute_table(), mesh):
            return embedding(table, tokens)

    found = rows(table, jnp.asarray(batch["tokens"]))
    assert found[0, :, 0].astype(int).tolist() == IDS[:4]
