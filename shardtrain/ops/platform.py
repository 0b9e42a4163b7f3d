"""The platform that traced code will run on. Owns that question; ops phrase themselves by it."""

import jax

from shardtrain.sharding.rules import current


def platform() -> str:
    """The active mesh's, or outside of rules the default device's: "cpu", "gpu" or "tpu"."""
    active = current()
    return str(jax.default_backend()) if active is None else active.platform
