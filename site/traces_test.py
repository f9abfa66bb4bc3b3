"""Traces that pages offer for download: valid files for Perfetto, with what the picture above shows."""

import gzip
import json
import re
from pathlib import Path

import pytest
from browser_test import SHAPES, watched
from playwright.sync_api import expect

from course.program.simulator.trace import IDLE
from course.render.quantities import seconds_text


def test_the_trace_of_a_timeline_has_the_rows_and_bars_that_are_drawn(browser, served):
    page, noted = watched(browser, *SHAPES["phone"])
    page.goto(f"{served}/profiling/fsdp.html", wait_until="load")
    figure = page.locator("figure.drawn:has(a.trace)").first
    with page.expect_download() as download:
        figure.get_by_role("link", name="Download its trace").click()
    trace = json.loads(Path(download.value.path()).read_text())
    events = trace["traceEvents"]
    threads = [event["args"]["name"] for event in events if event["name"] == "thread_name"]
    labels = figure.locator("svg text").all_text_contents()
    rows = [name for name in threads if name != IDLE]
    assert len(rows) > 1 and all(name.removeprefix("send ") in labels for name in rows)
    bars = [event for event in events if event["ph"] == "X"]
    lasting = {(event["name"], seconds_text(event["dur"] / 1e6)) for event in bars if event["cat"] != "idle"}
    drawn = 0
    for title in figure.locator("svg :is(rect, path) > title").all_text_contents():
        if match := re.match(r"([\w-]+) \w+\[[\d,]*\], (.*?), .*(?:moved|sent)\n", title):
            drawn += 1
            assert match.groups() in lasting, title
    (seconds,) = trace["otherData"]["step_seconds"]
    end = max(event["ts"] + event["dur"] for event in bars)
    assert drawn > 20 and end == pytest.approx(1e6 * seconds, rel=1e-4)
    assert figure.locator("svg > title").text_content().endswith(f": {seconds_text(seconds)}")
    assert noted["failed"] == [] and noted["said"] == []
    page.context.close()


def test_the_recorded_trace_is_downloaded_as_it_was_recorded(browser, served):
    page, noted = watched(browser, *SHAPES["desktop"])
    page.goto(f"{served}/traces.html", wait_until="load")
    figure = page.locator("figure.drawn", has=page.locator("title", has_text="recorded on 8 emulated CPU devices"))
    with page.expect_download() as download:
        figure.get_by_role("link", name="Download its trace").click()
    events = json.loads(gzip.decompress(Path(download.value.path()).read_bytes()))["traceEvents"]
    fastest = min(event["dur"] for event in events if event.get("name") == "train")
    expect(figure.locator("svg > title")).to_contain_text(f"A step of {fastest / 1e3:.1f} ms")
    devices = {event["args"]["device_ordinal"] for event in events if "device_ordinal" in event.get("args", {})}
    assert {f"device {device}" for device in devices} <= set(figure.locator("svg text").all_text_contents())
    assert noted["failed"] == [] and noted["said"] == []
    page.context.close()
