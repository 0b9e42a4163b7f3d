"""Reading compiled programs: small texts in XLA's notation, each with one thing to find."""

import numpy as np
import pytest

from shardtrain.plan.collectives import Collective, collectives, replica_groups, totals
from shardtrain.plan.hlo import HloError, Module, array_shapes, parse_hlo

MESH = {"replica": 2, "data": 2, "tensor": 2}
HEADER = (
    "HloModule jit_step, is_scheduled=true, entry_computation_layout={(f32[8]{0})->f32[8]{0}}\n"
)
ADD = """
%add (x: f32[], y: f32[]) -> f32[] {
  %x = f32[] parameter(0)
  %y = f32[] parameter(1)
  ROOT %sum = f32[] add(%x, %y)
}
"""
DATA = "replica_groups=mesh['replica'=2,'data'=2,'tensor'=2] {'data'}"


def module(*computations: str) -> Module:
    """A module of a reducer and these computations."""
    return parse_hlo(HEADER + ADD + "\n".join(computations))


def found(*computations: str) -> tuple[Collective, ...]:
    return collectives(module(*computations), MESH)


def entry(*lines: str) -> str:
    body = "\n".join(f"  {line}" for line in lines)
    return f"ENTRY %main (p: f32[8]) -> f32[8] {{\n{body}\n}}\n"


# -- text


def test_arrays_of_a_shape() -> None:
    tuple_ = array_shapes(
        "((bf16[128,16]{1,0:T(8,128)(2,1)}), pred[3]{0}, /*index=2*/s4[3], u32[])"
    )
    assert [(a.dtype, a.dims, a.nbytes) for a in tuple_] == [
        ("bf16", (128, 16), 4096),
        ("pred", (3,), 3),
        ("s4", (3,), 2),
        ("u32", (), 4),
    ]
    assert array_shapes("token[]") == ()


def test_instructions() -> None:
    text = entry(
        "%p = f32[8]{0} parameter(0)",
        "%c = f32[] constant(2)",
        '%q = f32[8]{0} fusion(%p, /*index=1*/%c), calls=%add, metadata={op_name="a(b)/c"}',
        "ROOT %r = f32[8]{0} add(f32[8]{0} %p, f32[8]{0} %q)",
    )
    main = module(text).computations["main"]
    fusion = main.by_name["q"]
    assert fusion.opcode == "fusion"
    assert fusion.operands == ("p", "c")
    assert fusion.callees("calls") == ("add",)
    assert fusion.op_name == "a(b)/c"
    assert main.by_name["r"].is_root
    assert main.by_name["r"].operands == ("p", "q")
    assert [a.dims for a in main.operand_arrays(fusion)] == [(8,), ()]


def test_names_without_percent_signs() -> None:
    text = HEADER + "ENTRY main {\n  a = f32[4] parameter(0)\n  ROOT b = f32[4] add(a, a)\n}\n"
    with pytest.raises(HloError, match="entry"):  # a signature is part of what XLA prints
        parse_hlo(text)
    text = text.replace("main {", "main (a: f32[4]) -> f32[4] {")
    assert parse_hlo(text).computations["main"].by_name["b"].operands == ("a", "a")


@pytest.mark.parametrize("text", ["", "HloModule m\n", "HloModule m, is_scheduled=false\n"])
def test_only_scheduled_programs(text: str) -> None:
    with pytest.raises(HloError, match="scheduled"):
        parse_hlo(text)


# -- how often

LOOP = """
%body (t: (s32[], f32[8])) -> (s32[], f32[8]) {
  %t = (s32[], f32[8]{0}) parameter(0)
  %g = f32[8]{0} get-tuple-element(%t), index=1
  %reduced = f32[8]{0} all-reduce(%g), DATA, to_apply=%add
  %i = s32[] get-tuple-element(%t), index=0
  ROOT %out = (s32[], f32[8]{0}) tuple(%i, %reduced)
}

%again (t: (s32[], f32[8])) -> pred[] {
  %t = (s32[], f32[8]{0}) parameter(0)
  ROOT %yes = pred[] constant(true)
}
""".replace("DATA", DATA)
WHILE = "while(%p), condition=%again, body=%body"
TRIPS = 'backend_config={"known_trip_count":{"n":"5"},"known_init_step":{"init":"0"}}'


