"""shardtrain: one sharded trainer in JAX, from a laptop's CPU to thousands of GPUs.

Owns: the public names and where they live. They are imported when first used (PEP 562), so that
`import shardtrain`, `--help` and the refusal of a bad config never import jax.

    import shardtrain as st

    config = st.load_config("quickstart", {"mesh.tensor": 2})
    run = st.build(config)
    state = st.train(run)
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shardtrain.commands_plan import make_plan
    from shardtrain.config import RunConfig, load_config, to_toml
    from shardtrain.errors import CheckpointError, ConfigError, DataError, ShardingError, UserError
    from shardtrain.run import Run, build
    from shardtrain.sharding.devices import prepare_devices
    from shardtrain.sharding.mesh import make_mesh
    from shardtrain.train.functional import make_train_step
    from shardtrain.train.own_model import jit, place, place_batch
    from shardtrain.training import train

__version__ = "0.1.0.dev0"

_HOME = {
    "CheckpointError": "shardtrain.errors",
    "ConfigError": "shardtrain.errors",
    "DataError": "shardtrain.errors",
    "ShardingError": "shardtrain.errors",
    "UserError": "shardtrain.errors",
    "RunConfig": "shardtrain.config",
    "load_config": "shardtrain.config",
    "to_toml": "shardtrain.config",
    "Run": "shardtrain.run",
    "build": "shardtrain.run",
    "make_mesh": "shardtrain.sharding.mesh",
    "make_plan": "shardtrain.commands_plan",
    "jit": "shardtrain.train.own_model",
    "make_train_step": "shardtrain.train.functional",
    "place": "shardtrain.train.own_model",
    "place_batch": "shardtrain.train.own_model",
    "prepare_devices": "shardtrain.sharding.devices",
}

__all__ = [
    "CheckpointError",
    "ConfigError",
    "DataError",
    "Run",
    "RunConfig",
    "ShardingError",
    "UserError",
    "build",
    "jit",
    "load_config",
    "make_mesh",
    "make_plan",
    "make_train_step",
    "place",
    "place_batch",
    "prepare_devices",
    "to_toml",
    "train",
]


def __getattr__(name: str) -> Any:
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module 'shardtrain' has no attribute {name!r}")
    value = getattr(importlib.import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)


class _TrainFolder(ModuleType):
    """The folder `shardtrain.train`, which is also the function `shardtrain.train(run)`.

    Importing any module of the folder binds the name to the folder; so the folder is callable.
    """

    def __call__(self, run: Run) -> Any:
        """Train a built run; see `shardtrain.training.train`."""
        return importlib.import_module("shardtrain.training").train(run)


importlib.import_module("shardtrain.train")  # only a docstring
sys.modules["shardtrain.train"].__class__ = _TrainFolder
