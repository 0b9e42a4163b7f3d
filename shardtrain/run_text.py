"""Runs on text with a stack of equal layers: what language models and BERT have in common.

Owns: counts of a batch, and how microbatches go through the layers. Does not own: the models, their
tasks and their data (`run_language`, `run_bert`).
"""

from collections.abc import Mapping

from jax.sharding import AbstractMesh, Mesh

from shardtrain.config import TextRunConfig
from shardtrain.errors import ConfigError
from shardtrain.models.config import TransformerConfig
from shardtrain.plan.layout import vocabulary_faults
from shardtrain.plan.stages import make_stages
from shardtrain.run_defaults import WorkDefaults
from shardtrain.sharding.mesh import mesh_platform
from shardtrain.strategies.accumulate import Accumulation
from shardtrain.strategies.parts import Runner
from shardtrain.strategies.pipeline import Pipeline
from shardtrain.strategies.stack import choose_loop


class TextWork(WorkDefaults):
    """A part of `run_work.Work`."""

    config: TextRunConfig

    unit = "tokens"

    @property
    def units(self) -> int:
        """Tokens of a global batch, padding included."""
        return self.config.data.batch_size * self.config.data.sequence_length

    @property
    def portions(self) -> str:
        """A global batch in words."""
        return f"{self.config.data.batch_size} x {self.config.data.sequence_length} tokens"

    @property
    def stack(self) -> TransformerConfig:
        """The layers, in the words of a transformer's section."""
        raise NotImplementedError  # each kind of model has its own

    def scored(self, size: int) -> int:
        """How many scores the head makes for a token of the batch, on average."""
        raise NotImplementedError  # each kind of model has its own

    def size(self, found: int) -> int:
        """`model.vocab_size` goes before what the data has."""
        return self.config.model.vocab_size or found

    def size_faults(
        self, found: int, degrees: Mapping[str, int], *, counted: bool = False
    ) -> list[ConfigError]:
        """A vocabulary whose rows the mesh does not divide."""
        sharding = self.config.sharding
        return vocabulary_faults(self.stack, sharding, degrees, found, counted=counted)

    def runner(self, mesh: Mesh | AbstractMesh, size: int) -> Runner:
        """Microbatches one after another, or in a pipeline."""
        config, stages = self.config, mesh.shape["pipeline"]
        train, model, platform = config.train, config.model, mesh_platform(mesh)
        if stages == 1:
            loop = choose_loop(model.layer_loop, model.num_layers, platform)
            if loop == "scan" and train.overlap:
                loop = "peel"
            return Accumulation(train.remat, loop, train.microbatches)
        schedule, layout = make_stages(
            config.pipeline,
            self.stack,
            stages=stages,
            microbatches=train.microbatches,
            length=config.data.sequence_length,
            vocab_size=self.scored(size),
        )
        loop = choose_loop(model.layer_loop, layout.num_slots, platform)
        return Pipeline(schedule, layout, train.remat, loop)
