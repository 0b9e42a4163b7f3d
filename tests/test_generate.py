"""Generation: the cache against whole passes, positions, meshes, windows, odd bytes."""

import dataclasses
import math
from functools import lru_cache
from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx

from shardtrain.config import load_config
from shardtrain.data.tokenizer import ByteTokenizer
from shardtrain.errors import ConfigError
from shardtrain.run import make_generator
from shardtrain.run_program import make_program
from shardtrain.sharding.rules import use_rules
from shardtrain.strategies.stack import make_stack
from shardtrain.train import generate as module

WINDOW = 32
STYLES: dict[str, dict[str, Any]] = {
    "gpt": {},
    "llama": {
        "norm": "rmsnorm",
        "position": "rope",
        "activation": "swiglu",
        "bias": False,
        "tied": False,
        "num_heads": 8,
        "num_kv_heads": 4,
        "head_dim": 4,
    },
    "bloom": {
        "position": "alibi",
        "activation": "gelu_tanh",
        "embed_norm": True,
        "tied": False,
    },
}
LAYOUTS: dict[str, dict[str, Any]] = {
    "one": {},
    "4x2": {"mesh.data": 4, "mesh.tensor": 2},
    "4x2,zero=3": {
        "mesh.data": 4,
        "mesh.tensor": 2,
        "sharding.zero": 3,
        "sharding.sequence_parallel": True,
        "model.layer_loop": "unroll",
    },
}
LAYOUTS["pipeline, uneven"] = {
    "mesh.pipeline": 2,
    "mesh.tensor": 2,
    "mesh.data": 2,
    "sharding.zero": 3,
    "model.num_layers": 3,
    "pipeline.layout": "E1,2H",
    "train.microbatches": 4,
}
CASES = [(style, layout) for style in STYLES for layout in ("one", "4x2")] + [
    ("llama", "4x2,zero=3"),
    ("llama", "pipeline, uneven"),
]


@pytest.fixture(autouse=True)
def wide_types():
    with jax.enable_x64(True):
        yield


class Subject:
    """A model with parameters large enough for the likeliest token to depend on the text."""

    def __init__(self, style: str, layout: str) -> None:
        model = {"num_layers": 2, "embed_dim": 16, "num_heads": 4, "layer_loop": "scan"}
        sections = {
            "run": {"steps": 1, "seed": 5},
            "model": model | {"vocab_multiple": 48, "dropout": 0.1} | STYLES[style],
            "data": {"sequence_length": WINDOW, "batch_size": 16},
            "train": {"precision": "float64"},
            "mesh": {"data": 1},
            "optimizer": {"learning_rate": 0.1},
        }
        config = load_config(sections, LAYOUTS[layout])
        devices = jax.devices()[: math.prod(config.mesh.model_dump().values())]
        tokenizer = ByteTokenizer()
        self.program = make_program(config, vocab_size=tokenizer.vocab_size, devices=devices)
        rng = np.random.default_rng(4)
        self.params = jax.tree.map(
            lambda leaf, sharding: jax.device_put(rng.normal(0, 0.4, leaf.shape), sharding),
            self.program.placement.shapes,
            self.program.placement.params,
        )
        self.generator = make_generator(config, self.program, tokenizer)
        self.whole = jax.jit(self._whole)

    def _whole(self, params, tokens):
        """Scores of every position by one pass over the whole text, as in evaluation."""
        placement = self.program.placement
        table = {**placement.compute, "batch": (), "length": (), "residual_length": ()}
        with use_rules(table, placement.mesh):
            model = nnx.merge(self.program.graph, self.program.in_model_order(params))
            return model({"tokens": tokens}, None, make_stack())[0]

    def scores(self, tokens: list[int]) -> np.ndarray:
        """Scores of the next token after each prefix."""
        padded = np.zeros((1, 128 if self.generator.window is None else WINDOW), np.int32)
        padded[0, : len(tokens)] = tokens
        return np.asarray(self.whole(self.params, padded))[: len(tokens)]

    def greedy(self, prompt: list[int], count: int) -> list[int]:
        """The likeliest tokens, each from a pass over the whole text before it."""
        text = list(prompt)
        for _ in range(count):
            text.append(int(self.scores(text)[-1][:256].argmax()))
        return text[len(prompt) :]

    def draw(self, prompt: list[int], count: int, temperature: float = 0.0, seed: int = 0):
        return self.generator.draw(
            self.params, prompt, tokens=count, temperature=temperature, seed=seed
        )


@lru_cache
def subject_of(style: str = "gpt", layout: str = "one") -> Subject:
    with jax.enable_x64(True):
        return Subject(style, layout)


