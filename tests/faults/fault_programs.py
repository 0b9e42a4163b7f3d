"""Tiny programs for the tests of known faults; each is compiled once for all tests of a process."""

from collections.abc import Mapping
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from shardtrain.config import load_config
from shardtrain.models.transformer import constant
from shardtrain.optim.config import OptimizerConfig
from shardtrain.optim.optimizers import make_transform
from shardtrain.optim.schedules import make_schedule
from shardtrain.run_program import make_program
from shardtrain.sharding.mesh import make_mesh
from shardtrain.sharding.rules import compute_table
from shardtrain.strategies.accumulate import Accumulation
from shardtrain.strategies.parts import Runner
from shardtrain.strategies.precision import cast, policy
from shardtrain.tasks.config import LanguageModelConfig
from shardtrain.tasks.language_model import LanguageModel
from shardtrain.train.build import Layout, Program
from shardtrain.train.state import TrainState

LENGTH, BATCH, VOCAB = 16, 4, 32

STYLES: dict[str, dict[str, Any]] = {
    "gpt": {},
    "llama": {
        "model.norm": "rmsnorm",
        "model.position": "rope",
        "model.activation": "swiglu",
        "model.num_kv_heads": 2,
        "model.bias": False,
        "model.tied": False,
    },
    "bloom": {"model.position": "alibi", "model.embed_norm": True},
}


def config(overrides: Mapping[str, Any]):
    """A transformer of two layers and width 16; nothing is clipped or decayed unless asked for."""
    sections = {
        "run": {"steps": 20},
        "model": {"num_layers": 2, "embed_dim": 16, "num_heads": 4, "mlp_dim": 32},
        "data": {"sequence_length": LENGTH, "batch_size": BATCH},
        "mesh": {"data": 1},
        "optimizer": {"name": "sgd", "learning_rate": 0.01, "momentum": 0.0},
    }
    return load_config(sections, overrides)


def program(overrides: Mapping[str, Any] | None = None, *, vocab_size: int = VOCAB) -> Program:
    """The program of a tiny transformer, on the first devices."""
    return _program(tuple(sorted((overrides or {}).items())), vocab_size, jax.config.jax_enable_x64)


@cache
def _program(overrides: tuple[tuple[str, Any], ...], vocab_size: int, _: bool) -> Program:
    made = config(dict(overrides))
    devices = jax.devices()[: int(np.prod(list(made.mesh.model_dump().values())))]
    return make_program(made, vocab_size=vocab_size, devices=devices)


def text(rows: int = BATCH, *, vocab_size: int = VOCAB, seed: int = 0) -> dict[str, np.ndarray]:
    """Random rows, every target of which counts."""
    tokens = np.random.default_rng(seed).integers(0, vocab_size, (rows, LENGTH + 1))
    return {
        "tokens": tokens[:, :-1].astype(np.int32),
        "targets": tokens[:, 1:].astype(np.int32),
        "weights": np.ones((rows, LENGTH), np.float32),
        "sample": np.arange(rows, dtype=np.uint32),
    }


def put(of: Program, batch: Mapping[str, np.ndarray]) -> dict[str, jax.Array]:
    """Cuts a global batch into the program's microbatches and places them."""

    def one(x: np.ndarray) -> jax.Array:
        x = x.reshape(of.layout.microbatches, -1, *x.shape[1:])
        return jax.device_put(x, of.batch_sharding(x.ndim))

    return {name: one(x) for name, x in batch.items()}


def gradients(of: Program, params: Any, batch: Mapping[str, np.ndarray]) -> tuple[Any, Any]:
    """(metrics, gradients as numpy) of a whole step, by the program's own step.

    Args:
        of: the program.
        params: parameters on the host, or None for the initial ones.
        batch: the global batch.
    """
    state = of.init() if params is None else state_of(of, params)
    _, metrics, grads = of.step_with_gradients(state, put(of, batch))
    return jax.device_get(metrics), jax.device_get(grads)


