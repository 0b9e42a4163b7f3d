"""The command `plan`: whether a config fits a cluster, how fast it is, and which layout is best."""

import json
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

import jax
from rich.console import Console

from shardtrain.commands_plan_bytes import check_mesh, platform_of
from shardtrain.commands_plan_text import (
    WIDTH,
    memory_help,
    show,
    show_candidate,
    show_points,
)
from shardtrain.config import (
    LanguageRunConfig,
    RunConfig,
    load_config,
    only_language,
    resolve_mesh,
    to_toml,
)
from shardtrain.errors import EXIT_DOES_NOT_FIT, ConfigError, UserError, unwritable
from shardtrain.plan.answer import Plan, Point, Program
from shardtrain.plan.artifacts import write_artifacts
from shardtrain.plan.audit import audit
from shardtrain.plan.compiling import DoesNotFitError, Job, compile_for
from shardtrain.plan.cost import DISK
from shardtrain.plan.expected import expect
from shardtrain.plan.hardware import Chips, Cluster, parse_cluster, read_chips
from shardtrain.plan.layout import all_divisors, listed, multiples
from shardtrain.plan.memory import MARGIN
from shardtrain.plan.options import PlanOptions
from shardtrain.plan.picture import save
from shardtrain.plan.search import Found, candidate, fewest_shards
from shardtrain.plan.search import search as search_layouts
from shardtrain.plan.targets import Target
from shardtrain.plan.workload import Layout, Workload
from shardtrain.run_program import lower_step, make_program
from shardtrain.run_remat import plan_remat, with_remat
from shardtrain.run_work import find_size, work_of
from shardtrain.run_workload import choices_of, layout_of, make_workload
from shardtrain.sharding.chips import CHIPS, KNOWN_KINDS
from shardtrain.sharding.mesh import abstract_mesh
from shardtrain.strategies.config import BUDGET

# -- the command


def make_plan(
    config: RunConfig,
    target: str,
    *,
    chips: Chips = CHIPS,
    search: bool = True,
    objective: str = "time",
    keep: int = 10,
    price: float | None = None,
) -> Plan:
    """Plans a config for a cluster, without a device.

    Args:
        config: from `load_config`.
        target: the cluster, such as `h100:64x8`.
        chips: those that may be named.
        search: whether to look at all other layouts.
        objective: what makes a layout better: "time", "memory" or "cost".
        keep: how many of the best to return.
        price: of one device for an hour; None = that of the chip's row.

    Returns:
        The plan. With a search the config's own layout need not be legal on the cluster: then
        `refused` says why it is not, and `own` is the best that was found.

    Raises:
        UserError: the target is unknown, or no layout is legal on it, or without a search the
            config's own is not.
    """
    cluster = parse_cluster(target, chips)
    fault = _own_fault(config, cluster)
    if fault and not search:
        raise fault
    language = only_language(config, "the cost model")
    size = find_size(config)
    if not fault:
        faults = work_of(config).size_faults(size, config.mesh.degrees(cluster.num_devices))
        fault = faults[0] if faults else None
        if fault and not search:
            raise fault
    workload = make_workload(language, size, platform_of(cluster))
    layout, choice, found = None, None, None
    if not fault:
        config, choice = plan_remat(config, workload, cluster.num_devices)
        layout = layout_of(config, cluster.num_devices)
    shared = config.mesh.context > 1
    if search:
        found = search_layouts(
            workload, cluster, own=layout, objective=objective, keep=keep, shared=shared
        )
    if fault and found:
        layout = _instead(workload, cluster, found, fault, shared=shared)
    assert layout is not None
    return Plan(
        cluster=cluster,
        workload=workload,
        own=candidate(workload, layout, cluster),
        found=found,
        price=price if price is not None else cluster.chip.price_per_hour,
        notes=(
            *cluster.notes(),
            *_notes(config, layout),
            *([f"by the plan, train.remat is {choice}"] if choice else []),
        ),
        refused=f"{fault.where}: {fault.message}" if fault else "",
    )


def _own_fault(config: RunConfig, cluster: Cluster) -> UserError | None:
    """Why the config's own layout is not legal on a cluster; None if it is."""
    try:
        check_mesh(config, cluster)
    except UserError as fault:
        return fault
    return None


