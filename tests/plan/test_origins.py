"""The way back from a value to the argument that it is a part or another form of."""

import pytest

from shardtrain.plan.hlo import Module, parse_hlo
from shardtrain.plan.origins import Origins

HEADER = "HloModule m, is_scheduled=true, entry_computation_layout={(f32[8])->f32[8]}\n"
PAIR = "(s32[], f32[8]{0})"
TWO = 'backend_config={"known_trip_count":{"n":"2"}}'


def module(*computations: str, lines: list[str]) -> Module:
    """A module whose entry has two arguments, `weight` and `other`, and these lines."""
    arguments = [
        f'%{letter} = f32[8]{{0}} parameter({number}), metadata={{op_name="{name}"}}'
        for number, (letter, name) in enumerate((("w", "weight"), ("o", "other")))
    ]
    body = "\n".join(f"  {line}" for line in [*arguments, "%i = s32[] constant(0)", *lines])
    entry = f"ENTRY %main (w: f32[8], o: f32[8]) -> f32[8] {{\n{body}\n}}\n"
    return parse_hlo(HEADER + "\n".join(computations) + entry)


def argument(found: Module, name: str = "x", computation: str = "main") -> str:
    return Origins(found).argument(found.computations[computation], name)


@pytest.mark.parametrize(
    ("lines", "name"),
    [
        (["%c = f32[8]{0} copy(%w)", "%x = f32[2,4]{1,0} bitcast(%c)"], "weight"),
        (["%x = f32[2]{0} dynamic-slice(%o, %i), dynamic_slice_sizes={2}"], "other"),
        (["%x = f32[8]{0} add(%w, %o)"], ""),
        (["%x = f32[8]{0} multiply(%w, %w)"], ""),
        (
            [
                "%s = (f32[8]{0}, f32[8]{0}, u32[]) copy-start(%w)",
                "%x = f32[8]{0} copy-done(%s)",
            ],
            "weight",
        ),
        (
            [
                "%t = (f32[8]{0}, f32[8]{0}) tuple(%w, %o)",
                "%b = (f32[8]{0}, f32[8]{0}) opt-barrier(%t)",
                "%x = f32[8]{0} get-tuple-element(%b), index=1",
            ],
            "other",
        ),
        (
            [
                "%s = ((f32[8]{0}, f32[8]{0}), (f32[16]{0}, f32[16]{0})) "
                "all-gather-start(%w, %o), dimensions={0}",
                "%d = (f32[16]{0}, f32[16]{0}) all-gather-done(%s)",
                "%x = f32[16]{0} get-tuple-element(%d), index=1",
            ],
            "other",
        ),
    ],
)
def test_moves(lines: list[str], name: str) -> None:
    assert argument(module(lines=lines)) == name


def loop(root: str, *lines: str) -> Module:
    """A loop over an index and `weight`, whose body is these lines, and its result."""
    body = "\n".join(f"  {line}" for line in lines)
    return module(
        f"""
%body (t: {PAIR}) -> {PAIR} {{
  %t = {PAIR} parameter(0)
  %n = s32[] get-tuple-element(%t), index=0
  %v = f32[8]{{0}} get-tuple-element(%t), index=1
{body}
  ROOT %out = {PAIR} tuple(%n, %{root})
}}
%more (u: {PAIR}) -> pred[] {{
  %u = {PAIR} parameter(0)
  ROOT %yes = pred[] constant(true)
}}
""",
        lines=[
            f"%t0 = {PAIR} tuple(%i, %w)",
            f"%loop = {PAIR} while(%t0), condition=%more, body=%body, {TWO}",
            "%x = f32[8]{0} get-tuple-element(%loop), index=1",
        ],
    )


def test_what_a_loop_hands_on() -> None:
    found = loop("same", "%same = f32[8]{0} copy(%v)")
    assert argument(found) == "weight"
    assert argument(found, "v", "body") == "weight"


def test_what_a_loop_changes() -> None:
    found = loop("new", "%new = f32[8]{0} add(%v, %v)")
    assert argument(found) == ""
    assert argument(found, "v", "body") == ""


PUT = "%put = f32[8]{0} dynamic-update-slice(%v, %p, %n)"


def test_what_a_loop_fills_by_turns() -> None:
    pair = "(f32[8]{0}, f32[8]{0})"
    found = module(
        f"""
%body (t: {pair}) -> {pair} {{
  %t = {pair} parameter(0)
  %v = f32[8]{{0}} get-tuple-element(%t), index=0
  %c = f32[8]{{0}} get-tuple-element(%t), index=1
  %n = s32[] constant(0)
  %p = f32[4]{{0}} slice(%c), slice={{[0:4]}}
  {PUT}
  ROOT %out = {pair} tuple(%put, %c)
}}
%more (u: {pair}) -> pred[] {{
  %u = {pair} parameter(0)
  ROOT %yes = pred[] constant(true)
}}
""",
        lines=[
            "%zero = f32[8]{0} broadcast(%i), dimensions={}",
            f"%t0 = {pair} tuple(%zero, %o)",
            f"%loop = {pair} while(%t0), condition=%more, body=%body, {TWO}",
            "%x = f32[8]{0} get-tuple-element(%loop), index=0",
        ],
    )
    assert argument(found) == "other"
    assert Origins(found).source(found.computations["body"], "put")[1].name == "put"


def test_what_a_loop_fills_of_itself() -> None:
    assert argument(loop("put", "%p = f32[4]{0} slice(%v), slice={[0:4]}", PUT)) == ""


BRANCH = """
%NAME (b: f32[8]) -> f32[8] {
  %NAME.b = f32[8]{0} parameter(0)
  ROOT %NAME.r = f32[8]{0} negate(%NAME.b)
}
"""


def test_branches_and_calls() -> None:
    found = module(
        BRANCH.replace("NAME", "yes"),
        BRANCH.replace("NAME", "no"),
        BRANCH.replace("NAME", "twice"),
        lines=[
            "%c = f32[8]{0} conditional(%i, %w, %o), branch_computations={%yes, %no}",
            "%d = f32[8]{0} call(%w), to_apply=%twice",
            "%e = f32[8]{0} call(%o), to_apply=%twice",
        ],
    )
    assert argument(found, "yes.b", "yes") == "weight"
    assert argument(found, "no.b", "no") == "other"
    assert argument(found, "twice.b", "twice") == ""  # it has two callers
