"""Pictures: valid SVG of bounded size that draws every bar once, describes its content, and is accessible."""

import io
import re
from dataclasses import replace
from itertools import combinations, product
from xml.etree import ElementTree

import pytest
from rich.console import Console

from course.machines import machine
from course.program.memory import Alive, Memory
from course.program.simulator import Bar, DeviceTime, Timeline
from course.render import memory_svg, side_by_side, timeline_svg
from course.render.captions import conclusion
from course.render.lanes import FILLS
from course.render.pictures import LEFT, MAX_LETTERS, RIGHT, WIDTH
from course.render.quantities import (
    axis_texts,
    bytes_text,
    capacity_text,
    count_text,
    dtype_text,
    seconds_text,
    share_text,
    ticks,
)
from course.render.svg import AXES, DARK, KERNEL, LETTER, LIGHT, MATMUL, Mark, contrast, merged, text_on
from course.render.tables import FittingLines, Section

SVG = "{http://www.w3.org/2000/svg}"


def bar(stream, start, end, kind="dot_general", line="cell:1", device=0):
    return Bar(device, stream, start, end, kind, line, (4, 8), "bf16", 64.0 if kind == "dot_general" else 0.0, 96.0)


def timeline_of(*bars, members=((0, 1, 2, 3),), seconds=None):
    """A timeline of given bars; the times of its devices follow from them."""
    end = max(b.end for b in bars)
    devices = []
    for alike in members:
        busy = sum(b.end - b.start for b in bars if b.stream == "compute" and b.device == alike[0])
        devices.append(DeviceTime(alike[0], alike, end, busy, 0.0, {}))
    return Timeline("plain", {"data": 4}, seconds or end, tuple(devices), (), bars)


# Computes, sends something hidden, then waits for a transfer that the others joined late.
STEP = timeline_of(
    bar("compute", 0.0, 0.4),
    bar("data", 0.1, 0.3, "all_gather", "cell:2"),
    bar("data", 0.6, 0.8, "reduce_scatter", "cell:3"),
    bar("compute", 0.8, 1.0, "add", "cell:4"),
)
MEMORY = Memory(2**20, 2**21, 2**19, 3 * 2**20, (Alive(2**20, (512, 512), "f32", "add", "a:1"),) * 2)


def rectangles(picture, height=None):
    """Rectangles with a tooltip: position, width, fill and tooltip; only those of one height, if given."""
    rects = []
    for rect in ElementTree.fromstring(picture).iter(f"{SVG}rect"):
        title = rect.find(f"{SVG}title")
        if title is not None and title.text and height in (None, float(rect.get("height", "0"))):
            rects.append((float(rect.get("x", "0")), float(rect.get("width", "0")), rect.get("fill"), title.text))
    return rects


def test_a_timeline_shows_bars_exposed_transfers_and_waits_to_scale():
    picture = timeline_svg(STEP)
    assert ">exposed: data<" in picture and ">waiting for others<" in picture  # in the legend
    rects = rectangles(picture)
    first, wait, exposed = rects[:3]
    assert wait[0] - first[0] == pytest.approx(0.4 * WIDTH, abs=0.1)
    assert exposed[0] - wait[0] == pytest.approx(0.2 * WIDTH, abs=0.1)
    assert first[1] == pytest.approx(0.4 * WIDTH, abs=1)
    assert [title.split("\n")[-1] for *_, title in rects] == [
        "cell:1",
        "cell:3",
        "cell:3",
        "cell:4",
        "cell:2",
        "cell:3",
    ]
    assert rects[0][2:] == (MATMUL, "matmul bf16[4,8], 400 ms, 64 FLOP, 96 B moved\ncell:1")
    assert rects[1][3].startswith("waiting for others, ") and rects[1][2].endswith("-w)")
    assert rects[2][3].startswith("exposed: data, ") and rects[2][2].endswith("-0)")
    assert [fill for _, _, fill, _ in rects[3:]] == [KERNEL, AXES[0], AXES[0]]


