"""Remat: what a block's backward finds saved, where, and what it computes again."""

from collections.abc import Callable
from typing import Any

import jax

from shardtrain.errors import ConfigError
from shardtrain.sharding.tiers import DEVICE, HOST
from shardtrain.strategies.config import INPUT, SAVEABLE, device_names, host_names

Block = Callable[..., Any]

PRODUCT = "product"
"""The name of every product with a weight: policies do not look into its custom derivative."""


def remat(policy: str) -> Callable[[Block], Block]:
    """The wrapper for a policy.

    Args:
        policy: "none" saves all that the backward reads; "full" saves the block's input only;
            "dots" saves the results of matrix products with weights; otherwise the names of the
            tensors to save, comma-separated, of `SAVEABLE` (`jax.ad_checkpoint.checkpoint_name`),
            with ":host" after those that are saved on the host.

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
    on_device, on_host = device_names(policy), host_names(policy)
    for name in (*on_device, *on_host):
        if name not in SAVEABLE and (name != INPUT or name in on_device):
            raise ConfigError(
                "unknown policy or tensor",
                where="train.remat",
                value=name,
                allowed=f"none, full, dots, or a comma-separated list of {', '.join(SAVEABLE)}",
            )
    if not on_host:
        keep = policies.save_only_these_names(*on_device)
    else:
        keep = policies.save_and_offload_only_these_names(
            names_which_can_be_saved=list(on_device),
            names_which_can_be_offloaded=list(on_host),
            offload_src=DEVICE,
            offload_dst=HOST,
        )
    return lambda block: jax.checkpoint(block, policy=keep)
