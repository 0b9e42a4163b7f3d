"""A run, from its config: the one place where every layer meets.

Owns: the assembly of a `Run`. Does not own: training it (`shardtrain.training`) and looking at it
(`shardtrain.commands`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, cast

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from numpy.typing import NDArray

from shardtrain.checkpoint.folder import complete_steps
from shardtrain.config import (
    LanguageRunConfig,
    RunConfig,
    known_vocab,
    only_language,
    resolve_mesh,
)
from shardtrain.data.loader import Samples, batch_on_device, evaluation_on_device
from shardtrain.data.sources import DataInfo
from shardtrain.data.tokenizer import Tokenizer
from shardtrain.errors import raise_all
from shardtrain.run_program import make_program, make_report
from shardtrain.run_remat import choose_remat
from shardtrain.run_weights import check_weights, require_tokenizer, weights_of
from shardtrain.run_work import Info, Work, work_of
from shardtrain.sharding.devices import prepare_devices
from shardtrain.sharding.disk import require_disk
from shardtrain.sharding.placement import Placement
from shardtrain.sharding.processes import processes
from shardtrain.sharding.report import Report
from shardtrain.sharding.tiers import require_host_memory
from shardtrain.strategies.offload import FetchedStack, fetched
from shardtrain.strategies.parts import GATHERED
from shardtrain.strategies.stack import Stack, make_stack, make_streamed_stack
from shardtrain.tasks.ranking import RankingTask
from shardtrain.train.build import Program
from shardtrain.train.generate import Generator
from shardtrain.train.rundir import checkpoints_in
from shardtrain.train.screen import make_console
from shardtrain.train.state import TrainState

PyTree = Any
Batch = Mapping[str, jax.Array]


@dataclass(frozen=True, eq=False)
class Run:
    """A config made into functions and data; nothing is compiled or written before it is used."""

    config: RunConfig
    program: Program
    data: Samples
    validation: Samples | None
    info: Info

    @property
    def mesh(self) -> Mesh:
        """The devices, by axis."""
        mesh = self.program.layout.mesh
        assert isinstance(mesh, Mesh)
        return mesh

    @property
    def placement(self) -> Placement:
        """Where parameters, gradients and optimizer state rest."""
        return self.program.placement

    @property
    def work(self) -> Work:
        """What it is about."""
        return work_of(self.config)

    @property
    def size(self) -> int:
        """Tokens or classes that are predicted."""
        return self.work.size(self.info.vocab_size)

    @cached_property
    def report(self) -> Report:
        """Bytes on one device, parameter by parameter."""
        return make_report(self.program)

    def init(self) -> TrainState:
        """The state before the first update: drawn, or of the weights that `run.init` names."""
        name = self.config.run.init
        if not name:
            return self.program.init()
        with weights_of(name, self.config, self.program) as weights:
            return self.program.init_from(weights)

    def step(self, state: TrainState, batch: Batch) -> tuple[TrainState, dict[str, jax.Array]]:
        """One update; the old state's memory is given up."""
        stepped: tuple[TrainState, dict[str, jax.Array]] = self.program.step(state, batch)
        return stepped

    def batch_at(self, cursor: int) -> dict[str, jax.Array]:
        """A global batch [microbatch, batch, ...] on the devices: a function of seed and cursor."""
        return batch_on_device(self.data, cursor, self.program.layout.microbatches, self.place)

    def place(self, _name: str, shape: tuple[int, ...]) -> NamedSharding:
        """The sharding of a batch array."""
        return self.program.batch_sharding(len(shape))

    def evaluate(self, state: TrainState) -> dict[str, float]:
        """What the task reports, over `eval.steps` batches, such as `val_loss` in nats.

        Exact also where the last batch is not full; empty without data.
        """
        validation, program = self.validation, self.program
        if validation is None or self.config.eval.steps == 0:
            return {}
        sums = evaluate_on(program, validation, state, self.config.eval.steps)
        return {name: total / max(weight, 1.0) for name, (total, weight) in sums.items()}

    @cached_property
    def _generator(self) -> Generator:
        config = only_language(self.config, "generation")
        assert isinstance(self.info, DataInfo)
        return make_generator(config, self.program, self.info.tokenizer())

    def generate(
        self,
        state: TrainState,
        prompt: str = "",
        *,
        tokens: int = 200,
        temperature: float = 0.8,
        seed: int = 0,
    ) -> str:
        """What the model writes after a prompt; the arguments are those of `Generator.text`."""
        return self._generator.text(
            self.program.evaluated_params(state),
            prompt,
            tokens=tokens,
            temperature=temperature,
            seed=seed,
        )