def test_loops_multiply() -> None:
    outer = LOOP.replace("%body", "%outer").replace(
        f"all-reduce(%g), {DATA}, to_apply=%add", f"{WHILE}, {TRIPS}"
    )
    trips = TRIPS.replace("5", "3")
    program = (LOOP, outer, entry(f"%w = (s32[], f32[8]) while(%p), body=%outer, {trips}"))
    (only,) = found(*program)
    assert only.times == 15
    assert only.loops == ("w", "reduced")
    assert module(*program).loops == {"w": 3, "reduced": 5}


def test_a_loop_of_unknown_length_counts_once_and_is_named() -> None:
    program = (LOOP, entry(f"%w = (s32[], f32[8]) {WHILE}"))
    assert [c.times for c in found(*program)] == [1]
    assert module(*program).loops == {"w": None}


def test_a_loop_of_no_turns_moves_nothing() -> None:
    trips = TRIPS.replace("5", "0")
    assert [c.times for c in found(LOOP, entry(f"%w = (s32[]) {WHILE}, {trips}"))] == [0]


@pytest.mark.parametrize(
    "branches",
    [
        "true_computation=%yes, false_computation=%no",
        "branch_computations={%yes, %no}",
    ],
)
def test_every_branch_of_a_conditional(branches: str) -> None:
    branch = """
%NAME (b: f32[8]) -> f32[8] {
  %b = f32[8]{0} parameter(0)
  %NAME.d = f32[8,8]{1,0} dot(%b, %b), lhs_contracting_dims={}, rhs_contracting_dims={}
  ROOT %NAME.r = f32[8]{0} all-reduce(%b), DATA, to_apply=%add
}
""".replace("DATA", DATA)
    other = branch.replace("NAME", "no").replace("f32[8,8]{1,0} dot", "f32[8,9]{1,0} dot")
    program = (
        branch.replace("NAME", "yes"),
        other,
        entry("%p = f32[8] parameter(0)", f"%c = f32[8]{{0}} conditional(%p, %p, %p), {branches}"),
    )
    assert [(c.name, c.is_conditional) for c in found(*program)] == [
        ("yes.r", True),
        ("no.r", True),
    ]
    assert module(*program).flops == 2 * 72  # the costlier branch


def test_calls_are_followed() -> None:
    body = LOOP.replace("(s32[], f32[8]{0}) tuple(%i, %reduced)", "f32[8]{0} copy(%reduced)")
    program = (body, entry("%p = f32[8] parameter(0)", "%c = f32[8] call(%p), to_apply=%body"))
    assert [c.name for c in found(*program)] == ["reduced"]


# -- FLOPs


def test_flops_of_products() -> None:
    fused = """
%fused (a: bf16[4,16,32], b: bf16[4,32,8]) -> bf16[4,16,8] {
  %a = bf16[4,16,32]{2,1,0} parameter(0)
  %b = bf16[4,32,8]{2,1,0} parameter(1)
  ROOT %d = bf16[4,16,8]{2,1,0} dot(%a, %b), lhs_batch_dims={0}, lhs_contracting_dims={2}, RIGHT
}
""".replace("RIGHT", "rhs_batch_dims={0}, rhs_contracting_dims={1}")
    cublas = (
        "%g = (f32[16,8]{1,0}, s8[1024]{0}) custom-call(%x, %x), "
        'custom_call_target="__cublas$gemm", '
        'backend_config={"gemm_backend_config":{"dot_dimension_numbers":'
        '{"lhs_contracting_dimensions":["0","2"],"rhs_contracting_dimensions":["0"]}}}'
    )
    program = module(
        fused,
        entry(
            "%x = bf16[4,16,32]{2,1,0} parameter(0)",
            "%y = bf16[4,32,8]{2,1,0} parameter(1)",
            "%f = bf16[4,16,8]{2,1,0} fusion(%x, %y), kind=kCustom, calls=%fused",
            cublas,
        ),
    )
    assert program.flops == 2 * 4 * 16 * 8 * 32 + 2 * 16 * 8 * (4 * 32)


def test_flops_of_loops() -> None:
    body = LOOP.replace(
        f"all-reduce(%g), {DATA}, to_apply=%add",
        "dot(%g, %g), lhs_contracting_dims={0}, rhs_contracting_dims={0}",
    ).replace("%reduced = f32[8]{0}", "%reduced = f32[]")
    program = module(body, entry(f"%w = (s32[], f32[]) {WHILE}, {TRIPS}"))
    assert program.flops == 5 * 2 * 8


