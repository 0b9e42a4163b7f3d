"""Where images come from, and what is said when they are damaged: file and place."""

import io
import tarfile
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from PIL import Image

from shardtrain.data.config import ImageDataConfig
from shardtrain.data.image_files import ImageInfo, open_images, require_classes
from shardtrain.data.images import ImageData
from shardtrain.errors import DataError

SIZE, COUNT = 6, 24


def pictures(count: int = COUNT) -> tuple[np.ndarray, np.ndarray]:
    """Flat colours, which JPEG keeps nearly as they are."""
    colours = np.random.default_rng(0).integers(0, 256, (count, 1, 1, 3))
    images = np.broadcast_to(colours, (count, SIZE, SIZE, 3)).astype(np.uint8)
    return images, (np.arange(count) % 3).astype(np.int64)


def encoded(pixels: np.ndarray, kind: str = "PNG") -> bytes:
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, kind)
    return file.getvalue()


def write_folder(root: Path, *, splits: tuple[str, ...] = ("",)) -> Path:
    images, labels = pictures()
    for split in splits:
        for number, (pixels, label) in enumerate(zip(images, labels, strict=True)):
            folder = root / split / f"class{label}"
            folder.mkdir(parents=True, exist_ok=True)
            (folder / f"{number:03}.png").write_bytes(encoded(pixels))
    return root


def write_npz(root: Path) -> Path:
    images, labels = pictures()
    root.mkdir()
    np.savez(
        root / "data.npz", x_train=images, y_train=labels, x_test=images[:5], y_test=labels[:5]
    )
    return root / "data.npz"


def write_cifar(root: Path) -> Path:
    root.mkdir()
    images, labels = pictures()
    large = np.repeat(np.repeat(images[:, :1, :1], 32, 1), 32, 2).transpose(0, 3, 1, 2)
    for name, part in (("data_batch_1", slice(0, 12)), ("data_batch_2", slice(12, 24))):
        rows = [bytes([labels[i]]) + large[i].tobytes() for i in range(24)[part]]
        (root / f"{name}.bin").write_bytes(b"".join(rows))
    (root / "test_batch.bin").write_bytes(bytes([labels[0]]) + large[0].tobytes())
    return root


def write_tars(root: Path) -> Path:
    images, labels = pictures()
    root.mkdir()
    for shard in range(2):
        with tarfile.open(root / f"train-{shard}.tar", "w") as tar:
            for number in range(12 * shard, 12 * shard + 12):
                for name, data in (
                    (f"{number:04}.png", encoded(images[number])),
                    (f"{number:04}.cls", str(labels[number]).encode()),
                    (f"{number:04}.json", b"{}"),
                ):
                    info = tarfile.TarInfo(name)
                    info.size = len(data)
                    tar.addfile(info, io.BytesIO(data))
    return root


def write_parquet(root: Path) -> Path:
    images, labels = pictures()
    root.mkdir()
    cells = [{"bytes": encoded(x), "path": f"{i}.png"} for i, x in enumerate(images)]
    table = pyarrow.table({"image": cells, "label": labels})
    pyarrow.parquet.write_table(table, root / "train-0.parquet", row_group_size=5)
    pyarrow.parquet.write_table(table.slice(0, 4), root / "validation-0.parquet")
    return root


def config(path: Path | str, **keys) -> ImageDataConfig:
    base = {"path": str(path), "image_size": SIZE, "batch_size": 4, "shuffle": False}
    return ImageDataConfig(**(base | {"validation_fraction": 0.0} | keys))


def opened(path: Path | str, said: list[str] | None = None, **keys):
    say = (said if said is not None else []).append
    return open_images(config(path, **keys), seed=0, say=say)


def in_order(data: ImageData) -> tuple[np.ndarray, np.ndarray]:
    batches = [data.batch_at(cursor) for cursor in range(data.order.batches_per_epoch)]
    return tuple(np.concatenate([b[name] for b in batches]) for name in ("image", "label"))


WRITERS = {
    "npz": (write_npz, 5),
    "tar": (write_tars, None),
    "parquet": (write_parquet, 4),
}


@pytest.mark.parametrize("kind", WRITERS)
def test_every_kind_gives_the_same_images(kind: str, tmp_path: Path) -> None:
    write, held = WRITERS[kind]
    data, validation, info = opened(write(tmp_path / "d"))
    images, labels = in_order(data)
    np.testing.assert_array_equal(images, pictures()[0])
    np.testing.assert_array_equal(labels, pictures()[1])
    assert info.vocab_size == 3
    assert (None if validation is None else validation.num_samples) == held
    assert opened(tmp_path / "d")[2].digest == info.digest


def test_folders(tmp_path: Path) -> None:
    root = write_folder(tmp_path / "d", splits=("train", "val"))
    data, validation, info = opened(root)
    images, labels = in_order(data)
    order = np.argsort(pictures()[1], kind="stable")
    np.testing.assert_array_equal(images, pictures()[0][order])
    np.testing.assert_array_equal(labels, pictures()[1][order])
    assert info.classes == ("class0", "class1", "class2")
    assert validation is not None
    assert validation.num_samples == COUNT


def test_cifar(tmp_path: Path) -> None:
    data, validation, info = opened(write_cifar(tmp_path / "d"), image_size=32)
    images, labels = in_order(data)
    np.testing.assert_array_equal(images[:, 5, 7], pictures()[0][:, 0, 0])
    np.testing.assert_array_equal(labels, pictures()[1])
    assert (info.vocab_size, validation.num_samples) == (10, 1)


def test_the_digits_need_no_file() -> None:
    data, validation, info = opened("", image_size=8, channels=1, validation_fraction=0.2)
    assert (data.num_samples, validation.num_samples, info.vocab_size) == (1438, 359, 10)
    assert not set(data.ids) & set(validation.ids)
    assert data.batch_at(0)["image"].max() == 255


