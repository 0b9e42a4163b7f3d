"""The promises of a layout: one function and one row each.

Owns: the table, and the checks of the state, of donation and of recomputation. Does not own: those
of communication (`promises_traffic`) and of offload (`promises_offload`), what they are checked on
(`evidence`), how outcomes are shown (`audit`).
"""

import re
from collections.abc import Callable, Mapping
from typing import Final, TypeAlias

from shardtrain.plan.evidence import Evidence, Fault, Outcome, broken, kept, unchecked
from shardtrain.plan.expected import STATE
from shardtrain.plan.hlo import Instruction
from shardtrain.plan.host_copies import HOST
from shardtrain.plan.promises_offload import disk_is_used_as_planned, host_copies_are_planned
from shardtrain.plan.promises_traffic import (
    gradients_reduced_once,
    gradients_scattered,
    gradients_stay_split,
    one_layer_gathered,
    parameters_gathered_once,
    tensor_in_domain,
    weights_stay_split,
)

Check: TypeAlias = Callable[[Evidence], Outcome]

PADDING = 0.001
"""Of the state's bytes: what a chip's tiles may add."""
TOLERANCE = 0.02
"""Of FLOPs: products of embeddings' gradients, and what XLA phrases otherwise."""
VISIBLE = 0.03
"""Of FLOPs: recomputation below this share does not show in their number."""


def state_rests_as_placed(evidence: Evidence) -> Outcome:
    """Each tensor of the state is an argument of the shard that its placement says, to the byte."""
    expected = evidence.expected
    arguments = {
        name: argument
        for name, argument in evidence.origins.arguments.items()
        if name.startswith(STATE + ".")
    }
    if not arguments:
        return unchecked(f"no argument of the program is named {STATE}")
    faults = []
    for name, (dims, size) in expected.state.items():
        argument = arguments.get(name)
        found = _nbytes(argument) if argument else 0
        if found != size:
            shape = argument.shape if argument else "no argument"
            note = f"{shape}, by its placement {list(dims)}"
            instruction = argument.name if argument else ""
            faults.append(Fault(instruction, name, "bytes", size, found, note))
    faults += [
        Fault(argument.name, name, "bytes", 0, _nbytes(argument), "not in the state")
        for name, argument in arguments.items()
        if name not in expected.state
    ]
    faults.sort(key=lambda fault: (fault.expected or 0) - fault.found)
    found, wanted = sum(map(_nbytes, arguments.values())), expected.state_bytes
    words = f"{found:,} bytes of state are arguments, {wanted:,} by the placement"
    if faults:
        return broken(words, faults)
    whole = sum(
        _nbytes(argument)
        for argument in evidence.origins.arguments.values()
        if HOST not in argument.shape
    )
    held = evidence.compiled.memory["arguments"]
    if held > whole * (1 + PADDING) + 8 * len(evidence.origins.arguments):
        return broken(words, [Fault("", "all arguments", "bytes", whole, held, "as allocated")])
    return kept(words)


def state_is_donated(evidence: Evidence) -> Outcome:
    """The new state takes over the memory of the old one, all of it."""
    expected, module = evidence.expected, evidence.module
    aliased, wanted = evidence.compiled.memory["aliased"], expected.device_bytes
    words = f"{aliased:,} bytes are donated, the state on the device has {wanted:,}"
    faults = [
        Fault(argument.name, name, "bytes", _nbytes(argument), 0, "its memory is not taken over")
        for name, argument in evidence.origins.arguments.items()
        if name.startswith(STATE + ".") and argument.number not in module.donated
    ]
    if faults:
        faults.sort(key=lambda fault: -(fault.expected or 0))
        return broken(words, faults)
    if aliased < wanted * (1 - PADDING):
        return broken(words, [Fault("", "the state", "bytes", wanted, aliased)])
    return kept(words)


def remat_costs_its_theory(evidence: Evidence) -> Outcome:
    """Products done again are those of the remat policy at most: none, or a layer's forward."""
    expected = evidence.expected
    theory = evidence.theory
    found, most = evidence.module.flops, theory.most
    words = (
        f"{found:.4g} FLOPs of products, {theory.model:.4g} without recomputation, at most "
        f"{most:.4g} with remat {expected.remat}"
    )
    if not theory.model:
        return unchecked("the layout does not say how many products there are")
    if found < theory.model * (1 - TOLERANCE):
        return unchecked(f"{words}: some products do not show in the program")
    if found <= most * (1 + TOLERANCE):
        return kept(words)
    return broken(words, _costliest(evidence, most, found))