# -- groups


@pytest.mark.parametrize(
    ("text", "groups"),
    [
        ("replica_groups={{0,2},{1,3}}", [[0, 2], [1, 3]]),
        ("replica_groups={{0,1,2,3}}", [[0, 1, 2, 3]]),
        ("replica_groups={}", [[0, 1, 2, 3]]),
        ("replica_groups=[2,2]<=[4]", [[0, 1], [2, 3]]),
        ("replica_groups=[2,2]<=[2,2]T(1,0)", [[0, 2], [1, 3]]),
        ("replica_groups=mesh['a'=2,'b'=2] {'b'}", [[0, 1], [2, 3]]),
        ("replica_groups=mesh['a'=2,'b'=2] {'a'}", [[0, 2], [1, 3]]),
        ("replica_groups=mesh['a'=2,'b'=2] {'b','a'}", [[0, 2, 1, 3]]),
        ("replica_groups=mesh['a'=4] {'a':(1)2}", [[0, 2], [1, 3]]),
        ("replica_groups=mesh['a'=4] {'a':(2)2}", [[0, 1], [2, 3]]),
        ("replica_groups=mesh['a'=2,'b'=2]([2,2]T(1,0)) {'b'}", [[0, 2], [1, 3]]),
        ("source_target_pairs={{0,1},{1,2}}", [[0, 1], [1, 2]]),
    ],
)
def test_notations_of_groups(text: str, groups: list[list[int]]) -> None:
    assert replica_groups(f"channel_id=1, {text}, dimensions={{0}}", 4).tolist() == groups


@pytest.mark.parametrize(
    "text",
    ["", "replica_groups=spiral(4)", "replica_groups=mesh['a'=4] by name {'a'}"],
)
def test_unknown_notations_are_refused(text: str) -> None:
    with pytest.raises(HloError):
        replica_groups(text, 4)


@pytest.mark.parametrize(
    ("groups", "axes", "size"),
    [
        ("{{0,1},{2,3},{4,5},{6,7}}", ("tensor",), 2),
        ("{{0,2},{1,3},{4,6},{5,7}}", ("data",), 2),
        ("{{0,4},{1,5},{2,6},{3,7}}", ("replica",), 2),
        ("{{0,2,4,6},{1,3,5,7}}", ("replica", "data"), 4),
        ("[1,8]<=[8]", ("replica", "data", "tensor"), 8),
        ("{{0,3},{1,2},{4,7},{5,6}}", ("data", "tensor"), 2),
    ],
)
def test_axes_are_those_that_vary(groups: str, axes: tuple[str, ...], size: int) -> None:
    line = f"ROOT %r = f32[8]{{0}} all-reduce(%p), replica_groups={groups}, to_apply=%add"
    (only,) = found(entry("%p = f32[8]{0} parameter(0)", line))
    assert (only.axes, only.group_size) == (axes, size)


# -- what moves

X = "%p = f32[8,4]{1,0} parameter(0)"


def test_payload_is_the_whole_array_and_wire_a_ring() -> None:
    moved = found(
        entry(
            X,
            "%b = bf16[6]{0} parameter(1)",
            f"%ar = f32[8,4]{{1,0}} all-reduce(%p), {DATA}, to_apply=%add",
            "%ag = f32[8,16]{1,0} all-gather(%p), replica_groups=[2,4]<=[8], dimensions={1}",
            f"%rs = f32[4,4]{{1,0}} reduce-scatter(%p), {DATA}, dimensions={{0}}, to_apply=%add",
            f"%aa = f32[8,4]{{1,0}} all-to-all(%p), {DATA}, dimensions={{0}}",
            "%cp = f32[8,4]{1,0} collective-permute(%p), source_target_pairs={{0,2},{2,0}}",
            f"%both = (f32[8,4]{{1,0}}, bf16[6]{{0}}) all-reduce(%p, %b), {DATA}, to_apply=%add",
        )
    )
    assert [(c.kind, c.payload, c.wire) for c in moved] == [
        ("all-reduce", 128, 128.0),
        ("all-gather", 512, 384.0),
        ("reduce-scatter", 128, 64.0),
        ("all-to-all", 128, 64.0),
        ("collective-permute", 128, 128.0),
        ("all-reduce", 140, 140.0),
    ]
    assert moved[1].arrays[0].dims == (8, 16)
    assert moved[5].dtypes == ("bf16", "f32")


