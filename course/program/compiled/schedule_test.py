"""The compiled schedule, on small texts: parsing, pricing, replay, and its collectives."""

from dataclasses import replace

import pytest

from course.machine import Efficiency, Link, Machine
from course.program import ProgramError
from course.program.compiled.collectives import collectives
from course.program.compiled.groups import replica_groups
from course.program.compiled.kernels import work_of
from course.program.compiled.replay import replay
from course.program.compiled.schedule import parse_schedule, walk

# One second for a MB of memory traffic, for a MFLOP of products, for a MB on a link; nothing else costs.
PLAIN = Machine("plain", "none", 8, {"bf16": 1e6, "f32": 1e6}, 1e18, 1e9, 1e6, (Link("wire", 8, 1e6, 0.0),))
TABLES = """
FileNames
1 "cell-a"
2 "/somewhere/worker.py"

FileLocations
1 {file_name_id=1 function_name_id=1 line=7 end_line=7 column=2 end_column=2}
2 {file_name_id=2 function_name_id=1 line=9 end_line=9 column=2 end_column=2}

StackFrames
1 {file_location_id=1 parent_frame_id=1}
2 {file_location_id=2 parent_frame_id=2}

"""


def text_of(entry, computations="", scheduled="true"):
    head = f"HloModule jit_call, is_scheduled={scheduled}, num_partitions=8\n{TABLES}{computations}\n"
    return f"{head}ENTRY %main () -> f32[] {{\n{entry}\n}}\n"


def schedule_of(entry, computations=""):
    return parse_schedule(text_of(entry, computations))


GATHER = """
  %x = f32[100,100]{1,0} parameter(0)
  %w = f32[100,100]{1,0} parameter(1)
  %start = (f32[100,100]{1,0}, f32[800,100]{1,0}) all-gather-start(%x), replica_groups=[1,8]<=[8], dimensions={0}, START
BETWEEN  %done = f32[800,100]{1,0} all-gather-done(%start), metadata={op_name="a" stack_frame_id=1}
  ROOT %y = f32[800,100]{1,0} dot(%done, %w), DIMS, metadata={op_name="b" stack_frame_id=2}
"""
DIMS = "lhs_contracting_dims={1}, rhs_contracting_dims={0}"
START = 'metadata={op_name="a" stack_frame_id=1}, backend_config={"collective_backend_config":{"is_sync":false}}'
GATHER = GATHER.replace("START", START).replace("DIMS", DIMS)
DOT = f"  %z = f32[100,100]{{1,0}} dot(%x, %w), {DIMS}\n"
TRIVIAL = "  %z = f32[] constant(1)\n"


# Reading


def test_instructions_keep_order_shapes_operands_and_the_learners_line():
    schedule = schedule_of(GATHER.replace("BETWEEN", DOT))
    entry = schedule.computations[schedule.entry]
    assert [i.opcode for i in entry.instructions] == (
        "parameter parameter all-gather-start dot all-gather-done dot".split()
    )
    start = entry.by_name["start"]
    assert [result.shape for result in start.results] == [(100, 100), (800, 100)]
    assert start.operands == ("x",) and start.line == "cell-a:7" and not start.is_sync
    assert entry.root.name == "y" and entry.root.line == ""  # the worker's own path is not a learner's line


@pytest.mark.parametrize(
    ("groups", "expected"),
    [
        ("{{0,1},{2,3}}", [[0, 1], [2, 3]]),
        ("{}", [[0, 1, 2, 3]]),
        ("[2,2]<=[4]", [[0, 1], [2, 3]]),
        ("[2,2]<=[2,2]T(1,0)", [[0, 2], [1, 3]]),
        ("mesh['a'=2,'b'=2] {'b'}", [[0, 1], [2, 3]]),
        ("mesh['a'=2,'b'=1,'c'=2] {'a'}", [[0, 2], [1, 3]]),
        ("mesh['a'=4] {'a':(1)2}", [[0, 2], [1, 3]]),
        ("mesh['a'=4] {'a':(2)2}", [[0, 1], [2, 3]]),
        ("mesh['a'=2,'b'=2] {'a','b'}", [[0, 1, 2, 3]]),
        ("mesh['a'=4,'b'=1], device_ids=([2,2]T(1,0)) {'a'}", [[0, 2, 1, 3]]),
        ("mesh['a'=2,'b'=2], device_ids=([2,2]T(1,0)) {'b'}", [[0, 2], [1, 3]]),
    ],
)
def test_groups_are_read_in_every_form(groups, expected):
    schedule = schedule_of(f"  ROOT %r = f32[] all-reduce(%r), replica_groups={groups}, to_apply=%add")
    assert replica_groups(schedule.computations["main"].root, 4) == expected


