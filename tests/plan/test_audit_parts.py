"""The audit on small texts in XLA's notation: what each promise finds, and what it cannot tell."""

import json
from dataclasses import replace
from typing import Any

import pytest

from shardtrain.plan.audit import Audit, audit
from shardtrain.plan.compiling import Compiled
from shardtrain.plan.evidence import Evidence, Outcome
from shardtrain.plan.expected import Expected, Leaf
from shardtrain.plan.host_copies import Travels
from shardtrain.plan.promises import PROMISES
from shardtrain.plan.recompute import Products

EMBEDDING = Leaf("embedding", "['embedding']", (1024, 512), 0, 2 * 1024 * 512, True, True)
UP = Leaf("layers/up", "['layers']['up']", (4, 512, 768), 4, 2 * 512 * 768, True, True)
PARAMS = EMBEDDING.size + UP.size
LAYOUT = Expected(
    degrees={"pipeline": 1, "replica": 1, "data": 2, "context": 1, "tensor": 2},
    zero=0,
    microbatches=1,
    remat="none",
    leaves=(EMBEDDING, UP),
    state={},
    on_host=frozenset(),
    travels=Travels(0.0, 0.0, 0.0),
    disk=Travels(0.0, 0.0, 0.0),
    parameter_width=2,
    gradient_width=2,
    products=Products(0.0, (0.0, 0.0)),
    products_in_kernels=Products(0.0, (0.0, 0.0)),
    model_flops=0.0,
    kept_bytes=None,
    domain=4,
    memory=None,
)
MEMORY = {"arguments": 0, "outputs": 0, "aliased": 0, "temporaries": 0}

DATA = "replica_groups=[2,2]<=[2,2]T(1,0)"
TENSOR = "replica_groups=[2,2]<=[4]"
HEADER = "HloModule jit_step, is_scheduled=true, ALIAS entry_computation_layout={(f32[])->f32[]}\n"
ADD = """
%add (x: f32[], y: f32[]) -> f32[] {
  %x = f32[] parameter(0)
  %y = f32[] parameter(1)
  ROOT %sum = f32[] add(%x, %y)
}
"""


def loop(name: str, carried: str, lines: list[str], root: str) -> str:
    """The body of a loop over `t`, and the condition that it shares its name with."""
    body = "\n".join(f"  {line}" for line in lines)
    return f"""
%{name} ({name}.t: ({carried})) -> ({carried}) {{
  %{name}.t = ({carried}) parameter(0)
{body}
  ROOT %{name}.out = ({carried}) tuple({root})
}}
%{name}.more ({name}.u: ({carried})) -> pred[] {{
  %{name}.u = ({carried}) parameter(0)
  ROOT %{name}.yes = pred[] constant(true)
}}
"""


def run(name: str, carried: str, operand: str, turns: int) -> str:
    """A line that runs such a loop."""
    return (
        f"%{name}.run = ({carried}) while(%{operand}), condition=%{name}.more, body=%{name}, "
        f'backend_config={{"known_trip_count":{{"n":"{turns}"}}}}'
    )


def program(*computations: str, lines: list[str], alias: str = "") -> str:
    body = "\n".join(f"  {line}" for line in lines)
    entry = f"ENTRY %main (p: f32[8]) -> f32[8] {{\n{body}\n}}\n"
    return HEADER.replace("ALIAS ", alias) + ADD + "\n".join(computations) + entry


def compiled(text: str, rematerialized: tuple[str, ...] | None = (), **memory: int) -> Compiled:
    return Compiled(text, {**MEMORY, **memory}, 0.0, rematerialized)


def check(promise: str, text: str, layout: Expected = LAYOUT, **memory: Any) -> Outcome:
    return PROMISES[promise](Evidence(compiled(text, **memory), layout))


def argument(number: int, name: str, shape: str) -> str:
    """An argument of the step, named as jax does it."""
    escaped = name.replace("'", "\\'")
    return f'%a{number} = {shape} parameter({number}), metadata={{op_name="{escaped}"}}'


# -- gradients

