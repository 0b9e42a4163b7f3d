"""Which tokens of a sample are hidden, and what stands in their place.

Owns: the choice, from a random generator that belongs to the sample. Does not own: samples.
"""

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from shardtrain.data.wordpiece import Pieces

_REPLACED, _RANDOM = 0.8, 0.1
"""Parts of the predicted tokens that become [MASK], and any token; the others stay."""
_TAG = 0x6D61736B
EVALUATION = 2**63
"""In place of an epoch: evaluation hides the same tokens in every run."""


class Masked(NamedTuple):
    """A sample with hidden tokens."""

    tokens: NDArray[np.int64]
    """What the model sees."""
    predicted: NDArray[np.int64]
    """The places that are predicted, in order."""
    targets: NDArray[np.int64]
    """The tokens that were there."""


def generator(seed: int, epoch: int, sample: int) -> np.random.Generator:
    """Return the random numbers of a sample in an epoch; each has a stream of its own.

    Args:
        seed: the run's.
        epoch: the epoch, or `EVALUATION`.
        sample: the sample's id.
    """
    # The lowest word of the counter is what counts on within the stream.
    bits = np.random.Philox(key=[seed % 2**64, _TAG], counter=[0, 0, epoch, sample])
    return np.random.Generator(bits)


def num_predicted(length: int, fraction: float) -> int:
    """Return the most places that a sample of so many tokens has predicted."""
    return max(1, int(np.ceil(length * fraction)))


def hide(
    tokens: NDArray[np.int64],
    pieces: Pieces,
    fraction: float,
    random: np.random.Generator,
    *,
    whole_words: bool,
) -> Masked:
    """Choose the tokens that are predicted, and replace most of them.

    As in the published code a sample of n tokens has round(n x fraction) predicted, at least one,
    and special tokens never (Devlin et al. 2018, arXiv 1810.04805, section 3.1).

    Args:
        tokens: the sample without padding.
        pieces: what is known of the tokenizer.
        fraction: part that is predicted.
        random: the sample's own random numbers.
        whole_words: whether all pieces of a word are chosen together.
    """
    special = (tokens == pieces.cls) | (tokens == pieces.sep) | (tokens == pieces.pad)
    candidates = np.flatnonzero(~special & (tokens != pieces.mask))
    count = min(len(candidates), max(1, round(len(tokens) * fraction)))
    if whole_words:
        predicted = _words(tokens, candidates, count, pieces.goes_on, random)
    else:
        predicted = np.sort(random.permutation(candidates)[:count])
    draws, others = random.random(len(predicted)), pieces.ordinary
    seen = tokens[predicted].copy()
    seen[draws < _REPLACED] = pieces.mask
    is_random = (draws >= _REPLACED) & (draws < _REPLACED + _RANDOM)
    seen[is_random] = others[random.integers(len(others), size=int(is_random.sum()))]
    shown = tokens.copy()
    shown[predicted] = seen
    return Masked(shown, predicted, tokens[predicted])


def _words(
    tokens: NDArray[np.int64],
    candidates: NDArray[np.int64],
    count: int,
    goes_on: NDArray[Any],
    random: np.random.Generator,
) -> NDArray[np.int64]:
    """Places of whole words, `count` at most; a word that would be too much is passed over."""
    if not len(candidates):
        return candidates
    begins = ~goes_on[tokens[candidates]]
    begins[1:] |= np.diff(candidates) > 1  # a special token parts words
    begins[0] = True
    words = np.split(candidates, np.flatnonzero(begins)[1:])
    chosen: list[NDArray[np.int64]] = []
    left = count
    for index in random.permutation(len(words)).tolist():
        if len(words[index]) <= left:
            chosen.append(words[index])
            left -= len(words[index])
        if not left:
            break
    return np.sort(np.concatenate(chosen)) if chosen else words[0][:count]
