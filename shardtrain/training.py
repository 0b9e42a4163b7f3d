"""Training a run, from an empty folder or an old one to its last checkpoint.

Owns: what happens in which order, where it is written down, how a run goes on and how it ends. Does
not own: what a run is made of (`shardtrain.run`), and what each part does.
"""

import shlex
import time
from typing import Any

import jax

from shardtrain.checkpoint.arrays import tree_bytes
from shardtrain.checkpoint.checkpointer import Checkpointer
from shardtrain.config import RunConfig, to_toml
from shardtrain.config_effects import ineffective_settings
from shardtrain.data.loader import Loader, batch_layout
from shardtrain.errors import DataError
from shardtrain.models.flops import training_flops_per_token
from shardtrain.run import Run, build
from shardtrain.run_audit import check_step, require_auditable
from shardtrain.sharding.mesh import mesh_platform, split_axes
from shardtrain.train.flops import utilisation
from shardtrain.train.interrupt import EXIT_CODES, Interrupt
from shardtrain.train.loop import Cadence, CompiledStep, Loop, Observer, Observers
from shardtrain.train.machine import warnings
from shardtrain.train.metrics import MetricsFile, read_events
from shardtrain.train.rundir import Change, RunDirectory, changes, check_changes
from shardtrain.train.screen import Screen, human_bytes
from shardtrain.train.state import TrainState
from shardtrain.train.trackers import Trackers, check_trackers, make_trackers


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
    with RunDirectory(run.config.run.dir) as directory:
        return _Training(run, directory).train()[0]


def train_command(config: RunConfig) -> int:
    """`shardtrain train`: the exit code."""
    check_trackers(config.log.trackers)
    with RunDirectory(config.run.dir) as directory:  # before data is prepared, perhaps for hours
        return _Training(build(config), directory).train()[1]