ONCE = "gradients are reduced once"
CARRIED = "s32[], bf16[512,768]{1,0}"
BACKWARD = loop(
    "backward",
    CARRIED,
    [
        "%i = s32[] get-tuple-element(%backward.t), index=0",
        "%g = bf16[512,768]{1,0} get-tuple-element(%backward.t), index=1",
        f"%reduced = bf16[512,768]{{1,0}} all-reduce(%g), {DATA}, to_apply=%add",
    ],
    "%i, %reduced",
)
REDUCE_EMBEDDING = f"%last = bf16[1024,512]{{1,0}} all-reduce(%e), {DATA}, to_apply=%add"
GRADIENTS = [
    f"%p = ({CARRIED}) parameter(0)",
    "%e = bf16[1024,512]{1,0} parameter(1)",
]


def test_gradients_reduced_layer_by_layer() -> None:
    text = program(BACKWARD, lines=[*GRADIENTS, run("backward", CARRIED, "p", 4), REDUCE_EMBEDDING])
    outcome = check(ONCE, text)
    assert outcome.state == "kept"
    assert f"{PARAMS:,} entries" in outcome.words


def test_gradients_reduced_in_every_microbatch() -> None:
    outer = loop("micro", CARRIED, [run("backward", CARRIED, "micro.t", 4)], "%micro.t, %micro.t")
    text = program(
        BACKWARD, outer, lines=[*GRADIENTS, run("micro", CARRIED, "p", 3), REDUCE_EMBEDDING]
    )
    layout = replace(LAYOUT, microbatches=3)
    outcome = check(ONCE, text, layout)
    assert outcome.state == "broken"
    (fault,) = outcome.faults
    assert (fault.instruction, fault.belongs_to) == ("reduced", "layers/up")
    assert (fault.unit, fault.expected, fault.found) == ("times a step", 4, 12)
    assert fault.note == f"{3 * 2 * UP.size:,} bytes a step"
    # That is what ZeRO 2 does, but for the reduce-scatter, and but for the embedding.
    found = check(ONCE, text, replace(layout, zero=2))
    assert found.state == "broken"
    assert found.faults[0].belongs_to == "all gradients"


def test_gradients_reduced_end_to_end_and_in_a_wider_dtype() -> None:
    joined = """
%joined (j: WIDTH[524288], k: WIDTH[1572864]) -> WIDTH[2097152] {
  %j = WIDTH[524288]{0} parameter(0)
  %k = WIDTH[1572864]{0} parameter(1)
  ROOT %all = WIDTH[2097152]{0} concatenate(%j, %k), dimensions={0}
}
"""
    lines = [
        "%j0 = WIDTH[524288]{0} parameter(0)",
        "%k0 = WIDTH[1572864]{0} parameter(1)",
        "%f = WIDTH[2097152]{0} fusion(%j0, %k0), kind=kLoop, calls=%joined",
        f"%r = WIDTH[2097152]{{0}} all-reduce(%f), {DATA}, to_apply=%add",
    ]
    text = program(joined, lines=lines)
    assert check(ONCE, text.replace("WIDTH", "bf16")).state == "kept"
    outcome = check(ONCE, text.replace("WIDTH", "f32"))
    assert outcome.state == "broken"
    assert outcome.faults[0].belongs_to == "embedding, layers/up"


def test_reductions_that_are_no_gradients_are_few() -> None:
    lines = [*GRADIENTS, run("backward", CARRIED, "p", 4), REDUCE_EMBEDDING]
    lines += ["%n = f32[3]{0} parameter(2)", f"%r = f32[3]{{0}} all-reduce(%n), {DATA}"]
    assert check(ONCE, program(BACKWARD, lines=lines)).state == "kept"


