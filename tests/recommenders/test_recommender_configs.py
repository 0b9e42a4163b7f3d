"""Configs of recommenders: what is shipped, what is refused, what has no effect."""

import tomllib
from typing import Any

import jax
import pytest
from recommenders import Case

from shardtrain import commands
from shardtrain.config import load_config, to_toml
from shardtrain.config_effects import ineffective_settings
from shardtrain.errors import ConfigError
from shardtrain.run_program import make_program, make_report
from shardtrain.run_work import work_of
from shardtrain.sharding.mesh import abstract_mesh

CRITEO_ROWS = 187_767_399
"""Of the tables of MLPerf Training 1.0, as published."""
REFUSED = {
    "mesh.tensor": (2, "tables are split over mesh.data"),
    "mesh.pipeline": (2, "it is no stack of layers"),
    "mesh.context": (2, "there is no sequence to share out"),
    "train.precision": ("bfloat16", "rows of tables are updated in the type that they rest in"),
    "train.remat": ("full", "has no stack of layers to compute again"),
    "offload.optimizer": ("host", "has nothing to come layer by layer"),
    "lora.rank": (4, "model.freeze_tables is for fine-tuning"),
    "optimizer.ema_decay": (0.9, "an average of all rows"),
    "sharding.rules": ({"rows": "data"}, "choose with model.placement"),
    "model.table_sizes": ([0, 5], "must be numbers of rows"),
    "data.type": ("text", 'model.type="dlrm" goes with another one'),
}


@pytest.mark.parametrize("key", REFUSED)
def test_what_cannot_be_is_refused(key: str) -> None:
    value, why = REFUSED[key]
    with pytest.raises(ConfigError) as caught:
        load_config(Case().sections(), {key: value})
    assert why in str(caught.value)


def refusal(**sections: dict[str, Any]) -> str:
    whole = Case().sections()
    with pytest.raises(ConfigError) as caught:
        load_config({**whole, **{name: {**whole[name], **part} for name, part in sections.items()}})
    return str(caught.value)


def test_tables_fit_their_devices_and_columns_their_model() -> None:
    assert "does not divide by 3 devices" in refusal(mesh={"data": 3}, data={"batch_size": 33})
    assert "columns do not divide by 8 devices" in refusal(
        mesh={"data": 8}, model={"embed_dim": 12, "placement": "columns"}
    )
    with pytest.raises(ConfigError, match="two towers need a table for the user"):
        load_config(Case(model="two_tower").sections(), {"model.table_sizes": [9]})
    files = {"path": "somewhere", "format": "csv", "ids": ["a"], "dense": ["x", "y"]}
    assert "model.table_sizes wants 6 of them" in refusal(data=files)
    assert "such rows have 26 ids and 13 numbers" in refusal(
        data={"path": "somewhere", "format": "criteo"}
    )


def test_settings_without_effect_are_said() -> None:
    config = load_config(Case().sections(), {"data.bad_rows": "skip", "model.table_epsilon": 1e-6})
    lines = "\n".join(ineffective_settings(config))
    assert "data.bad_rows=skip has no effect: interactions are generated" in lines
    assert "model.table_epsilon" not in lines
    small = load_config(Case().sections(), {"model.dense_rows": 100})
    assert "model.placement=rows has no effect" in "\n".join(ineffective_settings(small))
    assert load_config(tomllib.loads(to_toml(config))).model == config.model


def test_criteo_on_8_gpus_takes_the_bytes_of_its_tables() -> None:
    """24 billion parameters: each device has 16 columns of all rows, and a cell a row."""
    config = load_config("dlrm_criteo_8gpu")
    assert sum(config.model.table_sizes) == CRITEO_ROWS
    assert CRITEO_ROWS * 128 > 2**31  # O-23: entries beyond 32 bits
    mesh = abstract_mesh({"data": 8}, "gpu")
    program = make_program(config, vocab_size=1, mesh=mesh)
    rows = {row.path: row for row in make_report(program).rows}
    table = rows["banks/columns"]
    large = CRITEO_ROWS - 2912
    assert table.shape == (large, 128)
    assert (table.parameters, table.gradients) == (large * 16 * 4, 0)
    assert table.optimizer == large * 4
    assert work_of(config).row_gradient_bytes(8) == 65536 * 16 * (16 + 1) * 4
    layers = sum(row.parameters for path, row in rows.items() if path[:3] in ("bot", "top"))
    bottom = 13 * 512 + 512 * 256 + 256 * 128 + 512 + 256 + 128
    top = (128 + 27 * 26 // 2) * 1024 + 1024 * 1024 + 1024 * 512 + 512 * 256 + 256
    assert layers == 4 * (bottom + top + 1024 + 1024 + 512 + 256 + 1)


@pytest.mark.parametrize("name", ["dlrm_generated", "two_tower_movielens", "dlrm_criteo_8gpu"])
def test_shipped_configs_have_nothing_without_effect(name: str) -> None:
    lines = ineffective_settings(load_config(name))
    assert [line for line in lines if "sharding.zero" not in line] == []


def test_verify_compares_a_small_run_with_one_device() -> None:
    config = load_config("dlrm_generated", {"mesh.data": 8, "run.cpu_devices": 8})
    assert jax.device_count() == 8
    result = commands.verify(config, steps=1, shrink=True)
    assert result.equal, result
    assert "banks/rows" in result.gradients