def test_several_timelines_share_one_scale():
    half = timeline_of(bar("compute", 0.0, 0.5))
    rects = rectangles(side_by_side({"yours": half, "naive": timeline_of(bar("compute", 0.0, 1.0))}))
    assert rects[0][1] == pytest.approx(WIDTH / 2, abs=1) and rects[1][1] == pytest.approx(WIDTH, abs=1)
    assert rectangles(timeline_svg(half, until=1.0))[0] == rects[0]


def test_a_step_of_more_than_three_times_the_reference_is_cut_off_at_twice_the_longest_of_the_rest():
    slow = timeline_of(bar("compute", 0.0, 2.0), bar("compute", 2.0, 2.3), bar("compute", 2.5, 9.0))
    steps = {
        "yours": timeline_of(bar("compute", 0.0, 1.2)),
        "reference": timeline_of(bar("compute", 0.0, 1.0)),
        "slow": slow,
    }
    picture = side_by_side(steps, reference="reference")
    assert "slow: 9 s, cut off at 2.4 s" in picture
    rects = rectangles(picture)
    assert rects[0][1] == pytest.approx(WIDTH / 2, abs=1)
    assert [x + width <= LEFT + WIDTH for x, width, *_ in rects] == [True] * 4
    assert "cut off" not in side_by_side(steps) and "cut off" not in side_by_side(steps, reference="slow")
    assert "cut off" not in timeline_svg(steps["slow"], until=1e-9)
    threefold = {"reference": steps["reference"], "b": timeline_of(bar("compute", 0.0, 3.0))}
    assert "cut off" not in side_by_side(threefold, reference="reference")


def test_no_grid_line_runs_through_a_heading():
    root = ElementTree.fromstring(side_by_side({"yours": STEP, "a name that is long": STEP}))
    headings = [float(e.get("y", "")) for e in root.iter(f"{SVG}text") if e.get("font-weight") == "600"]
    lines = [e.get("d", "") for e in root.iter(f"{SVG}path") if e.get("stroke-opacity") == "0.18"]
    spans = [(float(a), float(b)) for d in lines for a, b in re.findall(r",([\d.]+)V([\d.]+)", d)]
    assert len(headings) == 2 and spans
    assert not any(low < y - 3 < high for y in headings for low, high in spans)


def test_a_picture_can_be_read_without_scrolling_at_700_px():
    least = float(re.findall(r"min-width:([\d.]+)px", timeline_svg(STEP))[0])
    assert least <= 700 - 2 * 24
    assert 11 * least / (LEFT + WIDTH + RIGHT) >= 9


def test_the_conclusion_names_the_collectives_that_the_step_waits_for():
    device = DeviceTime(0, (0, 1, 2, 3), 1.0, 0.6, 0.2, {"data": 0.2})
    waits = replace(STEP, devices=(device,))
    assert conclusion(waits).startswith("20% of the step waits")
    exposed = replace(waits, bars=tuple(replace(b, start=0.45) if b.line == "cell:3" else b for b in waits.bars))
    assert conclusion(exposed) == "35% of the step waits for reduce-scatters of cell:3; 40% in all computes nothing."
    busy = timeline_of(bar("compute", 0.0, 0.9), bar("compute", 0.9, 1.0, "add", ""))
    assert conclusion(busy) == "100% of the step computes, 90% of it cell:1; almost nothing waits."


def test_values_of_the_wrong_type_are_refused_with_a_sentence():
    for wrong in (MEMORY, "file", None):
        with pytest.raises(TypeError, match=r"draws a Timeline, .* as \.timeline"):
            timeline_svg(wrong)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"draws a Memory, .* as \.memory"):
        memory_svg(STEP)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="at least one timeline"):
        side_by_side({})


def test_float32_is_called_tf32_where_its_peak_is_that():
    assert dtype_text(machine("8xH100"), "f32") == "TF32"
    assert [dtype_text(machine("8xTPUv5e"), "f32"), dtype_text(machine("8xH100"), "bf16")] == ["f32", "bf16"]


