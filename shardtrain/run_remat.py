"""`train.remat = "budget"`: the cheapest policy whose compiled step fits a number of bytes.

Owns: the policies that are tried, their order, and the search. Does not own: what a policy does
(`strategies.remat`), what it costs and holds as planned (`shardtrain.plan`).

Policies are ordered by the products that they make again, as the run's own functions are traced;
one that is dearer and holds no less is left out. The plan says where to begin; only compiled steps
decide.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import jax

from shardtrain.config import RunConfig, only_language
from shardtrain.errors import EXIT_DOES_NOT_FIT, UserError
from shardtrain.plan.compiling import read_program
from shardtrain.plan.memory import memory
from shardtrain.plan.workload import Layout, Workload
from shardtrain.run_program import abstract_batch, make_program
from shardtrain.run_workload import layout_of, make_workload
from shardtrain.strategies.config import BUDGET, parse_bytes
from shardtrain.train.screen import human_bytes

POLICIES: Final = (
    "none",
    "dots",
    "qkv,mlp",
    "attention_out,mlp",
    "mlp",
    "qkv,attention_out",
    "qkv",
    "attention_out",
    "full",
)
"""Of all sets of tensors that can be kept, those that are worth it in transformers of any shape."""


class BudgetError(UserError):
    """No policy fits."""

    exit_code = EXIT_DOES_NOT_FIT


@dataclass(frozen=True)
class Policy:
    """A policy and its price."""

    remat: str
    again: float
    """Products that are made again, as a part of the model's own."""
    planned: float
    """Bytes on one device, as planned."""


@dataclass(frozen=True)
class Choice:
    """The policy that was chosen."""

    policy: Policy
    budget: float
    held: float
    """Bytes on one device of its step."""
    cheaper: tuple[Policy, float] | None
    """The next cheaper one and the bytes of its step; None where there is none."""

    def __str__(self) -> str:
        text = (
            f"{self.policy.remat}: {human_bytes(self.held)} of {human_bytes(self.budget)}, "
            f"{self.policy.again:.1%} of the products are made again"
        )
        if self.cheaper is None:
            return text
        other, held = self.cheaper
        return f"{text}; {other.remat} ({other.again:.1%}) would take {human_bytes(held)}"


def policies(workload: Workload, layout: Layout) -> list[Policy]:
    """The policies that are worth a try, cheapest first; each holds less than the one before.

    Args:
        workload: the work.
        layout: all of the layout but recomputation.
    """
    found = []
    plain = 0.0
    for remat in POLICIES:
        one = replace(layout, remat=remat)
        layer = workload.pieces(one).layer
        products = layer.forward.flops + layer.backward.flops
        plain = plain or products
        found.append(Policy(remat, products / plain - 1, memory(workload, one).total))
    found.sort(key=lambda policy: (policy.again, policy.planned))
    kept: list[Policy] = []
    for policy in found:
        if not kept or policy.planned < kept[-1].planned:
            kept.append(policy)
    return kept


def choose(tried: Sequence[Policy], budget: float, held: Callable[[Policy], float]) -> Choice:
    """The cheapest policy whose step fits, while the next cheaper one does not.

    Args:
        tried: cheapest first.
        budget: bytes on one device.
        held: bytes of a policy's step; it compiles.

    Raises:
        BudgetError: even the last of them does not fit.
    """
    sizes: dict[int, float] = {}

    def fits(index: int) -> bool:
        if index not in sizes:
            sizes[index] = held(tried[index])
        return sizes[index] <= budget

    last = len(tried) - 1
    index = next((i for i, policy in enumerate(tried) if policy.planned <= budget), last)
    while not fits(index):
        if index == last:
            raise BudgetError(
                f"the step with remat {tried[last].remat} takes {human_bytes(sizes[last])}",
                where="train.memory_budget",
                value=human_bytes(budget),
                allowed=f"{human_bytes(sizes[last])} or more with this layout",
                cure="more train.microbatches, a higher sharding.zero, or more devices: "
                "`shardtrain plan CONFIG` names the cheapest change",
            )
        index += 1
    while index and fits(index - 1):
        index -= 1
    cheaper = (tried[index - 1], sizes[index - 1]) if index else None
    return Choice(tried[index], budget, sizes[index], cheaper)


def choose_remat(
    config: RunConfig, vocab_size: int, devices: Sequence[jax.Device]
) -> tuple[RunConfig, Choice | None]:
    """A config with its recomputation chosen, where it asks for that.

    Args:
        config: from `load_config`.
        vocab_size: tokens of the data; `model.vocab_size` goes first.
        devices: of the run; steps are compiled for them.

    Returns:
        The config, and what was chosen; None where there was nothing to choose.

    Raises:
        BudgetError: no policy fits `train.memory_budget`.
    """
    if config.train.remat != BUDGET:
        return config, None
    language = only_language(config, f'train.remat="{BUDGET}"')

    def held(policy: Policy) -> float:
        return compiled_bytes(with_remat(config, policy.remat), vocab_size, devices)

    workload = make_workload(language, vocab_size, devices[0].platform)
    tried = policies(workload, layout_of(config, len(devices)))
    choice = choose(tried, parse_bytes(config.train.memory_budget), held)
    return with_remat(config, choice.policy.remat), choice


def plan_remat(
    config: RunConfig, workload: Workload, num_devices: int
) -> tuple[RunConfig, Choice | None]:
    """The same by planned bytes, for devices that are not here.

    Args:
        config: from `load_config`.
        workload: its work.
        num_devices: of the cluster.
    """
    if config.train.remat != BUDGET:
        return config, None
    tried = policies(workload, layout_of(config, num_devices))
    budget = parse_bytes(config.train.memory_budget)
    choice = choose(tried, budget, lambda policy: policy.planned)
    return with_remat(config, choice.policy.remat), choice


def with_remat(config: RunConfig, remat: str) -> RunConfig:
    """A config with that policy, whatever memory it takes."""
    train = config.train.model_copy(update={"remat": remat, "memory_budget": ""})
    return config.model_copy(update={"train": train})


def compiled_bytes(config: RunConfig, vocab_size: int, devices: Sequence[jax.Device]) -> float:
    """Most bytes that the compiled step has on one device at any time."""
    program = make_program(config, vocab_size=vocab_size, devices=devices)
    step: Any = program.compile_step(abstract_batch(config, program))
    held = read_program(step, rematerialized=None).memory
    return float(held["arguments"] + held["temporaries"])
