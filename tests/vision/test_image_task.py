"""What the task sums: cross-entropy, smoothing, mixing, ranks; exact means over uneven tails."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from shardtrain.strategies.stack import make_stack
from shardtrain.tasks.config import ImageClassificationConfig
from shardtrain.tasks.image_classification import ImageClassification

CLASSES = 7


class Told:
    """A model that gives the scores that it was told, and remembers what it was shown."""

    def __init__(self, scores: np.ndarray) -> None:
        self.scores = scores
        self.head = jnp.zeros((1, 1), jnp.float32)
        self.seen: list[tuple[np.ndarray, bool]] = []

    def __call__(self, images: jax.Array, training: bool) -> jax.Array:
        self.seen.append((np.asarray(images), training))
        return jnp.asarray(self.scores)


def task(smoothing: float = 0.0) -> ImageClassification:
    return ImageClassification(
        ImageClassificationConfig(label_smoothing=smoothing), CLASSES, (0.5,), (0.25,)
    )


def batch(rows: int, seed: int = 0) -> dict[str, np.ndarray]:
    random = np.random.default_rng(seed)
    return {
        "image": random.integers(0, 256, (rows, 2, 2, 1), dtype=np.uint8),
        "label": random.integers(0, CLASSES, rows, dtype=np.int32),
        "weights": np.ones(rows, np.float32),
    }


def sums(of: ImageClassification, model: Told, rows: dict, *, training: bool) -> dict[str, float]:
    key = jax.random.key(0) if training else None
    found = of.terms(model, {k: jnp.asarray(v) for k, v in rows.items()}, key, make_stack())
    return {name: float(value) for name, value in found.items()}


def test_terms_are_those_of_the_textbook() -> None:
    rows, scores = batch(12), np.random.default_rng(1).normal(size=(12, CLASSES)).astype(np.float32)
    rows |= {"other": np.roll(rows["label"], 1), "share": np.linspace(0, 1, 12, dtype=np.float32)}
    found = sums(task(0.1), Told(scores), rows, training=True)
    log = scores - np.log(np.exp(scores).sum(-1, keepdims=True))
    eye, share = np.eye(CLASSES), rows["share"][:, None]
    targets = share * eye[rows["label"]] + (1 - share) * eye[rows["other"]]
    targets = 0.9 * targets + 0.1 / CLASSES
    assert found["nll"] == pytest.approx(-(targets * log).sum(), rel=1e-5)
    order = np.argsort(-scores, -1)
    for name, count in (("top1", 1), ("top5", 5)):
        right = (order[:, :count] == rows["label"][:, None]).any(-1)
        assert found[name] == right.sum()


def test_evaluation_has_no_smoothing() -> None:
    rows, scores = batch(6), np.random.default_rng(1).normal(size=(6, CLASSES)).astype(np.float32)
    smooth, plain = (sums(task(s), Told(scores), rows, training=False) for s in (0.3, 0.0))
    assert smooth == plain


def test_images_are_normalised() -> None:
    model, rows = Told(np.zeros((3, CLASSES), np.float32)), batch(3)
    sums(task(), model, rows, training=True)
    images, training = model.seen[0]
    assert training
    np.testing.assert_allclose(images, (rows["image"] / 255 - 0.5) / 0.25, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("count", [22, 24, 2])
def test_means_are_exact_over_uneven_tails(count: int) -> None:  # O-41
    """Three batches of 8 on which all but two images are right; padding counts for nothing."""
    right, images, of = 0.0, 0.0, task()
    for start in range(0, 24, 8):
        rows = batch(8, seed=start)
        there = np.arange(start, start + 8) < count
        rows["weights"] = there.astype(np.float32)
        wrong = (np.arange(start, start + 8) >= count - 2) & there
        best = np.where(wrong, (rows["label"] + 1) % CLASSES, rows["label"])
        found = sums(of, Told(np.eye(CLASSES, dtype=np.float32)[best]), rows, training=False)
        right += found["top1"]
        images += float(of.totals(rows)["top1"])
    assert right / images == (count - 2) / count


def test_scores_that_are_no_numbers_are_never_right() -> None:
    rows = batch(4)
    found = sums(task(), Told(np.full((4, CLASSES), np.nan, np.float32)), rows, training=False)
    assert (found["top1"], found["top5"]) == (0, 0)


def test_of_equal_scores_the_first_class_is_taken() -> None:
    rows = batch(CLASSES)
    rows["label"] = np.arange(CLASSES, dtype=np.int32)
    found = sums(task(), Told(np.zeros((CLASSES, CLASSES), np.float32)), rows, training=False)
    assert (found["top1"], found["top5"]) == (1, 5)
