"""The options of the `schedule` command.

Owns: the options and the order of what the command does. Does not own: schedules
(`shardtrain.strategies.schedules`) and how they are told (`commands_schedule`), which are imported
when the command runs.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class ScheduleOptions:
    """Prove a pipeline schedule, print what it costs and draw its timeline."""

    schedule: str = ""
    """gpipe, 1f1b, interleaved or zero_bubble. "" = 1f1b, or the table."""
    stages: int = 0
    """Stages, the degree of mesh.pipeline. 0 = 4, or the table's."""
    microbatches: int = 0
    """Microbatches of a step, as train.microbatches. 0 = 8, or the table's."""
    virtual_stages: int = 0
    """Parts of the model on each stage. 0 = 1 (2 for interleaved), or the table's."""
    table: str = ""
    """A CSV file with a schedule of your own, instead of a named one."""
    layout: str = ""
    """Layers of each part in model order, such as E,4,4,4,3H. "" = equal parts."""
    layers: int = 0
    """Layers of the model; without a layout they are spread by cost. 0 = equal parts."""
    embedding: float = 0.0
    """Cost of the embedding in layers."""
    head: float = 0.0
    """Cost of the head in layers."""
    forward: float = 1.0
    """Time of a microbatch's forward: on a stage, or with layers or a layout in one layer."""
    backward: float = 2.0
    """Time of its backward, in the same unit."""
    weight: float = -1.0
    """The part of it that is the gradient of the weights, for zero_bubble. -1 = half."""
    activation_bytes: float = 0.0
    """Bytes of a microbatch's activation, as sent between stages. 0 = count only."""
    residual_bytes: float = 0.0
    """Bytes that its forward keeps for the backward: on a stage, or in one layer."""
    pending_bytes: float = 0.0
    """Bytes that its backward leaves for the weight gradient, in the same unit."""
    out: str = ""
    """A file to write: a picture (.svg, .png), or the table (.csv)."""
    json: bool = False
    """Print JSON and nothing else."""


def schedule_command(options: ScheduleOptions) -> int:
    """Print what a schedule costs, and draw it.

    Args:
        options: The command's options.

    Returns:
        0.

    Raises:
        ConfigError: There is no such schedule, it is faulty, or a file cannot be written.
    """
    from shardtrain.commands_schedule import (
        Told,
        find_layout,
        find_schedule,
        print_json,
        print_text,
        write,
    )
    from shardtrain.strategies.schedules.simulate import Sizes, even, make_costs, simulate
    from shardtrain.strategies.schedules.timeline import make_timeline

    schedule = find_schedule(
        options.schedule,
        options.table,
        stages=options.stages,
        microbatches=options.microbatches,
        virtual_stages=options.virtual_stages,
    )
    stages, virtual_stages = schedule.work.num_stages, schedule.work.num_virtual
    layout = find_layout(
        options.layout,
        options.layers,
        stages=stages,
        virtual_stages=virtual_stages,
        embedding=options.embedding,
        head=options.head,
    )
    share = even(stages, virtual_stages)
    if layout is not None:
        share = layout.share(options.embedding, options.head)
    weight = None if options.weight == -1 else options.weight
    costs = make_costs(share, options.forward, options.backward, weight)
    sizes = Sizes(options.activation_bytes, options.residual_bytes, options.pending_bytes)
    told = Told(
        schedule=schedule,
        layout=layout,
        figures=simulate(schedule, costs, sizes, share),
        timeline=make_timeline(schedule, costs),
    )
    if options.out:
        write(told, options.out)
    if options.json:
        print_json(told)
    else:
        print_text(told)
    return 0
