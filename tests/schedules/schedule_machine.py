"""A pipeline in whole numbers: runs any table as an executor does, and its model without one.

Each virtual stage is y = w x^2 + c modulo a prime, the loss is t y^2. Sums are exact, and a slot
that holds anything but what it should shows in the result. Nothing is checked here: what the table
names is read and written, and slot -1 is a bin.
"""

import random
from dataclasses import dataclass

from shardtrain.strategies.schedules.table import BUFFERS, Schedule

PRIME = 2**31 - 1


@dataclass(frozen=True)
class Model:
    """Numbers of each virtual stage [stages][virtual stages] and of each microbatch."""

    weights: list[list[int]]
    biases: list[list[int]]
    inputs: list[int]
    targets: list[int]


def make_model(stages: int, virtual_stages: int, microbatches: int, seed: int = 0) -> Model:
    draw = random.Random(seed)

    def numbers(count: int) -> list[int]:
        return [draw.randrange(1, PRIME) for _ in range(count)]

    return Model(
        [numbers(virtual_stages) for _ in range(stages)],
        [numbers(virtual_stages) for _ in range(stages)],
        numbers(microbatches),
        numbers(microbatches),
    )


def plain(model: Model) -> tuple[int, list[list[int]]]:
    """The loss and the gradients of the weights, one microbatch after another."""
    stages, virtual_stages = len(model.weights), len(model.weights[0])
    order = [(s, v) for v in range(virtual_stages) for s in range(stages)]
    loss, grads = 0, [[0] * virtual_stages for _ in range(stages)]
    for x, target in zip(model.inputs, model.targets, strict=True):
        kept = []
        for s, v in order:
            kept.append(x)
            x = (model.weights[s][v] * x * x + model.biases[s][v]) % PRIME
        loss = (loss + target * x * x) % PRIME
        gradient = 2 * target * x % PRIME
        for (s, v), x in zip(reversed(order), reversed(kept), strict=True):
            grads[s][v] = (grads[s][v] + gradient * x * x) % PRIME
            gradient = gradient * 2 * model.weights[s][v] * x % PRIME
    return loss, grads


def run(schedule: Schedule, model: Model) -> tuple[int, list[list[int]]]:
    """The same, as the table says."""
    work = schedule.work
    columns = {name: column.tolist() for name, column in schedule.columns().items()}
    draw = random.Random(1)
    buffers = [
        {
            name: [draw.randrange(PRIME) for _ in range(schedule.slots.size(name) + 1)]
            for name in BUFFERS
        }
        for _ in range(work.num_stages)
    ]
    loss, grads = 0, [[0] * work.num_virtual for _ in range(work.num_stages)]
    last = (work.num_stages - 1, work.num_virtual - 1)
    for tick in range(work.num_ticks):
        outputs, gradients = [0] * work.num_stages, [0] * work.num_stages
        for s, own in enumerate(buffers):
            at = {name: column[tick][s] for name, column in columns.items()}
            if at["forward_micro"] >= 0:
                v, m = at["forward_virtual"], at["forward_micro"]
                x = model.inputs[m] if s == v == 0 else own["activation"][at["forward_activation"]]
                own["residual"][at["forward_residual"]] = x
                y = (model.weights[s][v] * x * x + model.biases[s][v]) % PRIME
                if (s, v) == last:
                    own["gradient"][at["forward_gradient"]] = 2 * model.targets[m] * y % PRIME
                    loss = (loss + model.targets[m] * y * y) % PRIME
                outputs[s] = y
            if at["backward_micro"] >= 0:
                v = at["backward_virtual"]
                x = own["residual"][at["backward_residual"]]
                gradient = own["gradient"][at["backward_gradient"]]
                if work.split:
                    own["pending"][at["backward_pending"]] = gradient
                else:
                    grads[s][v] = (grads[s][v] + gradient * x * x) % PRIME
                gradients[s] = gradient * 2 * model.weights[s][v] * x % PRIME
            if at["weight_micro"] >= 0:
                v = at["weight_virtual"]
                x = own["residual"][at["weight_residual"]]
                gradient = own["pending"][at["weight_pending"]]
                grads[s][v] = (grads[s][v] + gradient * x * x) % PRIME
        for s, own in enumerate(buffers):
            own["activation"][columns["receive_activation"][tick][s]] = outputs[s - 1]
            after = (s + 1) % work.num_stages
            own["gradient"][columns["receive_gradient"][tick][s]] = gradients[after]
    return loss, grads


def is_right(schedule: Schedule) -> bool:
    """Whether a table computes what the model is without one."""
    work = schedule.work
    model = make_model(work.num_stages, work.num_virtual, work.num_microbatches)
    return run(schedule, model) == plain(model)