def test_a_picture_describes_its_content_for_screen_readers():
    root = ElementTree.fromstring(side_by_side({"yours": STEP, "naive": STEP}))
    title, desc = root.find(f"{SVG}title"), root.find(f"{SVG}desc")
    assert root.get("role") == "img" and title is not None and desc is not None
    assert root.get("aria-labelledby") == f"{title.get('id')} {desc.get('id')}"
    assert title.text == "Timeline of a step on plain, data=4: yours: 1 s, naive: 1 s"
    assert desc.text and desc.text.startswith("yours: device 0 (and 3 more alike) computes 600 ms")


def test_pictures_are_self_contained_and_have_different_ids():
    pictures = [timeline_svg(STEP), timeline_svg(replace(STEP, seconds=2.0)), memory_svg(MEMORY)]
    for picture in pictures:
        assert set(re.findall(r"https?://[^\"]*", picture)) == {"http://www.w3.org/2000/svg"}
        assert "<script" not in picture and "<style" not in picture
        ids = re.findall(r'id="([^"]+)"', picture)
        assert len(set(ids)) == len(ids)
    ElementTree.fromstring(alone := timeline_svg(STEP, file=True))
    assert "prefers-color-scheme:dark" in alone
    names = [set(re.findall(r'id="([^"]+)"', picture)) for picture in pictures]
    assert not any(one & other for one, other in combinations(names, 2))


def test_a_line_is_escaped_and_operations_without_one_were_inserted_by_jax():
    assert rectangles(timeline_svg(timeline_of(bar("compute", 0.0, 1.0, line=""))))[0][3].endswith("\ninserted by JAX")
    nasty = timeline_of(bar("compute", 0.0, 1.0, line="<script>\x1b[31m&\"'"))
    picture = timeline_svg(nasty)
    assert "<script" not in picture and "\x1b" not in picture
    assert rectangles(picture)[0][3].endswith("<script>\ufffd[31m&\"'")


def test_a_hundred_thousand_bars_make_a_small_picture_in_which_no_time_is_lost():
    bars = [bar("compute", i * 1e-5, (i + 0.9) * 1e-5, ("dot_general", "add")[i % 2]) for i in range(100_000)]
    bars += [bar("data", i * 1e-5, (i + 0.5) * 1e-5, "all_gather") for i in range(0, 100_000, 10)]
    picture = timeline_svg(timeline_of(*sorted(bars, key=lambda b: b.start)))
    assert len(picture.encode()) < 300_000
    counted = [int(title.split()[0]) for *_, title in rectangles(picture) if re.match(r"\d+ operations", title)]
    assert sum(counted) == 110_000


def test_many_streams_and_devices_make_a_small_picture_too():
    devices = [(i,) for i in range(64)]
    streams = ("compute", "data", "pipe", "tensor")
    places = product(range(300), range(64), streams)
    bars = [bar(stream, at * 1e-3, (at + 0.7) * 1e-3, device=device) for at, device, stream in places]
    picture = timeline_svg(timeline_of(*bars, members=tuple(devices)))
    assert len(picture) <= MAX_LETTERS
    assert "and 56 more that behave differently, not drawn" in picture


def test_single_axes_have_colours_of_their_own_and_labels_fit():
    streams = ("data", "data,pipe", "data,pipe,tensor", "data,tensor", "pipe", "pipe,tensor", "tensor")
    sent = [bar(stream, i * 1e-3, (i + 0.7) * 1e-3, "all_gather") for i, stream in enumerate(streams)]
    picture = timeline_svg(timeline_of(bar("compute", 0, 0.01), *sent))
    labels = re.findall(r">sending over ([^<]*)<", picture)
    assert labels == ["data", "pipe", "tensor", "data,pipe or data,tensor or pipe,tensor or data,pipe,tensor"]
    assert ">over 3 axes<" in picture and ">over pipe,tensor<" in picture and ">over data,pipe,tensor<" not in picture


def test_long_bars_are_never_drawn_together():
    marks = [Mark(i, i + 1, MATMUL, (), "", "matmul") for i in range(5)]
    assert merged(marks, 1.0) == marks
    assert [round(m.end - m.start) for m in merged(marks, 1.5)] == [3, 2]


@pytest.mark.parametrize("colour", sorted({MATMUL, KERNEL, *AXES, *(c for fills in FILLS.values() for c in fills)}))
def test_colours_contrast_with_light_and_dark_and_with_their_labels(colour):
    assert min(contrast(colour, LIGHT), contrast(colour, DARK)) >= 3
    assert contrast(colour, text_on(colour)) >= 4.5


