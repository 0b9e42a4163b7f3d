"""The command `plan` for runs that the cost model does not know: bytes, and whether they fit.

Owns: what is said of them, and the refusal of what needs the cost model. Does not own: plans of
language models (`commands_plan`). State is counted exactly, from the same placement as a run has;
what a step takes besides only a compiler knows, so it is told with --compile.
"""

import json
from typing import Any

from rich.table import Table

from shardtrain.config import RunConfig, resolve_mesh
from shardtrain.errors import EXIT_DOES_NOT_FIT, ConfigError, ShardingError
from shardtrain.plan.compiling import Compiled, Job, compile_for
from shardtrain.plan.hardware import Cluster, parse_cluster, read_chips
from shardtrain.plan.options import PlanOptions
from shardtrain.plan.search import room
from shardtrain.plan.targets import Target
from shardtrain.run_program import count_parameters, lower_step, make_program, make_report
from shardtrain.run_work import find_size, work_of
from shardtrain.sharding.chips import CHIPS
from shardtrain.sharding.mesh import abstract_mesh
from shardtrain.train.screen import human_bytes, make_console

Bytes = dict[str, int]


def platform_of(cluster: Cluster) -> str:
    """What the chips of a cluster are: "cpu", "gpu" or "tpu"."""
    if cluster.chip.name == "cpu":
        return "cpu"
    return "tpu" if "TPU" in cluster.chip.full_name else "gpu"


def check_mesh(config: RunConfig, cluster: Cluster) -> dict[str, int]:
    """The degree of every mesh axis on a cluster.

    Raises:
        UserError: the config's mesh does not fit it.
    """
    try:
        return resolve_mesh(config, cluster.num_devices)
    except ShardingError as fault:
        if fault.where == "mesh":
            fault.cure = "give other degrees: --mesh.data -1 takes what the others leave"
        raise


def plan_bytes(options: PlanOptions, config: RunConfig) -> int:
    """`shardtrain plan` of such a run: 0 it fits, 4 it does not.

    Args:
        options: of the command.
        config: from `load_config`.

    Raises:
        UserError: the target is unknown, the mesh does not fit it, or an option needs the cost
            model.
    """
    _refuse(options, config)
    chips = read_chips(options.chips) if options.chips else CHIPS
    cluster = parse_cluster(options.cluster, chips)
    degrees = check_mesh(config, cluster)
    size, work = find_size(config), work_of(config)
    program = make_program(
        config, vocab_size=size, mesh=abstract_mesh(degrees, platform_of(cluster))
    )
    found = make_report(program)
    state = {
        "parameters": found.parameters,
        "optimizer": found.optimizer,
        "statistics and averages": found.beside,
    }
    gradients = found.gradients + work.row_gradient_bytes(cluster.num_devices)
    compiled = _compile(options, config, size, cluster) if options.compile else None
    step = {} if compiled is None else _step(compiled)
    # Of a compiled step the arguments are the state and the batch.
    needed = sum(step.values()) if step else sum(state.values()) + gradients
    fits = needed <= room(cluster)
    count = count_parameters(program, size)
    told: dict[str, Any] = {
        "target": options.cluster,
        "mesh": degrees,
        "count": count,
        "bytes_per_device": {**state, "gradients": gradients},
        "compiled": step or None,
        "needed": needed,
        "room": round(room(cluster)),
        "fits": fits,
        "notes": work.notes,
    }
    if options.json:
        print(json.dumps(told))
    else:
        _show(config, cluster, told)
    return 0 if fits else EXIT_DOES_NOT_FIT


def _refuse(options: PlanOptions, config: RunConfig) -> None:
    """Refuses options that would have no answer here."""
    asked = {
        "explain": options.explain,
        "sweep": options.sweep,
        "out": options.out,
        "picture": options.picture,
        "audit": options.audit,
        "keep": options.keep,
        "objective": "" if options.objective == "time" else options.objective,
        "price": options.price,
    }
    for name, value in asked.items():
        if value:
            raise ConfigError(
                "times, other layouts and promises are planned for language models alone",
                where=f"--{name}",
                value=str(value),
                allowed=f'model.type="transformer", not "{config.model.type}"',
                cure="leave it out; --compile says what the compiled step takes",
            )


def _compile(options: PlanOptions, config: RunConfig, size: int, cluster: Cluster) -> Compiled:
    target = Target(cluster.chip.target or cluster.chip.name, cluster.hosts, cluster.per_host)
    offload = config.offload
    uses_host = {offload.optimizer, offload.master} != {"device"}
    job = Job(lower_step, (config, size), uses_host=uses_host)
    return compile_for(
        target, {"step": job}, seconds=options.seconds, overlap=config.train.overlap
    )["step"]


def _step(compiled: Compiled) -> Bytes:
    """Bytes of a compiled step on one device."""
    return {name: int(compiled.memory[name]) for name in ("arguments", "temporaries")}


def _show(config: RunConfig, cluster: Cluster, told: dict[str, Any]) -> None:
    console = make_console(stderr=False)
    degrees = " x ".join(f"{axis} {n}" for axis, n in told["mesh"].items() if n > 1)
    console.print(
        f"{config.model.type}, {told['count']:,} parameters, on {cluster.num_devices} x "
        f"{cluster.chip.full_name}: {degrees or '1 device'}, ZeRO {config.sharding.zero}; "
        "bytes on one device",
        soft_wrap=True,
    )
    table = Table(show_header=False, box=None)
    for name, size in told["bytes_per_device"].items():
        table.add_row(name, human_bytes(size))
    for name, size in (told["compiled"] or {}).items():
        table.add_row(f"compiled: {name}", human_bytes(size))
    console.print(table)
    for note in told["notes"]:
        console.print(note, soft_wrap=True)
    needed = f"{human_bytes(told['needed'])} of {human_bytes(told['room'])}"
    if told["compiled"]:
        words = f"{'fits' if told['fits'] else 'does not fit'}: the compiled step takes {needed}"
    elif told["fits"]:
        words = (
            f"state and gradients take {needed}. Whether the step fits is not known yet: "
            "activations are not in it, nor is a time, for the cost model is that of language "
            "models. --compile says what the step takes"
        )
    else:
        words = f"does not fit: state and gradients alone take {needed}"
    console.print(words, soft_wrap=True)