def initial(overrides: Mapping[str, Any] | None = None, *, vocab_size: int = VOCAB) -> Any:
    """The initial parameters of such a model, on the host; drawn on one device."""
    drawn = {k: v for k, v in (overrides or {}).items() if k.split(".")[0] in ("model", "run")}
    drawn |= {"train.precision": "float64"} if jax.config.jax_enable_x64 else {}
    return _initial(tuple(sorted(drawn.items())), vocab_size)


@cache
def _initial(overrides: tuple[tuple[str, Any], ...], vocab_size: int) -> Any:
    return jax.device_get(program(dict(overrides), vocab_size=vocab_size).init().params)


def state_of(of: Program, params: Any) -> TrainState:
    """The state that begins with these parameters, without compiling the drawing of others."""
    step, cursor, skipped = (
        jnp.zeros((), jnp.int32) for _ in range(3)
    )  # each is donated: 3 arrays
    optimizer = of.optimizer.init(cast(params, of.policy.master))
    params = cast(params, of.policy.params)
    return jax.device_put(
        TrainState(step, cursor, params, optimizer, jax.random.key(1), skipped), of.shardings
    )


def assert_trees_near(got: Any, want: Any, bound: float) -> None:
    """Leaves are equal within a part of the largest entry of the leaf."""
    jax.tree.map_with_path(
        lambda path, g, w: np.testing.assert_allclose(
            np.asarray(g, np.float64),
            np.asarray(w, np.float64),
            rtol=0,
            atol=bound * max(np.abs(np.asarray(w)).max(), 1e-3),
            err_msg=jax.tree_util.keystr(path),
        ),
        got,
        want,
    )


# -- programs of models that are known by heart


class TwoLosses(nnx.Module):
    """Each target costs what its token says, while the parameter is 1: token 0 costs 1, token 1 4.

    With scores (0, a) of two tokens, target 0 costs log(1 + exp(a)).
    """

    COSTS = np.array([1.0, 4.0])
    SCORES = np.log(np.expm1(COSTS))

    def __init__(self, dtype: Any) -> None:
        self.scale = constant(("embed",), (8,), dtype, 1 / 8)

    def __call__(self, batch: Mapping[str, jax.Array], key: Any, stack: Any) -> jax.Array:
        scale = self.scale[...].sum()
        score = jnp.asarray(self.SCORES, scale.dtype)[batch["tokens"]] * scale
        return jnp.stack([jnp.zeros_like(score), score], -1)


class Next(nnx.Module):
    """All mass on the token after the one that is read."""

    def __init__(self, vocab_size: int, dtype: Any) -> None:
        self.vocab_size = vocab_size
        self.scale = constant(("embed",), (8,), dtype, 1.0)

    def __call__(self, batch: Mapping[str, jax.Array], key: Any, stack: Any) -> jax.Array:
        scale = self.scale[...].sum()
        return 100.0 * jax.nn.one_hot(batch["tokens"] + 1, self.vocab_size, dtype=scale.dtype)


def stub(
    create: Any,
    task: Any = None,
    *,
    mesh: Mapping[str, int] | None = None,
    zero: int = 0,
    microbatches: int = 1,
    precision: str = "float32",
    optimizer: Mapping[str, Any] | None = None,
    steps: int = 10,
    runner: Runner | None = None,
) -> Program:
    """A program of somebody's own model: `create` makes it from a dtype."""
    sizes = {"data": 1, **(mesh or {})}
    devices = jax.devices()[: int(np.prod(list(sizes.values())))]
    plain = {"learning_rate": 1.0, "weight_decay": 0.0, "clip_norm": 0.0, "schedule": "constant"}
    plain |= {"name": "sgd", "momentum": 0.0}
    section = OptimizerConfig(**{**plain, **(optimizer or {})})
    return Program(
        create=lambda dtype, rngs: create(dtype),
        task=task or LanguageModel(LanguageModelConfig(), 2),
        layout=Layout(
            mesh=make_mesh(**sizes, devices=devices),
            compute=compute_table(),
            zero=zero,
            runner=runner or Accumulation(microbatches=microbatches),
        ),
        policy=policy(precision),
        make_transform=lambda names: make_transform(section, names),
        schedule=make_schedule(section, steps),
        clip_norm=section.clip_norm,
        seed=0,
    )