def test_a_split_does_not_depend_on_the_seed(tmp_path: Path) -> None:
    root = write_folder(tmp_path / "d")
    keys = {"validation_fraction": 0.25}
    first = open_images(config(root, **keys), seed=1, say=print)[1]
    second = open_images(config(root, **keys), seed=2, say=print)[1]
    assert first is not None
    assert len(first.ids) == 6
    np.testing.assert_array_equal(first.ids, second.ids)


# -- damage


def test_a_corrupt_image_stops_or_is_skipped(tmp_path: Path) -> None:
    root = write_folder(tmp_path / "d")
    bad = root / "class0" / "003.png"
    bad.write_bytes(bad.read_bytes()[:40])
    data = opened(root)[0]
    with pytest.raises(DataError, match="an image cannot be read") as caught:
        in_order(data)
    assert caught.value.where == str(bad)
    assert "data.bad_images" in caught.value.cure
    said: list[str] = []
    data, _, _ = opened(root, said, bad_images="skip")
    _, labels = in_order(data)
    in_order(data)
    assert data.remarks() == {"skipped_images": 1}
    assert len(said) == 1
    assert str(bad) in said[0]
    # The next image takes its place; in evaluation it counts for nothing.
    assert len(labels) == COUNT
    weights = np.concatenate([data.evaluation_rows(i, 0, 4)["weights"] for i in range(6)])
    assert weights.sum() == COUNT - 1


@pytest.mark.parametrize("left", [3000, 12 * 3 * 1024 + 200, -1024])
def test_a_shard_that_is_cut_off(tmp_path: Path, left: int) -> None:
    root = write_tars(tmp_path / "d")
    path = root / "train-1.tar"
    with tarfile.open(path) as tar:
        end = max(m.offset_data + -(-m.size // 512) * 512 for m in tar)
    path.write_bytes(path.read_bytes()[: left if left > 0 else end])
    with pytest.raises(DataError, match="this file is not whole") as caught:
        opened(root)
    assert caught.value.where == str(path)
    assert "cut off" in caught.value.value
    said: list[str] = []
    data, _, _ = opened(root, said, bad_images="skip")
    assert 12 <= data.num_samples <= 24
    assert len(said) == 1
    assert str(path) in said[0]


def test_parquet_and_cifar_that_are_cut_off(tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "p") / "train-0.parquet"
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(DataError, match="not whole") as caught:
        opened(tmp_path / "p")
    assert caught.value.where == str(path)
    path = write_cifar(tmp_path / "c") / "data_batch_2.bin"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(DataError, match="not whole") as caught:
        opened(tmp_path / "c", image_size=32)
    assert caught.value.where == str(path)
    assert "into record 11 of 3073 bytes" in caught.value.value
    assert opened(tmp_path / "c", image_size=32, bad_images="skip")[0].num_samples == 23
    path = write_npz(tmp_path / "n")
    path.write_bytes(path.read_bytes()[:-50])
    with pytest.raises(DataError, match="cut off") as caught:
        opened(path)
    assert caught.value.where == str(path)


def test_a_class_without_folder_or_images(tmp_path: Path) -> None:
    root = write_folder(tmp_path / "d", splits=("train", "val"))
    (root / "val" / "class1").rename(tmp_path / "away")
    with pytest.raises(DataError, match="this folder is missing") as caught:
        opened(root)
    assert caught.value.where == str(root / "val" / "class1")
    (root / "val" / "class1").mkdir()
    with pytest.raises(DataError, match="this folder of a class has no images") as caught:
        opened(root)
    assert caught.value.where == str(root / "val" / "class1")
    said: list[str] = []
    assert opened(root, said, bad_images="skip")[0].num_samples == COUNT
    assert len(said) == 1
    assert said[0].startswith(f"skipped a class: {root / 'val' / 'class1'}")


def test_a_class_of_validation_that_is_never_learned(tmp_path: Path) -> None:
    root = write_folder(tmp_path / "d", splits=("train", "val"))
    (root / "val" / "class1").rename(root / "val" / "clas1")
    with pytest.raises(DataError, match="train has no such class") as caught:
        opened(root)
    assert caught.value.where == str(root / "val" / "clas1")
    assert caught.value.allowed == "class0, class1, class2"
    assert caught.value.cure.startswith("did you mean class1? ")
    assert "skip" not in str(caught.value)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda root: root / "absent", "no such file or folder"),
        (lambda root: root, "no folders of classes"),
        (lambda root: _write(root / "a.txt", b"text"), "no kind of file"),
        (lambda root: _write(root / "a.tar", b"no tar file at all"), "not whole"),
        (lambda root: _npz(root / "a.npz", a=np.zeros(3)), "no images in it"),
        (
            lambda root: _npz(root / "a.npz", x=np.zeros((3, 4, 4)), y=np.zeros(3, int)),
            "no images w",
        ),
    ],
)
def test_what_is_no_data_is_refused(tmp_path: Path, make, message: str) -> None:
    with pytest.raises(DataError, match=message) as caught:
        opened(make(tmp_path))
    assert str(tmp_path) in str(caught.value)


def test_too_few_classes_or_images(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="fewer classes"):
        require_classes(2, ImageInfo("here", ("a", "b", "c"), ""))
    with pytest.raises(DataError, match="too few images for one batch of 32"):
        opened(write_folder(tmp_path / "d"), batch_size=32)


def _write(path: Path, data: bytes) -> Path:
    path.write_bytes(data)
    return path


def _npz(path: Path, **arrays: np.ndarray) -> Path:
    np.savez(path, **arrays)
    return path
