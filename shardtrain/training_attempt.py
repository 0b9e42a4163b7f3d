"""One attempt at a run: from its start, or its newest checkpoint, to its end.

Owns: what happens in which order in one process, where it is written down, how it goes back and how
it ends. Does not own: who holds the folder and what other processes' faults do (`training`), and
what each part does. Of several processes each makes the same calls; only process 0 writes.
"""

import json
import shlex
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from shardtrain.checkpoint.arrays import Writer, tree_bytes
from shardtrain.checkpoint.checkpointer import Checkpointer
from shardtrain.checkpoint.retention import Retention
from shardtrain.config import to_toml, with_defaults
from shardtrain.config_effects import ineffective_settings
from shardtrain.data.loader import Loader, batch_layout
from shardtrain.errors import EXIT_POLICY, EXIT_PREEMPTED, DataError, PolicyError
from shardtrain.run import Run
from shardtrain.run_audit import check_step, require_auditable
from shardtrain.run_program import count_parameters
from shardtrain.run_state import (
    base_digest,
    base_of,
    chosen_by_weights,
    is_imported,
    restore_state,
    save_base,
)
from shardtrain.run_weights import copy_beside, has_kept_config
from shardtrain.sharding.mesh import mesh_platform, split_axes
from shardtrain.sharding.placement import leaves_by_path
from shardtrain.sharding.processes import Processes
from shardtrain.train.agreement import Agreement, Request
from shardtrain.train.chaos import Chaos, flip_a_byte
from shardtrain.train.chaos_words import parse_chaos
from shardtrain.train.checks import Rerun, check_replicas
from shardtrain.train.config import limit_seconds
from shardtrain.train.flops import utilisation
from shardtrain.train.guard import Guard, Update, Verdict
from shardtrain.train.interrupt import EXIT_CODES, Interrupt
from shardtrain.train.loop import Cadence, CompiledStep, Ending, Loop, Observer, Observers
from shardtrain.train.machine import CacheUse, warnings
from shardtrain.train.metrics import plain
from shardtrain.train.pace import Pace, Targets
from shardtrain.train.phases import Phases
from shardtrain.train.rundir import BASE, Change, RunDirectory, changes, check_changes
from shardtrain.train.screen import Screen, human_bytes, make_console
from shardtrain.train.state import TrainState
from shardtrain.train.watchdog import Limits
from shardtrain.training_record import Past, Record, check_nothing_is_gone

_ENDLESS = 2**62
_PATIENCE = 24 * 3600.0
"""How long processes wait for each other between the parts of an attempt; a stuck one is the
watchdog's affair."""


