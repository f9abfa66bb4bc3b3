"""Summary of a timeline: the same picture from bounded data, and a refusal of invalid data."""

import json
from copy import deepcopy

import pytest

from course.program.simulator import Bar, DeviceTime, Timeline
from course.program.simulator.gaps import gaps
from course.render import side_by_side
from course.render.captions import compare_steps
from course.render.timeline_summary import MOST_BARS, MOST_BYTES, from_summary, pictured, to_summary

MS = 1e-3


def step(count=2, line="cell:{}", seconds=None):
    """``count`` matmuls of a millisecond, each after a gather that takes half a millisecond."""
    bars, at = [], 0.0
    for i in range(count):
        bars.append(Bar(0, "data", at, at + MS / 2, "all_gather", line.format(i), (8, 4), "f32", 0.0, 96.0))
        matmul = "dot_general", line.format(i), (8, 4), "f32", 64.0, 1.0
        bars.append(Bar(0, "compute", at + MS / 2, at + 1.5 * MS, *matmul))
        at += 1.5 * MS
    waits = DeviceTime(0, (0, 1, 2), seconds or at, count * MS, 0.0, {"data": count * MS / 2})
    early = DeviceTime(3, (3,), at / 2, at / 2, 0.0, {"data": 0.0})
    return Timeline("8xH100", {"tensor": 1, "data": 4}, seconds or at, (early, waits), (), tuple(bars))


def test_a_summary_that_is_read_back_draws_the_same_and_is_the_same():
    summary = json.loads(json.dumps(to_summary(step())))
    restored = from_summary(summary)
    assert to_summary(restored) == summary and json.dumps(to_summary(restored)) == json.dumps(summary)
    assert (restored.seconds, restored.exposed_seconds, restored.busy) == (3 * MS, MS, step().busy)
    assert list(restored.mesh) == ["tensor", "data"] and [d.device for d in restored.devices] == [0, 3]
    (device,) = pictured(restored).devices
    assert [gap.line for gap in gaps(restored, device)] == ["cell:0", "cell:1"]
    assert side_by_side({"a": pictured(restored)}) == side_by_side({"a": pictured(step())})


def test_a_summary_is_small_however_many_bars_and_however_long_the_lines():
    for many in (step(5000), step(2000, line="x" * 95 + "{}")):
        summary = to_summary(many)
        restored = from_summary(summary)
        assert len(summary["bars"]) <= MOST_BARS and len(json.dumps(summary)) <= MOST_BYTES
        assert {bar.stream for bar in restored.bars} == {"compute", "data"}
        assert sum(bar.flops for bar in restored.bars) == sum(bar.flops for bar in many.bars)
        assert max(bar.end for bar in restored.bars) == pytest.approx(many.seconds)
        assert any(" more" in bar.kind for bar in restored.bars)
        assert "matmul and" in side_by_side({"": pictured(restored)})


def test_a_step_that_takes_no_time_ends():
    still = [Bar(0, "compute", 0.0, 0.0, "add", "a:1", (), "f32", 0.0, 0.0)] * (2 * MOST_BARS)
    to_summary(Timeline("m", {"data": 1}, 0.0, (DeviceTime(0, (0,), 0.0, 0.0, 0.0, {}),), (), tuple(still)))


def changed(path, value):
    summary = deepcopy(to_summary(step()))
    at = summary
    for key in path[:-1]:
        at = at[key]
    at[path[-1]] = value
    return summary


@pytest.mark.parametrize(
    "data",
    [
        None,
        [],
        {},
        "text",
        changed(["bars", 0], [1, 2]),
        changed(["bars", 0, 0], 99),
        changed(["bars", 0, 0], -1),
        changed(["bars", 0, 1], 10**30),
        changed(["bars", 0, 2], -5),
        changed(["bars", 1, 7], float("nan")),
        changed(["bars", 1, 7], "64"),
        changed(["bars", 0, 6], {"a": 1}),
        changed(["texts", 1], "<script>"),
        changed(["texts", 0], "x" * 101),
        changed(["texts", 0], 7),
        changed(["devices"], []),
        changed(["devices", 0, "exposed"], []),
        changed(["devices", 0, "members"], ["0"]),
        changed(["seconds"], float("inf")),
        changed(["mesh"], {"data": 4}),
        changed(["machine"], None),
        changed(["bars"], to_summary(step())["bars"] * 2000),
    ],
)
def test_data_that_is_no_timeline_summary_is_refused(data):
    with pytest.raises(ValueError):
        from_summary(data)


def test_the_comparison_with_a_reference_has_both_figures():
    sentences = compare_steps(step(4), step(2))
    assert "would take 6 ms and the course's own 3 ms, so yours is 2.00 times as long" in sentences
    assert "takes 2 ms of yours and 1 ms of the course's own" in sentences
    assert "3 ms, so both take the same time." in compare_steps(step(), step())
