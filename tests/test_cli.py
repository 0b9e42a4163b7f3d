"""The command line: flags, refusals, exit codes; that none of it imports jax."""

import contextlib
import dataclasses
import json
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

import shardtrain as st
from shardtrain import cli
from shardtrain.cli_flags import parse, scan

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
        (("bench", "nowhere.toml"), "nowhere.toml: there is no such file"),
        (("report", "runs/nowhere"), "runs/nowhere: there is no such run folder"),
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
    assert "--sharding.sequence_parallel {true,false}" in result.stdout


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--mesh.tensor", "2", "--mesh.tensor", "2"), "--mesh.tensor: is given twice"),
        (("--run.stop-at=3", "--run.stop_at", "3"), "--run.stop_at: is given twice"),
        (("--mesh.tensr", "2"), "did you mean mesh.tensor?"),
        (("--mesh.zero", "2"), "zero belongs to [sharding]: sharding.zero"),
        (("--mehs.tensor", "2"), "--mehs.tensor: unknown section"),
        (("--mesh.tensor", "two"), 'mesh.tensor: must be a whole number\n  value: "two"\n'),
        (("--mesh.tensor",), "mesh.tensor: a value is missing after it"),
        (("--optimizer.learning_rate", "3e-4x"), "optimizer.learning_rate: must be a number"),
        (("--optimizer.learning_rate", "nan"), "optimizer.learning_rate: must be a finite number"),
        (("--offload.optimizer", "hots"), 'to do: did you mean "host"?'),
        (("resnet18_digits", "--data.bad_images", "skp"), 'to do: did you mean "skip"?'),
        (("resnet18_digits", "--model.depth", "20"), "to do: the nearest is 18"),
        (("--sharding.sequence_parallel", "yes"), "sequence_parallel: must be true or false"),
        (("--sharding.rules", "mlp"), "sharding.rules: takes pairs of name and value"),
        (("--sharding.zero", "5"), "sharding.zero: must be at most 3"),
        (("--model.type", "resnt"), "allowed: transformer, resnet"),
        (("--task.type", "image_classification"), 'model.type="transformer" goes with another'),
        (("--placment",), "to do: did you mean --placement?"),
        (("--json", "--template=maybe"), "--template: must be true or false"),
        (("--tensor", "2"), "to do: did you mean --mesh.tensor?"),
        (("--template", "--out", "x"), "--out: there is no such option"),
        (("quickstart", "llama_style"), "more words than the command takes\n  value: llama_style"),
        (("quickstrat",), "did you mean quickstart?"),
    ],
)
def test_a_wrong_flag_is_refused(
    words: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = answer(capsys, "config", *words)
    assert (code, out) == (2, "")
    assert message in err
    assert "\u2502" not in err  # no box of the argument parser's


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("plan", "--objective", "tme"), 'to do: did you mean "time"?'),
        (("launch", "-n", "x"), "--processes: must be a whole number"),
        (("prepare", "text"), "shardtrain prepare: --out is missing"),
        (("checkpoints",), "shardtrain checkpoints: RUN is missing"),
        (("checkpoints", "runs/a", "lst"), "checkpoints ACTION: unknown value"),
        (("doctor", "me"), "more words than the command takes"),
        (("doctor", "--jsn"), "to do: did you mean --json?"),
    ],
)
def test_a_commands_own_options_are_refused_alike(
    words: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = answer(capsys, *words)
    assert (code, out) == (2, "")
    assert message in err
    assert "\u2502" not in err


@pytest.mark.parametrize(
    "words",
    [
        *(("--run.allow_changes", word) for word in ("true", "True", "TRUE")),
        ("--run.allow_changes=true",),
        ("--run.allow_changes",),
        ("--run.allow_changes", "--run.steps", "3"),
    ],
)
def test_truth_in_any_case_and_alone(
    words: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, _ = answer(capsys, "config", "--json", *words)
    assert (code, json.loads(out)["run"]["allow_changes"]) == (0, True)
    code, out, _ = answer(capsys, "config", "--json", "--run.allow_changes", "False")
    assert (code, json.loads(out)["run"]["allow_changes"]) == (0, False)


def test_a_switch_that_is_on_is_turned_off_and_takes_no_word() -> None:
    kind = cli.COMMANDS["plan"].options
    options, source, _ = parse(
        kind, ["--no_search", "llama_style"], command="plan", source="config"
    )
    assert (options.search, source) == (False, "llama_style")
    options, _, _ = parse(kind, ["llama_style"], command="plan", source="config")
    assert options.search


def test_a_run_that_is_not_there_names_those_that_are(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "first").mkdir()
    (tmp_path / "first" / "resolved.toml").touch()
    code, _, err = answer(capsys, "report", str(tmp_path / "frst"))
    assert code == 2
    assert f"allowed: in {tmp_path}: first\n" in err
    assert f"to do: did you mean {tmp_path / 'first'}?" in err
    _, _, err = answer(capsys, "train", "quickstrat.toml")
    assert "did you mean quickstart?" in err
    assert "llama_style" not in err


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


@pytest.mark.parametrize("command", ["train", "verify", "bench", "plan", "launch"])
def test_what_is_taken_where_nothing_is_named_is_told_first(
    command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = cli.COMMANDS[command]
    quiet = dataclasses.replace(found, handler=lambda *_: 0)
    monkeypatch.setitem(cli.COMMANDS, command, quiet)
    config = "bench_small" if command == "bench" else "quickstart"
    assert answer(capsys, command)[2] == f"note: no config is named: this is {config}\n"
    assert answer(capsys, command, config) == (0, "", "")


def test_a_plan_without_a_target_says_for_what_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("plan", "quickstart", "--keep", "folder")  # which is refused: there is no program
    assert "note: no --target is given: this plans for h100:1x8\n" in answer(capsys, *words)[2]
    assert "--target" not in answer(capsys, *words, "--target", "h100:1x1")[2]


def test_the_readme_names_the_commands_with_json() -> None:
    readme = (Path(__file__).parent.parent / "README.md").read_text(encoding="utf-8")
    sentence = readme.split("With `--json`, which ")[1].split(" have,")[0]
    having = [name for name, c in cli.COMMANDS.items() if "json" in c.options.__dataclass_fields__]
    assert sorted(re.findall(r"`(\w+)`", sentence)) == sorted(having)


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
