"""What is kept of a compiled plan: the text of a program, without what changes by itself."""

from shardtrain.plan.artifacts import stable_text

PROGRAM = """\
HloModule jit_step, is_scheduled=true

FileNames
1 "{folder}/step.py"

FunctionNames
1 "step"

FileLocations
1 {{file_name_id=1 function_name_id=1 line={line} end_line={line} column=2 end_column=104}}

StackFrames
1 {{file_location_id=1 parent_frame_id=1}}


%fused (p.0: f32[8]) -> f32[8] {{
  %p.0 = f32[8]{{0}} parameter(0), metadata={{op_name="state.params['w']"}}
  ROOT %neg = f32[8]{{0}} negate(%p.0), metadata={{op_name="jit(step)/neg" stack_frame_id={frame}}}
}}
"""
KEPT = """\
HloModule jit_step, is_scheduled=true

%fused (p.0: f32[8]) -> f32[8] {
  %p.0 = f32[8]{0} parameter(0), metadata={op_name="state.params['w']"}
  ROOT %neg = f32[8]{0} negate(%p.0), metadata={op_name="jit(step)/neg"}
}
"""


def test_files_and_lines_are_left_out_and_nothing_else() -> None:
    for folder, line, frame in (("/home/me", 7, 117), ("/srv/other", 8, 3)):
        assert stable_text(PROGRAM.format(folder=folder, line=line, frame=frame)) == KEPT
    assert stable_text(KEPT) == KEPT