def test_loop_multiplies_its_instructions_by_its_trips():
    schedule = schedule_of(LOOP, BODY)
    assert {i.name: (trips, in_loop) for _, i, trips, in_loop in walk(schedule)} == {
        "t": (1, False),
        "l": (1, False),
        "p": (5, True),
        "c": (5, True),
    }


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (text_of("  ROOT %a = f32[] parameter(0)", scheduled="false"), "not a schedule"),
        ("HloModule m, is_scheduled=true\n", "no ENTRY"),
        (text_of("  ROOT %a = f32[] parameter(0"), "cannot be read"),
    ],
)
def test_other_texts_are_refused(text, message):
    with pytest.raises(ProgramError, match=message):
        parse_schedule(text)


# Kernels

FUSED = """
%fused (p0: f32[12,100], p1: s32[], p2: f32[12,100]) -> f32[12,100] {
  %p0 = f32[12,100]{1,0} parameter(0)
  %p1 = s32[] parameter(1)
  %zero = s32[] constant(0)
  %slice = f32[1,100]{1,0} dynamic-slice(%p0, %p1, %zero), dynamic_slice_sizes={1,100}
  %twice = f32[1,100]{1,0} add(%slice, %slice)
  %p2 = f32[12,100]{1,0} parameter(2)
  ROOT %update = f32[12,100]{1,0} dynamic-update-slice(%p2, %twice, %p1, %zero)
}
"""
LIBRARY = (
    '  ROOT %r = (f32[10,30]{1,0}, s8[4096]{0}) custom-call(%a, %b), custom_call_target="__cublas$lt$matmul", '
    'backend_config={"gemm_backend_config":{"dot_dimension_numbers":{"lhs_contracting_dimensions":["1"],'
    '"rhs_contracting_dimensions":["0"],"lhs_batch_dimensions":[],"rhs_batch_dimensions":[]}}}'
)


def work(entry, computations=""):
    schedule = schedule_of(entry, computations)
    computation = schedule.computations[schedule.entry]
    return work_of(schedule, computation, computation.root)


def test_fusion_touches_the_slice_it_reads_and_the_update_it_writes():
    entry = """  %a = f32[12,100]{1,0} parameter(0)
  %i = s32[] parameter(1)
  %b = f32[12,100]{1,0} parameter(2)
  ROOT %f = f32[12,100]{1,0} fusion(%a, %i, %b), kind=kLoop, calls=%fused"""
    priced = work(entry, FUSED)
    assert priced.bytes == pytest.approx(400 + 4 + 400)
    assert (priced.flops, priced.operations) == (0.0, 100.0)


def test_fusion_with_a_product_counts_its_flops_and_dtype():
    computations = """
%fused (p0: bf16[10,20], p1: bf16[20,30]) -> bf16[10,30] {
  %p0 = bf16[10,20]{1,0} parameter(0)
  %p1 = bf16[20,30]{1,0} parameter(1)
  ROOT %d = bf16[10,30]{1,0} dot(%p0, %p1), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}
"""
    entry = """  %a = bf16[10,20]{1,0} parameter(0)
  %b = bf16[20,30]{1,0} parameter(1)
  ROOT %f = bf16[10,30]{1,0} fusion(%a, %b), kind=kCustom, calls=%fused"""
    priced = work(entry, computations)
    assert (priced.flops, priced.dtype, priced.bytes) == (2 * 10 * 20 * 30, "bf16", 2 * (200 + 600 + 300))


def test_library_product_counts_its_flops_and_not_its_workspace():
    entry = f"  %a = f32[10,20]{{1,0}} parameter(0)\n  %b = f32[20,30]{{1,0}} parameter(1)\n{LIBRARY}"
    priced = work(entry)
    assert (priced.flops, priced.bytes) == (2 * 10 * 20 * 30, 4 * (200 + 600 + 300))


# Collectives


@pytest.mark.parametrize(
    ("between", "sync", "asynchronous", "spans"),
    [(DOT, "false", True, True), (TRIVIAL, "false", True, False), ("", "true", False, False)],
)
def test_collective_spans_a_product_only_if_one_is_scheduled_before_its_end(between, sync, asynchronous, spans):
    text = GATHER.replace("BETWEEN", between).replace('"is_sync":false', f'"is_sync":{sync}')
    (collective,) = collectives(schedule_of(text), {"data": 4, "tensor": 2})
    assert (collective.kind, collective.axes, collective.group_size, collective.count) == (
        "all_gather",
        ("data", "tensor"),
        8,
        1,
    )
    assert (collective.operand_bytes, collective.line) == (40_000, "cell-a:7")
    assert (collective.asynchronous, collective.spans_matmul, collective.in_loop) == (asynchronous, spans, False)


# Replay