def _instead(
    workload: Workload, cluster: Cluster, found: Found, fault: UserError, *, shared: bool
) -> Layout:
    """What is planned where the config's own layout is not legal: the best, or the smallest.

    Raises:
        UserError: there is none.
    """
    if found.best:
        return found.best[0].layout
    if found.smallest:
        return found.smallest
    batch, shards = workload.batch_size, fewest_shards(workload, cluster, shared=shared)
    if shards and batch % shards:
        raise ConfigError(
            f"no layout shares out so many sequences over {cluster.num_devices} devices: as far as "
            f"the model divides, at least {shards} data shards are left; "
            f"use {listed(multiples(shards, batch))}, or fewer devices",
            where=f"data.batch_size={batch}",
        )
    raise fault


def _notes(config: RunConfig, layout: Layout) -> list[str]:
    tiers = (config.offload.optimizer, config.offload.master, config.offload.parameters)
    disk = [f"each host's disk reads and writes {DISK / 1e9:g} GB/s; a run measures it"]
    return [*_overlap_notes(config, layout), *(disk if "disk" in tiers else [])]


def _overlap_notes(config: RunConfig, layout: Layout) -> list[str]:
    if not config.train.overlap or layout.pipeline > 1:
        return []
    return [
        "the memory is that of train.overlap=False; with it the step takes up to a third more: "
        "--compile says how much"
    ]


def compiled_program(plan: Plan, config: RunConfig, *, seconds: float = 900.0) -> Program:
    """Compiles the run's own step for the plan's cluster.

    Args:
        plan: of `config`.
        config: from `load_config`.
        seconds: time limit.

    Raises:
        DoesNotFitError: the compiler says so itself, as that for TPUs does.
        UserError: the compiler is missing, does not know the chip, or fails.
    """
    cluster, language = plan.cluster, only_language(config, "the cost model")
    config = with_remat(config, plan.own.layout.remat)
    target = Target(cluster.chip.target or cluster.chip.name, cluster.hosts, cluster.per_host)
    job = Job(
        lower_step,
        (config, plan.workload.vocab_size),
        uses_host=plan.workload.program.layout.tiers.any,
    )
    try:
        compiled = compile_for(
            target, {"step": job}, seconds=seconds, overlap=config.train.overlap
        )["step"]
    except DoesNotFitError as fault:
        fault.cure = "one of these changes\n" + memory_help(replace(plan, tight=True))
        raise
    if target.is_tpu or config.lora.rank:
        return Program(compiled, None)
    mesh = abstract_mesh(plan.own.layout.degrees, plan.workload.platform)
    expected = expect(
        make_program(config, vocab_size=plan.workload.vocab_size, mesh=mesh),
        model=language.model,
        vocab_size=plan.workload.vocab_size,
        length=plan.workload.length,
        batch_size=plan.workload.batch_size,
        remat=config.train.remat,
        domain=cluster.domain,
        memory=cluster.chip.memory,
        loss_chunks=language.task.loss_chunks,
    )
    return Program(compiled, audit(compiled, expected))


def help_with_memory(config: RunConfig, error: Exception) -> UserError:
    """What to say when a real run has not enough memory.

    Args:
        config: what was run on all devices of this process.
        error: jax's own.

    Returns:
        What is largest, and the cheapest changes; with the exit code of what does not fit.
    """
    if not isinstance(config, LanguageRunConfig):
        fault = UserError(
            "out of memory",
            where="train",
            value=str(error).splitlines()[0][:200],
            cure="more devices, a higher sharding.zero, or a smaller data.batch_size; "
            "`shardtrain plan CONFIG --compile` says what a step takes",
        )
        fault.exit_code = EXIT_DOES_NOT_FIT
        return fault
    devices = jax.devices()
    known = KNOWN_KINDS.get(devices[0].device_kind)
    chip = known if known and known.flops else replace(CHIPS["h100"], name="here")
    stats = devices[0].memory_stats() or {}
    if "bytes_limit" in stats:
        chip = replace(chip, usable_memory=int(stats["bytes_limit"] / (1 - MARGIN)))
    count = len(devices)
    plan = make_plan(config, f"{chip.name}:1x{count}", chips={chip.name: chip}, search=False)
    needed, there = plan.own.memory.total / 2**30, plan.room / 2**30
    fault = UserError(
        f"out of memory: the plan is {needed:.1f} GiB a device, of {there:.1f}",
        where="train",
        value=str(error).splitlines()[0][:200],
        cure="one of these changes\n" + memory_help(replace(plan, tight=True)),
    )
    fault.exit_code = EXIT_DOES_NOT_FIT
    return fault


