"""Commands on what a run has learned: `generate` and `eval`, on any mesh.

Owns: finding the newest checkpoint and reading only what they need of it, and what they print. Does
not own: generation and evaluation.
"""

import json as json_
import math
import sys
from collections.abc import Sequence
from itertools import pairwise
from typing import Final

import jax

from shardtrain.checkpoint.checkpointer import Checkpointer
from shardtrain.config import (
    LanguageRunConfig,
    RunConfig,
    known_vocab,
    only_language,
    resolve_mesh,
)
from shardtrain.data.sources import open_data, open_tokenizer, open_whole
from shardtrain.data.tokenizer import Tokenizer
from shardtrain.data.tokens import TokenFile
from shardtrain.errors import EXIT_FAILED, CheckpointError, ConfigError, DataError
from shardtrain.run import build, evaluate_on, make_generator
from shardtrain.run_program import make_program
from shardtrain.run_state import restore_state
from shardtrain.run_weights import lacks_tokenizer, require_tokenizer
from shardtrain.train.build import Program
from shardtrain.train.metrics import plain
from shardtrain.train.rundir import checkpoints_in
from shardtrain.train.screen import make_console, printable
from shardtrain.train.state import TrainState

_LARGEST: Final = 700.0
"""Nats whose exponential is still a number."""


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
    config = only_language(config, "generation")
    resolve_mesh(config, jax.device_count())
    require_tokenizer(config)
    tokenizer = open_tokenizer(config.data)
    program = make_program(config, vocab_size=tokenizer.vocab_size)
    generator = make_generator(config, program, tokenizer)
    generator.check(tokens=tokens, temperature=temperature)
    state = restore_newest(config, program)
    if note := generator.note(prompt, tokens):
        make_console().print(f"note: {note}", markup=False, soft_wrap=True)
    params = program.evaluated_params(state)
    text = generator.text(params, prompt, tokens=tokens, temperature=temperature, seed=seed)
    if json:
        print(json_.dumps({"step": int(state.step), "prompt": prompt, "text": text}))
        return 0
    encoding = sys.stdout.encoding or "utf-8"
    print(printable(prompt + text).encode(encoding, "replace").decode(encoding))
    return 0


def eval_command(config: RunConfig, *, json: bool) -> int:
    """`shardtrain eval`: what the task reports of the newest checkpoint, such as `val_loss`."""
    run = build(config)
    if run.validation is None or config.eval.steps == 0:
        raise ConfigError(
            "there is nothing to evaluate on",
            where="eval.steps" if run.validation else "data.validation_fraction",
            value=str(config.eval.steps if run.validation else config.data.validation_fraction),
            allowed="more than 0",
        )
    state = restore_newest(config, run.program)
    found = run.evaluate(state)
    result = {"step": int(state.step), **found}
    if json:
        print(json_.dumps(plain(result)))
    else:
        words = [f"{name} {value:.4f}" for name, value in found.items()]
        print("  ".join([f"step {result['step']}", *words]))
    return _judge(int(state.step), [v for name, v in found.items() if name.endswith("loss")])


def _judge(step: int, losses: Sequence[float]) -> int:
    """The exit code of an evaluation, which says so where a loss is no number."""
    if all(math.isfinite(loss) for loss in losses):
        return 0
    _say(
        f"the loss is no number: the weights of step {step} have entries that are none, or lead to "
        "scores that are none"
    )
    return EXIT_FAILED


def eval_file_command(config: LanguageRunConfig, trained: LanguageRunConfig, *, json: bool) -> int:
    """`shardtrain eval RUN --data.path FILE`: the loss over all of a file.

    Args:
        config: of the run, with the file as its data.
        trained: of the run as it was trained.
        json: print JSON and nothing else.
    """
    resolve_mesh(config, jax.device_count())
    if config.data.tokenizer != trained.data.tokenizer:
        trained = config
    if known_vocab(config) is not None:
        require_tokenizer(config)
    tokenizer = None if lacks_tokenizer(config) else _known_tokenizer(trained)
    data, file = open_whole(config.data, tokenizer, say=_say)
    vocab_size = config.model.vocab_size or _vocab_size(trained, tokenizer)
    if file.header.vocab_size > vocab_size:
        raise DataError(
            "the file has tokens that the model does not know",
            where="data.path",
            value=f"{config.data.path}, vocabulary {file.header.vocab_size}",
            allowed=f"tokens below {vocab_size}",
            cure="prepare it with the tokenizer of the model",
        )
    program = make_program(config, vocab_size=vocab_size)
    state = restore_newest(config, program)
    total, targets = evaluate_on(program, data, state)["val_loss"]
    size = _text_bytes(file, tokenizer)
    loss = total / max(targets, 1.0)
    result = {
        "step": int(state.step),
        "loss": loss,
        "perplexity": math.inf if loss >= _LARGEST else math.exp(loss),  # also of no number
        "bits_per_byte": total / math.log(2) / size if size else None,
        "targets": int(targets),
        "tokens": file.header.tokens,
        "bytes": size,
    }
    code = _judge(int(state.step), [loss])
    if json:
        print(json_.dumps(plain(result)))
        return code
    bits = "unknown" if size is None else f"{result['bits_per_byte']:.4f}"
    print(
        f"step {result['step']}  loss {loss:.4f}  perplexity {result['perplexity']:.4g}  "
        f"bits per byte {bits}  ({result['targets']:,} targets)"
    )
    return code


def _known_tokenizer(config: LanguageRunConfig) -> Tokenizer | None:
    """The tokenizer of a run; None where its tokens came without one."""
    try:
        return open_tokenizer(config.data)
    except DataError:
        if config.data.tokenizer != "bytes":
            raise
        return None


def _vocab_size(trained: LanguageRunConfig, tokenizer: Tokenizer | None) -> int:
    """Tokens of the data that a run was trained on."""
    if tokenizer is not None:
        return tokenizer.vocab_size
    return open_data(trained.data)[2].vocab_size


def _text_bytes(file: TokenFile, tokenizer: Tokenizer | None) -> int | None:
    """Bytes of the text that a token file was made of; None = nobody knows."""
    header = file.header
    if header.masked:  # not all of it is predicted
        return None
    if header.text_bytes or tokenizer is None:
        return header.text_bytes or None
    if tokenizer.name == "bytes":
        return header.tokens
    pairs = pairwise(file.offsets.tolist())
    return sum(len(tokenizer.decode(file.tokens[a:b]).encode()) for a, b in pairs)


def _say(message: str) -> None:
    make_console().print(message, markup=False, soft_wrap=True)
