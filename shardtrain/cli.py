"""The command line: which commands there are, and how their faults are told.

Owns: the commands' own options, exit codes for errors, the order of things before jax is imported.
Does not own: what a command does; each handler imports its module when it runs, so that help and
refusals never import jax.
"""

import difflib
import json
import os
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import tyro

from shardtrain import __version__
from shardtrain.cli_checkpoints import CheckpointsOptions, checkpoints_command
from shardtrain.cli_flags import config_words, names_source, parse, parse_plain
from shardtrain.cli_interop import (
    ExportOptions,
    ImportConfigOptions,
    ImportOptions,
    check_import,
    export_command,
    import_command,
    import_config_command,
    import_sections,
)
from shardtrain.cli_launch import SHORT, LaunchFlags, launch_command
from shardtrain.cli_plan import PlanFlags, plan_command
from shardtrain.cli_schedule import ScheduleOptions, schedule_command
from shardtrain.config import (
    LanguageRunConfig,
    RunConfig,
    assemble,
    config_faults,
    load_config,
    only_language,
    to_template,
    to_toml,
)
from shardtrain.config_effects import ineffective_settings
from shardtrain.errors import (
    EXIT_FAULT_OF_OURS,
    EXIT_INTERRUPTED,
    EXIT_PREEMPTED,
    ConfigError,
    PeerEndError,
    UserError,
    raise_all,
)
from shardtrain.launch_job import check_devices, device_faults
from shardtrain.sharding.devices import prepare_devices
from shardtrain.sharding.processes import find_peers, join, leave
from shardtrain.train.interrupt import leave_on_termination

_TOGETHER = (0, EXIT_PREEMPTED, EXIT_INTERRUPTED)
"""Exit codes that all processes of a run come to at the same step."""

Source = Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="CONFIG")]
RunSource = Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]


@dataclass(frozen=True)
class Train:
    """Train a model, or go on with a run that was begun."""

    config: Source = "quickstart"
    """A TOML file, a run folder, or a shipped config."""


@dataclass(frozen=True)
class Verify:
    """Compare the config's layout with one device on the same batches; exit 1 beyond the bound."""

    config: Source = "quickstart"
    """A TOML file, a run folder, or a shipped config."""
    steps: int = 0
    """Updates to compare. 0 = 3, or `run.steps` with --precision."""
    shrink: bool = False
    """Use a small model of the same shape."""
    precision: bool = False
    """Compare train.precision with float32 instead: train both, and hold the gap of their losses
    against what is published."""
    json: bool = False
    """Print JSON and nothing else."""


@dataclass(frozen=True)
class Prepare:
    """Turn text files, folders, JSONL, Parquet columns or arrays of tokens into token files."""

    paths: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="PATH...")]
    """Files and folders; .npy, .bin and .idx are tokens already."""
    out: str
    """Folder for train.tokens and validation.tokens."""
    tokenizer: str = "bytes"
    """bytes, the path of a tokenizer.json, or wordpiece:N = N tokens at most, learned from the
    text."""
    validation_fraction: float = 0.05
    """Part of the documents kept for validation."""
    seed: int = 0
    """Decides which documents those are."""
    column: str = ""
    """Field or column that holds the text. "" = the one that is there."""
    megatron: bool = False
    """Write each file for Megatron-LM too, as .bin and .idx beside it."""
    bad_records: Literal["stop", "skip"] = "stop"
    """A record of prompt and completion that lacks one, or is too long: stop, or skip and count."""
    max_tokens: int = 0
    """Tokens of such a record; one with more is bad. 0 = any."""


@dataclass(frozen=True)
class Generate:
    """Let a trained run go on with a text."""

    run: RunSource
    """A run folder, or the config of one."""
    prompt: str = ""
    """Text to go on with."""
    tokens: int = 200
    """Tokens to generate."""
    temperature: float = 0.8
    """Randomness; 0 takes the likeliest token."""
    seed: int = 0
    """Seed of the draws."""
    json: bool = False
    """Print JSON and nothing else."""


@dataclass(frozen=True)
class Evaluate:
    """Print the validation loss of a run's newest checkpoint; with --data.path, that of a file."""

    run: RunSource
    """A run folder, or the config of one."""
    json: bool = False
    """Print JSON and nothing else."""


@dataclass(frozen=True)
class Report:
    """Say where a run's time went, how its attempts ended and what it cost."""

    run: RunSource
    """A run folder, or the config of one."""
    json: bool = False
    """Print JSON and nothing else."""