def test_a_gradient_that_tensor_groups_hold_alike_may_be_reduced_in_parts() -> None:
    lines = [*GRADIENTS, run("backward", CARRIED, "p", 4), REDUCE_EMBEDDING]
    text = program(BACKWARD, lines=lines).replace("[1024,512]", "[512,512]")
    assert check(ONCE, text).state == "broken"
    alike = (replace(EMBEDDING, tensor_split=False), UP)
    assert check(ONCE, text, replace(LAYOUT, leaves=alike)).state == "kept"


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"data": 1, "tensor": 4}, "one data shard"),
        ({"pipeline": 2, "data": 2, "tensor": 1}, "branches"),
    ],
)
def test_gradients_that_nobody_can_count(changes: dict[str, int], reason: str) -> None:
    layout = replace(LAYOUT, zero=2, degrees={**LAYOUT.degrees, **changes})
    outcome = check(ONCE, program(lines=GRADIENTS), layout)
    assert outcome.state == "not checked"
    assert reason in outcome.words


SCATTERED = "gradients are reduce-scattered"


@pytest.mark.parametrize(
    ("line", "state"),
    [
        (f"%s = bf16[2,512,768]{{2,1,0}} reduce-scatter(%w), {DATA}, dimensions={{0}}", "kept"),
        (f"%s = bf16[4,512,768]{{2,1,0}} all-reduce(%w), {DATA}", "broken"),
        (f"%s = bf16[4,512,768]{{2,1,0}} all-reduce(%w), {TENSOR}", "kept"),
    ],
)
def test_gradients_are_scattered(line: str, state: str) -> None:
    lines = ["%w = bf16[4,512,768]{2,1,0} parameter(0)", f"{line}, to_apply=%add"]
    outcome = check(SCATTERED, program(lines=lines), replace(LAYOUT, zero=2))
    assert outcome.state == state
    assert [(f.instruction, f.belongs_to) for f in outcome.faults] == (
        [("s", "layers/up")] if state == "broken" else []
    )
    assert check(SCATTERED, program(lines=lines)).state == "not checked"


# -- parameters

GATHER = "%g = DTYPE[4,512,768]{2,1,0} all-gather(%w), GROUPS, dimensions={1}"
SHARD = "DTYPE[4,256,768]{2,1,0}"


def gather(dtype: str = "bf16", groups: str = DATA, times: int = 1) -> str:
    lines = [argument(0, "state.params['layers']['up']", SHARD), *(GATHER,) * times]
    text = program(lines=lines).replace("%w", "%a0")
    return text.replace("DTYPE", dtype).replace("GROUPS", groups)


@pytest.mark.parametrize(
    ("zero", "text", "state"),
    [
        (1, gather(), "kept"),
        (1, gather(times=2), "broken"),
        (1, gather("f32"), "broken"),
        (0, gather(), "broken"),
        (3, gather(times=2), "kept"),
        (3, gather(times=3), "broken"),
        (0, gather(groups=TENSOR), "kept"),
    ],
)
def test_parameters_are_gathered_once(zero: int, text: str, state: str) -> None:
    layout = replace(LAYOUT, zero=zero, leaves=(UP,))
    outcome = check("parameters are gathered once", text, layout)
    assert outcome.state == state
    assert {f.belongs_to for f in outcome.faults} <= {"layers/up"}


ONE_LAYER = "one layer is gathered at a time"


def test_the_stack_gathered_at_once() -> None:
    layout = replace(LAYOUT, zero=3)
    for text in (gather(), gather().replace("state.params", "another")):
        outcome = check(ONE_LAYER, text, layout)
        assert outcome.state == "broken"
        (fault,) = outcome.faults
        assert (fault.instruction, fault.belongs_to) == ("g", "layers/up")
        assert (fault.expected, fault.found) == (UP.layer_size, UP.size)
    assert check(ONE_LAYER, gather()).state == "not checked"


def test_a_layer_that_tensor_does_not_split_is_still_one() -> None:
    line = "%g = bf16[512,1536]{1,0} all-gather(%a0), DATA, dimensions={0}".replace("DATA", DATA)
    name = "state.params['layers']['up']"
    text = program(lines=[argument(0, name, "bf16[256,1536]{1,0}"), line])
    assert check(ONE_LAYER, text, replace(LAYOUT, zero=3)).state == "kept"


