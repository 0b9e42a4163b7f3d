"""A run, from its config: the one place where every layer meets.

Owns the assembly of a `Run` and what `train` does with one, from an empty folder or an old one to the last
checkpoint. The parts do the work.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import jax
from flax import nnx
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding

from shardtrain.checkpoint.arrays import tree_bytes
from shardtrain.checkpoint.checkpointer import Checkpointer
from shardtrain.config import RunConfig, resolve_mesh, to_toml
from shardtrain.config_effects import ineffective_settings
from shardtrain.data.language import LanguageData
from shardtrain.data.loader import Loader, batch_layout, batch_on_device, evaluation_on_device
from shardtrain.data.sources import DataInfo, open_data, require_vocabulary
from shardtrain.models.flops import training_flops_per_token
from shardtrain.models.transformer import Transformer
from shardtrain.optim.optimizers import make_transform
from shardtrain.optim.schedules import make_schedule
from shardtrain.sharding.mesh import MESH_AXES, make_mesh
from shardtrain.sharding.placement import Placement
from shardtrain.sharding.report import Report, report
from shardtrain.sharding.rules import compute_table
from shardtrain.strategies.precision import policy
from shardtrain.strategies.stack import choose_loop, make_stack
from shardtrain.tasks.language_model import LanguageModel
from shardtrain.train.build import Create, Layout, Program
from shardtrain.train.flops import utilisation
from shardtrain.train.interrupt import EXIT_CODES, Interrupt
from shardtrain.train.loop import Cadence, Loop, Observer
from shardtrain.train.metrics import MetricsFile
from shardtrain.train.rundir import RunDirectory, changes, check_changes
from shardtrain.train.screen import Screen, human_bytes, human_time
from shardtrain.train.state import TrainState
from shardtrain.train.trackers import Trackers, check_trackers, make_trackers

PyTree = Any
Batch = Mapping[str, jax.Array]


@dataclass(frozen=True, eq=False)
class Run:
    """A config made into functions and data; nothing is compiled or written before it is used."""

    config: RunConfig
    program: Program
    data: LanguageData
    validation: LanguageData | None
    info: DataInfo

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

    @cached_property
    def report(self) -> Report:
        """Bytes on one device, parameter by parameter."""
        return make_report(self.program)

    def init(self) -> TrainState:
        """The state before the first update."""
        return self.program.init()

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
        """The validation loss in nats a target, over `eval.steps` batches; empty without data."""
        validation = self.validation
        if validation is None or self.config.eval.steps == 0:
            return {}
        sums, weights = 0.0, 0.0
        headline = self.program.task.headline
        for index in range(validation.evaluation_batches(self.config.eval.steps)):
            batch = evaluation_on_device(
                validation, index, self.program.layout.microbatches, self.place
            )
            part, weight = self.program.evaluate(state.params, batch)
            sums += float(part[headline])
            weights += float(weight[headline])
        return {"val_loss": sums / max(weights, 1.0)}


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
    devices = list(jax.devices() if devices is None else devices)
    resolve_mesh(config, len(devices))
    data, validation, info = open_data(config.data, seed=config.run.seed, say=_say)
    if config.model.vocab_size:
        require_vocabulary(config.model.vocab_size, info)
    program = make_program(config, vocab_size=info.vocab_size, devices=devices)
    return Run(config, program, data, validation, info)


def make_program(
    config: RunConfig,
    *,
    vocab_size: int,
    devices: Sequence[jax.Device] | None = None,
    mesh: Mesh | AbstractMesh | None = None,
) -> Program:
    """The functions of a config's run, without data.

    Args:
        config: from `load_config`.
        vocab_size: tokens of the data; `model.vocab_size` goes first.
        devices: devices to use, all of them; by default every device.
        mesh: a mesh to use instead, which may be abstract.
    """
    mesh = mesh or make_mesh(**config.mesh.model_dump(), devices=devices)
    vocab_size = config.model.vocab_size or vocab_size
    platform = jax.default_backend() if isinstance(mesh, AbstractMesh) else _platform(mesh)
    loop = choose_loop(config.model.layer_loop, config.model.num_layers, platform)
    sharding = config.sharding
    layout = Layout(
        mesh=mesh,
        compute=compute_table(
            sequence_parallel=sharding.sequence_parallel, overrides=sharding.rules
        ),
        zero=sharding.zero,
        microbatches=config.train.microbatches,
        stack=make_stack(policy=config.train.remat, loop=loop),
    )
    return Program(
        create=model_creator(config, vocab_size),
        task=LanguageModel(config.task, vocab_size),
        layout=layout,
        policy=policy(config.train.precision),
        make_transform=lambda names: make_transform(config.optimizer, names),
        schedule=make_schedule(config.optimizer, config.run.steps),
        clip_norm=config.optimizer.clip_norm,
        seed=config.run.seed,
    )


def model_creator(config: RunConfig, vocab_size: int) -> Create:
    """(dtype, rngs) -> the config's model."""
    max_length = config.model.max_length or config.data.sequence_length

    def create(dtype: Any, rngs: nnx.Rngs) -> nnx.Module:
        return Transformer(
            config.model, vocab_size=vocab_size, max_length=max_length, dtype=dtype, rngs=rngs
        )

    return create


