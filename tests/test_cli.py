"""The command line: flags, refusals, exit codes; that none of it imports jax."""

import contextlib
import json
import os
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

import shardtrain as st
from shardtrain import cli
from shardtrain.cli_flags import scan

HEAVY = ("jax", "jaxlib", "flax", "optax", "orbax", "grain")


def run(*words: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    """A command line in a process of its own, which fails when a heavy package was imported."""
    code = f"""
import sys
from shardtrain.cli import main
code = main({list(words)!r})
loaded = [name for name in {HEAVY!r} if name in sys.modules]
sys.exit(f"imported {{loaded}}" if loaded else code)
"""
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=cwd, check=False
    )


def answer(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    """A command line in this process."""
    code = cli.main(words)
    captured = capsys.readouterr()
    return code, captured.out, captured.err


@contextlib.contextmanager
def handler(name: str, function: object) -> Iterator[None]:
    """Another handler for a command, for a while."""
    command = cli.COMMANDS[name]
    cli.COMMANDS[name] = cli.Command(command.options, command.source, function)  # type: ignore[arg-type]
    try:
        yield
    finally:
        cli.COMMANDS[name] = command


# -- without jax


@pytest.mark.parametrize("command", [None, *cli.COMMANDS])
def test_help_does_not_import_jax(command: str | None) -> None:
    result = run(*([command] if command else []), "--help")
    assert (result.returncode, result.stderr) == (0, "")
    assert f"usage: shardtrain {command or 'COMMAND'}" in result.stdout


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("train", "--mesh.tensor", "3"), "model.num_heads=4 is not divisible by 3"),
        (("train", "--mesh.data", "2"), "the product is 4, but there are 8 devices"),
        (("train", "--mesh.data", "3"), "mesh: the product is 6, but there are 8 devices"),
        (("train", "--mesh.tensor", "5"), "mesh: 5 does not divide 8 devices"),
        (("verify", "--optimizer.learning_rat", "1"), "did you mean optimizer.learning_rate?"),
        (("config", "--placement", "--mesh.tensor", "3"), "use 1, 2 or 4"),
        (("bench", "nowhere.toml"), "there is no such config"),
        (("generate", "nowhere"), "nowhere: there is no such config"),
    ],
)
@pytest.mark.smoke312
def test_a_refusal_does_not_import_jax(words: tuple[str, ...], message: str) -> None:
    result = run(*words)
    assert (result.returncode, result.stdout) == (2, "")
    assert message in result.stderr
    assert "Traceback" not in result.stderr
    # a degree that the devices forbid is not taken for what the batch must divide by
    assert "data.batch_size" not in result.stderr


def test_the_package_does_not_import_jax() -> None:
    code = f"""
import sys
import shardtrain as st
st.load_config(), st.RunConfig, st.ConfigError, dir(st), st.train
sys.exit(str(loaded) if (loaded := [name for name in {HEAVY!r} if name in sys.modules]) else 0)
"""

    words = [sys.executable, "-c", code]
    result = subprocess.run(words, capture_output=True, text=True, check=False)
    assert (result.returncode, result.stderr.strip()) == (0, "")


def test_the_number_of_devices_comes_from_the_environment_without_cpu_devices() -> None:
    environment = os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=6"}
    words = [sys.executable, "-m", "shardtrain", "train", "--run.cpu_devices", "0"]
    result = subprocess.run(
        [*words, "--mesh.tensor", "4"], env=environment, capture_output=True, text=True, check=False
    )
    assert result.returncode == 2
    assert "mesh: 4 does not divide 6 devices" in result.stderr


# -- flags


@pytest.mark.smoke312
def test_flags_reach_the_config(capsys: pytest.CaptureFixture[str]) -> None:
    flags = "--mesh.tensor 4 --mesh.data=-1 --sharding.sequence_parallel True --run.stop-at 7"
    more = "--optimizer.learning_rate 1e-4 --log.trackers --sharding.rules mlp data vocab"
    code, out, _ = answer(capsys, "config", "--json", *f"{flags} {more}".split(), "")
    found = json.loads(out)
    assert code == 0
    assert found["mesh"] == {"pipeline": 1, "replica": 1, "data": -1, "context": 1, "tensor": 4}
    assert found["sharding"]["sequence_parallel"] is True
    assert found["sharding"]["rules"] == {"mlp": "data", "vocab": ""}
    assert (found["run"]["stop_at"], found["log"]["trackers"]) == (7, [])
    assert found["optimizer"]["learning_rate"] == 1e-4