WEIGHTS = "weights stay split over tensor"
STACKED = "s32[], bf16[4,512,768]{2,1,0}, bf16[512,768]{1,0}"


def layers(source: int) -> str:
    """A loop that gathers over tensor a slice of what it is handed (1), or what it carries (2)."""
    slice_ = """
%slice (c: bf16[4,512,768], n: s32[]) -> bf16[1,512,768] {
  %c = bf16[4,512,768]{2,1,0} parameter(0)
  %n = s32[] parameter(1)
  ROOT %d = bf16[1,512,768]{2,1,0} dynamic-slice(%c, %n, %n, %n), dynamic_slice_sizes={1,512,768}
}
"""
    lines = [
        "%i = s32[] get-tuple-element(%forward.t), index=0",
        "%w = bf16[4,512,768]{2,1,0} get-tuple-element(%forward.t), index=1",
        "%x = bf16[512,768]{1,0} get-tuple-element(%forward.t), index=2",
        "%y = bf16[512,768]{1,0} add(%x, %x)",
        "%s = ((bf16[4,512,768]{2,1,0}, s32[]), bf16[1,512,768]{2,1,0}) "
        "fusion-start(%w, %i), kind=kLoop, calls=%slice",
        "%d0 = bf16[1,512,768]{2,1,0} fusion-done(%s)",
        "%b = bf16[512,768]{1,0} bitcast(%d0)",
        f"%g = bf16[512,1536]{{1,0}} all-gather({('%b', '%y')[source - 1]}), {TENSOR}, "
        "dimensions={1}",
    ]
    lines = [line.replace("%slice", "%slice") for line in lines]
    body = loop("forward", STACKED, lines, "%i, %w, %y")
    return program(
        slice_,
        body,
        lines=[
            argument(0, "state.params['layers']['up']", "bf16[4,512,768]{2,1,0}"),
            argument(1, "state.params['norm']", "bf16[512,768]{1,0}"),
            "%zero = s32[] constant(0)",
            f"%all = ({STACKED}) tuple(%zero, %a0, %a1)",
            run("forward", STACKED, "all", 4),
        ],
    )


def test_a_weight_gathered_over_tensor() -> None:
    outcome = check(WEIGHTS, layers(1))
    assert outcome.state == "broken"
    (fault,) = outcome.faults
    assert (fault.instruction, fault.belongs_to) == ("g", "layers/up")
    assert (fault.expected, fault.found) == (UP.layer_size, 2 * UP.layer_size)
    assert "tensor 4 times" in fault.note


def test_an_activation_of_a_weights_shape_gathered_over_tensor() -> None:
    assert check(WEIGHTS, layers(2)).state == "kept"


def test_a_weight_that_nothing_splits() -> None:
    whole = replace(LAYOUT, leaves=(replace(UP, tensor_split=False),))
    assert check(WEIGHTS, layers(1), whole).state == "not checked"


SPLIT = "gradients stay split over tensor"


def test_a_gradient_gathered_over_tensor_before_it_is_scattered() -> None:
    lines = [
        "%g = f32[512,768]{1,0} parameter(0)",
        "%other = f32[512,1536]{1,0} parameter(1)",
        f"%w = f32[512,1536]{{1,0}} all-gather(%g), {TENSOR}, dimensions={{1}}",
        "%b = f32[1,512,1536]{2,1,0} bitcast(%w)",
        f"%r = f32[1,256,1536]{{2,1,0}} reduce-scatter(%b), {DATA}, dimensions={{1}}",
    ]
    outcome = check(SPLIT, program(lines=lines))
    assert outcome.state == "broken"
    (fault,) = outcome.faults
    assert (fault.instruction, fault.belongs_to) == ("w", "layers/up")
    assert (fault.expected, fault.found) == (0, 4 * 512 * 1536)
    lines[3] = lines[3].replace("%w", "%other")
    assert check(SPLIT, program(lines=lines)).state == "kept"
    alone = replace(LAYOUT, degrees={**LAYOUT.degrees, "data": 4, "tensor": 1})
    assert check(SPLIT, program(lines=lines[:2]), alone).state == "not checked"


