"""Remat: what a block's backward finds saved, and what it computes again."""

from collections.abc import Callable
from typing import Any

import jax

from shardtrain.errors import ConfigError

Block = Callable[..., Any]
NAMED = ("qkv", "attention", "attention_out", "mlp", "mlp_out")
"""The tensors of a block that can be saved by name (`jax.ad_checkpoint.checkpoint_name`)."""

PRODUCT = "product"
"""The name of every product with a weight: policies do not look into its custom derivative."""


def remat(policy: str) -> Callable[[Block], Block]:
    """The wrapper for a policy.

    Args:
        policy: "none" saves all that the backward reads; "full" saves the block's input only;
            "dots" saves the results of matrix products with weights; otherwise the names of the
            tensors to save, comma-separated, of `NAMED`.

    Raises:
        ConfigError: an unknown policy or name.
    """
    if policy == "none":
        return lambda block: block
    policies = jax.checkpoint_policies
    if policy == "full":
        return lambda block: jax.checkpoint(block, policy=policies.nothing_saveable)
    if policy == "dots":
        keep = policies.save_only_these_names(PRODUCT)
        return lambda block: jax.checkpoint(block, policy=keep)
    names = [name.strip() for name in policy.split(",")]
    for name in names:
        if name not in NAMED:
            raise ConfigError(
                "unknown policy or tensor",
                where="train.remat",
                value=name,
                allowed=f"none, full, dots, or a comma-separated list of {', '.join(NAMED)}",
            )
    return lambda block: jax.checkpoint(block, policy=policies.save_only_these_names(*names))
