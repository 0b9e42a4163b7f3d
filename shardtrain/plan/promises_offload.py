"""What offload promises: what rests away from the device travels no oftener than it must.

Owns: these checks. Does not own: how copies are found (`host_copies`).
"""

from shardtrain.plan.evidence import Evidence, Fault, Outcome, broken, kept, unchecked
from shardtrain.plan.host_copies import HOST, disk_bytes, host_copies

SLACK = 1.02
"""Of bytes: counts and the like."""
ASYNC = 0.9
"""Of bytes that travel: those of single tensors between the layers may be waited for."""


def host_copies_are_planned(evidence: Evidence) -> Outcome:
    """What rests on the host is an argument there, and is copied as planned, beside other work."""
    expected, module = evidence.expected, evidence.module
    travels = expected.travels
    if not travels.stored:
        return unchecked("nothing is on the host")
    wanted = sum(expected.state[name][1] for name in expected.on_host)
    arguments = evidence.origins.arguments
    faults = [
        Fault(
            found.name if found else "", name, "bytes", expected.state[name][1], 0, "on the device"
        )
        for name in sorted(expected.on_host)
        if (found := arguments.get(name)) is None or HOST not in found.shape
    ]
    copies = host_copies(module)
    moved = {
        way: sum(c.nbytes * c.times for c in copies if c.to_host is (way == "out"))
        for way in ("in", "out")
    }
    alone = sum(c.nbytes * c.times for c in copies if not c.is_async)
    words = (
        f"{wanted:,} bytes of state are on the host; {moved['in']:,} come in and {moved['out']:,} "
        f"go out in a step, {1 - alone / max(sum(moved.values()), 1):.0%} beside other work"
    )
    bounds = {
        "in": (travels.loaded, travels.loaded + travels.again),
        "out": (travels.stored, travels.stored),
    }
    faults += [
        Fault("", f"all that goes {way}", "bytes", least, moved[way])
        for way, (least, most) in bounds.items()
        if not least / SLACK <= moved[way] <= SLACK * most
    ]
    if alone > (1 - ASYNC) * sum(moved.values()):
        faults += [
            Fault(c.name, c.op_name, "bytes", 0, c.nbytes * c.times, "nothing goes on meanwhile")
            for c in copies
            if not c.is_async
        ]
    return broken(words, faults) if faults else kept(words)


def disk_is_used_as_planned(evidence: Evidence) -> Outcome:
    """What rests on a disk is read and written as often as planned."""
    wanted = evidence.expected.disk
    if not wanted.stored:
        return unchecked("nothing is on a disk")
    read, written = disk_bytes(evidence.module)
    words = f"{read:,} bytes are read from a disk and {written:,} are written there in a step"
    found = (
        ("read", read, wanted.loaded, wanted.loaded + wanted.again),
        ("written", written, wanted.stored, wanted.stored),
    )
    faults = [
        Fault("", f"all that is {way}", "bytes", least, moved)
        for way, moved, least, most in found
        if not least / SLACK <= moved <= SLACK * most
    ]
    return broken(words, faults) if faults else kept(words)
