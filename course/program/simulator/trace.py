"""A timeline as a trace file for Perfetto (ui.perfetto.dev) and ``chrome://tracing``.

The Trace Event Format, in JSON: a process for each class of devices that behave alike, a thread for each of its
streams and one for the reasons why it is idle, a complete event for each bar, and an arrow from a collective to the
kernel that waited for it.
"""

from __future__ import annotations

import json
from itertools import count
from typing import Any

from course.mesh import mesh_text
from course.program.ir import COLLECTIVES, plain_kind
from course.program.simulator import Bar, DeviceTime, Timeline
from course.program.simulator.gaps import Gap, by_device, gaps

IDLE = "not computing"


def to_trace(timeline: Timeline) -> dict[str, Any]:
    """The trace as one JSON object; times are whole nanoseconds, written in microseconds as the format requires."""
    events: list[dict[str, Any]] = []
    arrows = count(1)
    streams = by_device(timeline)
    for device in timeline.devices:
        events += _device(timeline, device, streams[device.device], arrows)
    about = {"machine": timeline.machine, "mesh": mesh_text(timeline.mesh), "step_seconds": timeline.seconds}
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": about}


def trace_text(timeline: Timeline) -> str:
    """The contents of a trace file."""
    return json.dumps(to_trace(timeline), separators=(",", ":")) + "\n"


def device_name(device: DeviceTime) -> str:
    """``device 0 (and 3 more alike)``."""
    other_members = len(device.members) - 1
    return f"device {device.device}" + (f" (and {other_members} more alike)" if other_members else "")


def shape_text(shape: tuple[int, ...], dtype: str) -> str:
    """``f32[2048,4096]``."""
    return f"{dtype}[{','.join(map(str, shape))}]"


def work_of(kind: str) -> str:
    """``matmul``, ``collective`` or ``kernel``: determines a bar's colour and a trace's category."""
    return "matmul" if kind == "dot_general" else "collective" if kind in COLLECTIVES else "kernel"


def _device(
    timeline: Timeline, device: DeviceTime, streams: dict[str, list[Bar]], arrows: count[int]
) -> list[dict[str, Any]]:
    pid = device.device
    threads = {name: tid for tid, name in enumerate(streams, 1)}
    idle = gaps(timeline, device)
    titles = {tid: name if name == "compute" else f"send over {name}" for name, tid in threads.items()}
    titles |= {len(threads) + 1: IDLE} if idle else {}
    name, place = {"name": device_name(device)}, {"sort_index": pid}
    events = [_about("process_name", pid, 0, **name), _about("process_sort_index", pid, 0, **place)]
    for tid, title in titles.items():
        events.append(_about("thread_name", pid, tid, name=title))
        events.append(_about("thread_sort_index", pid, tid, sort_index=tid))
    events += [_bar(bar, pid, tid) for name, tid in threads.items() for bar in streams[name]]
    events += [_gap(gap, pid, len(threads) + 1) for gap in idle]
    return events + _arrows(streams, threads, pid, arrows)


def _about(metadata_name: str, pid: int, tid: int, **args: str | int) -> dict[str, Any]:
    return {"ph": "M", "name": metadata_name, "pid": pid, "tid": tid, "args": args}


def _complete(name: str, category: str, start: float, end: float, pid: int, tid: int) -> dict[str, Any]:
    # Both ends are rounded in the same way, so that no bar overlaps the next: Perfetto drops slices that cross.
    first, last = round(start * 1e9), round(end * 1e9)
    times = {"ts": first / 1000, "dur": (last - first) / 1000}
    return {"ph": "X", "name": name, "cat": category, **times, "pid": pid, "tid": tid}


def _bar(bar: Bar, pid: int, tid: int) -> dict[str, Any]:
    args = {"line": bar.line or "unknown line", "result": shape_text(bar.shape, bar.dtype), "bytes": round(bar.bytes)}
    if bar.flops:
        args["flops"] = round(bar.flops)
    return {**_complete(plain_kind(bar.kind), work_of(bar.kind), bar.start, bar.end, pid, tid), "args": args}


def _gap(gap: Gap, pid: int, tid: int) -> dict[str, Any]:
    name = f"exposed: {gap.axes}" if gap.axes else "waiting for other devices"
    args = {"line": gap.line or "unknown line"}
    return {**_complete(name, "idle", gap.start, gap.end, pid, tid), "args": args}


def _arrows(
    streams: dict[str, list[Bar]], threads: dict[str, int], pid: int, arrows: count[int]
) -> list[dict[str, Any]]:
    """Arrows from each collective whose end a kernel waited for to that kernel."""
    ended = {bar.end: (bar, name) for name, bars in streams.items() if name != "compute" for bar in bars}
    events, free = [], 0.0
    for kernel in streams.get("compute", ()):
        if kernel.start > free and kernel.start in ended:
            bar, name = ended[kernel.start]
            same = {"name": "waited for", "cat": "wait", "id": next(arrows), "pid": pid}
            events.append({"ph": "s", "ts": round(bar.start * 1e9) / 1000, "tid": threads[name], **same})
            end = round(kernel.start * 1e9) / 1000
            events.append({"ph": "f", "bp": "e", "ts": end, "tid": threads["compute"], **same})
        free = kernel.end
    return events