def test_tensor_groups_and_domains() -> None:
    promise = "tensor groups are in one domain"
    lines = [
        "%x = bf16[8,512]{1,0} parameter(0)",
        f"%r = bf16[8,512]{{1,0}} all-reduce(%x), {TENSOR}, to_apply=%add, "
        'metadata={op_name="jit(step)/dot_general"}',
    ]
    text = program(lines=lines)
    assert check(promise, text).state == "kept"
    assert check(promise, text, replace(LAYOUT, domain=2)).state == "kept"
    outcome = check(promise, text, replace(LAYOUT, domain=1))
    assert outcome.state == "broken"
    (fault,) = outcome.faults
    assert (fault.instruction, fault.belongs_to) == ("r", "jit(step)/dot_general")
    assert (fault.expected, fault.found) == (1, 2)
    assert check(promise, program(lines=lines[:1])).state == "not checked"


# -- state

RESTS, DONATED = "state rests as placed", "state is donated"
MU = "state.opt_state['mu']['layers']['up']"
STATE = {"state.params['layers']['up']": ((4, 256), 2048), MU: ((4, 128), 2048)}
LINES = [
    argument(0, "state.params['layers']['up']", "bf16[4,256]{1,0}"),
    argument(1, MU, "f32[4,128]{1,0}"),
    argument(2, "batch['tokens']", "s32[8]{0}"),
]
BOTH = "input_output_alias={ {0}: (0, {}, may-alias), {1}: (1, {}, must-alias) }, "


def test_state_as_placed_and_donated() -> None:
    layout, text = replace(LAYOUT, state=STATE), program(lines=LINES, alias=BOTH)
    memory = {"arguments": 4096 + 32, "aliased": 4096}
    assert check(RESTS, text, layout, **memory).state == "kept"
    assert check(DONATED, text, layout, **memory).state == "kept"


def test_a_moment_that_every_device_holds_whole() -> None:
    text = program(lines=[LINES[0], argument(1, MU, "f32[4,256]{1,0}")], alias=BOTH)
    outcome = check(RESTS, text, replace(LAYOUT, state=STATE), arguments=6144)
    assert outcome.state == "broken"
    (fault,) = outcome.faults
    assert (fault.instruction, fault.belongs_to, fault.unit) == ("a1", MU, "bytes")
    assert (fault.expected, fault.found) == (2048, 4096)


def test_a_tensor_of_the_state_that_is_missing_or_too_many() -> None:
    layout = replace(LAYOUT, state={MU: STATE[MU], "state.step": ((), 4)})
    outcome = check(RESTS, program(lines=LINES), layout, arguments=4128)
    assert {(f.belongs_to, f.expected, f.found) for f in outcome.faults} == {
        ("state.params['layers']['up']", 0, 2048),
        ("state.step", 4, 0),
    }
    assert check(RESTS, program(lines=LINES[2:]), layout).state == "not checked"


def test_memory_that_is_not_given_up() -> None:
    text = program(lines=LINES, alias="input_output_alias={ {0}: (0, {}, may-alias) }, ")
    outcome = check(DONATED, text, replace(LAYOUT, state=STATE), aliased=2048)
    assert outcome.state == "broken"
    assert [f.belongs_to for f in outcome.faults] == [MU]


# -- recomputation

COSTS, SAVES = "remat costs its theory", "remat saves memory"
DOT = "%m = f32[8,8]{1,0} dot(%p, %p), lhs_contracting_dims={1}, rhs_contracting_dims={1}"
FLOPS = 2 * 8 * 8 * 4


def dots(count: int) -> str:
    lines = ["%p = f32[8,4]{1,0} parameter(0)"]
    return program(lines=lines + [DOT.replace("%m", f"%m{i}") for i in range(count)])


FULL = replace(LAYOUT, remat="full", products=Products(30.0 * FLOPS, (9.0 * FLOPS, 10.0 * FLOPS)))


