"""Traces and gaps: a trace file agrees with the timeline, in a format that trace readers accept."""

import json

import jax.numpy as jnp
import jsonschema
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P
from trace_lanefix.core import fix_overlaps

from course.program import parse, timeline
from course.program.program_test import program_of, struct
from course.program.simulator.gaps import gaps
from course.program.simulator.timeline_test import MACHINE, RING
from course.program.simulator.trace import IDLE, to_trace, trace_text

# The documented Trace Event Format, as far as we use it: metadata, complete events, and flows bound to their slice.
NUMBER, WHOLE, TEXT = {"type": "number", "minimum": 0}, {"type": "integer", "minimum": 0}, {"type": "string"}


def event(phases, required, **fields):
    same = {"ph": {"enum": phases}, "name": TEXT, "pid": WHOLE, "tid": WHOLE}
    properties = {**same, **fields}
    return {"type": "object", "properties": properties, "required": [*same, *required], "additionalProperties": False}


SCHEMA = {
    "type": "object",
    "required": ["traceEvents"],
    "properties": {
        "displayTimeUnit": {"enum": ["ms", "ns"]},
        "otherData": {"type": "object"},
        "traceEvents": {
            "type": "array",
            "items": {
                "oneOf": [
                    event(["M"], ["args"], args={"type": "object"}),
                    event(
                        ["X"], ["cat", "ts", "dur", "args"], cat=TEXT, ts=NUMBER, dur=NUMBER, args={"type": "object"}
                    ),
                    event(["s"], ["cat", "ts", "id"], cat=TEXT, ts=NUMBER, id=WHOLE),
                    event(["f"], ["cat", "ts", "id", "bp"], cat=TEXT, ts=NUMBER, id=WHOLE, bp={"const": "e"}),
                ]
            },
        },
    },
}


def ring(x, w):
    """A product that overlaps a longer transfer, a product that waits for it, and a sum over all devices at the end."""
    received = lax.ppermute(x, "data", RING)
    return lax.psum(jnp.sum(x[:4] @ w) + jnp.sum(received @ w), "data")


def stages(x):
    """A pipeline's first step: one device computes, the others wait for its message."""
    x = lax.cond(lax.axis_index("data") == 0, lambda x: x @ x, lambda x: x, x)
    received = lax.ppermute(x, "data", RING)
    return received @ received


@pytest.fixture(scope="module", params=["ring", "stages"])
def result(request):
    if request.param == "ring":
        arrays = {"x": struct(64, 4), "w": struct(4, 4)}
        program = program_of(ring, arrays, {"x": P("data"), "w": P()}, P())
    else:
        program = program_of(stages, {"x": struct(32, 4)}, {"x": P("data")}, P("data"))
    return timeline(parse(program), MACHINE)


def test_a_trace_has_the_documented_form(result):
    jsonschema.validate(json.loads(json.dumps(to_trace(result))), SCHEMA)


def test_a_trace_reader_that_knows_perfettos_rules_finds_nothing_to_mend(result, tmp_path):
    (tmp_path / "trace.json").write_text(trace_text(result))
    fix_overlaps(str(tmp_path / "trace.json"), str(tmp_path / "read.json"), 0.0)
    before, after = (json.loads((tmp_path / name).read_text())["traceEvents"] for name in ("trace.json", "read.json"))
    in_order = {json.dumps(e, sort_keys=True) for e in before}
    assert {json.dumps(e, sort_keys=True) for e in after} == in_order


def test_every_bar_is_in_the_trace_with_its_line_and_its_times(result):
    events = [e for e in to_trace(result)["traceEvents"] if e["ph"] == "X" and e["cat"] != "idle"]
    expected = sorted(
        (b.device, round(b.start * 1e9), round(b.end * 1e9), b.line or "unknown line") for b in result.bars
    )
    actual = [(e["pid"], e["ts"] * 1000, (e["ts"] + e["dur"]) * 1000, e["args"]["line"]) for e in events]
    assert [(d, round(s), round(e), line) for d, s, e, line in sorted(actual)] == expected


def test_processes_are_classes_of_devices_and_threads_their_streams(result):
    events = to_trace(result)["traceEvents"]
    processes = [e["args"]["name"] for e in events if e["name"] == "process_name"]
    threads = {e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert len(processes) == len(result.devices)
    assert processes[0] == ("device 0 (and 7 more alike)" if len(processes) == 1 else "device 0")
    assert threads == {"compute", "send over data", IDLE}


def test_an_arrow_leads_from_a_collective_to_the_kernel_that_waited_for_it(result):
    events = to_trace(result)["traceEvents"]
    starts, ends = ({e["id"]: e for e in events if e["ph"] == phase} for phase in "sf")
    assert starts and starts.keys() == ends.keys()
    kernels = {(e["pid"], e["ts"]) for e in events if e["ph"] == "X" and e["cat"] in ("matmul", "kernel")}
    assert all((e["pid"], e["ts"]) in kernels for e in ends.values())


def test_gaps_add_up_to_what_the_timeline_says(result):
    for device in result.devices:
        idle = gaps(result, device)
        exposed = sum(gap.end - gap.start for gap in idle if gap.axes == "data")
        waiting = sum(gap.end - gap.start for gap in idle if not gap.axes)
        assert exposed == pytest.approx(device.exposed.get("data", 0.0), abs=1e-6)
        assert waiting == pytest.approx(device.waiting, abs=1e-6)
