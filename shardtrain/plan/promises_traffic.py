"""What a layout promises about communication: what crosses which axis, how often, in what form.

Owns: the checks of gradients, parameters and tensor groups. Does not own: what each is checked on
(`evidence`), and the table of all promises (`promises`).

Bytes are those of whole arrays, before a ring splits them; times are counted through loops.
"""

from collections.abc import Iterable

from shardtrain.plan.collectives import Collective
from shardtrain.plan.evidence import (
    Evidence,
    Fault,
    Outcome,
    broken,
    kept,
    largest,
    step_bytes,
    step_entries,
    unchecked,
)
from shardtrain.plan.expected import STATE, Leaf

TOLERANCE = 0.02
"""Of entries: what norms and the sums of the loss may add."""
WIDER = 1.1
"""Of bytes: what XLA may reduce in 32 bits where the gradient has 16, such as that of a bias."""
FEW = 1024
"""Entries that are no gradient and no parameter: counts, sums of the loss, norms."""

_ONE_SHARD = "there is one data shard"
_BRANCHES = (
    "they stand in branches of the pipeline's loop, and the program does not say how often each "
    "is taken"
)


def gradients_reduced_once(evidence: Evidence) -> Outcome:
    """ZeRO 0-1: each gradient is reduced over the data axes once a step, and nothing else is.

    From ZeRO 2 on once a microbatch, which is what lets the sums rest in shards.
    """
    expected = evidence.expected
    if not expected.data_axes:
        return unchecked(_ONE_SHARD)
    if expected.is_pipeline and expected.zero >= 2:
        return unchecked(_BRANCHES)
    if expected.degrees["context"] > 1 and expected.zero <= 1 and expected.microbatches > 1:
        return unchecked("devices that share a sequence reduce each microbatch's gradient")
    times = expected.microbatches if expected.zero >= 2 else 1
    entries, width = times * expected.parameters, expected.gradient_width
    reductions = [c for c in evidence.moved if c.kind in ("all-reduce", "reduce-scatter")]
    # Shards are reduced over data, and what is then left over replicas.
    over = max(_by_last_axis(evidence, reductions), key=step_entries)
    found, size = step_entries(over), step_bytes(over)
    words = (
        f"{found:,} entries ({size:,} bytes) are reduced over {' and '.join(expected.data_axes)}, "
        f"{entries:,} ({width * entries:,}) by the layout"
    )
    slack = TOLERANCE * entries + FEW
    # What all of a tensor group hold alike, each of them may reduce a part of.
    alike = sum(leaf.size for leaf in expected.leaves if not leaf.tensor_split)
    fewest = entries - times * alike * (1 - 1 / expected.degrees["tensor"])
    if found < fewest - slack:
        return broken(words, [Fault("", "all gradients", "bytes", width * entries, size)])
    if found > entries + slack or size > WIDER * width * entries + 8 * FEW:
        return broken(words, _excess(evidence, over, times, width))
    return kept(words)


def _by_last_axis(evidence: Evidence, found: list[Collective]) -> list[list[Collective]]:
    """Those that span data shards, and those that span only replicas."""
    axes = evidence.expected.data_axes
    spanned = [tuple(axis for axis in axes if axis in c.axes) for c in found]
    return [
        [c for c, some in zip(found, spanned, strict=True) if some[-1:] == (axis,)] for axis in axes
    ]


def gradients_scattered(evidence: Evidence) -> Outcome:
    """ZeRO 2-3: a device gets only its shard of the sum, by reduce-scatter."""
    expected = evidence.expected
    if expected.zero < 2:
        return unchecked(f"ZeRO {expected.zero} does not promise it")
    if not expected.splits_state:
        return unchecked(_ONE_SHARD)
    whole = sum(leaf.size for leaf in expected.leaves if not leaf.data_split)
    allowed = whole * expected.microbatches
    slack = TOLERANCE * expected.parameters + FEW
    reduced = [c for c in evidence.over_data if c.kind == "all-reduce"]
    large = [c for c in reduced if sum(a.size for a in c.arrays) > FEW]
    if step_entries(reduced) <= allowed + slack or not large:
        scattered = [c for c in evidence.over_data if c.kind == "reduce-scatter"]
        return kept(f"{step_bytes(scattered):,} bytes are reduce-scattered over data")
    words = f"{step_bytes(large):,} bytes are all-reduced over data"
    if expected.is_pipeline:
        words += ", if every branch is taken in every tick"
    return broken(words, _excess(evidence, large, 0, 0))


