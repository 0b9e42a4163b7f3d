"""Commands that look at a run without training it: `verify`, and `config --placement`."""

import json as json_
import math
from dataclasses import asdict
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh
from rich.table import Table
from rich.text import Text

from shardtrain.config import RunConfig, load_config
from shardtrain.errors import EXIT_FAILED
from shardtrain.run import Run, build
from shardtrain.run_program import count_parameters, make_program, make_report
from shardtrain.run_work import find_size, work_of
from shardtrain.sharding.mesh import MESH_AXES, abstract_mesh, split_axes
from shardtrain.sharding.report import Report, Row
from shardtrain.train.screen import human_bytes, make_console
from shardtrain.verify.compare import BOUNDS, Comparison, Subject, compare

# -- verify


def verify(config: RunConfig, *, steps: int = 3, shrink: bool = False) -> Comparison:
    """Runs a config's layout and one device on the same batches.

    Args:
        config: from `load_config`.
        steps: updates to compare.
        shrink: compare a small model of the same kind on short sequences.

    Returns:
        The differences. Computed in float64 on CPU devices, else in float32.
    """
    devices = jax.devices()
    precision = "float64" if devices[0].platform == "cpu" else "float32"
    work, sections = work_of(config), config.model_dump()
    alone = work.microbatches_alone()
    if shrink:
        sections = work.shrunk(sections, config.mesh.degrees(len(devices)))
    sections["train"]["precision"] = precision
    # GPUs round the operands of float32 products to 10 bits unless told otherwise.
    with jax.enable_x64(precision == "float64"), jax.default_matmul_precision("highest"):
        layout = build(load_config(sections), devices=devices)
        one = build(load_config(on_one_device(sections, alone)), devices=devices[:1])
        return compare(_subject(layout), _subject(one), steps=steps, bound=BOUNDS[precision])


def on_one_device(sections: dict[str, Any], microbatches: int = 1) -> dict[str, Any]:
    """The same run with no feature of a layout.

    Args:
        sections: a whole config.
        microbatches: more than one where they are a part of what is computed.
    """
    return {
        **sections,
        "mesh": dict.fromkeys(MESH_AXES, 1),
        "sharding": {"zero": 0},
        "train": {**sections["train"], "microbatches": microbatches, "remat": "none"},
    }


def _subject(run: Run) -> Subject:
    return Subject(run.program, run.batch_at)


def verify_command(config: RunConfig, *, steps: int, shrink: bool, json: bool) -> int:
    """`shardtrain verify`: 0 within the bound, 1 outside."""
    result = verify(config, steps=steps, shrink=shrink)
    if json:
        print(json_.dumps({**asdict(result), "worst": result.worst, "equal": result.equal}))
        return 0 if result.equal else EXIT_FAILED
    table = Table("parameter", "gradient", "updated", box=None)
    for path, difference in result.gradients.items():
        table.add_row(path, f"{difference:.1e}", f"{result.parameters[path]:.1e}")
    for path, difference in result.kept.items():
        table.add_row(path, "", f"{difference:.1e}")
    console = make_console(stderr=False)
    console.print(table)
    verdict = "equal" if result.equal else "NOT equal"
    console.print(
        f"loss {result.loss:.1e}\n{verdict} to one device over {result.steps} updates: "
        f"largest difference {result.worst:.1e}, bound {result.bound:.0e}"
    )
    return 0 if result.equal else EXIT_FAILED


# -- config --placement


def placement(config: RunConfig) -> tuple[Report, Mesh | AbstractMesh, int]:
    """Where a config's parameters rest, without data and, if need be, without the devices.

    Args:
        config: from `load_config`. Its mesh need not fit this machine.

    Returns:
        Bytes on one device, the mesh, and how many parameters there are.
    """
    count = jax.device_count()
    asked = math.prod(d for d in config.mesh.model_dump().values() if d > 0)
    fits = config.mesh.data == -1 or asked == count
    mesh = None if fits else abstract_mesh(config.mesh.model_dump())
    vocab = find_size(config)
    program = make_program(config, vocab_size=vocab, mesh=mesh)
    return make_report(program), program.layout.mesh, count_parameters(program, vocab)


def placement_command(config: RunConfig, *, json: bool) -> int:
    """`shardtrain config --placement`."""
    report, mesh, count = placement(config)
    total = {
        "parameters": report.parameters,
        "gradients": report.gradients,
        "optimizer": report.optimizer,
    }
    memory = dict.fromkeys(total, "device")
    if json:
        rows = [{**asdict(row), "memory": memory} for row in report.rows]
        print(
            json_.dumps(
                {
                    "mesh": dict(mesh.shape),
                    "zero": config.sharding.zero,
                    "count": count,
                    "parameters": rows,
                    "total": total,
                    "beside": report.beside,
                    "memory": memory,
                }
            )
        )
        return 0
    console = make_console(stderr=False)
    degrees = " x ".join(split_axes(mesh))
    table = Table("", box=None, pad_edge=False)
    for name in ("parameter", "gradient", "optimizer"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in report.rows:
        sizes = (row.parameters, row.gradients, row.optimizer)
        table.add_row(_description(row), *map(human_bytes, sizes))
    table.add_row("total", *map(human_bytes, total.values()))
    console.print(
        f"{count:,} parameters; mesh {degrees or '1 device'}, ZeRO {config.sharding.zero}; "
        "bytes on one device"
    )
    console.print(table)
    if report.beside:
        console.print(f"statistics and averages beside them: {human_bytes(report.beside)}")
    return 0


def _description(row: Row) -> Text:
    """A parameter's path, then its axes: name, size, and the mesh axes that split it."""
    axes = zip(row.names, row.shape, _spread(row.spec, row), strict=True)
    dims = [f"{name or 'dim'} {size}{f'/{over}' if over else ''}" for name, size, over in axes]
    lines = [", ".join(dims)]
    if row.stored_spec != row.spec:
        stored = zip(row.names, _spread(row.stored_spec, row), strict=True)
        split = [f"{name or 'dim'}/{over}" for name, over in stored if over]
        lines.append(f"optimizer: {', '.join(split)}")
    if row.note:
        lines.append(row.note)
    return Text.assemble((row.path, "bold"), *(f"\n  {line}" for line in lines))


def _spread(spec: tuple[Any, ...], row: Row) -> list[str]:
    """The mesh axes of every dim, in words."""
    words = [" ".join(axes) if isinstance(axes, tuple) else axes or "" for axes in spec]
    return [*words, *[""] * (len(row.shape) - len(words))]