def remat_saves(evidence: Evidence) -> Outcome:
    """What the remat policy drops is dropped: done again, and not kept from layer to layer."""
    expected = evidence.expected
    if expected.remat == "none":
        return unchecked("remat none drops nothing")
    theory = evidence.theory
    found, least = evidence.module.flops, theory.again[0]
    checked, faults, words = False, list[Fault](), ""
    if least > VISIBLE * theory.model and found > theory.model * (1 - TOLERANCE):
        checked, again = True, max(found - theory.model, 0)
        words = f"{again:.4g} FLOPs are done again, at least {least:.4g} by the policy"
        if again < least / 2:
            faults.append(Fault("", "products done again", "FLOPs", least, again))
    if expected.kept_bytes is not None and not expected.is_pipeline:
        most, places = _kept_bytes(evidence)
        if most:
            checked = True
            words += f"{'; ' if words else ''}{most:,} bytes are kept for the backward, at most "
            words += f"{expected.kept_bytes:,.0f} by the policy"
        if most > expected.kept_bytes * (1 + TOLERANCE):
            faults += places
    if not checked:
        return unchecked("what is done again does not show in the number of FLOPs")
    return broken(words, faults) if faults else kept(words)


def nothing_rematerialized(evidence: Evidence) -> Outcome:
    """XLA finds a way between all layouts, and gathers no tensor whole for want of one."""
    if evidence.compiled.rematerialized is None:
        return unchecked("XLA's messages while it compiled are in this process's own output")
    faults = []
    for message in evidence.compiled.rematerialized:
        operation = re.search(r"%([\w.\-]+) = (\S+)", message)
        name = re.search(r'op_name="([^"]*)"', message)
        instruction, shape = (operation[1], operation[2]) if operation else ("", "")
        faults.append(Fault(instruction, name[1] if name else message, "tensors", 0, 1, shape))
    if faults:
        return broken(f"{len(faults)} tensors are gathered whole to be split otherwise", faults)
    return kept("no tensor is gathered whole to be split otherwise")


PROMISES: Final[Mapping[str, Check]] = {
    "state rests as placed": state_rests_as_placed,
    "state is donated": state_is_donated,
    "copies to the host are as planned": host_copies_are_planned,
    "a disk is used as planned": disk_is_used_as_planned,
    "gradients are reduced once": gradients_reduced_once,
    "gradients are reduce-scattered": gradients_scattered,
    "parameters are gathered once": parameters_gathered_once,
    "one layer is gathered at a time": one_layer_gathered,
    "weights stay split over tensor": weights_stay_split,
    "gradients stay split over tensor": gradients_stay_split,
    "tensor groups are in one domain": tensor_in_domain,
    "remat costs its theory": remat_costs_its_theory,
    "remat saves memory": remat_saves,
    "nothing is rematerialized": nothing_rematerialized,
}
"""All promises by name, in the order in which they are shown."""


def _nbytes(instruction: Instruction) -> int:
    return sum(array.nbytes for array in instruction.arrays)


def _kept_bytes(evidence: Evidence) -> tuple[int, list[Fault]]:
    """Bytes that the loop which keeps most keeps of all layers, and the arrays, largest first."""
    expected = evidence.expected
    layers = {leaf.layers for leaf in expected.leaves if leaf.layers}
    most, places = 0, list[Fault]()
    for loop, keeping in evidence.kept_in_loops():
        here = (i for i in keeping if HOST not in i.shape)
        arrays = [i for i in here if layers.intersection(i.arrays[0].dims[:1])]
        size = sum(map(_nbytes, arrays))
        if size > most:
            most = size
            places = [
                Fault(i.name, i.op_name, "bytes", None, _nbytes(i), f"{i.shape} in {loop.name}")
                for i in sorted(arrays, key=lambda i: -_nbytes(i))
            ]
    total = Fault("", "all that is kept", "bytes", expected.kept_bytes, most)
    return most, [total, *places]


def _costliest(evidence: Evidence, most: float, found: float) -> list[Fault]:
    """The products with most FLOPs: among them are those that are done too often."""
    products = sorted(evidence.products(), key=lambda product: -product[2] * product[0].times)
    return [
        Fault("", "all products", "FLOPs", most, found),
        *(
            Fault(i.name, i.op_name, "FLOPs", None, n * visit.times, f"runs {visit.times} times")
            for visit, i, n in products
        ),
    ]
