"""Runs of recommenders, as functions: model, task, data and counts.

Owns: what is particular to them. Does not own: what all runs share (`run_program`, `run`), and the
interface (`run_work`).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from flax import nnx
from jax.sharding import AbstractMesh, Mesh

from shardtrain.config import RecommenderRunConfig
from shardtrain.data.interaction_files import Data, InteractionInfo, open_interactions
from shardtrain.data.interactions import blank_interactions
from shardtrain.data.loader import Rows
from shardtrain.models.config import DlrmConfig
from shardtrain.models.dlrm import Dlrm, TwoTower, layout_of
from shardtrain.models.flops import training_flops_per_interaction
from shardtrain.models.frozen_tables import FrozenTables
from shardtrain.models.lora import Training
from shardtrain.models.table_layout import TableLayout
from shardtrain.optim.tables import RowAdagrad, RowRule, RowSgd
from shardtrain.run_defaults import WorkDefaults
from shardtrain.sharding.processes import processes
from shardtrain.strategies.accumulate import Accumulation
from shardtrain.strategies.parts import Runner
from shardtrain.strategies.tables import TableAccumulation
from shardtrain.tasks.base import Task
from shardtrain.tasks.click import Click
from shardtrain.tasks.config import RetrievalConfig
from shardtrain.tasks.ranking import auc
from shardtrain.tasks.retrieval import Retrieval
from shardtrain.train.build import Create


@dataclass(frozen=True)
class RecommenderWork(WorkDefaults):
    """A recommender on interactions; see `run_work.Work`."""

    config: RecommenderRunConfig

    unit = "examples"
    samples = "interactions"

    @cached_property
    def tables(self) -> TableLayout:
        """Which table is split in which way."""
        return layout_of(self.config.model)

    @property
    def units(self) -> int:
        """Interactions of a global batch."""
        return self.config.data.batch_size

    @property
    def portions(self) -> str:
        """A global batch in words."""
        return f"{self.config.data.batch_size} interactions"

    @property
    def notes(self) -> tuple[str, ...]:
        """How tables are split."""
        return tuple(self.tables.words())

    def known_size(self) -> int:
        """One number is predicted."""
        return 1

    def size(self, found: int) -> int:
        """One number is predicted."""
        return found

    def open_data(self, say: Callable[[str], None]) -> tuple[Data, Data | None, InteractionInfo]:
        """Interactions by index."""
        config = self.config
        for note in self.notes:
            say(note)
        return open_interactions(
            config.data,
            sizes=self.tables.sizes,
            num_dense=config.model.num_dense,
            microbatches=config.train.microbatches,
            seed=config.run.seed,
            peers=processes(),
            figure=auc,
            say=say,
        )

    def create(self, size: int) -> Create:
        """(dtype, rngs) -> the model."""
        del size
        model = self.config.model

        def create(dtype: Any, rngs: nnx.Rngs) -> nnx.Module:
            if isinstance(model, DlrmConfig):
                return Dlrm(model, dtype, rngs)
            return TwoTower(model, dtype, rngs)

        return create

    def task(self, size: int) -> Task:
        """Clicks, or retrieval."""
        del size
        task, model = self.config.task, self.config.model
        if isinstance(task, RetrievalConfig):
            return Retrieval(task, model.table_sizes[-1], model.table_parts)
        return Click()

    def training(self) -> Training | None:
        """All but the tables, where they are frozen."""
        return FrozenTables() if self.config.model.freeze_tables else None

    def row_rule(self) -> RowRule:
        """What moves rows of tables that are split."""
        model = self.config.model
        if model.table_optimizer == "sgd":
            return RowSgd(model.table_rate)
        return RowAdagrad(model.table_rate, model.table_epsilon)

    def row_gradient_bytes(self, num_devices: int) -> int:
        """Bytes on one of so many devices of gradients that are rows."""
        if self.config.model.freeze_tables:
            return 0
        return self.tables.gradient_bytes(self.config.data.batch_size, num_devices)

    def runner(self, mesh: Mesh | AbstractMesh, size: int) -> Runner:
        """Microbatches one after another, with gradients of rows where tables are trained so."""
        del mesh, size
        microbatches = self.config.train.microbatches
        if self.tables.split and not self.config.model.freeze_tables:
            return TableAccumulation(microbatches)
        return Accumulation(microbatches=microbatches, whole=True)

    def blank(self, rows: int) -> Rows:
        """Interactions that count for nothing."""
        model = self.config.model
        return blank_interactions(rows, model.num_dense, len(model.table_sizes))

    def microbatches_alone(self) -> int:
        """As many as there are, where each has negatives of its own."""
        in_batch = isinstance(self.config.task, RetrievalConfig)
        return self.config.train.microbatches if in_batch else 1

    def shrunk(
        self, sections: Mapping[str, Any], degrees: Mapping[str, int]
    ) -> dict[str, dict[str, Any]]:
        """Narrow layers and few interactions; small tables where any ids fit them."""
        rows = degrees["replica"] * degrees["data"] * sections["train"]["microbatches"]
        model, data = dict(sections["model"]), dict(sections["data"])
        for key in ("bottom", "top", "tower"):
            if key in model:
                model[key] = [min(width, 32) for width in model[key]]
        if not data["path"] or data["hash_ids"] or data["format"] == "criteo":
            model["table_sizes"] = [min(size, 64) for size in model["table_sizes"]]
            model["dense_rows"] = min(model["dense_rows"], 16)
        data["batch_size"] = min(data["batch_size"], 2 * rows)
        data["generated"] = min(data["generated"], 1000)
        return {**sections, "model": model, "data": data}

    def flops(self, size: int) -> int:
        """FLOPs of forward and backward for a global batch."""
        del size
        data = self.config.data
        return self.units * training_flops_per_interaction(
            self.config.model, batch=data.batch_size // self.config.train.microbatches
        )