def other_layout(plan: Plan, text: str, own: Layout | None = None) -> Layout:
    """A layout from changes to the config's own, such as `tensor=4, zero=3`.

    Args:
        plan: the plan.
        text: keys of `Layout` with their values; `data` takes what is left if it is not given.
        own: the config's own where that is not the plan's; None = the plan's.

    Raises:
        ConfigError: a key or value is wrong, or the layout is not legal on the cluster.
    """
    changes = layout_changes(text)
    layout = replace(own or plan.own.layout, **changes)
    if "layers" not in changes and {"pipeline", "virtual_stages"} & set(changes):
        layout = replace(layout, layers="")
    if "data" not in changes:
        others = layout.pipeline * layout.replica * layout.context * layout.tensor
        layout = replace(layout, data=max(plan.cluster.num_devices // others, 1))
    return layout


def _choices(plan: Plan, config: RunConfig) -> Layout | None:
    """The config's own choices where they are no layout of the cluster; None where they are."""
    if not plan.refused:
        return None
    chosen = choices_of(config)
    return replace(chosen, remat=plan.own.layout.remat) if chosen.remat == BUDGET else chosen


def layout_changes(text: str) -> dict[str, Any]:
    """The keys of `Layout` that a text names, with their values.

    Raises:
        ConfigError: there is no such key, or it has no such value.
    """
    known = {field.name: type(field.default) for field in fields(Layout)}
    changes = {}
    for word in filter(None, (word.strip() for word in text.split(","))):
        key, equals, value = (part.strip() for part in word.partition("="))
        if key not in known or not equals:
            raise ConfigError(
                "is no choice of a layout",
                where="explain",
                value=word,
                allowed=", ".join(f"{name}=..." for name in known),
            )
        changes[key] = _typed(key, value, known[key])
    return changes


def _typed(key: str, value: str, kind: type) -> Any:
    if kind is bool and value.lower() in ("true", "false"):
        return value.lower() == "true"
    if kind is int and value.isdigit() and int(value) >= (key != "zero"):
        return int(value)
    if kind is str:
        return value
    raise ConfigError("is no value of this key", where=f"explain: {key}", value=value)


def with_layout(config: RunConfig, layout: Layout) -> RunConfig:
    """A config with another layout.

    Raises:
        ConfigError: the layout is not legal.
    """
    sections = with_remat(config, layout.remat).model_dump()
    for name, part in layout.sections.items():
        sections[name] = {**sections[name], **part}
    if layout.pipeline == 1:
        del sections["pipeline"]
    return load_config(sections)


SWEPT = ("batch_size", "sequence_length", "hosts")


def sweep(plan: Plan, text: str) -> tuple[Point, ...]:
    """The best layout for each of some sizes.

    Args:
        plan: the plan; all else is as there.
        text: a key of `SWEPT` and sizes, such as `batch_size=256,512`.

    Raises:
        ConfigError: another key, or a size is no number.
    """
    key, sizes = swept_sizes(text)
    return tuple(_point(plan, key, size) for size in sizes)


def swept_sizes(text: str) -> tuple[str, list[int]]:
    """A key of `SWEPT`, and sizes.

    Raises:
        ConfigError: another key, or a size is no number.
    """
    key, _, values = (part.strip() for part in text.partition("="))
    sizes = [word.strip() for word in values.split(",") if word.strip()]
    if key not in SWEPT or not sizes or not all(s.isdigit() and int(s) > 0 for s in sizes):
        raise ConfigError(
            "is not a sweep",
            where="sweep",
            value=text,
            allowed=" or ".join(f"{name}=A,B,..." for name in SWEPT),
        )
    return key, [int(size) for size in sizes]


def _point(plan: Plan, key: str, value: int) -> Point:
    workload, cluster = plan.workload, plan.cluster
    if key == "hosts":
        cluster = replace(cluster, hosts=value)
    elif key == "batch_size":
        workload = replace(workload, batch_size=value)
    else:
        workload = replace(workload, length=value)
    found = search_layouts(workload, cluster, keep=1, shared=plan.own.layout.context > 1)
    best, tokens = found.best[0] if found.best else None, workload.batch_size * workload.length
    return Point(key, value, cluster, best, tokens, legal=found.tried > 0)


def _require_promises(target: str, plan: Plan, config: RunConfig) -> None:
    """Refuses an audit where there are no promises to read."""
    if plan.workload.platform != "gpu":
        raise ConfigError(
            "promises are read in programs for GPUs alone",
            where="audit",
            value=target,
            cure="use --compile, which says what the program takes",
        )
    if config.lora.rank:
        raise ConfigError(
            "promises are those of training all weights",
            where="audit",
            value=f"lora.rank={config.lora.rank}",
            allowed="lora.rank=0",
            cure="use --compile, which says what the program takes",
        )


def _check_words(options: PlanOptions) -> None:
    """Refuses wrong words before anything is said of the mesh."""
    if options.keep and not (options.compile or options.audit):
        raise ConfigError(
            "there is no program to keep", where=f"keep={options.keep}", cure="add --compile"
        )
    layout_changes(options.explain)
    if options.sweep:
        swept_sizes(options.sweep)


def run_plan(options: PlanOptions, config: RunConfig) -> int:
    """`shardtrain plan`: 0 it fits, 4 it does not, 5 a promise is broken."""
    _check_words(options)
    chips = read_chips(options.chips) if options.chips else CHIPS
    if options.compile or options.audit:  # which are those of the config's own layout
        check_mesh(config, parse_cluster(options.cluster, chips))
    plan = make_plan(
        config,
        options.cluster,
        chips=chips,
        search=options.search,
        objective=options.objective,
        keep=options.top,
        price=options.price or None,
    )
    if options.audit:
        _require_promises(options.cluster, plan, config)
    if options.objective == "cost" and plan.price is None:
        raise ConfigError("is not known", where="price", cure="give one with --price")
    if options.compile or options.audit:
        plan = replace(plan, program=compiled_program(plan, config, seconds=options.seconds))
    others = []
    if options.explain:
        layout = other_layout(plan, options.explain, _choices(plan, config))
        resolve_mesh(with_layout(config, layout), plan.cluster.num_devices)
        others.append(candidate(plan.workload, layout, plan.cluster))
    swept = options.sweep
    if options.objective == "cost" and not swept:
        swept = "hosts=" + ",".join(map(str, all_divisors(plan.cluster.hosts)))
    points = sweep(plan, swept) if swept else ()
    if options.out:
        _write(plan, config, options.out)
    if options.picture:
        save(plan, options.picture)
    if options.keep and plan.program:
        write_artifacts(plan, plan.program, options.keep)
    if options.json:
        explained = [{**plan.candidate_json(c), "why": plan.why(c)} for c in others]
        told = [_point_json(plan, point) for point in points]
        print(json.dumps({**plan.as_json(), "explained": explained, "sweep": told}))
        return _exit_code(plan, options)
    console = Console(highlight=False, width=WIDTH)
    show(plan, console)
    for other in others:
        show_candidate(plan, other, console)
    show_points(plan, points, console)
    written = (options.out, options.picture, options.keep if plan.program else "")
    for path in filter(None, written):
        console.print(f"written: {path}", markup=False, soft_wrap=True)
    return _exit_code(plan, options)


def _exit_code(plan: Plan, options: PlanOptions) -> int:
    """A config whose own layout is refused cannot run there: only one that is written can."""
    return plan.exit_code or (EXIT_DOES_NOT_FIT if plan.refused and not options.out else 0)


def _write(plan: Plan, config: RunConfig, out: str) -> None:
    if plan.found is None or not plan.found.best:
        raise ConfigError(
            "there is no layout that fits to write" if plan.found else "the search was left out",
            where=f"out={out}",
        )
    text = to_toml(with_layout(config, plan.found.best[0].layout))
    try:
        Path(out).write_text(text, encoding="utf-8")
    except OSError as error:
        raise unwritable("out", out, error) from None


def _point_json(plan: Plan, point: Point) -> dict[str, Any]:
    best = point.best
    found: dict[str, Any] = {point.key: point.value, "fits": best is not None}
    if best is None:
        return found
    price = None if plan.price is None else point.price_of_tokens(plan.price)
    return found | {
        "layout": asdict(best.layout),
        "step_seconds": [best.cost.low.total, best.cost.high.total],
        "bytes_per_device": round(best.memory.total),
        "tokens_per_second": point.tokens / best.cost.middle,
        "price_per_billion_tokens": price,
    }
