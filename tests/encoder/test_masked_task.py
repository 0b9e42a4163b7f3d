"""The two terms of BERT's loss, by hand."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from shardtrain.tasks.masked_lm import MaskedLanguageModel, is_best

SIZE = 5


class Model:
    """Gives the scores that it was given."""

    def __init__(self, tokens: np.ndarray, following: np.ndarray) -> None:
        self.tokens, self.following = jnp.asarray(tokens), jnp.asarray(following)

    def hidden(self, batch: Any, key: Any, stack: Any) -> jax.Array:
        return jnp.zeros((len(self.tokens), 4, 2))

    def token_scores(self, x: jax.Array, predicted: jax.Array) -> jax.Array:
        return self.tokens

    def next_scores(self, x: jax.Array) -> jax.Array:
        return self.following


def nll(scores: np.ndarray, target: int) -> float:
    return float(np.log(np.exp(scores).sum()) - scores[target])


def test_each_term_by_hand() -> None:
    """Padding of the vocabulary has the highest score and neither probability nor a say."""
    random = np.random.default_rng(0)
    tokens = random.normal(size=(3, 2, SIZE + 3)).astype(np.float32)
    tokens[..., SIZE:] = 50.0
    following = random.normal(size=(3, 2)).astype(np.float32)
    batch = {
        "predicted": np.zeros((3, 2), np.int32),
        "targets": random.integers(0, SIZE, (3, 2)).astype(np.int32),
        "weights": np.array([[1, 1], [1, 0], [0, 0]], np.float32),
        "next": np.array([0, 1, 1], np.int32),
        "next_weights": np.array([1, 1, 0], np.float32),
    }
    batch["targets"][0, 0] = tokens[0, 0, :SIZE].argmax()  # one hit at least
    task = MaskedLanguageModel(SIZE, next_sentence=True)
    arrays = {name: jnp.asarray(array) for name, array in batch.items()}
    found = jax.device_get(task.terms(Model(tokens, following), arrays, None, None))  # type: ignore[arg-type]
    there = [(0, 0), (0, 1), (1, 0)]
    wanted = {
        "masked_loss": sum(nll(tokens[i, j, :SIZE], batch["targets"][i, j]) for i, j in there),
        "masked_accuracy": sum(
            tokens[i, j, :SIZE].argmax() == batch["targets"][i, j] for i, j in there
        ),
        "next_loss": sum(nll(following[i], batch["next"][i]) for i in (0, 1)),
        "next_accuracy": sum(following[i].argmax() == batch["next"][i] for i in (0, 1)),
    }
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        np.testing.assert_allclose(found[name], value, rtol=1e-5)
    totals = {name: float(total) for name, total in task.totals(arrays).items()}
    masked, pairs = 3.0, 2.0
    assert totals == {
        "masked_loss": masked,
        "masked_accuracy": masked,
        "next_loss": pairs,
        "next_accuracy": pairs,
    }


def test_without_pairs_there_is_one_term() -> None:
    task = MaskedLanguageModel(SIZE, next_sentence=False)
    assert task.coefficients == {"masked_loss": 1.0}
    assert task.reported == {"val_loss": "masked_loss", "val_masked_accuracy": "masked_accuracy"}


def test_the_best_is_the_first_of_equal_ones_and_never_no_number() -> None:
    scores = jnp.array([[1.0, 3.0, 3.0, 9.0], [1.0, 3.0, 3.0, 9.0], [jnp.nan, 0, 0, 0]])
    found = is_best(scores, jnp.array([1, 2, 0]), 3)
    np.testing.assert_array_equal(found, [True, False, False])
