"""Summary of a timeline: the bars of one device as plain data of bounded size, stored in a verdict and drawn on a page.

Data that is read back is untrusted: it describes a program that somebody submitted.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from dataclasses import replace
from typing import Annotated, Any

import msgspec

from course.program.simulator import Bar, DeviceTime, Timeline
from course.render.svg import close_together

MOST_BARS, MOST_BYTES, MOST_DEVICES = 500, 64_000, 16
LONGEST = 100
NANO = 1e-9
KIND = re.compile(r"\w{1,40}( and \d{1,9} more)?")
Text = Annotated[str, msgspec.Meta(max_length=LONGEST)]
Whole = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
Figure = Annotated[float, msgspec.Meta(ge=0)]


class _Device(msgspec.Struct):
    device: Whole
    members: tuple[Whole, ...]
    end: Figure
    busy: Figure
    waiting: Figure
    exposed: dict[Text, Figure]


class _Summary(msgspec.Struct):
    """A bar is its stream, start, end, kind, line, dtype, shape, FLOPs and bytes; names are indices into ``texts``."""

    machine: Text
    mesh: list[tuple[Text, Whole]]
    seconds: Figure
    devices: Annotated[list[_Device], msgspec.Meta(min_length=1)]
    texts: list[Text]
    bars: list[tuple[Whole, Whole, Whole, Whole, Whole, Whole, tuple[Whole, ...], Figure, Figure]]


def to_summary(timeline: Timeline) -> dict[str, Any]:
    """The timeline without its critical path, and with the bars of the device that ends last.

    Times of bars are whole nanoseconds. If there are too many bars, short neighbours on a stream are merged; the kind
    and line of the result are those with the most time among them.
    """
    devices = sorted(timeline.devices, key=lambda device: (-device.end, device.device))[:MOST_DEVICES]
    all_bars = [bar for bar in timeline.bars if bar.device == devices[0].device]
    bars, least = all_bars, timeline.seconds / 2000
    while True:
        summary = _packed(timeline, devices, bars)
        fits = len(bars) <= MOST_BARS and len(json.dumps(summary)) <= MOST_BYTES
        if fits or least >= timeline.seconds:
            return summary
        bars, least = _merged(all_bars, least), 2 * least


def _packed(timeline: Timeline, devices: list[DeviceTime], bars: list[Bar]) -> dict[str, Any]:
    texts: dict[str, int] = {}

    def place(text: str) -> int:
        return texts.setdefault(text[:LONGEST], len(texts))

    rows = []
    for bar in bars:
        times = place(bar.stream), round(bar.start / NANO), round(bar.end / NANO)
        details = place(bar.kind), place(bar.line), place(bar.dtype), list(bar.shape), bar.flops, bar.bytes
        rows.append([*times, *details])
    summary = {
        "machine": timeline.machine,
        "mesh": list(timeline.mesh.items()),
        "seconds": timeline.seconds,
        "devices": msgspec.to_builtins(devices),
        "texts": list(texts),
        "bars": rows,
    }
    # Normalised as when read back: the same verdict has the same bytes.
    return json.loads(json.dumps(summary, sort_keys=True))


def _merged(bars: list[Bar], least: float) -> list[Bar]:
    """The bars with those shorter than ``least`` seconds merged into close ones on their stream, in order of start."""
    streams = [[bar for bar in bars if bar.stream == stream] for stream in sorted({bar.stream for bar in bars})]
    merged = [_as_one(group) for stream_bars in streams for group in close_together(stream_bars, least)]
    return sorted(merged, key=lambda bar: (bar.start, bar.stream))


def _as_one(group: list[Bar]) -> Bar:
    if len(group) == 1:
        return group[0]
    kind = _longest([(bar.kind, bar) for bar in group])
    return replace(
        group[0],
        end=group[-1].end,
        kind=f"{kind} and {len(group) - 1} more",
        line=_longest([(bar.line, bar) for bar in group]),
        shape=(),
        dtype="",
        flops=sum(bar.flops for bar in group),
        bytes=sum(bar.bytes for bar in group),
    )


def _longest(named: list[tuple[str, Bar]]) -> str:
    """The name with the longest total time of its bars."""
    times: dict[str, float] = defaultdict(float)
    for name, bar in named:
        times[name] += bar.end - bar.start
    return max(times, key=lambda name: (times[name], name))


def from_summary(data: Any) -> Timeline:
    """The timeline that ``to_summary`` summarised, with the bars of one device.

    Raises:
        ValueError: It is malformed, or larger than the output of ``to_summary`` can be.
    """
    try:
        if len(json.dumps(data, allow_nan=False)) > MOST_BYTES:
            raise ValueError(f"a timeline summary has at most {MOST_BYTES:,} bytes")
        summary = msgspec.convert(data, _Summary)
        devices = tuple(DeviceTime(**msgspec.structs.asdict(device)) for device in summary.devices)
        bars = tuple(_bar(devices[0].device, summary.texts, *row) for row in summary.bars)
    except (TypeError, IndexError, RecursionError) as error:
        raise ValueError(f"this is not a timeline summary: {error}") from None
    return Timeline(summary.machine, dict(summary.mesh), summary.seconds, devices, (), bars)


def _bar(
    device: int, texts: list[str], stream: int, start: int, end: int, kind: int, line: int, dtype: int, *rest: Any
) -> Bar:
    if not KIND.fullmatch(texts[kind]) or end < start:
        raise ValueError("a bar has no kind, or ends before it starts")
    shape, flops, moved = rest
    names = texts[kind], texts[line], shape, texts[dtype]
    return Bar(device, texts[stream], start * NANO, end * NANO, *names, flops, moved)


def pictured(timeline: Timeline) -> Timeline:
    """The same with only the device that has bars, for a picture next to others."""
    drawn = {bar.device for bar in timeline.bars}
    return replace(timeline, devices=tuple(device for device in timeline.devices if device.device in drawn)[:1])
