"""A timeline in brief: the bars of one device as plain data of bounded size, for a verdict to keep and a page to draw.

What is read back is trusted in nothing: it describes a program that somebody handed in.
"""

from __future__ import annotations

import json
import math
import re
from collections import defaultdict
from dataclasses import asdict, replace
from typing import Any

from course.program.simulator import Bar, DeviceTime, Timeline

MOST_BARS, MOST_BYTES, MOST_DEVICES = 500, 64_000, 16
LONGEST = 100
NANO = 1e-9
KIND = re.compile(r"\w{1,40}( and \d{1,9} more)?")


def to_brief(timeline: Timeline) -> dict[str, Any]:
    """The timeline without its critical path, and with the bars of the device that ends last.

    Times of bars are whole nanoseconds. Where there are too many bars, short neighbours on a stream are one; its kind
    and line are those that take longest among them.
    """
    devices = sorted(timeline.devices, key=lambda device: (-device.end, device.device))[:MOST_DEVICES]
    every = [bar for bar in timeline.bars if bar.device == devices[0].device]
    bars, least = every, timeline.seconds / 2000
    while True:
        brief = _packed(timeline, devices, bars)
        fits = len(bars) <= MOST_BARS and len(json.dumps(brief)) <= MOST_BYTES
        if fits or least >= timeline.seconds:
            return brief
        bars, least = _merged(every, least), 2 * least


def _packed(timeline: Timeline, devices: list[DeviceTime], bars: list[Bar]) -> dict[str, Any]:
    texts: dict[str, int] = {}

    def place(text: str) -> int:
        return texts.setdefault(text[:LONGEST], len(texts))

    rows = [
        [place(bar.stream), round(bar.start / NANO), round(bar.end / NANO), place(bar.kind), place(bar.line),
         place(bar.dtype), list(bar.shape), bar.flops, bar.bytes]
        for bar in bars
    ]  # fmt: skip
    brief = {
        "machine": timeline.machine,
        "mesh": list(timeline.mesh.items()),
        "seconds": timeline.seconds,
        "devices": [asdict(device) for device in devices],
        "texts": list(texts),
        "bars": rows,
    }
    # As it will be read back: the same verdict is the same bytes.
    return json.loads(json.dumps(brief, sort_keys=True))


def _merged(bars: list[Bar], least: float) -> list[Bar]:
    """The bars with those shorter than ``least`` seconds joined to what lies close behind them, in order of start."""
    found: list[Bar] = []
    for stream in sorted({bar.stream for bar in bars}):
        group: list[Bar] = []
        for bar in (bar for bar in bars if bar.stream == stream):
            narrow = bar.end - bar.start < least
            far = group and (bar.end - group[0].start > 2 * least or bar.start - group[-1].end > least)
            if group and (far or not narrow):
                found.append(_as_one(group))
                group = []
            if narrow:
                group.append(bar)
            else:
                found.append(bar)
        found += [_as_one(group)] if group else []
    return sorted(found, key=lambda bar: (bar.start, bar.stream))


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
    """The name whose bars take longest in all."""
    times: dict[str, float] = defaultdict(float)
    for name, bar in named:
        times[name] += bar.end - bar.start
    return max(times, key=lambda name: (times[name], name))


def from_brief(data: Any) -> Timeline:
    """The timeline that ``to_brief`` described, with the bars of one device.

    Raises:
        ValueError: It is malformed, or larger than ``to_brief`` makes them.
    """
    try:
        if len(json.dumps(data)) > MOST_BYTES:
            raise ValueError(f"a timeline in brief has at most {MOST_BYTES:,} bytes")
        devices = tuple(_device(device) for device in data["devices"])
        texts = [_text(text) for text in data["texts"]]
        bars = tuple(_bar(devices[0].device, texts, row) for row in data["bars"])
        mesh = {_text(axis): _whole(size) for axis, size in data["mesh"]}
        return Timeline(_text(data["machine"]), mesh, _number(data["seconds"]), devices, (), bars)
    except (TypeError, KeyError, IndexError, AttributeError, OverflowError, RecursionError) as error:
        raise ValueError(f"this is no timeline in brief: {error}") from None


def _device(data: dict[str, Any]) -> DeviceTime:
    exposed = {_text(axes): _number(seconds) for axes, seconds in data["exposed"].items()}
    end, busy, waiting = (_number(data[name]) for name in ("end", "busy", "waiting"))
    return DeviceTime(_whole(data["device"]), tuple(map(_whole, data["members"])), end, busy, waiting, exposed)


def _bar(device: int, texts: list[str], row: list[Any]) -> Bar:
    stream, start, end, kind, line, dtype, shape, flops, moved = row
    if not KIND.fullmatch(texts[_whole(kind)]) or _whole(end) < _whole(start):
        raise ValueError("a bar has no kind, or ends before it starts")
    return Bar(
        device, texts[_whole(stream)], start * NANO, end * NANO, texts[kind], texts[_whole(line)],
        tuple(map(_whole, shape)), texts[_whole(dtype)], _number(flops), _number(moved)
    )  # fmt: skip


def _text(value: Any) -> str:
    if not isinstance(value, str) or len(value) > LONGEST:
        raise ValueError("a name is no text, or too long")
    return value


def _whole(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 2**63:
        raise ValueError("a number is not whole, negative or too large")
    return value


def _number(value: Any) -> float:
    if type(value) not in (int, float) or not math.isfinite(value) or value < 0:
        raise ValueError("a figure is no number, negative or not finite")
    return float(value)


def pictured(timeline: Timeline) -> Timeline:
    """The same with the one device that has bars, for a picture beside others."""
    drawn = {bar.device for bar in timeline.bars}
    return replace(timeline, devices=tuple(device for device in timeline.devices if device.device in drawn)[:1])