class _Training:
    """What one process does for a run while it holds the run's folder."""

    def __init__(self, run: Run, directory: RunDirectory) -> None:
        config = run.config
        check_trackers(config.log.trackers)
        require_auditable(config, run.mesh)
        self.run = run
        self.directory = directory
        self.checkpoints = Checkpointer(directory.checkpoints, config.checkpoint.keep)
        self.cadence = Cadence(
            config.run.stop_at or config.run.steps, config.checkpoint.every, config.eval.every
        )

    def train(self) -> tuple[TrainState, int]:
        """Returns the state and the exit code."""
        resume, last = self._resumable(), self.cadence.last
        screen = Screen(first=resume or 0, last=last, every=self.run.config.log.every)
        with self.checkpoints, screen:
            screen.table(*self._introduction(resume))
            for line in self._notes():
                screen.say(f"note: {line}")
            if resume is not None and resume >= last:
                screen.say(f"nothing to do: {resume} of {last} updates are done")
                return self._restore(resume), 0
            self._make_room(screen)
            return self._go(screen, resume)

    # -- before the first update

    def _resumable(self) -> int | None:
        """The step to go on from; refuses a folder that holds another run."""
        latest = self.checkpoints.latest()
        if latest is None:
            return None
        saved, tokens = self.checkpoints.metadata(latest), self.run.info.digest
        found = changes(saved["config"], self.run.config.model_dump())
        if saved["tokens"] != tokens:
            found.append(Change("the tokens", saved["tokens"], tokens, "breaks"))
        allow = self.run.config.run.allow_changes
        check_changes(found, allow=allow, where=str(self.directory.path))
        return latest

    def _introduction(self, resume: int | None) -> tuple[str, list[tuple[str, str]]]:
        """What runs where, as a title and rows."""
        run, config, bytes_ = self.run, self.run.config, self.run.report
        devices, mesh = run.mesh.devices, " x ".join(split_axes(run.mesh))
        count = sum(leaf.size for leaf in jax.tree.leaves(run.program.abstract_saved.params))
        data = config.data
        title = "a new run" if resume is None else f"goes on from step {resume}"
        return f"{config.run.name}: {title}", [
            ("model", f"{config.model.type}, {count:,} parameters, {config.train.precision}"),
            ("data", f"{run.info.source}, {run.data.num_samples:,} sequences"),
            ("devices", f"{devices.size} x {devices.flat[0].device_kind}, {mesh or 'no mesh'}"),
            ("state", f"ZeRO {config.sharding.zero}; on each device: parameters "
             f"{human_bytes(bytes_.parameters)}, gradients {human_bytes(bytes_.gradients)}, "
             f"optimizer {human_bytes(bytes_.optimizer)}"),
            ("steps", f"{self.cadence.last:,} of {data.batch_size} x "
             f"{data.sequence_length} tokens"),
            ("folder", str(self.directory.path)),
        ]  # fmt: skip

    def _notes(self) -> list[str]:
        """What was set and has no effect here, and what this machine could do better."""
        config, mesh = self.run.config, self.run.mesh
        lines = ineffective_settings(config, degrees=dict(mesh.shape))
        if config.run.deterministic and mesh_platform(mesh) == "cpu":
            lines.append("run.deterministic=True has no effect: CPU kernels always are")
        return [*lines, *warnings()]

    def _make_room(self, screen: Screen) -> None:
        """Takes away what a killed save has left; refuses a disk that is too small."""
        for path in self.checkpoints.clean():
            screen.say(f"deleted what an interrupted save has left: {path}")
        self.checkpoints.preflight(tree_bytes(self.run.program.abstract_saved))
        self.directory.write_resolved(to_toml(self.run.config))

    # -- from the first update to the last

    def _go(self, screen: Screen, resume: int | None) -> tuple[TrainState, int]:
        first = resume or 0
        with Interrupt() as interrupt, MetricsFile(self.directory.metrics) as metrics:
            seen = metrics.truncate(first).last_step
            with self._trackers(first, seen) as trackers:
                observer = Observers((metrics, trackers, screen))
                step = self._compile(screen, observer, first)
                state = self._begin(observer, resume, seen)
                state = self._loop(step, state, observer, interrupt)
                return state, self._end(screen, observer, state, interrupt)

    def _trackers(self, first: int, seen: int) -> Trackers:
        config = self.run.config
        return make_trackers(
            config.log.trackers,
            self.directory.path,
            run_name=config.run.name,
            config=config.model_dump(),
            resumed_at=first,
            replayed_to=seen,
        )

    def _compile(self, screen: Screen, observer: Observer, first: int) -> CompiledStep:
        run = self.run
        screen.say("compiling the step ...")
        begun = time.perf_counter()
        layout = batch_layout(run.data, run.program.layout.microbatches, run.place)
        step: CompiledStep = run.program.compile_step(layout.arrays)
        seconds = time.perf_counter() - begun
        observer.event("compile", first, {"seconds": seconds, **_device_bytes(step)})
        if run.config.train.audit:
            screen.say(check_step(run.config, run.program, run.info.vocab_size, step))
        return step

    def _begin(self, observer: Observer, resume: int | None, seen: int) -> TrainState:
        """Makes or restores the state."""
        if resume is None:
            return self.run.init()
        begun = time.perf_counter()
        state = self._restore(resume)
        seconds = time.perf_counter() - begun
        observer.event("restore", resume, {"seconds": seconds, "replayed_to": seen})
        if self.cadence.eval_due(resume) and not self._evaluated(resume):
            values = self.run.evaluate(state)
            if values:
                observer.event("eval", resume, values)
        return state

    def _evaluated(self, step: int) -> bool:
        """Whether a step has its evaluation, which an interrupt leaves out."""
        events = read_events(self.directory.metrics)
        return any(e["event"] == "eval" and e["step"] == step for e in events)

    def _restore(self, step: int) -> TrainState:
        program = self.run.program
        saved: TrainState = self.checkpoints.restore(step, program.abstract_saved)
        return program.from_saved(saved)

    def _loop(
        self, step: CompiledStep, state: TrainState, observer: Observer, interrupt: Interrupt
    ) -> TrainState:
        run, config = self.run, self.run.config
        tokens = config.data.batch_size * config.data.sequence_length
        flops = tokens * training_flops_per_token(
            config.model,
            vocab_size=config.model.vocab_size or run.info.vocab_size,
            length=config.data.sequence_length,
        )
        devices = list(run.mesh.devices.flat)

        def describe(cursor: int) -> dict[str, Any]:
            return {"sample_digest": run.data.digest(cursor), "tokens": (cursor + 1) * tokens}

        def rates(seconds: float) -> dict[str, Any]:
            mfu = utilisation(flops / seconds, devices, config.train.precision)
            return {"tokens_per_second": tokens / seconds, "mfu": mfu}

        with Loader(
            run.data,
            microbatches=run.program.layout.microbatches,
            place=run.place,
            start=int(state.cursor),
            stop=int(state.cursor) + self.cadence.last - int(state.step),
            prefetch=config.data.prefetch,
        ) as batches:
            return Loop(
                step=step,
                batches=batches,
                describe=describe,
                rates=rates,
                evaluate=run.evaluate,
                save=lambda step, state: self._save(step, state, observer),
                cadence=self.cadence,
                observer=observer,
                poll=lambda: self._tell_saved(observer),
                stop=lambda: interrupt.signal is not None,
            ).run(state)

    def _save(self, step: int, state: TrainState, observer: Observer) -> None:
        """Begins to save; what was told of the steps before is on the disk first."""
        observer.flush()
        metadata = {"config": self.run.config.model_dump(), "tokens": self.run.info.digest}
        self.checkpoints.save(step, self.run.program.to_saved(state), metadata)

    def _tell_saved(self, observer: Observer) -> None:
        """Tells which saves are complete; raises when one has failed."""
        for saved in self.checkpoints.poll():
            observer.event("save", saved.step, {
                "seconds": saved.total_seconds,
                "blocked": saved.blocked_seconds,
                "bytes": saved.num_bytes,
            })  # fmt: skip

    def _end(
        self, screen: Screen, observer: Observer, state: TrainState, interrupt: Interrupt
    ) -> int:
        """Waits for the last save and says how it ended."""
        self.checkpoints.wait()
        self._tell_saved(observer)
        done, last, steps = int(state.step), self.cadence.last, self.run.config.run.steps
        if interrupt.signal is not None and done < last:
            observer.event("stop", done, {"reason": interrupt.signal.name})
            what = f"saved at step {done}" if done else "nothing was done yet"
            screen.say(
                f"interrupted, {what}; the same command goes on from there, or this one:\n"
                f"  shardtrain train {shlex.quote(str(self.directory.path))}"
            )
            return EXIT_CODES[interrupt.signal]
        self._sample(screen, observer, state)
        observer.event("stop", done, {"reason": "done" if done == steps else "run.stop_at"})
        more = "" if done == steps else f" {done} of {steps} updates, as run.stop_at says:"
        screen.say(f"done:{more} {self.directory.path}")
        return 0

    def _sample(self, screen: Screen, observer: Observer, state: TrainState) -> None:
        """Lets the model write; all that matters is saved already."""
        tokens, seed = self.run.config.eval.sample_tokens, self.run.config.run.seed
        if not tokens:
            return
        try:
            text = self.run.generate(state, tokens=tokens, seed=seed)
        except DataError as error:  # the tokens are there, but not what turns them into text
            screen.say(f"no sample of text: {error}")
            return
        observer.event("sample", int(state.step), {"text": text})


def _device_bytes(step: Any) -> dict[str, int]:
    """Bytes on one device while the step runs, as the compiler counts them, where it does."""
    found = step.memory_analysis()
    if found is None:
        return {}
    return {"arguments": found.argument_size_in_bytes, "temporaries": found.temp_size_in_bytes}