def test_a_group_of_one_moves_nothing() -> None:
    line = "ROOT %r = f32[8,4]{1,0} all-reduce(%p), replica_groups=[8,1]<=[8], to_apply=%add"
    assert [(c.axes, c.wire) for c in found(entry(X, line))] == [((), 0.0)]


def test_totals_add_up_a_step() -> None:
    trips = TRIPS.replace("5", "4")
    reduced = f"%r = f32[8]{{0}} all-reduce(%p), {DATA}, to_apply=%add"
    program = (
        LOOP,
        entry("%p = f32[8]{0} parameter(0)", reduced, f"%w = (s32[]) {WHILE}, {trips}"),
    )
    (row,) = totals(found(*program))
    assert (row.kind, row.axes, row.instructions, row.times) == ("all-reduce", ("data",), 2, 5)
    assert (row.payload, row.wire, row.wire_overlapped) == (5 * 32, 5 * 32.0, 0.0)


# -- overlap

START = "%s = ((f32[8,4]{1,0}), f32[16,4]{1,0}) all-gather-start(%p), GROUPS, dimensions={0}"
START = START.replace("GROUPS", DATA)
DONE = "%d = f32[16,4]{1,0} all-gather-done(%s)"
DOT = "%m = f32[8,8]{1,0} dot(%p, %p), lhs_contracting_dims={1}, rhs_contracting_dims={1}"


def test_products_between_start_and_done() -> None:
    (hidden,) = found(entry(X, START, DOT, DONE))
    assert hidden.is_async
    assert hidden.is_overlapped
    assert hidden.hidden_flops == 2 * 8 * 8 * 4
    assert hidden.payload == 256
    (exposed,) = found(entry(X, START, DONE, DOT))
    assert exposed.is_async
    assert not exposed.is_overlapped


def test_a_start_that_xla_runs_synchronously() -> None:
    config = 'backend_config={"collective_backend_config":{"is_sync":true}}'
    (only,) = found(entry(X, f"{START}, {config}", DOT, DONE))
    assert not only.is_async
    assert not only.is_overlapped


def test_a_start_that_is_handed_on() -> None:
    (only,) = found(entry(X, START, "%h = f32[16,4] get-tuple-element(%s), index=1", DOT))
    assert only.is_overlapped  # its done is in the loop's next turn


def test_collectives_inside_fusions_and_asynchronous_computations() -> None:
    fused = f"""
%wrapped (q: f32[8,4]) -> f32[8,4] {{
  %q = f32[8,4]{{1,0}} parameter(0)
  ROOT %inner = f32[8,4]{{1,0}} all-reduce(%q), {DATA}, to_apply=%add
}}
"""
    shape = "((f32[8,4]{1,0}), f32[8,4]{1,0})"
    for opcode in ("fusion", "async"):
        start = f"%f = {shape} {opcode}-start(%p), calls=%wrapped"
        (only,) = found(fused, entry(X, start, DOT, f"%d = f32[8,4]{{1,0}} {opcode}-done(%f)"))
        assert (only.name, only.kind, only.payload) == ("f", "all-reduce", 128)
        assert only.is_overlapped


def test_an_all_reduce_of_which_a_fusion_keeps_a_slice() -> None:
    fused = f"""
%all-reduce-scatter (q: f32[8,4]) -> f32[4,4] {{
  %q = f32[8,4]{{1,0}} parameter(0)
  %inner = f32[8,4]{{1,0}} all-reduce(%q), {DATA}, to_apply=%add
  %zero = s32[] constant(0)
  ROOT %slice = f32[4,4]{{1,0}} dynamic-slice(%inner, %zero, %zero), dynamic_slice_sizes={{4,4}}
}}
"""
    (only,) = found(
        fused, entry(X, "%f = f32[4,4] fusion(%p), kind=kCustom, calls=%all-reduce-scatter")
    )
    assert (only.kind, only.payload, only.wire) == ("reduce-scatter", 128, 64.0)


def test_devices_are_counted_row_by_row() -> None:
    """What the tests above take for granted: XLA's numbering is that of our mesh."""
    order = np.arange(8).reshape(tuple(MESH.values()))
    assert order[0, 1, 0] == 2