def test_memory_shows_live_arrays_at_the_peak_with_their_lines():
    rects = rectangles(memory_svg(MEMORY, 2.0**23))
    sizes = ["inputs: 1 MiB", "outputs: 1.5 MiB", "temporaries: 3 MiB"]
    assert [title for *_, title in rects] == [*sizes, "2 × f32[512,512], add, a:1: 2 MiB"]
    picture = memory_svg(MEMORY, 2.0**23)
    assert "peak 5.5 MiB of 8 MiB (0.00839 GB)" in picture and "1 MiB in smaller ones" in picture


def test_columns_of_the_memory_picture_make_room_for_their_longest_text():
    long = replace(MEMORY.alive[0], shape=(12, 1, 8, 2, 1024, 1024), line="a_module_with_a_long_name.py:1234")
    root = ElementTree.fromstring(memory_svg(replace(MEMORY, alive=(long, long, MEMORY.alive[0]))))
    texts = [(float(t.attrib["x"]), t.text or "") for t in root.iter() if t.tag.endswith("text")]
    row = next(i for i, (_, label) in enumerate(texts) if label.startswith("2 × f32[12,"))
    ends = [x + LETTER * len(label) for x, label in texts[row : row + 3]]
    assert ends[0] < texts[row + 1][0] and ends[1] < texts[row + 2][0]
    assert ends[2] < float(root.attrib["viewBox"].split()[2])


def test_a_step_without_temporaries_has_a_picture():
    ElementTree.fromstring(memory_svg(Memory(0, 0, 0, 0, ())))
    still = Timeline("plain", {"data": 1}, 0.0, (DeviceTime(0, (0,), 0.0, 0.0, 0.0, {}),), ())
    ElementTree.fromstring(timeline_svg(still))


def test_quantities_read_as_people_write_them():
    expected = "0 s, 20.6 ms, 1 ms, 72 µs, 3.2 s, 0 s"
    assert ", ".join(map(seconds_text, (0, 0.02064, 9.996e-4, 7.2e-5, 3.2, 1e-12))) == expected
    assert [bytes_text(b) for b in (0, 17, 2**20, 1536, 5.4 * 2**30)] == ["0 B", "17 B", "1 MiB", "1.5 KiB", "5.4 GiB"]
    assert [count_text(c, "FLOP") for c in (0, 12, 7.148e12)] == ["0 FLOP", "12 FLOP", "7.15 TFLOP"]
    assert [share_text(p, 1) for p in (0, 0.305, 1e-6, 1, 5e3)] == ["0%", "30.5%", "< 0.1%", "100%", "500,000%"]
    expected = "74.5 GiB (80 GB), 22.4 GiB (24 GB), 131 GiB (141 GB)"
    assert ", ".join(map(capacity_text, (80e9, 24e9, 141e9))) == expected
    assert axis_texts(ticks(0.0206)) == ["0", "5 ms", "10 ms", "15 ms", "20 ms"]
    ends = [10.0**power * factor for power in range(-9, 2) for factor in (1, 1.7, 3, 7.5, 9.99)]
    assert all(2 <= len(ticks(end)) <= 8 for end in ends)


def test_no_name_of_a_line_is_broken_at_80_columns():
    line, columns = (
        "context_parallel.py:228",
        ("your line", "computing>", "of step>", "sending>", "FLOPs>", "operations"),
    )
    row = (line, "15.9 ms", "81.5%", "3.54 ms", "51.5 GFLOP", "dynamic-update-slice, broadcast-in-dim")
    for width, whole in ((120, line), (80, line), (76, "context_parallel.py")):
        console = Console(file=io.StringIO(), width=width)
        console.print(FittingLines(Section("", columns, (row,))))
        shown = console.file.getvalue()  # type: ignore[attr-defined]
        assert all(word in shown for word in (whole, ":228", "81.5%", "51.5 GFLOP", "dynamic-update-slice")), shown
        assert width == 120 or not re.search(r"^\s*,", shown, re.MULTILINE)
