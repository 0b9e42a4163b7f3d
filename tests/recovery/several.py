"""Several processes of a run as threads of one: they share a store, as through jax's service."""

import threading

from shardtrain.sharding.processes import Alone


def several(count: int) -> list[Alone]:
    """That many processes."""
    texts: dict[str, str] = {}
    news = threading.Condition()
    return [Alone(index, count, texts, news) for index in range(count)]