@pytest.mark.parametrize(
    ("count", "costs", "saves"),
    [
        (40, "kept", "kept"),
        (39, "kept", "kept"),
        (50, "broken", "kept"),
        (31, "kept", "broken"),
        (20, "not checked", "not checked"),
    ],
)
def test_products_done_again(count: int, costs: str, saves: str) -> None:
    outcome = check(COSTS, dots(count), FULL)
    assert outcome.state == costs
    if costs == "broken":
        assert (outcome.faults[0].expected, outcome.faults[0].found) == (40 * FLOPS, 50 * FLOPS)
        assert outcome.faults[1].instruction == "m0"
    assert check(SAVES, dots(count), FULL).state == saves


def test_recomputation_that_does_not_show() -> None:
    few = replace(FULL, products=Products(30.0 * FLOPS, (0.5 * FLOPS, FLOPS)))
    assert check(SAVES, dots(30), few).state == "not checked"
    assert check(SAVES, dots(30), replace(FULL, remat="none")).state == "not checked"


def keeps(width: int) -> str:
    """A loop over layers that keeps something of each, beside the gradients of a weight."""
    carried = f"s32[], bf16[4,8,{width}]{{2,1,0}}, bf16[4,512,768]{{2,1,0}}, bf16[4,8]{{1,0}}"
    fused = f"""
%put (c: bf16[4,8,{width}], u: bf16[1,8,{width}], n: s32[]) -> bf16[4,8,{width}] {{
  %c = bf16[4,8,{width}]{{2,1,0}} parameter(0)
  %u = bf16[1,8,{width}]{{2,1,0}} parameter(1)
  %n = s32[] parameter(2)
  ROOT %filled = bf16[4,8,{width}]{{2,1,0}} dynamic-update-slice(%c, %u, %n, %n, %n)
}}
"""
    lines = [
        "%i = s32[] get-tuple-element(%forward.t), index=0",
        f"%k = bf16[4,8,{width}]{{2,1,0}} get-tuple-element(%forward.t), index=1",
        "%w = bf16[4,512,768]{2,1,0} get-tuple-element(%forward.t), index=2",
        "%mask = bf16[4,8]{1,0} get-tuple-element(%forward.t), index=3",
        f"%new = bf16[1,8,{width}]{{2,1,0}} broadcast(%i), dimensions={{}}",
        "%grad = bf16[1,512,768]{2,1,0} broadcast(%i), dimensions={}",
        f"%kept = bf16[4,8,{width}]{{2,1,0}} fusion(%k, %new, %i), kind=kLoop, calls=%put",
        "%grads = bf16[4,512,768]{2,1,0} dynamic-update-slice(%w, %grad, %i, %i, %i), "
        'metadata={op_name="jit(step)/transpose(jvp())/while/body/put"}',
    ]
    body = loop("forward", carried, lines, "%i, %kept, %grads, %mask")
    start = [f"%p = ({carried}) parameter(0)", run("forward", carried, "p", 4)]
    return program(fused, body, lines=start)


def test_what_a_policy_forbids_to_keep() -> None:
    layout = replace(LAYOUT, remat="full", kept_bytes=4.0 * 8 * 16 * 2)
    assert check(SAVES, keeps(16), layout).state == "kept"
    outcome = check(SAVES, keeps(64), layout)
    assert outcome.state == "broken"
    total, array = outcome.faults
    assert (total.expected, total.found) == (1024, 4096)
    assert array.instruction == "filled"
    assert array.note.endswith("in forward.run")


def test_rematerialization_is_found() -> None:
    message = (
        "W0000 spmd_partitioner.cc:666] [SPMD] Involuntary full rematerialization. The compiler "
        "cannot go from sharding {devices=[2,1]<=[2]} to {devices=[1,2]<=[2]} efficiently for HLO "
        'operation %gather.1 = f32[8,4]{1,0} gather(%p), metadata={op_name="jit(step)/take"}. As'
    )
    promise = "nothing is rematerialized"
    outcome = check(promise, dots(1), rematerialized=(message,))
    assert outcome.state == "broken"
    (fault,) = outcome.faults
    assert (fault.instruction, fault.belongs_to) == ("gather.1", "jit(step)/take")
    assert check(promise, dots(1)).state == "kept"
    assert check(promise, dots(1), rematerialized=None).state == "not checked"