def make_report(program: Program) -> Report:
    """Bytes on one device, parameter by parameter."""
    return report(
        program.placement,
        params=program.shapes.params,
        opt_state=program.shapes.opt_state,
        gradient_dtype=program.policy.gradient_dtype(program.layout.microbatches),
    )


# -- training


def train(run: Run) -> TrainState:
    """Trains a run to its last update, from its newest checkpoint if it has one.

    Args:
        run: from `build`. Its `run.dir` gets checkpoints, `metrics.jsonl`, tracker files and
            `resolved.toml`.

    Returns:
        The state after the last update, or after the one at which the run was interrupted.

    Raises:
        UserError: the folder cannot be used, or holds another run.
    """
    return _Training(run).train()[0]


class _Training:
    """One process's part of a run's life: from opening the folder to closing it."""

    def __init__(self, run: Run) -> None:
        self.run = run
        config = run.config
        check_trackers(config.log.trackers)
        self.last = config.run.stop_at or config.run.steps
        self.directory = RunDirectory(config.run.dir)
        self.checkpoints = Checkpointer(self.directory.checkpoints, config.checkpoint.keep)
        self.saved_text = to_toml(config)

    def train(self) -> tuple[TrainState, int]:
        """Returns the state and the exit code."""
        with self.directory, self.checkpoints:
            resume = self._resumable()
            first = resume or 0
            with Screen(first=first, last=self.last, every=self.run.config.log.every) as screen:
                self._introduce(screen, resume)
                if first >= self.last:
                    screen.say(f"nothing to do: {first} of {self.last} updates are done")
                    return self._restore(first), 0
                for path in self.checkpoints.clean():
                    screen.say(f"deleted what an interrupted save has left: {path}")
                self.checkpoints.preflight(tree_bytes(self.run.program.shapes))
                self.directory.write_resolved(self.saved_text)
                return self._go(screen, resume)

    def _resumable(self) -> int | None:
        """The step to go on from; refuses a folder that holds another run."""
        latest = self.checkpoints.latest()
        saved = self.directory.saved_config()
        if latest is None or saved is None:
            return None
        check_changes(
            changes(saved, self.run.config.model_dump()),
            allow=self.run.config.run.allow_changes,
            where=str(self.directory.path),
        )
        return latest

    def _restore(self, step: int) -> TrainState:
        state: TrainState = self.checkpoints.restore(step, self.run.program.abstract_state)
        return state

    def _go(self, screen: Screen, resume: int | None) -> tuple[TrainState, int]:
        run, config, first = self.run, self.run.config, resume or 0
        with MetricsFile(self.directory.metrics) as metrics, Interrupt() as interrupt:
            gone = metrics.truncate(first)
            trackers = make_trackers(
                config.log.trackers,
                self.directory.path,
                run_name=config.run.name,
                config=config.model_dump(),
                resumed_at=first,
                replayed_to=gone.last_step,
            )
            try:
                state = self._begin(screen, metrics, resume, gone.last_step)
                observers = (_Metrics(metrics), _Tracked(trackers), screen)
                state = self._loop(state, observers, interrupt)
                code = self._end(screen, metrics, trackers, state, interrupt)
            finally:
                trackers.close()
        return state, code

    def _begin(
        self, screen: Screen, metrics: MetricsFile, resume: int | None, replayed_to: int
    ) -> TrainState:
        """Compiles the step, then makes or restores the state."""
        run, first = self.run, resume or 0
        screen.say("compiling the step ...")
        begun = time.perf_counter()
        layout = batch_layout(run.data, run.program.layout.microbatches, run.place)
        self.compiled = run.program.compile_step(layout.arrays)
        seconds = time.perf_counter() - begun
        screen.say(f"compiled in {seconds:.1f} s")
        metrics.event("compile", first, {"seconds": seconds})
        if resume is None:
            return run.init()
        begun = time.perf_counter()
        state = self._restore(resume)
        seconds = time.perf_counter() - begun
        metrics.event("restore", first, {"seconds": seconds, "replayed_to": replayed_to})
        screen.say(f"restored step {first} in {seconds:.1f} s")
        return state

    def _loop(
        self, state: TrainState, observers: tuple[Observer, ...], interrupt: Interrupt
    ) -> TrainState:
        run, config = self.run, self.run.config
        first = int(state.step)
        per_step = config.data.batch_size * config.data.sequence_length
        flops = training_flops_per_token(
            config.model,
            vocab_size=config.model.vocab_size or run.info.vocab_size,
            length=config.data.sequence_length,
        )
        devices = list(run.mesh.devices.flat)

        def describe(cursor: int) -> dict[str, Any]:
            return {
                "sample_digest": run.data.digest(cursor),
                "tokens": (cursor + 1) * per_step,
            }

        def rates(seconds: float) -> dict[str, Any]:
            speed = per_step / seconds
            mfu = utilisation(speed * flops, devices, config.train.precision)
            return {"tokens_per_second": speed, "mfu": mfu}

        with Loader(
            run.data,
            microbatches=run.program.layout.microbatches,
            place=run.place,
            start=int(state.cursor),
            stop=int(state.cursor) + self.last - first,
            prefetch=config.data.prefetch,
        ) as loader:
            return Loop(
                step=self.compiled,
                batches=loader,
                describe=describe,
                rates=rates,
                evaluate=run.evaluate,
                save=lambda step, state: self._save(step, state, observers),
                cadence=Cadence(self.last, config.checkpoint.every, config.eval.every),
                observers=observers,
                stop=lambda: interrupt.signal is not None,
            ).run(state)

    def _save(self, step: int, state: TrainState, observers: tuple[Observer, ...]) -> None:
        """Begins to save; says what has been saved meanwhile."""
        self._saved(observers)
        if step not in self.checkpoints.steps():
            self.checkpoints.save(step, state, {"config": self.run.config.model_dump()})
        if step == self.last:
            self.checkpoints.wait()
            self._saved(observers)

    def _saved(self, observers: tuple[Observer, ...]) -> None:
        for saved in self.checkpoints.poll():
            values = {
                "seconds": saved.total_seconds,
                "blocked": saved.blocked_seconds,
                "bytes": saved.num_bytes,
            }
            for observer in observers:
                observer.event("save", saved.step, values)

    def _end(
        self,
        screen: Screen,
        metrics: MetricsFile,
        trackers: Trackers,
        state: TrainState,
        interrupt: Interrupt,
    ) -> int:
        """Says how it ended."""
        self.checkpoints.wait()
        done = int(state.step)
        if interrupt.signal is not None and done < self.last:
            metrics.event("stop", done, {"signal": interrupt.signal.name})
            screen.say(
                f"interrupted and saved at step {done}; the same command goes on from there:\n"
                f"  shardtrain train {self.directory.path}"
            )
            return EXIT_CODES[interrupt.signal]
        metrics.event("stop", done, {"reason": "done"})
        screen.say(f"done: {self.directory.path}")
        return 0

    def _introduce(self, screen: Screen, resume: int | None) -> None:
        """Shows what runs where before anything is compiled."""
        run, config, bytes_ = self.run, self.run.config, self.run.report
        devices = run.mesh.devices
        mesh = " x ".join(f"{a} {run.mesh.shape[a]}" for a in MESH_AXES if run.mesh.shape[a] > 1)
        count = sum(leaf.size for leaf in jax.tree.leaves(run.program.shapes.params))
        screen.table(
            f"{config.run.name}: {'goes on from step ' + str(resume) if resume else 'a new run'}",
            [
                ("model", f"{config.model.type}, {count:,} parameters, {config.train.precision}"),
                ("data", f"{run.info.source}, {run.data.num_samples:,} sequences"),
                ("devices", f"{devices.size} x {devices.flat[0].device_kind}, {mesh or 'no mesh'}"),
                ("state", f"ZeRO {config.sharding.zero}; on each device: parameters "
                 f"{human_bytes(bytes_.parameters)}, gradients {human_bytes(bytes_.gradients)}, "
                 f"optimizer {human_bytes(bytes_.optimizer)}"),
                ("steps", f"{self.last:,} of {config.data.batch_size} x "
                 f"{config.data.sequence_length} tokens"),
                ("folder", str(self.directory.path)),
            ],
        )  # fmt: skip
        for line in ineffective_settings(config):
            screen.say(f"note: {line}")


class _Metrics:
    """The metrics file as an observer."""

    def __init__(self, file: MetricsFile) -> None:
        self._file = file

    def row(self, step: int, values: Mapping[str, Any]) -> None:
        self._file.row(step, values)

    def event(self, name: str, step: int, values: Mapping[str, Any]) -> None:
        self._file.event(name, step, values)


class _Tracked:
    """The trackers as an observer."""

    def __init__(self, trackers: Trackers) -> None:
        self._trackers = trackers

    def row(self, step: int, values: Mapping[str, Any]) -> None:
        self._trackers.log(step, values)

    def event(self, name: str, step: int, values: Mapping[str, Any]) -> None:
        """Trackers have no events."""


def _say(message: str) -> None:
    from rich.console import Console

    Console(stderr=True, highlight=False).print(message, markup=False)


def _platform(mesh: Mesh) -> str:
    return str(mesh.devices.flat[0].platform)


def train_command(config: RunConfig) -> int:
    """`shardtrain train`: the exit code."""
    return _Training(build(config)).train()[1]