@pytest.mark.parametrize(
    "words",
    [
        ("llama_style", "--run.steps", "7", "--json"),
        ("--json", "--run.steps", "7", "llama_style"),
        ("--log.trackers", "--run.steps", "7", "llama_style", "--json"),
    ],
)
def test_the_config_may_stand_anywhere(
    words: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    _, out, _ = answer(capsys, "config", *words)
    found = json.loads(out)
    assert (found["model"]["norm"], found["run"]["steps"]) == ("rmsnorm", 7)


def test_only_given_flags_count_as_given(capsys: pytest.CaptureFixture[str]) -> None:
    seen: list[st.RunConfig] = []
    with handler("train", lambda _, config: seen.append(config) or 0):
        assert answer(capsys, "train", "--run.seed", "3", "--mesh.tensor", "2")[0] == 0
    assert seen == [st.load_config(None, {"run.seed": 3})]
    assert seen[0].mesh.model_fields_set == {"data", "tensor"}
    assert "momentum" not in seen[0].optimizer.model_fields_set


def test_help_shows_the_values_of_the_file(tmp_path: Path) -> None:
    result = run("train", "llama_style", "--help")
    line = next(text for text in result.stdout.split("--model.norm ")[1].splitlines())
    assert "layernorm,rmsnorm" in line
    assert "(default: rmsnorm)" in result.stdout
    assert "--sharding.sequence_parallel {True,False}" in result.stdout


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--mesh.tensor", "2", "--mesh.tensor", "2"), "--mesh.tensor: is given twice"),
        (("--run.stop-at=3", "--run.stop_at", "3"), "--run.stop_at: is given twice"),
        (("--mesh.tensr", "2"), "did you mean mesh.tensor?"),
        (("--mesh.zero", "2"), "zero belongs to [sharding]: sharding.zero"),
        (("--mehs.tensor", "2"), "--mehs.tensor: unknown section"),
        (("--mesh.tensor", "two"), "Error parsing --mesh.tensor"),
        (("--optimizer.learning_rate", "3e-4x"), "Error parsing --optimizer.learning_rate"),
        (("--sharding.sequence_parallel", "yes"), "Expected one"),
        (("--sharding.zero", "5"), "sharding.zero: must be at most 3"),
        (("--model.type", "resnt"), "allowed: transformer, resnet"),
        (("--task.type", "image_classification"), 'model.type="transformer" goes with another'),
        (("--placment",), "--placement"),
        (("quickstrat",), "did you mean quickstart?"),
    ],
)
def test_a_wrong_flag_is_refused(
    words: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = answer(capsys, "config", *words)
    assert (code, out) == (2, "")
    assert message in err


def test_a_missing_key_can_be_given_as_a_flag(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = st.to_toml(st.load_config()).replace("steps = 400", "")
    (tmp_path / "mine.toml").write_text(text)
    code, _, err = answer(capsys, "config", str(tmp_path / "mine.toml"))
    assert code == 2
    assert "--run.steps" in err
    code, out, _ = answer(capsys, "config", str(tmp_path / "mine.toml"), "--run.steps", "9")
    assert code == 0
    assert "steps = 9" in out


def test_words_and_flags_are_told_apart() -> None:
    given = scan(
        ["a", "--x", "b", "c", "--y=d", "e", "--list", "f", "g", "--on", "h"],
        {"list": None, "on": 0},
    )
    assert given.words == ("a", "c", "e", "h")
    assert given.values == {"x": ("b",), "y": ("d",), "list": ("f", "g"), "on": ()}


# -- commands


def test_config_prints_toml_and_notes(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = answer(capsys, "config", "--optimizer.momentum", "0.5")
    assert code == 0
    assert tomllib.loads(out)["optimizer"]["momentum"] == 0.5
    assert err == "note: optimizer.momentum=0.5 has no effect: adamw has none (sgd and muon have)\n"


def test_the_template_is_a_config_with_comments(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, _ = answer(capsys, "config", "--template")
    (tmp_path / "quickstart.toml").write_text(out)
    assert code == 0
    assert st.load_config(tmp_path / "quickstart.toml") == st.load_config()
    assert '# activation = "gelu"' in out


def test_an_installed_command_works_from_any_folder(tmp_path: Path) -> None:
    result = run("config", "bloom_style", "--json", cwd=tmp_path)
    assert result.returncode == 0
    assert json.loads(result.stdout)["model"]["position"] == "alibi"


def test_version_and_unknown_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert answer(capsys, "--version") == (0, f"shardtrain {st.__version__}\n", "")
    code, _, err = answer(capsys, "trian")
    assert code == 2
    assert "did you mean train?" in err


@pytest.mark.parametrize("command", ["generate", "eval"])
def test_commands_on_a_run_want_one(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert answer(capsys, command) == (2, "", f"shardtrain {command}: RUN is missing\n")


# -- exit codes


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (st.DataError("empty", where="data.path"), 2, "data.path: empty\n"),
        (KeyboardInterrupt(), 130, "interrupted\n"),
        (ZeroDivisionError("oh"), 70, "Please report it"),
        (SystemExit(3), 3, ""),
    ],
    ids=["user error", "interrupt", "our fault", "exit"],
)
def test_exit_codes(
    error: BaseException, code: int, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(_options: object, _config: object) -> int:
        raise error

    with handler("train", fail):
        found, out, err = answer(capsys, "train")
    assert (found, out) == (code, "")
    assert message in err
    assert ("Traceback" in err) == (code == 70)


def test_a_closed_pipe_is_no_fault() -> None:
    words = f"{sys.executable} -m shardtrain config --template | head -n 1"
    result = subprocess.run(
        ["bash", "-o", "pipefail", "-c", words], capture_output=True, text=True, check=False
    )
    assert (result.returncode, result.stderr) == (0, "")
