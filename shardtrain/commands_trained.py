"""Commands on what a run has learned: `generate` and `eval`, on any mesh.

Owns: finding the newest checkpoint and reading only what they need of it, and what they print. Does
not own: generation and evaluation.
"""

import json as json_
import sys

import jax

from shardtrain.checkpoint.checkpointer import Checkpointer
from shardtrain.config import RunConfig, resolve_mesh
from shardtrain.data.sources import open_tokenizer
from shardtrain.errors import CheckpointError, ConfigError
from shardtrain.run import build, make_generator
from shardtrain.run_program import make_program
from shardtrain.run_state import restore_state
from shardtrain.train.build import Program
from shardtrain.train.rundir import checkpoints_in
from shardtrain.train.screen import make_console, printable
from shardtrain.train.state import TrainState


def restore_newest(config: RunConfig, program: Program) -> TrainState:
    """The newest complete state of a run, without that of its optimizer.

    Args:
        config: of the run; its mesh need not be the one that it was trained on.
        program: made of that config.

    Returns:
        A state to evaluate or to generate with; its `opt_state` is empty.

    Raises:
        CheckpointError: there is none, or it is that of another model.
    """
    folder = checkpoints_in(config.run.dir)
    with Checkpointer(folder, config.checkpoint.keep) as checkpoints:
        step = checkpoints.latest()
        if step is None:
            raise CheckpointError(
                "this run has no complete checkpoint",
                where=str(folder),
                cure="train it first (`shardtrain train`); an interrupted run saves as it stops",
            )
        return restore_state(checkpoints, step, program, evaluates=True)


def generate_command(
    config: RunConfig, *, prompt: str, tokens: int, temperature: float, seed: int, json: bool
) -> int:
    """`shardtrain generate`: the prompt and what comes after it."""
    resolve_mesh(config, jax.device_count())
    tokenizer = open_tokenizer(config.data)
    program = make_program(config, vocab_size=tokenizer.vocab_size)
    generator = make_generator(config, program, tokenizer)
    generator.check(tokens=tokens, temperature=temperature)
    state = restore_newest(config, program)
    if note := generator.note(prompt, tokens):
        make_console().print(f"note: {note}", markup=False, soft_wrap=True)
    text = generator.text(state.weights, prompt, tokens=tokens, temperature=temperature, seed=seed)
    if json:
        print(json_.dumps({"step": int(state.step), "prompt": prompt, "text": text}))
        return 0
    encoding = sys.stdout.encoding or "utf-8"
    print(printable(prompt + text).encode(encoding, "replace").decode(encoding))
    return 0


def eval_command(config: RunConfig, *, json: bool) -> int:
    """`shardtrain eval`: the validation loss of the newest checkpoint."""
    run = build(config)
    if run.validation is None or config.eval.steps == 0:
        raise ConfigError(
            "there is nothing to evaluate on",
            where="eval.steps" if run.validation else "data.validation_fraction",
            value=str(config.eval.steps if run.validation else config.data.validation_fraction),
            allowed="more than 0",
        )
    state = restore_newest(config, run.program)
    result = {"step": int(state.step), **run.evaluate(state)}
    if json:
        print(json_.dumps(result))
    else:
        print(f"step {result['step']}  val_loss {result['val_loss']:.4f}")
    return 0