# -- the whole


def whole(text: str, layout: Expected = LAYOUT, **memory: int) -> Audit:
    return audit(compiled(text, **memory), layout)


def test_every_promise_has_an_outcome_and_json_takes_all() -> None:
    found = whole(gather(groups=TENSOR), replace(LAYOUT, domain=1))
    assert [p.name for p in found.promises] == list(PROMISES)
    assert [p.name for p in found.broken] == [
        "state rests as placed",
        "state is donated",
        "gradients are reduced once",
        "weights stay split over tensor",
        "tensor groups are in one domain",
    ]
    plain = json.loads(json.dumps(found.as_json()))
    by_name = {promise["name"]: promise for promise in plain["promises"]}
    assert by_name[ONE_LAYER]["state"] == "not checked"
    assert by_name["weights stay split over tensor"]["faults"][0]["belongs_to"] == "layers/up"


def test_traffic_within_and_across_domains() -> None:
    text = program(
        lines=[
            "%x = bf16[8,512]{1,0} parameter(0)",
            "%s = ((bf16[8,512]{1,0}), bf16[16,512]{1,0}) all-gather-start(%x), "
            f"{DATA}, dimensions={{0}}",
            "%m = f32[8,8]{1,0} dot(%x, %x), lhs_contracting_dims={1}, rhs_contracting_dims={1}",
            "%d = bf16[16,512]{1,0} all-gather-done(%s)",
            f"%r = f32[4]{{0}} all-reduce(%x), {TENSOR}, to_apply=%add",
        ]
    )
    rows = whole(text, replace(LAYOUT, domain=2)).traffic
    assert [(r.kind, r.axes, r.crosses, r.overlapped) for r in rows] == [
        ("all-gather", ("data",), True, 1.0),
        ("all-reduce", ("tensor",), False, 0.0),
    ]
    assert rows[0].wire == 8192


def test_notes_on_what_figures_are_worth() -> None:
    assert whole(dots(1)).notes == ()
    full = whole(dots(1), replace(LAYOUT, memory=80.0), arguments=50, temporaries=31)
    assert "81 bytes and the chip has 80" in full.notes[0]
    assert whole(dots(1), replace(LAYOUT, memory=81.0), arguments=50, temporaries=31).notes == ()
    endless = BACKWARD, [*GRADIENTS, run("backward", CARRIED, "p", 4).partition(", backend")[0]]
    (note,) = whole(program(endless[0], lines=endless[1])).notes
    assert "loop backward.run runs is not known" in note
    piped = replace(LAYOUT, degrees={**LAYOUT.degrees, "pipeline": 2, "data": 1})
    assert "each tick of the pipeline" in whole(dots(1), piped).notes[0]


def test_copies_to_and_from_the_host() -> None:
    here, there = "f32[8]{0}", "f32[8]{0:S(5)}"
    text = program(
        lines=[
            f"%a = {here} parameter(0)",
            f"%h = {there} parameter(1)",
            f"%out = ({there}, {here}, u32[]) copy-start(%a)",
            f"%out.d = {there} copy-done(%out)",
            f"%in = {here} copy(%h)",
            f"%stay = {here} copy(%a)",
            "%big = f32[4,8]{1,0:S(5)} parameter(2)",
            "%put = f32[4,8]{1,0:S(5)} dynamic-update-slice(%big, %a, %i, %i)",
            "%get = f32[1,8]{1,0} dynamic-slice(%big, %i, %i), dynamic_slice_sizes={1,8}",
        ]
    )
    copies = whole(text).host_copies
    assert [(c.name, c.to_host, c.nbytes, c.is_async) for c in copies] == [
        ("out", True, 32, True),
        ("in", False, 32, False),
        ("put", True, 32, False),
        ("get", False, 32, False),
    ]
    assert whole(text).as_json()["host_copies"] == {
        "instructions": 4,
        "to_host": 64,
        "from_host": 64,
    }