class Attempt:
    """What one process does for a run while process 0 holds the run's folder."""

    def __init__(
        self,
        run: Run,
        directory: RunDirectory,
        peers: Processes,
        phases: Phases,
        limits: Limits,
    ) -> None:
        config = run.config
        require_auditable(config, run.mesh)
        self.run, self.directory = run, directory
        self.peers, self.phases, self.limits = peers, phases, limits
        self.chaos = self._chaos()
        writer = _FaultyWriter(self.chaos) if "diskfull" in config.run.chaos else None
        part = config.checkpoint
        self.checkpoints = Checkpointer(
            directory.checkpoints,
            retention=Retention(part.keep, part.keep_every, part.keep_hours, part.keep_best),
            peers=peers,
            writer=writer,
        )
        self.cadence = Cadence(
            config.run.stop_at or config.run.steps, config.checkpoint.every, config.eval.every
        )
        self.agreement = Agreement(peers)
        self._rollbacks = 0
        self._checks = 0
        self._damage: list[str] = []

    def train(self) -> tuple[TrainState, int]:
        """Returns the state and the exit code."""
        resume, last = self._resumable(), self.cadence.last
        screen = self.screen = Screen(
            first=resume or 0,
            last=last,
            every=self.run.config.log.every,
            quiet=self.peers.index > 0,
        )
        with self.checkpoints, screen:
            screen.table(*self._introduction(resume))
            for line in self._notes():
                screen.say(f"note: {line}")
            if resume is not None and resume >= last:
                screen.say(f"nothing to do: {resume} of {last} updates are done")
                return self._restore(resume), 0
            if self.peers.index == 0:
                self._make_room(resume)
            self.peers.barrier("there is room", _PATIENCE)
            return self._go(resume)

    # -- before the first update

    def _resumable(self) -> int | None:
        """The step to go on from; refuses a folder that holds another run, or did hold steps."""
        latest = self.checkpoints.newest_good(self._tell_damage)
        if latest is None:
            if self.peers.index == 0:
                check_nothing_is_gone(self.directory, imported=self._was_imported())
            return None
        saved, tokens = self.checkpoints.metadata(latest), self.run.info.digest
        found = changes(with_defaults(saved["config"]), self.run.config.model_dump())
        if is_imported(saved):  # nothing was trained yet
            found = [change for change in found if chosen_by_weights(change.key)]
        elif saved["tokens"] != tokens:
            found.append(Change("the tokens", saved["tokens"], tokens, "breaks"))
        allow = self.run.config.run.allow_changes
        check_changes(found, allow=allow, where=str(self.directory.path))
        return latest

    def _was_imported(self) -> bool:
        """Whether the folder has what lies beside weights, and they were not to come by itself."""
        return not self.run.config.run.init and has_kept_config(self.directory.path)

    def _tell_damage(self, words: str) -> None:
        self._damage.append(words)
        if self.peers.index == 0:
            make_console().print(words, markup=False, soft_wrap=True)

    def _introduction(self, resume: int | None) -> tuple[str, list[tuple[str, str]]]:
        """What runs where, as a title and rows."""
        run, config, bytes_ = self.run, self.run.config, self.run.report
        devices, mesh = run.mesh.devices, " x ".join(split_axes(run.mesh))
        count = count_parameters(run.program, run.size)
        trained = sum(leaf.size for leaf in jax.tree.leaves(run.program.abstract_saved.params))
        title = "a new run" if resume is None else f"goes on from step {resume}"
        return f"{config.run.name}: {title}", [
            ("model", f"{config.model.type}, {count:,} parameters, {config.train.precision}"
              + (f"; {trained:,} of adapters are trained" if config.lora.rank else "")),
            ("data", f"{run.info.source}, {run.data.num_samples:,} {run.work.samples}"),
            ("devices", f"{devices.size} x {devices.flat[0].device_kind}, {mesh or 'no mesh'}"),
            ("state", f"ZeRO {config.sharding.zero}; on each device: parameters "
             f"{human_bytes(bytes_.parameters)}, gradients {human_bytes(bytes_.gradients)}, "
             f"optimizer {human_bytes(bytes_.optimizer)}"
             + (f", beside them {human_bytes(bytes_.beside)}" if bytes_.beside else "")
             + (f"; on the host {human_bytes(bytes_.host)}" if bytes_.host else "")
             + (f"; on the disk {human_bytes(bytes_.disk)}" if bytes_.disk else "")),
            ("steps", f"{self.cadence.last:,} of {run.work.portions}"),
            ("folder", str(self.directory.path)),
        ]  # fmt: skip

    def _notes(self) -> list[str]:
        """What was set and has no effect here, and what this machine could do better."""
        config, mesh = self.run.config, self.run.mesh
        lines = ineffective_settings(config, degrees=dict(mesh.shape))
        if config.run.deterministic and mesh_platform(mesh) == "cpu":
            lines.append("run.deterministic=True has no effect: CPU kernels always are")
        return [*lines, *warnings(brief=True)]

    def _make_room(self, resume: int | None) -> None:
        """Takes away what a killed save has left; refuses a disk that is too small."""
        if resume is None or is_imported(self.checkpoints.metadata(resume)):
            base_of(self.checkpoints).drop_after(-1)  # of an attempt that never saved a step
        for path in self.checkpoints.clean():
            self.screen.say(f"deleted what an interrupted save has left: {path}")
        self.checkpoints.preflight(tree_bytes(self.run.program.abstract_saved))
        if self.run.program.disk.all:
            self.screen.say(self._disk_words())
        if resume is None and self.run.config.run.init:
            copy_beside(self.run.config.run.init, self.directory.path)
        self.run.work.leave(self.directory.path)
        self.directory.write_resolved(to_toml(self.run.config))

    def _disk_words(self) -> str:
        """What the disk can do, and what a step asks of it."""
        program = self.run.program
        disk, speed = program.disk, program.disk.begin()
        masters = program.policy.has_master
        read, written = disk.traffic(program.layout.microbatches, masters=masters)
        count = len(disk.all[0].here)
        seconds = count * (read / speed.read + written / speed.write)
        past = "past the page cache" if speed.direct else "through the page cache"
        return (
            f"disk: {disk.all[0].files.parent} reads {speed.read / 1e9:.2g} GB/s and writes "
            f"{speed.write / 1e9:.2g}, {past}; a step reads {human_bytes(count * read)} and writes "
            f"{human_bytes(count * written)} here: {seconds:.2g} s of it"
        )

    # -- from the first update to the last

    def _go(self, resume: int | None) -> tuple[TrainState, int]:
        first, config = resume or 0, self.run.config
        with ExitStack() as stack:
            interrupt = stack.enter_context(Interrupt())
            record = stack.enter_context(Record(config, self.directory, self.peers, self.phases))
            past = record.open(first, self.run.mesh.devices.size)
            observer = Observers((record, self.screen, *self._watchers(record)))
            step = self._compile(observer, first)
            state = self._begin(observer, resume, past)
            with self.agreement, self._time_limit():
                interrupt.tell(
                    lambda caught: self.agreement.ask(
                        Request("stop", EXIT_CODES[caught], caught.name)
                    )
                )
                guard, seen = Guard(config.guard, past.losses), past.seen
                while True:
                    ending = self._loop(step, state, observer, interrupt, guard, seen)
                    if ending.verdict is None:
                        break
                    seen = max(seen, ending.verdict.update.step - 1)
                    state = self._roll_back(ending, observer, record, guard, seen)
            return ending.state, self._end(observer, record, ending)

    def _watchers(self, record: Record) -> list[Observer]:
        """Who looks back at each window of updates."""
        config, every = self.run.config, self.run.config.log.every
        notes = Observers((record, self.screen))
        watchers: list[Observer] = [Pace(every, self.peers, self.phases, notes.event)]
        if self.peers.index:
            return watchers
        price = config.targets.device_hour * self.run.mesh.devices.size / 3600

        def missed(step: int, words: str) -> None:
            notes.event("target", step, {"reason": words})
            if config.targets.action == "stop":
                self.agreement.ask(Request("stop", EXIT_POLICY, words))

        cost = lambda: price * record.seconds() if price else None  # noqa: E731
        return [*watchers, Targets(config.targets, every, cost, missed)]

    @contextmanager
    def _time_limit(self) -> Iterator[None]:
        """While this is open, a run out of its time stops, and one that is due saves."""
        config, timers = self.run.config, []
        if self.peers.index == 0 and config.run.time_limit:
            left = limit_seconds(config.run.time_limit) - (time.monotonic() - self.phases.begun)
            request = Request("stop", EXIT_PREEMPTED, "run.time_limit")
            timers.append(threading.Timer(max(0.0, left), self.agreement.ask, (request,)))
        if self.peers.index == 0 and config.checkpoint.every_minutes:
            timers.append(_Every(60 * config.checkpoint.every_minutes, self._ask_to_save))
        for timer in timers:
            timer.daemon = True
            timer.start()
        try:
            yield
        finally:
            for timer in timers:
                timer.cancel()

    def _ask_to_save(self) -> None:
        self.agreement.ask(Request("save"))

    def _compile(self, observer: Observer, first: int) -> CompiledStep:
        run = self.run
        self.screen.say("compiling the step ...")
        self.phases.enter("compile", first)
        begun = time.perf_counter()
        layout = batch_layout(run.data, run.program.layout.microbatches, run.place)
        with CacheUse() as cache:
            step: CompiledStep = run.program.compile_step(layout.arrays)
        seconds = time.perf_counter() - begun
        self.phases.enter("start")
        observer.event(
            "compile", first, {"seconds": seconds, "cached": cache.all, **_device_bytes(step)}
        )
        if run.config.train.audit:
            self.screen.say(check_step(run.config, run.program, run.info.vocab_size, step))
        every = run.config.guard.rerun_every
        return Rerun(step, every) if every else step

    def _begin(self, observer: Observer, resume: int | None, past: Past) -> TrainState:
        """Makes or restores the state."""
        if resume is None:
            return self._first_state()
        self.phases.enter("restore", resume)
        begun = time.perf_counter()
        state = self._restore(resume)
        seconds = time.perf_counter() - begun
        for words in self._damage:
            observer.event("damaged", resume, {"reason": words})
        observer.event("restore", resume, {"seconds": seconds, "replayed_to": past.seen})
        if self.cadence.eval_due(resume) and not past.evaluated:
            self.phases.enter("eval", resume)
            values = self.run.evaluate(state)
            if values:
                observer.event("eval", resume, values)
        return state

    def _first_state(self) -> TrainState:
        """The state before the first update, its frozen weights saved."""
        state = self.run.init()
        save_base(self.checkpoints, state, self.run.program)
        return state

    def _restore(self, step: int) -> TrainState:
        state = restore_state(self.checkpoints, step, self.run.program)
        save_base(self.checkpoints, state, self.run.program)  # of imported weights
        return state

    def _loop(
        self,
        step: CompiledStep,
        state: TrainState,
        observer: Observer,
        interrupt: Interrupt,
        guard: Guard,
        seen: int,
    ) -> Ending:
        run, config = self.run, self.run.config
        units, unit, flops = run.work.units, run.work.unit, run.work.flops(run.size)
        devices = list(run.mesh.devices.flat)
        chaos, step_time = self.chaos, 0.0

        def describe(cursor: int) -> dict[str, Any]:
            seen = {"sample_digest": run.data.digest(cursor), unit: (cursor + 1) * units}
            return seen | run.data.remarks()

        def rates(seconds: float) -> dict[str, Any]:
            nonlocal step_time
            step_time = seconds
            self.limits.saw(seconds)
            mfu = utilisation(flops / seconds, devices, config.train.precision)
            return {f"{unit}_per_second": units / seconds, "mfu": mfu}

        def prepare(
            update: int, cursor: int, batch: Mapping[str, jax.Array]
        ) -> Mapping[str, jax.Array]:
            chaos.before(update, step_time)
            return chaos.batch(cursor + 1, batch)

        def inspect(update: int, state: TrainState) -> None:
            if config.guard.replicas_every and update % config.guard.replicas_every == 0:
                self._checks += 1
                check_replicas(state, self.peers, f"replicas {self._checks}")

        with Loader(
            run.data,
            microbatches=run.program.layout.microbatches,
            place=run.place,
            start=int(state.cursor),
            stop=_ENDLESS,
            prefetch=config.data.prefetch,
            threads=run.work.threads,
        ) as batches:
            return Loop(
                step=step,
                batches=batches,
                describe=describe,
                rates=rates,
                evaluate=run.evaluate,
                save=lambda step, state, values: self._save(step, state, values, observer),
                cadence=self.cadence,
                observer=observer,
                judge=lambda update, finite: self._judge(guard, update, finite),
                may_step=self.agreement.may_step,
                hurry=lambda: interrupt.signal is not None and self.peers.count == 1,
                phases=self.phases,
                replayed_to=seen,
                prepare=prepare,
                inspect=inspect,
                poll=lambda: self._tell_saved(observer),
                retries=run.program.scaling.retries,
            ).run(state)

    def _chaos(self) -> Chaos:
        """Faults that were asked for."""
        config, index = self.run.config.run, self.peers.index

        def corrupt() -> None:
            self.checkpoints.wait()
            latest = self.checkpoints.latest()
            if latest is not None:
                path = flip_a_byte(self.directory.checkpoints / str(latest))
                self.screen.say(f"chaos: a byte of {path} has changed")

        return Chaos(
            parse_chaos(config.chaos, config.seed, self.peers.count),
            index,
            log=self.directory.path / f"chaos-{index}.json",
            corrupt=corrupt,
            say=lambda words: print(words, file=sys.stderr, flush=True),
        )

    def _save(
        self, step: int, state: TrainState, values: Mapping[str, Any], observer: Observer
    ) -> None:
        """Begins to save; what was told of the steps before is on the disk first."""
        observer.flush()
        metadata = {"config": self.run.config.model_dump(), "tokens": self.run.info.digest}
        metadata |= {BASE: digest} if (digest := base_digest(self.checkpoints)) else {}
        # The frozen weights are there already, and none of them has changed.
        saved = self.run.program.saved.save(state).replace(frozen=())
        metric = values.get("val_loss")
        self.checkpoints.save(step, saved, metadata, metric=metric)

    def _tell_saved(self, observer: Observer) -> None:
        """Tells which saves are complete; raises when one has failed."""
        for saved in self.checkpoints.poll():
            observer.event("save", saved.step, {
                "seconds": saved.total_seconds,
                "blocked": saved.blocked_seconds,
                "bytes": saved.num_bytes,
            })  # fmt: skip

    # -- numbers that are none, or jump

    def _judge(self, guard: Guard, update: Update, finite: NDArray[np.bool_]) -> Verdict | None:
        verdict = guard.judge(update)
        if verdict is None or update.moved or finite.all():
            return verdict
        names = [path for path, _ in leaves_by_path(self.run.placement.shapes)]
        bad = [name for name, good in zip(names, finite, strict=True) if not good]
        what = f"{verdict.reason}; of {len(bad)} of {len(names)} gradients, first that of {bad[0]}"
        return replace(verdict, reason=what)

    def _roll_back(
        self, ending: Ending, observer: Observer, record: Record, guard: Guard, seen: int
    ) -> TrainState:
        """Goes back before a verdict and past its batches, or stops."""
        verdict, config = ending.verdict, self.run.config.guard
        assert verdict is not None
        update = verdict.update
        path = self._write_evidence(verdict, ending.state)
        limited = verdict.action == "rollback" and self._rollbacks == config.rollback_limit
        if verdict.action == "stop" or limited:
            self.checkpoints.wait()
            self._tell_saved(observer)
            observer.event("stop", update.step - 1, verdict.values())
            more = f", after {self._rollbacks} rollbacks (guard.rollback_limit)" if limited else ""
            raise PolicyError(
                f"stopped: {verdict.reason}{more}",
                where=f"update {update.step}",
                value=f"parameters hold nothing of it; its samples are in {path}",
                allowed=f"newest checkpoint: {self.checkpoints.latest() or 'none'}",
                cure="look at those samples; the same command meets them again, unless "
                'guard.bad_numbers is "skip" or "rollback", or guard.spikes is "rollback"',
            )
        self._rollbacks += 1
        self.phases.enter("restore")
        self.checkpoints.wait()
        self._tell_saved(observer)
        # What rests on a disk is still written by a step that runs.
        jax.block_until_ready(ending.state)
        state, step = self._state_before(update.step - config.rollback_steps)
        cursor = max(int(state.cursor) + config.rollback_batches, update.cursor + 1)
        left_out = cursor - int(state.cursor)
        state = state.replace(cursor=_like(state.cursor, cursor), skipped=_like(state.skipped, 0))
        if self.peers.index == 0:
            self.checkpoints.drop_after(step)
        self.peers.barrier(f"rolled back {self._rollbacks}", _PATIENCE)
        self.phases.enter("restore", step)  # from here on the clock's steps are those of now
        record.go_back(step, seen)
        guard.forget()
        values = {**verdict.values(), "from": update.step, "cursor": cursor, "left_out": left_out}
        observer.event("rollback", step, values)
        return state

    def _state_before(self, step: int) -> tuple[TrainState, int]:
        """The state of the newest checkpoint up to a step, or the oldest there is."""
        steps = self.checkpoints.steps()
        if not steps:
            return self._first_state(), 0
        chosen = max((s for s in steps if s <= step), default=steps[0])
        return self._restore(chosen), chosen

    def _write_evidence(self, verdict: Verdict, state: TrainState) -> Path:
        """Writes down what a verdict is about: the update, its samples, parameters gone bad."""
        update, folder = verdict.update, self.directory.path / "bad_numbers"
        path = folder / f"update-{update.step}-batch-{update.cursor}.json"
        leaves = leaves_by_path(state.params)
        flags = jax.jit(lambda tree: [jnp.isfinite(leaf).all() for leaf in jax.tree.leaves(tree)])
        good = jax.device_get(flags(state.params))
        bad = [name for (name, _), fine in zip(leaves, good, strict=True) if not fine]
        if self.peers.index == 0:
            folder.mkdir(exist_ok=True)
            told = {**plain(verdict.values()), "parameters_not_finite": bad}
            told["samples"] = self.run.data.sample_ids(update.cursor).tolist()
            path.write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")
        return path

    # -- the end

    def _end(self, observer: Observer, record: Record, ending: Ending) -> int:
        """Waits for the last save and says how it ended."""
        done, request = int(ending.state.step), ending.request
        self.phases.enter("end", done)
        self.checkpoints.wait()
        self._tell_saved(observer)
        steps = self.run.config.run.steps
        if request is not None:
            told = {"reason": request.reason, "code": request.code, **record.goodput()}
            observer.event("stop", done, told)
            what = f"saved at step {done}" if done else "nothing was done yet"
            self.screen.say(
                f"{'stopped' if request.code == EXIT_POLICY else 'interrupted'}, {what}; "
                "the same command goes on from there, or this one:\n"
                f"  shardtrain train {shlex.quote(str(self.directory.path))}"
            )
            return request.code
        self._sample(observer, ending.state)
        reason = "done" if done == steps else "run.stop_at"
        observer.event("stop", done, {"reason": reason, "code": 0, **record.goodput()})
        more = "" if done == steps else f" {done} of {steps} updates, as run.stop_at says:"
        self.screen.say(f"done:{more} {self.directory.path}")
        return 0

    def _sample(self, observer: Observer, state: TrainState) -> None:
        """Lets the model write; all that matters is saved already."""
        tokens, seed = self.run.work.sample_tokens, self.run.config.run.seed
        if not tokens:
            return
        try:
            text = self.run.generate(state, tokens=tokens, seed=seed)
        except DataError as error:  # the tokens are there, but not what turns them into text
            self.screen.say(f"no sample of text: {error}")
            return
        observer.event("sample", int(state.step), {"text": text})


class _FaultyWriter(Writer):
    """A writer whose disk may be full."""

    def __init__(self, chaos: Chaos) -> None:
        super().__init__()
        self._chaos = chaos

    def finish(self) -> None:
        """Wait until everything is written."""
        super().finish()
        self._chaos.disk()


class _Every(threading.Timer):
    """A timer that goes on."""

    def run(self) -> None:
        """Calls the function again and again until it is cancelled."""
        while not self.finished.wait(self.interval):
            self.function()


def _like(leaf: jax.Array, value: int) -> jax.Array:
    """A value in place of a scalar of the state."""
    make = jax.jit(lambda: jnp.asarray(value, leaf.dtype), out_shardings=leaf.sharding)
    made: jax.Array = make()
    return made


def _device_bytes(step: Any) -> dict[str, int]:
    """Bytes on one device while the step runs, as the compiler counts them, where it does."""
    found = step.memory_analysis()
    if found is None:
        return {}
    return {"arguments": found.argument_size_in_bytes, "temporaries": found.temp_size_in_bytes}
