"""Parameters in two trees: those that are trained, and those that rest.

Owns: how the two become the one tree that a model is merged of. Does not own: which parameter is in
which (`strategies.lora`), nor where either rests (`placement`).
"""

from typing import Any

PyTree = Any


def joined(trained: PyTree, frozen: PyTree) -> PyTree:
    """The tree of a model's parameters, from nested dicts that have no leaf in common.

    Args:
        trained: parameters that have gradients.
        frozen: those that have none; `()` where all are trained.

    Example:
        >>> joined({"layers": {"up": {"a": 1}}}, {"head": 2, "layers": {"up": {"base": 3}}})
        {'layers': {'up': {'a': 1, 'base': 3}}, 'head': 2}
        >>> joined({"head": 2}, ())
        {'head': 2}
    """
    if frozen == ():
        return trained
    both = {name: joined(trained[name], frozen[name]) for name in trained if name in frozen}
    return {**trained, **frozen, **both}
