"""Damage to a checkpoint is found, named and set aside, the step before is used; nobody gets in."""

import ast
import json
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import shardtrain
from shardtrain import cli
from shardtrain.checkpoint import folder
from shardtrain.checkpoint.checkpointer import Checkpointer
from shardtrain.errors import CheckpointError
from shardtrain.ops import digest
from shardtrain.ops.digest import host_digest, pieces, text
from shardtrain.sharding.mesh import make_mesh


@pytest.fixture(scope="module")
def two_steps(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with steps 1 and 2."""
    run = tmp_path_factory.mktemp("saved")
    sharding = NamedSharding(make_mesh(data=8), PartitionSpec("data"))
    with Checkpointer(run / "checkpoints") as checkpointer:
        for step in (1, 2):
            w = jax.device_put(jnp.arange(64.0).reshape(8, 8) * step, sharding)
            state = {"w": w, "key": jax.random.key(step), "step": jnp.int32(step)}
            checkpointer.save(step, state, {"config": {"run": {"seed": step}}}, metric=3.0 - step)
    return run


@pytest.fixture
def run(two_steps: Path, tmp_path: Path) -> Path:
    """A copy that may be damaged."""
    return Path(shutil.copytree(two_steps, tmp_path / "run"))


def files(run: Path, step: int = 2) -> list[str]:
    return [*folder.file_names(run / "checkpoints" / str(step)), folder.RECORD]


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 0x10
    path.write_bytes(data)


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


DAMAGE = {"a byte": flip, "cut short": truncate, "gone": Path.unlink}


@pytest.mark.parametrize("how", DAMAGE)
def test_damage_to_any_file_is_found_named_and_the_older_step_used(run: Path, how: str) -> None:
    names = files(run)
    assert len(names) > 5
    step = run / "checkpoints" / "2"
    for name in names:
        kept = (step / name).read_bytes()
        DAMAGE[how](step / name)
        said: list[str] = []
        checkpointer = Checkpointer(run / "checkpoints")
        assert checkpointer.newest_good(said.append) == 1, name
        if (how, name) == ("gone", folder.RECORD):
            assert said == [], "a step without a record is none"
            (step / name).write_bytes(kept)
            continue
        assert "step 2 is damaged and not used" in said[0]
        assert name in said[0]
        aside = run / "checkpoints" / f"2{folder.DAMAGED}"
        assert aside.is_dir(), "it is not deleted"
        aside.rename(step)
        (step / name).write_bytes(kept)
    assert Checkpointer(run / "checkpoints").newest_good() == 2


def test_a_file_that_no_save_has_written_is_damage(run: Path) -> None:
    (run / "checkpoints" / "2" / "state" / "extra").write_text("x")
    said: list[str] = []
    assert Checkpointer(run / "checkpoints").newest_good(said.append) == 1
    assert "state/extra: was not written by this save" in said[0]


def test_without_any_good_step_nothing_begins_anew_by_itself(run: Path) -> None:
    for step in ("1", "2"):
        flip(run / "checkpoints" / step / folder.RECORD)
    with pytest.raises(CheckpointError, match="every checkpoint of this run is damaged"):
        Checkpointer(run / "checkpoints").newest_good(lambda _: None)
    assert len(list((run / "checkpoints").glob(f"*{folder.DAMAGED}"))) == 2
    with pytest.raises(CheckpointError, match=f"1{folder.DAMAGED}, 2{folder.DAMAGED}"):
        Checkpointer(run / "checkpoints").newest_good()  # nor at the second start
    shutil.rmtree(run / "checkpoints" / f"1{folder.DAMAGED}")
    shutil.rmtree(run / "checkpoints" / f"2{folder.DAMAGED}")
    assert Checkpointer(run / "checkpoints").newest_good() is None


def test_what_was_read_is_compared_leaf_by_leaf(run: Path) -> None:
    """Where files are whole and an array is not: a faulty reader, memory, a wrong mesh."""
    path = run / "checkpoints" / "2" / folder.RECORD
    document = json.loads(path.read_text())
    document["leaves"]["w"]["digest"] = "0" * 16
    document["sha256"] = folder._own_digest(document)
    path.write_text(folder._text(document))
    checkpointer = Checkpointer(run / "checkpoints")
    assert checkpointer.newest_good() == 2
    wanted = {
        "w": jax.ShapeDtypeStruct((8, 8), jnp.float32),
        "key": jax.ShapeDtypeStruct((), jax.random.key(0).dtype),
        "step": jax.ShapeDtypeStruct((), jnp.int32),
    }
    with pytest.raises(CheckpointError, match="was read, and is not what was saved") as caught:
        checkpointer.restore(2, wanted)
    assert "value: w" in str(caught.value)


def test_leaves_that_older_steps_lack(run: Path) -> None:
    wanted = {
        "w": jax.ShapeDtypeStruct((8, 8), jnp.float32),
        "key": jax.ShapeDtypeStruct((), jax.random.key(0).dtype),
        "step": jax.ShapeDtypeStruct((), jnp.int32),
        "skipped": jax.ShapeDtypeStruct((), jnp.int32),
    }
    checkpointer = Checkpointer(run / "checkpoints")
    with pytest.raises(CheckpointError, match="skipped: not in the checkpoint"):
        checkpointer.restore(2, wanted)
    found = checkpointer.restore(2, wanted, missing={"skipped": 0, "w": 9})
    assert int(found["skipped"]) == 0
    assert found["w"].max() == 126


# -- digests


@pytest.mark.parametrize("small", [0, digest.SMALL], ids=["devices", "host"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8", "bool", "float64"])
def test_a_digest_is_that_of_the_whole_leaf_on_any_mesh(
    dtype: str, small: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(digest, "SMALL", small)
    with jax.enable_x64(dtype == "float64"):
        values = np.random.default_rng(0).normal(size=(8, 4, 6)) * 50
        leaf = values.astype(jnp.dtype(dtype))
        wanted = text(host_digest(leaf))
        mesh = make_mesh(data=4, tensor=2)
        for spec in (
            (),
            ("data", "tensor"),
            (("data", "tensor"),),
            (None, "tensor"),
            (None, "data"),
        ):
            placed = jax.device_put(leaf, NamedSharding(mesh, PartitionSpec(*spec)))
            assert text(pieces(placed).total()) == wanted
        assert text(pieces(jnp.asarray(leaf)).total()) == wanted


def test_a_digest_sees_each_bit_and_each_place() -> None:
    leaf = np.zeros((16, 16), np.float32)
    leaf[3, 5] = 1.0
    seen = {text(host_digest(leaf))}
    for bit in range(32):
        other = leaf.copy()
        other.view(np.uint32)[7, 7] ^= np.uint32(1 << bit)
        seen.add(text(host_digest(other)))
    seen.add(text(host_digest(leaf.T.copy())))
    seen.add(text(host_digest(np.roll(leaf, 1))))
    assert len(seen) == 35


# -- nobody gets in


@pytest.mark.parametrize("name", ["../../evil", "/etc/passwd", "state/../../x", ""])
def test_a_manifest_cannot_leave_its_folder(run: Path, name: str) -> None:
    path = run / "checkpoints" / "2" / folder.RECORD
    document = json.loads(path.read_text())
    document["files"][name] = {"size": 1, "sha256": "0"}
    document["sha256"] = folder._own_digest(document)
    path.write_text(folder._text(document))
    said: list[str] = []
    assert Checkpointer(run / "checkpoints").newest_good(said.append) == 1
    assert "is outside of the step" in said[0]


def test_a_link_in_place_of_a_file_is_damage(run: Path, tmp_path: Path) -> None:
    path = next(p for p in (run / "checkpoints" / "2" / "state").rglob("*") if p.is_file())
    elsewhere = tmp_path / "elsewhere"
    path.rename(elsewhere)
    path.symlink_to(elsewhere)
    said: list[str] = []
    assert Checkpointer(run / "checkpoints").newest_good(said.append) == 1
    assert path.name in said[0]


@pytest.mark.parametrize(
    "content",
    ["", "[]", "null", "[" * 5000, '{"format": 1}', '{"format": "shardtrain-checkpoint"}'],
)
def test_a_hostile_record_is_damage(run: Path, content: str) -> None:
    (run / "checkpoints" / "2" / folder.RECORD).write_text(content)
    assert Checkpointer(run / "checkpoints").newest_good(lambda _: None) == 1


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("step", "../../x"), ("step", "/abs/x"), ("step", 1), ("step", True), ("created", 5),
        ("created", "x"), ("created", "2026-01-01T00:00:00"), ("metric", "x"),
        ("num_bytes", "y"), ("leaves", []), ("files", 3), ("metadata", "z"), ("format_version", 0),
        ("format_version", 1),
    ],
)  # fmt: skip
def test_a_record_that_no_save_writes_is_damage(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], key: str, value: object
) -> None:
    """Also where its own digest is right."""
    step = run / "checkpoints" / "2"
    document = json.loads((step / folder.RECORD).read_text())
    document[key] = value
    document["sha256"] = folder._own_digest(document)
    (step / folder.RECORD).write_text(folder._text(document))
    if key != "step" or value != 1:
        assert command(tmp_path / "other" / "run", "adopt", step) == 2
    assert command(run, "list") == 0
    assert "step 2: damaged" in capsys.readouterr().out
    assert Checkpointer(run / "checkpoints").newest_good(lambda _: None) == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run"]


def test_a_newer_format_and_a_disk_that_fails_are_no_damage(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = run / "checkpoints" / "2" / folder.RECORD
    document = json.loads(path.read_text())
    document["format_version"] = 3
    path.write_text(folder._text(document))
    with pytest.raises(CheckpointError, match="written by a newer shardtrain"):
        Checkpointer(run / "checkpoints").newest_good()

    def fail(self: Path) -> bytes:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(Path, "read_bytes", fail)
    with pytest.raises(CheckpointError, match="the record of this step cannot be read"):
        Checkpointer(run / "checkpoints").newest_good()
    assert (run / "checkpoints" / "2").is_dir()


def test_each_byte_of_a_record_counts(run: Path) -> None:
    path = run / "checkpoints" / "2" / folder.RECORD
    data = path.read_bytes()
    for place in range(len(data)):
        path.write_bytes(data[:place] + bytes([data[place] ^ 0x01]) + data[place + 1 :])
        with pytest.raises(CheckpointError):
            folder.read_record(run / "checkpoints", 2)
    path.write_bytes(data)
    assert folder.read_record(run / "checkpoints", 2).step == 2


def test_nothing_here_can_run_code_from_a_file() -> None:
    unsafe = {"pickle", "cPickle", "marshal", "shelve", "dill", "cloudpickle", "joblib"}
    root = Path(shardtrain.__file__).parent
    talks_to_its_own_child = root / "plan" / "compiling.py"  # through a private folder
    for path in set(root.rglob("*.py")) - {talks_to_its_own_child}:
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not {name.split(".")[0] for name in names} & unsafe, path
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name | ast.Attribute):
                called = node.func.id if isinstance(node.func, ast.Name) else node.func.attr
                assert called not in ("eval", "exec"), path
                for keyword in node.keywords:
                    if keyword.arg == "allow_pickle":
                        assert getattr(keyword.value, "value", True) is False, path


# -- the command


def command(*words: object) -> int:
    return cli.main(["checkpoints", *map(str, words)])


def told(capsys: pytest.CaptureFixture[str]) -> dict:
    return json.loads(capsys.readouterr().out)


def test_list(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copytree(run / "checkpoints" / "1", run / "checkpoints" / f"7{folder.DAMAGED}")
    (run / "checkpoints" / "mine").mkdir()
    assert command(run, "--json") == 0
    found = told(capsys)
    assert [row["step"] for row in found["steps"]] == [1, 2]
    assert [row["val_loss"] for row in found["steps"]] == [2.0, 1.0]
    assert [row["stays"] for row in found["steps"]] == ["the one before", "newest"]
    assert found["set_aside"] == [f"7{folder.DAMAGED}"]
    assert command(run, "list") == 0
    text = capsys.readouterr().out
    assert "set aside as damaged" in text
    assert "mine" not in text


def test_verify(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command(run, "verify") == 0
    assert capsys.readouterr().out.count("every file and array is as it was saved") == 2
    name = files(run)[0]
    flip(run / "checkpoints" / "2" / name)
    assert command(run, "verify", "--json") == 1
    found = told(capsys)
    assert found["steps"] == {"1": [], "2": [f"{name}: its content is not what was written"]}
    assert command(run, "verify", "1") == 0
    assert (run / "checkpoints" / "2").is_dir(), "looking changes nothing"


def test_diff(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command(run, "diff", "1", "1") == 0
    assert "3 arrays are equal, 0 differ" in capsys.readouterr().out
    assert command(run, "diff", "1", f"{run}:2", "--json") == 1
    found = told(capsys)
    assert found["config"] == ["run.seed: 1 -> 2"]
    assert found["leaves"]["w"] == {"max_abs": 63.0, "relative": 0.5}
    assert set(found["leaves"]) == {"w", "key", "step"}


def test_adopt(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = run / "checkpoints" / "2"
    aside = source.rename(run / "checkpoints" / f"2{folder.DAMAGED}")
    assert command(run, "adopt", aside) == 0
    assert Checkpointer(run / "checkpoints").newest_good() == 2
    assert "step 2 is a step of this run now" in capsys.readouterr().out
    assert command(run, "adopt", aside) == 2
    assert "step 2 is there already" in capsys.readouterr().err
    other = tmp_path / "other"
    assert command(other, "adopt", aside) == 0, "a run can begin with it"
    flip(aside / files(run)[0])
    assert command(tmp_path / "third", "adopt", aside) == 2
    assert "damaged and cannot be adopted" in capsys.readouterr().err
    assert not (tmp_path / "third").exists()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("nowhere",), "there are no checkpoints here"),
        (("RUN", "verify", "9"), "step 9 is not there"),
        (("RUN", "verify", "x"), "this is no step"),
        (("RUN", "diff", "1"), "two steps are compared"),
        (("RUN", "adopt", "nowhere"), "there is no step here"),
        (("RUN", "list", "1"), "list takes nothing more"),
    ],
)
def test_what_cannot_be(
    run: Path, capsys: pytest.CaptureFixture[str], words: tuple[str, ...], said: str
) -> None:
    assert command(*(run if word == "RUN" else word for word in words)) == 2
    err = capsys.readouterr().err
    assert said in err
    assert "Traceback" not in err
