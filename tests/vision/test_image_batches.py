"""Batches of images: a function of seed and cursor, whoever reads which rows."""

import jax
import numpy as np
import pytest

from shardtrain.data.image_arrays import ArrayImages
from shardtrain.data.image_augment import for_evaluation, for_training
from shardtrain.data.image_codec import with_channels
from shardtrain.data.images import ImageData, View
from shardtrain.data.loader import Loader
from shardtrain.sharding.mesh import make_mesh


def images(count: int = 50, size: int = 12, *, batch: int = 8, seed: int = 1, **view) -> ImageData:
    random = np.random.default_rng(0)
    pixels = random.integers(0, 256, (count, size, size, 3), dtype=np.uint8)
    source = ArrayImages(pixels, (np.arange(count) % 10).astype(np.int32), 3, "made up")
    shown = View(
        **({"size": 8, "channels": 3, "crop": "resized", "flip": True, "mixup": 0.4} | view)
    )
    return ImageData(source, np.arange(count, dtype=np.int64), shown, batch, seed)


def assert_equal(one: dict, two: dict) -> None:
    assert one.keys() == two.keys()
    for name, values in one.items():
        np.testing.assert_array_equal(values, two[name], err_msg=name)


@pytest.mark.parametrize("crop", ["none", "pad", "resized"])
def test_rows_do_not_depend_on_who_reads_them(crop: str) -> None:
    """Crops, flips and mixing are keyed by the sample's number, for any cut of the batch."""
    data = images(crop=crop)
    whole = data.batch_at(9)
    parts = [data.rows(9, start, stop) for start, stop in ((0, 3), (3, 7), (7, 8))]
    assert_equal({k: np.concatenate([p[k] for p in parts]) for k in whole}, whole)
    assert_equal(images(crop=crop).batch_at(9), whole)


def test_another_seed_epoch_or_row_looks_otherwise() -> None:
    data = images(count=8, mixup=0.0, crop="pad")  # one batch an epoch: the same 8 images
    first, later = data.batch_at(0), data.batch_at(1)
    assert sorted(first["label"]) == sorted(later["label"])
    for label in first["label"]:
        a, b = (x["image"][x["label"] == label] for x in (first, later))
        assert a.shape == b.shape
    assert not np.array_equal(first["image"], later["image"])
    assert not np.array_equal(
        first["image"], images(count=8, seed=2, mixup=0.0).batch_at(0)["image"]
    )


def test_mixing_takes_another_row_by_its_share() -> None:
    mixed, plain = images(), images(mixup=0.0)
    a, b = mixed.batch_at(2), plain.batch_at(2)
    own, other = b["image"].astype(float), np.roll(b["image"], -1, 0).astype(float)
    share = a["share"].astype(float)[:, None, None, None]
    np.testing.assert_allclose(a["image"], share * own + (1 - share) * other, atol=0.5001)
    np.testing.assert_array_equal(a["other"], np.roll(b["label"], -1))
    assert 0 <= a["share"].min() < a["share"].max() <= 1


def test_crops_are_parts_of_the_image() -> None:
    random = np.random.default_rng(0)
    pixels = np.arange(64, dtype=np.uint8).reshape(8, 8, 1) + 1
    seen = {tuple(for_training(pixels, 8, "pad", False, random)[4, :, 0]) for _ in range(60)}
    assert len(seen) > 5
    assert all(set(row) <= {0, *range(1, 65)} for row in seen)
    np.testing.assert_array_equal(for_evaluation(pixels, 8, "pad"), pixels)
    wide = np.repeat(pixels, 3, 1)  # [8, 24]: evaluation sees the middle
    np.testing.assert_array_equal(for_evaluation(wide, 8, "none"), wide[:, 8:16])
    flipped = [for_training(pixels, 8, "none", True, random)[0, 0, 0] for _ in range(64)]
    assert 16 < sum(value == 8 for value in flipped) < 48


def test_channels() -> None:
    grey = np.array([[[10]]], np.uint8)
    assert with_channels(grey, 3).tolist() == [[[10, 10, 10]]]
    colour = np.array([[[255, 0, 0], [0, 255, 0]]], np.uint8)
    assert with_channels(colour, 1)[0, :, 0].tolist() == [76, 150]
    assert with_channels(np.full((1, 1, 4), 7, np.uint8), 3).shape == (1, 1, 3)


@pytest.mark.parametrize("count", [22, 24, 2])
def test_evaluation_reads_each_image_once(count: int) -> None:  # O-41
    data = images(count=count, batch=24, mixup=0.0)
    batch = data.evaluation_rows(0, 0, 24)
    assert batch["weights"].sum() == count
    assert data.evaluation_batches(0) == 1
    parts = [data.evaluation_rows(0, start, start + 8) for start in (0, 8, 16)]
    assert_equal({k: np.concatenate([p[k] for p in parts]) for k in batch}, batch)


def test_threads_change_nothing() -> None:
    data, mesh = images(), make_mesh(data=8)
    spec = jax.sharding.PartitionSpec(None, "data")

    def place(_name: str, shape: tuple[int, ...]) -> jax.sharding.Sharding:
        return jax.sharding.NamedSharding(mesh, spec)

    read = []
    for prefetch, threads in ((0, 1), (4, 3)):
        with Loader(
            data,
            microbatches=1,
            place=place,
            start=3,
            stop=9,
            prefetch=prefetch,
            threads=threads,
        ) as loader:
            read.append([(cursor, jax.device_get(batch)) for cursor, batch, _ in loader])
    for (a, one), (b, two) in zip(*read, strict=True):
        assert a == b
        assert_equal(one, two)