@dataclass(frozen=True)
class Show:
    """Print a config with every key resolved, or where each parameter rests."""

    config: Source = "quickstart"
    """A TOML file, a run folder, or a shipped config."""
    placement: bool = False
    """For each parameter: names, rule, spec and bytes per device, and the totals."""
    template: bool = False
    """A commented config to start from."""
    json: bool = False
    """Print JSON and nothing else."""


@dataclass(frozen=True)
class Bench:
    """Time the steps of a config."""

    config: Source = "bench_small"
    """A TOML file, a run folder, or a shipped config."""
    steps: int = 12
    """Timed steps."""
    warmup: int = 3
    """Steps before them."""
    json: bool = False
    """Print JSON and nothing else."""


@dataclass(frozen=True)
class Doctor:
    """Say what this machine can do and what is missing."""

    json: bool = False
    """Print JSON and nothing else."""


def _train(_options: Train, config: RunConfig) -> int:
    with leave_on_termination():
        peers = find_peers()
        _devices(config, 1 if peers is None else peers.count)
        if peers is not None:
            join(peers)
        from shardtrain.training import train_command

        try:
            return train_command(config)
        except RuntimeError as error:  # jax's
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
            from shardtrain.commands_plan import help_with_memory

            raise help_with_memory(config, error) from None


def _verify(options: Verify, config: RunConfig) -> int:
    _devices(config)
    steps, shrink = options.steps, options.shrink
    if options.precision:
        from shardtrain.commands_precision import precision_command

        return precision_command(config, steps=steps, shrink=shrink, json=options.json)
    from shardtrain.commands import verify_command

    return verify_command(config, steps=steps or 3, shrink=shrink, json=options.json)


def _prepare(options: Prepare) -> int:
    from shardtrain.data.prepare_command import prepare_command

    prepare_command(
        options.paths,
        options.out,
        options.tokenizer,
        options.validation_fraction,
        options.seed,
        options.column,
        megatron=options.megatron,
        bad_records=options.bad_records,
        max_tokens=options.max_tokens,
    )
    return 0


def _generate(options: Generate, config: RunConfig) -> int:
    _devices(config)
    from shardtrain.commands_trained import generate_command

    return generate_command(
        config,
        prompt=options.prompt,
        tokens=options.tokens,
        temperature=options.temperature,
        seed=options.seed,
        json=options.json,
    )


def _evaluate(options: Evaluate, config: RunConfig, words: list[str]) -> int:
    _devices(config)
    from shardtrain.commands_trained import eval_command, eval_file_command

    has_file = any(word.partition("=")[0] == "--data.path" for word in words)
    if has_file and isinstance(config, LanguageRunConfig):
        trained = only_language(load_config(options.run), "the loss of a file")
        return eval_file_command(config, trained, json=options.json)
    return eval_command(config, json=options.json)


def _report(options: Report, config: RunConfig) -> int:
    from shardtrain.report import report_command

    return report_command(config, json=options.json)


def _show(options: Show, config: RunConfig) -> int:
    if options.placement:
        prepare_devices(config.run.cpu_devices)
        from shardtrain.commands import placement_command

        return placement_command(config, json=options.json)
    if options.template:
        print(to_template(config), end="")
        return 0
    print(json.dumps(config.model_dump(), indent=2) if options.json else to_toml(config).rstrip())
    for line in ineffective_settings(config):
        print(f"note: {line}", file=sys.stderr)
    return 0


def _bench(options: Bench, config: RunConfig) -> int:
    _devices(config)
    from shardtrain.bench import bench_command

    return bench_command(config, steps=options.steps, warmup=options.warmup, json=options.json)


def _doctor(options: Doctor) -> int:
    from shardtrain.doctor import doctor_command

    return doctor_command(json=options.json)


def _devices(config: RunConfig, processes: int = 1) -> None:
    """Check the mesh while jax is not imported, as far as that goes, and ask for CPU devices."""
    check_devices(config, processes)
    prepare_devices(
        config.run.cpu_devices // processes,
        deterministic=config.run.deterministic,
        overlap=config.train.overlap,
    )


@dataclass(frozen=True)
class Command:
    """A command: its options, the one of them that names a config, and what it does."""

    options: type[Any]
    source: str
    handler: Callable[..., int]
    passes_on: bool = False
    """Whether the handler also gets the config's flags as they were written."""
    tells_default: bool = False
    """Whether it says which config it takes where none is named."""
    short: Mapping[str, str] = field(default_factory=dict)
    """Flags of one letter, and what they stand for."""
    sections: Callable[[str], Mapping[str, Any]] | None = None
    """How what `source` names becomes sections, where it is no config."""
    check: Callable[[str, Mapping[str, Any], Mapping[str, Any]], None] | None = None
    """Refuses flags that do not agree with those sections, before any other check."""
    is_run: bool = False
    """Whether it is a run on the devices that are here, which decide about its mesh."""