def evaluate_on(
    program: Program, data: Samples, state: TrainState, limit: int = 0
) -> dict[str, tuple[float, float]]:
    """What the task reports of data, each sample once.

    Args:
        program: the run's functions.
        data: what to predict.
        state: with the parameters; its `opt_state` may be empty.
        limit: at most so many batches; 0 = all.

    Returns:
        Of each term by the name that it is reported under: its sum, and the weight of that. What is
        said of all samples together has the weight 1.
    """

    def place(_name: str, shape: tuple[int, ...]) -> NamedSharding:
        return program.batch_sharding(len(shape))

    reported = program.task.reported
    gathered: list[dict[str, NDArray[Any]]] = []
    sums, weights = dict.fromkeys(reported, 0.0), dict.fromkeys(reported, 0.0)
    for index in range(data.evaluation_batches(limit)):
        batch = evaluation_on_device(data, index, program.layout.microbatches, place)
        part, weight = program.evaluate(state.params, batch, state.model_state, state.frozen)
        for name, term in reported.items():
            sums[name] += float(part[term])
            weights[name] += float(weight[term])
        if GATHERED in part:
            arrays: Any = jax.device_get(part[GATHERED])
            gathered.append({name: array.reshape(-1) for name, array in arrays.items()})
    found = {name: (sums[name], weights[name]) for name in reported}
    if not gathered:
        return found
    joined = {name: np.concatenate([one[name] for one in gathered]) for name in gathered[0]}
    ranked = cast(RankingTask, program.task).ranked(joined)
    return {**found, **{name: (value, 1.0) for name, value in ranked.items()}}


def build(config: RunConfig, *, devices: Sequence[jax.Device] | None = None) -> Run:
    """Makes a run of a config.

    Args:
        config: from `load_config`.
        devices: devices to use, all of them; by default every device of this process group.

    Returns:
        The run. Data is opened (text is prepared into the cache the first time).

    Raises:
        UserError: the mesh does not fit the devices, or the data cannot be used.
    """
    if devices is None:
        prepare_devices(
            config.run.cpu_devices // processes().count,
            deterministic=config.run.deterministic,
            overlap=config.train.overlap,
        )
        devices = jax.devices()
    degrees = resolve_mesh(config, len(devices))
    offload = config.offload
    if "host" in (offload.optimizer, offload.master, offload.parameters):
        require_host_memory(devices)
    if "disk" in (offload.optimizer, offload.master, offload.parameters):
        require_disk(devices)
    if isinstance(config, LanguageRunConfig) and known_vocab(config) is not None:
        require_tokenizer(config)
    work = work_of(config)
    known = work.known_size()
    if begins := bool(config.run.init) and not complete_steps(checkpoints_in(config.run.dir)):
        _check_init(config, known, devices)  # before data is prepared, perhaps for hours
    data, validation, info = work.open_data(_say)
    counted = isinstance(info, DataInfo) and not info.tokenizer_name
    raise_all(work.size_faults(info.vocab_size, degrees, counted=counted))
    if begins and known is None:
        _check_init(config, info.vocab_size, devices)
    config, choice = choose_remat(config, info.vocab_size, devices)
    if choice:
        _say(f"train.remat is {choice}")
    program = make_program(config, vocab_size=info.vocab_size, devices=devices)
    return Run(config, program, data, validation, info)


def _check_init(config: RunConfig, size: int | None, devices: Sequence[jax.Device]) -> None:
    """Refuses weights of another model, where its size is known."""
    if size is not None:
        program = make_program(config, vocab_size=size, devices=devices)
        check_weights(config.run.init, config, program)


def make_generator(config: LanguageRunConfig, program: Program, tokenizer: Tokenizer) -> Generator:
    """What goes on with texts; needs no data.

    Learned and rotary positions beyond those of training are noise, so a window slides; ALiBi is
    made to go on.
    """
    model = config.model
    trained = config.data.sequence_length
    windows = {"learned": model.max_length or trained, "alibi": None}
    # Also on CPU a scan: for one token it is faster, and soon compiled.
    mesh, placement = program.layout.mesh, program.placement.all
    stack: Stack = FetchedStack(placement) if placement.any_away else make_stack()
    if mesh.shape["pipeline"] > 1:
        assert isinstance(mesh, Mesh)
        stack = make_streamed_stack(program.order, mesh, partial(fetched, placement))
    return Generator(
        config=model,
        graph=program.graph,
        placement=program.placement,
        tokenizer=tokenizer,
        stack=stack,
        window=windows.get(model.position, trained),
    )


def _say(message: str) -> None:
    make_console().print(message, markup=False, soft_wrap=True)