def parameters_gathered_once(evidence: Evidence) -> Outcome:
    """ZeRO 1-2: new parameters are gathered once a step, in the dtype that computes with them.

    At ZeRO 0 nothing is to be gathered; at ZeRO 3 every use gathers, a forward and a backward.
    """
    expected = evidence.expected
    if not expected.data_axes:
        return unchecked(_ONE_SHARD)
    if expected.is_pipeline and expected.zero == 3:
        return unchecked(_BRANCHES)
    times = (0, 1, 1, 2 * expected.microbatches)[expected.zero]
    entries, width = times * expected.parameters, expected.parameter_width
    gathers = [c for c in evidence.over_data if c.kind == "all-gather"]
    found, size = step_entries(gathers), step_bytes(gathers)
    words = (
        f"{found:,} entries ({size:,} bytes) are gathered over {' and '.join(expected.data_axes)}, "
        f"at most {entries:,} ({width * entries:,}) by the layout"
    )
    slack = TOLERANCE * expected.parameters * max(times, 1) + FEW
    if found <= entries + slack and size <= width * (entries + slack):
        return kept(words)
    return broken(words, _excess(evidence, gathers, times, width))


def one_layer_gathered(evidence: Evidence) -> Outcome:
    """ZeRO 3: no device holds more than one layer besides its shards: none gathers the stack."""
    expected = evidence.expected
    if expected.zero < 3:
        return unchecked(f"ZeRO {expected.zero} does not promise it")
    if not expected.splits_state:
        return unchecked(_ONE_SHARD)
    stacked = [leaf for leaf in expected.leaves if leaf.layers > 1 and leaf.data_split]
    if not stacked:
        return unchecked("a device has one layer")
    most, faults = 0, []
    for c in evidence.over_data:
        if c.kind != "all-gather":
            continue
        for array, argument in evidence.origins.gathered(c):
            leaf = expected.by_argument.get(argument) or _stack(stacked, array.dims)
            if leaf is None or leaf not in stacked:
                continue
            # A layer that tensor does not split either is another fault, but still one layer.
            is_stack = _stack([leaf], array.dims) is not None
            layers = leaf.layers if is_stack else -(-array.size // leaf.unsplit)
            most = max(most, layers)
            if layers > 1:
                note = f"{layers} layers at once"
                faults.append(
                    Fault(c.name, leaf.path, "entries", leaf.layer_size, array.size, note)
                )
    if faults:
        faults.sort(key=lambda fault: -fault.found)
        return broken(f"up to {most} layers are gathered at once", faults)
    return kept("one layer is gathered at a time" if most else "no layer is gathered")


def weights_stay_split(evidence: Evidence) -> Outcome:
    """Tensor parallel: a weight that is split over `tensor` is never gathered whole."""
    expected = evidence.expected
    split = {
        f"{STATE}.{tree}{leaf.keys}": leaf
        for leaf in expected.leaves
        if leaf.tensor_split
        for tree in ("params", "opt_state['master']")
    }
    if expected.degrees["tensor"] == 1 or not split:
        return unchecked("nothing is split over tensor")
    faults = []
    for c in largest(evidence.moved):
        if c.kind != "all-gather" or "tensor" not in c.axes:
            continue
        for array, argument in evidence.origins.gathered(c):
            if argument in split:
                faults.append(
                    Fault(
                        instruction=c.name,
                        belongs_to=split[argument].path,
                        unit="entries",
                        expected=array.size // c.group_size,
                        found=array.size,
                        note=f"gathered over {' and '.join(c.axes)} {c.times} times a step",
                    )
                )
    if faults:
        return broken("weights are gathered over tensor", faults)
    return kept(f"none of {len(split) // 2} weights is gathered over tensor")


def gradients_stay_split(evidence: Evidence) -> Outcome:
    """Tensor parallel: gradients are reduced over data as they are, split over `tensor`."""
    expected = evidence.expected
    if expected.degrees["tensor"] == 1 or not any(leaf.tensor_split for leaf in expected.leaves):
        return unchecked("nothing is split over tensor")
    if not expected.data_axes:
        return unchecked(_ONE_SHARD)
    gathers = {c.name: c for c in evidence.moved if c.kind == "all-gather" and "tensor" in c.axes}
    reductions = [c for c in evidence.over_data if c.kind in ("all-reduce", "reduce-scatter")]
    passed = {step.name for c in reductions for step in evidence.origins.passed(c)}
    whole = largest(gathers[name] for name in passed if name in gathers)
    if not whole:
        return kept("no gradient is gathered over tensor before it is reduced over data")
    faults = []
    for c in whole:
        owners = [path for array in c.arrays for path in expected.unsplit_owners(array.size)]
        faults.append(
            Fault(
                instruction=c.name,
                belongs_to=", ".join(dict.fromkeys(owners)) or c.op_name,
                unit="bytes",
                expected=0,
                found=c.payload * c.times,
                note=f"gathered over {' and '.join(c.axes)} {c.times} times a step",
            )
        )
    return broken("gradients are gathered over tensor before they are reduced over data", faults)


def tensor_in_domain(evidence: Evidence) -> Outcome:
    """Tensor parallel: its groups are joined by the fast link, inside a host or a domain."""
    expected = evidence.expected
    groups = [c for c in evidence.moved if c.axes == ("tensor",)]
    if not groups:
        return unchecked("nothing crosses the tensor axis")
    crossing = [c for c in groups if c.crosses(expected.domain)]
    size = sum(c.wire * c.times for c in crossing)
    if not crossing:
        return kept(f"groups of {groups[0].group_size} in domains of {expected.domain} devices")
    words = f"a device sends {size:,.0f} bytes of tensor's between domains of {expected.domain}"
    return broken(
        words,
        [
            Fault(
                instruction=c.name,
                belongs_to=c.op_name,
                unit="domains",
                expected=1,
                found=_domains(c, expected.domain),
                note=f"{c.wire * c.times:,.0f} bytes a step",
            )
            for c in largest(crossing)
        ],
    )


def _domains(collective: Collective, domain: int) -> int:
    return max(len(set(group)) for group in (collective.groups // domain).tolist())


def _times(evidence: Evidence, collective: Collective) -> int:
    """How often a collective runs that moves each of its parameters once: by layer, or at once."""
    leaves, times = evidence.expected.leaves, 1
    for array in evidence.origins.pieces(collective):
        if not any(array.size == leaf.size for leaf in leaves):
            layers = (leaf.layers for leaf in leaves if array.size == leaf.layer_size)
            times = max(times, *layers, 0)
    return times


def _excess(evidence: Evidence, over: Iterable[Collective], times: int, width: int) -> list[Fault]:
    """The collectives that move more than their parameters so many times, of that width.

    Where each by itself is within bounds and all together are not, it is all of them.
    """
    faults, others = [], []
    for c in largest(over):
        allowed, entries = times * _times(evidence, c), sum(array.size for array in c.arrays)
        if entries * c.times <= FEW:
            continue
        words, size = evidence.owners(c), c.payload * c.times
        note = f"{size:,} bytes a step"
        if c.times > allowed:
            faults.append(Fault(c.name, words, "times a step", allowed, c.times, note))
        elif size > WIDER * width * entries * c.times:
            faults.append(Fault(c.name, words, "bytes", width * entries * c.times, size))
        else:
            others.append(Fault(c.name, words, "bytes", None, size))
    return faults or others


def _stack(leaves: Iterable[Leaf], dims: tuple[int, ...]) -> Leaf | None:
    """The stacked parameter that has these dims, up to their order and dims of 1."""
    wanted = sorted(dim for dim in dims if dim > 1)
    return next((x for x in leaves if sorted(d for d in x.dims if d > 1) == wanted), None)
