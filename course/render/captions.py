"""Sentences for pictures and tables: the conclusions from a timeline, and how to read it."""

from __future__ import annotations

from collections import defaultdict

from course.program.ir import plain_kind
from course.program.simulator import DeviceTime, Timeline
from course.program.simulator.gaps import Gap, gaps
from course.render.quantities import share_text

NOTHING = "computes and sends nothing that takes time"
WAITING = "waiting for others"
HIDDEN = 0.01  # fraction of the step below which waiting is not mentioned

# Terms of pictures and tables, in the order in which a reader meets them.
HOW_TO_READ = (
    ("compute", "a bar for each operation that a device computes, in the order of the program"),
    ("over data", "concurrent transfers over mesh axis data; each set of axes has its own row"),
    (
        "exposed: data",
        "hatched in the colour of the transfer: nothing is computed while it is sent, so the step takes "
        "that much longer. A transfer under bars of the compute row costs no time",
    ),
    (
        WAITING,
        "hatched without a colour: nothing is computed because other devices are not ready to send or receive; "
        "in a pipeline this is the bubble",
    ),
    ("busy", "the time in which the busiest device computes"),
    ("a bar", "point at it to see the operation, its shape, its duration and your line"),
    (
        "your line",
        "fsdp_loss:22 is line 22 of the cell, or of the file, fsdp_loss; "
        "inserted by JAX: none of your lines requests it",
    ),
    ("device 0 (and 7 more alike)", "devices that behave alike are drawn once"),
    (
        "critical path",
        "operations that wait for each other from the start to the end of the step: only making one of these "
        "faster shortens the step",
    ),
    ("cut off", "a step that takes more than three times as long as the reference is not drawn to its end"),
)


def line_text(line: str) -> str:
    """The learner's line, or the origin of an operation without one."""
    return line or "inserted by JAX"


def exposed_text(axes: str) -> str:
    """The label in tables and pictures for exposed transfers."""
    return f"exposed: {axes}"


def conclusion(timeline: Timeline) -> str:
    """The main finding in one sentence: the transfers that the most affected device waits for, or its computation.

    >>> from course.program import Timeline
    >>> conclusion(Timeline("plain", {"data": 1}, 0.0, ()))
    'It computes and sends nothing that takes time.'
    """
    whole = timeline.seconds
    if not whole:
        return f"It {NOTHING}."
    worst = max(timeline.devices, key=_lost)
    lost = _lost(worst)
    if lost < HIDDEN * whole:
        return (
            f"{share_text(timeline.busy, whole)} of the step computes{_most_expensive_line(timeline)}; "
            "almost nothing waits."
        )
    causes: dict[tuple[str, str], float] = defaultdict(float)
    for gap in gaps(timeline, worst):
        causes[_cause(timeline, worst, gap)] += gap.end - gap.start
    where = f"On device {worst.device}, " if len(timeline.devices) > 1 else ""
    if not causes:
        return f"{where}{share_text(lost, whole)} of the step computes nothing."
    (verb, collectives), seconds = max(causes.items(), key=lambda entry: (entry[1], entry[0]))
    share, lost_share = share_text(seconds, whole), share_text(lost, whole)
    suffix = "" if share == lost_share else f"; {lost_share} in all computes nothing"
    return f"{where}{share} of the step {verb} {collectives}{suffix}."


def compare_steps(own: Timeline, reference: Timeline) -> str:
    """Compare a reader's step with the course's own, in sentences with both figures."""
    return (
        f"On {own.machine} your step would take {_ms(own.seconds)} and the course's own {_ms(reference.seconds)}"
        f"{_times(own.seconds, reference.seconds)}. Yours computes for {_ms(own.busy)}, the course's own for "
        f"{_ms(reference.busy)}. Communication that nothing hides takes {_ms(own.exposed_seconds)} of yours and "
        f"{_ms(reference.exposed_seconds)} of the course's own."
    )


def _ms(seconds: float) -> str:
    """Format milliseconds as in the facts about time."""
    return f"{1e3 * seconds:.4g} ms"


def _times(own: float, reference: float) -> str:
    if not reference:
        return ""
    ratio = own / reference
    return ", so both take the same time" if round(ratio, 2) == 1 else f", so yours is {ratio:.2f} times as long"


def _lost(device: DeviceTime) -> float:
    return device.waiting + sum(device.exposed.values())


def _cause(timeline: Timeline, device: DeviceTime, gap: Gap) -> tuple[str, str]:
    """The cause of a gap: a verb, and the collectives of a line."""
    sent = [b for b in timeline.bars if b.device == device.device and b.stream != "compute" and b.line == gap.line]
    ended = [b for b in sent if b.stream == gap.axes and b.end == gap.end] or sent
    kind = plain_kind(ended[0].kind) if ended else "transfer"
    collectives = f"{kind}s of {gap.line}" if gap.line else f"{kind}s {line_text('')}"
    return ("waits for", collectives) if gap.axes else ("waits until other devices are ready for", collectives)


def _most_expensive_line(timeline: Timeline) -> str:
    """The line with the longest compute time, as an aside."""
    seconds_by_line: dict[str, float] = defaultdict(float)
    busiest = max(timeline.devices, key=lambda device: device.busy).device
    for bar in timeline.bars:
        if bar.device == busiest and bar.stream == "compute":
            seconds_by_line[bar.line] += bar.end - bar.start
    if not seconds_by_line:
        return ""
    line = max(seconds_by_line, key=lambda name: (seconds_by_line[name], name))
    return f", {share_text(seconds_by_line[line], timeline.seconds)} of it {line_text(line)}" if line else ""