def text(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(0, 256, length).tolist()


@pytest.mark.parametrize(("style", "layout"), CASES)
def test_scores_of_the_cache_are_those_of_a_whole_pass(style, layout, monkeypatch):
    monkeypatch.setattr(module, "PIECE", 16)
    subject = subject_of(style, layout)
    generator, tokens = subject.generator, text(WINDOW)
    want = subject.scores(tokens)
    # one token at a time, from the first
    cache = generator._empty(WINDOW, np.float64)
    got = []
    for position, token in enumerate(tokens):
        cache, scores = generator._read_piece(
            subject.params, cache, np.array([[token]], np.int32), np.int32(position), np.int32(0)
        )
        got.append(np.asarray(scores))
    scale = np.abs(want).max()
    assert np.abs(np.array(got) - want).max() <= 1e-9 * scale
    # piece by piece, whole pieces and parts of one
    for length in (1, 15, 16, 17, 32):
        scores = generator._read(subject.params, tokens[:length], WINDOW)[1]
        assert np.abs(np.asarray(scores) - want[length - 1]).max() <= 1e-9 * scale


@pytest.mark.parametrize(("style", "layout"), CASES)
def test_greedy_text_is_that_of_repeated_whole_passes(style, layout):
    subject = subject_of(style, layout)
    prompt = text(7, seed=1)
    got = subject.draw(prompt, WINDOW - 6)
    assert got == subject.greedy(prompt, WINDOW - 6)
    assert len(set(got)) > 1  # the text decides
    assert subject.params["embedding"].sharding == subject.program.placement.params["embedding"]


@pytest.mark.parametrize("style", ["gpt", "llama"])
@pytest.mark.parametrize("length", [3, WINDOW, WINDOW + 9])
def test_a_full_window_slides_by_half(style, length):
    subject = subject_of(style)
    prompt, half = text(length, seed=2), WINDOW // 2
    view = prompt[-WINDOW:]
    want: list[int] = []
    while len(want) < 50:
        want += subject.greedy(view, WINDOW - len(view) + 1)
        view = [*prompt, *want][-half:]
    assert subject.draw(prompt, 50) == want[:50]


def test_alibi_goes_beyond_the_length_of_training():
    subject = subject_of("bloom")
    prompt = text(WINDOW + 5, seed=3)
    assert subject.draw(prompt, 40) == subject.greedy(prompt, 40)
    assert subject.generator.note("x" * 200, 200) == ""


def test_what_outgrows_the_model_is_said():
    generator = subject_of("gpt").generator
    assert generator.note("x" * 12, WINDOW - 11) == ""
    assert "goes on from the last 16 tokens" in generator.note("x" * 12, WINDOW)
    note = generator.note("x" * (WINDOW + 1), 1)
    assert f"only the last {WINDOW} tokens of the prompt are read" in note


def test_draws_are_the_same_on_every_mesh_and_depend_on_the_seed():
    one, many = subject_of("llama"), subject_of("llama", "4x2,zero=3")
    prompt = text(5)
    first = one.draw(prompt, 60, temperature=0.7, seed=1)
    assert first == many.draw(prompt, 60, temperature=0.7, seed=1)
    assert first == one.draw(prompt, 60, temperature=0.7, seed=1)
    assert first != one.draw(prompt, 60, temperature=0.7, seed=2)
    assert first[:20] == one.draw(prompt, 20, temperature=0.7, seed=1)


def test_hot_draws_are_spread_and_never_padding():
    drawn = subject_of("gpt").draw(text(5), 300, temperature=1e9)
    assert max(drawn) < 256
    assert len(set(drawn)) > 100


def test_text_ends_with_the_document():
    subject = subject_of("gpt")
    prompt = text(4)
    want = subject.draw(prompt, 20)
    stop = want[12]
    tokenizer = ByteTokenizer(end=(stop,))
    generator = dataclasses.replace(subject.generator, tokenizer=tokenizer)
    got = generator.draw(subject.params, prompt, tokens=20, temperature=0.0, seed=0)
    assert got == want[: want.index(stop)]
    # an empty prompt begins where a document ends
    assert generator.encode("").tolist() == [stop]


@pytest.mark.parametrize(
    "prompt", ["", "def f(", "gr\u00fc\u00dfe", "a" * 100, "\udcff\udcfe\udc80", "\ud800"]
)
def test_any_prompt_and_any_bytes_are_text(prompt):
    subject = subject_of("gpt")
    got = subject.generator.text(subject.params, prompt, tokens=60, temperature=1e9, seed=0)
    assert isinstance(got, str)
    assert "\ufffd" in got
    got.encode()


def test_bytes_of_a_command_line_are_kept():
    generator = subject_of().generator
    assert generator.encode("a\udcff\udc80").tolist() == [97, 255, 128]


def test_no_tokens_are_an_empty_text():
    subject = subject_of("gpt")
    assert subject.generator.text(subject.params, "a", tokens=0, temperature=0, seed=0) == ""


@pytest.mark.parametrize(("name", "value"), [("tokens", -1), ("temperature", -0.5)])
def test_negative_numbers_are_refused(name, value):
    subject = subject_of("gpt")
    numbers = {"tokens": 1, "temperature": 0.0} | {name: value}
    with pytest.raises(ConfigError, match=f"{name}: must be 0 or more"):
        subject.generator.text(subject.params, "a", seed=0, **numbers)


def test_few_programs_are_compiled():
    subject = subject_of()
    generator = dataclasses.replace(subject.generator)
    for length in (1, 7, 16):
        generator.draw(subject.params, text(length), tokens=60, temperature=0.5, seed=length)
    assert generator._read_piece._cache_size() == 1
    assert generator._go_on._cache_size() == 1