COMMANDS = {
    "train": Command(Train, "config", _train, tells_default=True, is_run=True),
    "verify": Command(Verify, "config", _verify, tells_default=True, is_run=True),
    "prepare": Command(Prepare, "", _prepare),
    "generate": Command(Generate, "run", _generate, is_run=True),
    "eval": Command(Evaluate, "run", _evaluate, passes_on=True, is_run=True),
    "report": Command(Report, "run", _report),
    "config": Command(Show, "config", _show),
    "bench": Command(Bench, "config", _bench, tells_default=True, is_run=True),
    "plan": Command(PlanFlags, "config", plan_command, tells_default=True),
    "checkpoints": Command(CheckpointsOptions, "", checkpoints_command),
    "launch": Command(
        LaunchFlags, "config", launch_command, passes_on=True, tells_default=True, short=SHORT
    ),
    "schedule": Command(ScheduleOptions, "", schedule_command),
    "import": Command(
        ImportOptions, "hf_dir", import_command, sections=import_sections, check=check_import
    ),
    "export": Command(ExportOptions, "run", export_command),
    "import-config": Command(ImportConfigOptions, "", import_config_command),
    "doctor": Command(Doctor, "", _doctor),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command line.

    Args:
        arguments: The words after the program's name; None = those of this process.

    Returns:
        The exit code: 0 done, 2 the input is wrong, 70 a fault of ours, and what the command says.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    code = _main(words)
    if find_peers() is not None and code not in _TOGETHER and "jax" in sys.modules:
        leave(code)
    return code


def _main(words: list[str]) -> int:
    try:
        code = _dispatch(words)
        sys.stdout.flush()
        return code
    except (UserError, PeerEndError) as error:
        if isinstance(error, UserError):  # the process whose fault it is tells the other one
            print(error, file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
    except BrokenPipeError:  # the reader of a pipe, such as `head`, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except SystemExit as exit_:
        return exit_.code if isinstance(exit_.code, int) else 0
    except Exception:
        traceback.print_exc()
        print(
            "\nThis is a fault in shardtrain, not in your input. Please report it with the lines "
            f"above, the command\n  shardtrain {' '.join(words)}\n"
            "and what `shardtrain doctor` prints.",
            file=sys.stderr,
        )
        return EXIT_FAULT_OF_OURS


def _dispatch(words: list[str]) -> int:
    name, *rest = words or ["--help"]
    if name in ("--help", "-h", "help"):
        print(_overview())
        return 0
    if name == "--version":
        print(f"shardtrain {__version__}")
        return 0
    if name not in COMMANDS:
        near = difflib.get_close_matches(name, COMMANDS, n=1)
        raise ConfigError(
            "there is no such command",
            where=name,
            allowed=", ".join(COMMANDS),
            cure=f"did you mean {near[0]}?" if near else "",
        )
    command = COMMANDS[name]
    if not command.source:
        return command.handler(parse_plain(command.options, rest, command=name))
    rest = [command.short.get(word, word) for word in rest]
    named = names_source(command.options, rest)
    options, source, flags = parse(
        command.options, rest, command=name, source=command.source, sections=command.sections
    )
    if command.tells_default and not named:
        print(f"note: no config is named: this is {source}", file=sys.stderr)
    sections = command.sections(source) if command.sections else None
    if command.check and sections is not None:
        command.check(source, sections, flags)
    config = assemble(source if sections is None else sections, flags)
    if command.is_run:
        peers = find_peers()
        raise_all(device_faults(config, 1 if peers is None else peers.count))
    raise_all(config_faults(config, config.mesh.model_dump()))
    if command.passes_on:
        return command.handler(options, config, config_words(command.options, rest))
    return command.handler(options, config)


def _overview() -> str:
    lines = ["usage: shardtrain COMMAND [OPTIONS]", "", "One sharded trainer in JAX.", ""]
    lines += [
        f"  {name:13} {(command.options.__doc__ or '').splitlines()[0]}"
        for name, command in COMMANDS.items()
    ]
    lines += ["", "`shardtrain COMMAND --help` has the options; every key of a config is one."]
    return "\n".join(lines)