LOOP = """  %t = (s32[]) parameter(0)
  ROOT %l = (s32[]) while(%t), condition=%cond, body=%body, backend_config={"known_trip_count":{"n":"5"}}"""
BODY = """
%body (p: f32[250000]) -> f32[250000] {
  %p = f32[250000]{0} parameter(0)
  ROOT %c = f32[250000]{0} copy(%p)
}
"""
MESH = {"data": 8}


@pytest.mark.parametrize(
    ("between", "exposed"),
    # The gather sends 7 x 40 kB in 0.28 s; the concurrent product takes 2 s. The product of the whole takes 16 s.
    [(DOT, 0.0), (TRIVIAL, 0.28)],
)
def test_replay_hides_a_transfer_behind_what_is_scheduled_until_its_end(between, exposed):
    result = replay(schedule_of(GATHER.replace("BETWEEN", between)), MESH, PLAIN)
    products = 16.0 + (2.0 if between == DOT else 0.0)
    assert result.busy == result.matmul == pytest.approx(products)
    assert result.seconds == pytest.approx(products + exposed)
    assert sum(result.exposed.values()) == pytest.approx(exposed)


def test_two_transfers_over_one_axis_queue_and_over_two_axes_share_the_link():
    entry = """  %x = f32[250000]{0} parameter(0)
  %a = (f32[250000]{0}, f32[250000]{0}) collective-permute-start(%x), source_target_pairs={{0,1},{1,0}}
  %b = (f32[250000]{0}, f32[250000]{0}) collective-permute-start(%x), source_target_pairs=PAIRS
  %c = f32[250000]{0} collective-permute-done(%a)
  ROOT %d = f32[250000]{0} collective-permute-done(%b)"""
    one_axis = replay(schedule_of(entry.replace("PAIRS", "{{0,1},{1,0}}")), {"data": 2, "tensor": 2}, PLAIN)
    assert one_axis.exposed == {"tensor": pytest.approx(2.0)}
    two_axes = replay(schedule_of(entry.replace("PAIRS", "{{0,2},{2,0}}")), {"data": 2, "tensor": 2}, PLAIN)
    assert two_axes.seconds == pytest.approx(2.0)


def test_loop_takes_its_trips_with_and_without_bars():
    schedule = schedule_of(LOOP, BODY)
    short, long = (replay(schedule, MESH, PLAIN, bars=bars) for bars in (False, True))
    assert short.seconds == long.seconds == pytest.approx(5 * 2.0)
    assert len(long.bars) == 5 and not short.bars


def test_loop_of_unknown_length_is_an_error_that_says_what_to_use():
    with pytest.raises(ProgramError, match=r"does not know how often l runs.*lax\.scan"):
        replay(schedule_of(LOOP.replace("known_trip_count", "other"), BODY), MESH, PLAIN)


def test_branch_costs_as_much_as_its_more_expensive_side():
    cheap = "%cheap (q: f32[250000]) -> f32[250000] {\n  ROOT %q = f32[250000]{0} parameter(0)\n}\n"
    entry = """  %i = s32[] parameter(0)
  %x = f32[250000]{0} parameter(1)
  ROOT %r = f32[250000]{0} conditional(%i, %x, %x), branch_computations={%cheap, %body}"""
    assert replay(schedule_of(entry, BODY + cheap), MESH, PLAIN).seconds == pytest.approx(2.0)


def test_efficiency_of_the_machine_scales_the_replay():
    half = replace(PLAIN, efficiency=Efficiency(memory=0.5))
    assert replay(schedule_of(LOOP, BODY), MESH, half).seconds == pytest.approx(5 * 4.0)


@pytest.mark.parametrize(
    ("target", "operands", "result"),
    [
        ("Forward", ("8,16,16,32", "64,3,3,32"), "8,16,16,64"),
        ("BackwardInput", ("8,16,16,64", "64,3,3,32"), "8,16,16,32"),
        ("BackwardFilter", ("8,16,16,32", "8,16,16,64"), "64,3,3,32"),
    ],
)
def test_library_convolution_and_its_gradients_count_the_same_flops(target, operands, result):
    a, b = operands
    entry = f"""  %a = f32[{a}] parameter(0)
  %b = f32[{b}] parameter(1)
  ROOT %r = (f32[{result}], u8[99]) custom-call(%a, %b), window={{size=3x3 pad=1_1x1_1}}, \
dim_labels=b01f_o01i->b01f, custom_call_target="__cudnn$conv{target}\""""
    priced = work(entry)
    assert (priced.flops, priced.dtype) == (2 * 8 * 16 * 16 * 64 * 9 * 32, "f32")
    assert priced.bytes == 4 * (8 * 16 * 16 * (32 + 64) + 64 * 9 * 32)
