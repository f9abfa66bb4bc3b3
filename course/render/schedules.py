"""Pictures of pipeline schedules: a row for each stage, from given schedules and from a Program's timeline."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from course.program.ir import plain_kind
from course.program.simulator import Bar, Timeline
from course.render.captions import line_text
from course.render.lanes import LEAST, MASKED, WORDS, Cell, Picture, Row, Wire, draw_lanes
from course.render.quantities import digits, seconds_text, share_text
from course.schedules import Action, Schedule, Timed, measure, run
from course.schedules.orders import LETTERS
from course.schedules.ticks import Tick, Work, match_ticks, program_ticks, stage_bars


def schedule_svg(
    drawn: Schedule | Timed | Timeline, schedule: Schedule | None = None, *, axis: str = "pipe", file: bool = False
) -> str:
    """A pipeline's schedule: each stage's actions over time, and its idle times.

    Args:
        drawn: A schedule, one with its own times (``run``), or the timeline of a Program.
        schedule: With a timeline: the intended schedule. Its ticks are matched to those of the Program and identify
            the microbatch of each; if the numbers of ticks differ, the Program's are drawn without labels.
        axis: With a timeline: the mesh axis that the stages are on.
        file: Whether the picture is standalone, with its own colours.

    Raises:
        TypeError: It is none of these, or a timeline without a schedule.
        ValueError: It has too many actions to be readable, or the Program has no ticks.
    """
    if isinstance(drawn, Timeline):
        if not isinstance(schedule, Schedule):
            raise TypeError(
                "a timeline does not know its microbatches: pass the schedule, schedule_svg(timeline, schedule)"
            )
        picture = _of_program(drawn, schedule, axis)
    elif isinstance(drawn, Schedule | Timed):
        picture = _of_schedule(run(drawn) if isinstance(drawn, Schedule) else drawn)
    else:
        raise TypeError(f"this draws a Schedule, one with times, or a Timeline, not a {type(drawn).__name__}")
    return draw_lanes(picture, file=file)


def _of_schedule(timed: Timed) -> Picture:
    schedule, repeats = timed.schedule, timed.schedule.num_repeats
    timed = timed if schedule.flushes else beginning(timed)
    rows = []
    for stage, spans in enumerate(timed.spans):
        cells = tuple(
            _cell(span.start, span.end, span.action, stage, repeats, f"{digits(span.start)} to {digits(span.end)}")
            for span in spans
        )
        sent = [message for message in timed.messages if message.source == stage and message.end > message.start]
        targets = sorted({message.target for message in sent}, key=lambda target: target < stage)
        wires = tuple(
            Wire(m.start, m.end, m.action.kind, targets.index(m.target), f"to stage {m.target}: {_named(m.action)}")
            for m in sent
        )
        busy = sum(span.end - span.start for span in spans)
        rows.append(Row(cells, wires, f"computes {digits(busy)} of {digits(timed.end)}: {_order(spans, repeats)}"))
    sizes = f"{schedule.num_stages} stages, {schedule.num_microbatches} microbatches"
    sizes += f", {repeats} repeats" if repeats > 1 else ""
    whole = schedule.flushes and not schedule.forward_only
    lost = f", bubble {share_text(measure(timed).bubble, 1)}" if whole else ""
    ends = digits(timed.end) if schedule.flushes else "the beginning of a stream that never flushes"
    heading = f"{schedule.name}: {ends}{lost}"
    return Picture(f"{schedule.name}, {sizes}", heading, tuple(rows), timed.end, False, repeats > 1)


def beginning(timed: Timed) -> Timed:
    """The part before the first stage runs out of microbatches, which never happens in an endless stream."""
    end = max(span.end for span in timed.spans[0] if span.action.kind == "F")
    spans, messages = (
        [tuple(replace(item, end=min(item.end, end)) for item in items if item.start < end) for items in groups]
        for groups in (timed.spans, (timed.messages,))
    )
    return replace(timed, spans=tuple(spans), messages=messages[0])


def _order(spans: Iterable, repeats: int) -> str:
    return " ".join(f"{s.action.kind}{_number(s.action, repeats)}" for s in spans)


def _number(action: Action, repeats: int) -> str:
    return f"{action.microbatch}{LETTERS[action.repeat] if repeats > 1 else ''}"


def _named(action: Action) -> str:
    return f"microbatch {action.microbatch}, repeat {action.repeat}, {WORDS[action.kind]}"


def _cell(start: float, end: float, action: Action, stage: int, repeats: int, when: str) -> Cell:
    number = _number(action, repeats)
    labels = (number, str(action.microbatch)) if repeats > 1 else (number,)
    return Cell(start, end, action.kind, action.repeat, labels, f"stage {stage}, {_named(action)}: {when}")


def _of_program(timeline: Timeline, schedule: Schedule, axis: str) -> Picture:
    ticks = program_ticks(timeline, axis)
    scheduled = match_ticks(ticks, schedule)
    bars = stage_bars(timeline, axis)
    if len(bars) != schedule.num_stages:
        raise ValueError(f"the Program has {len(bars)} stages over {axis!r} and the schedule {schedule.num_stages}")
    rows = []
    for stage, own in enumerate(bars):
        cells, useful = _ticks_of(stage, ticks, scheduled, schedule)
        cells += _others(own, [tick.work[stage] for tick in ticks], LEAST * timeline.seconds)
        rows.append(Row(tuple(cells), _sent(own, axis), f"useful in {useful} of {len(ticks)} ticks"))
    schedule_text = f"{schedule.name}, of {schedule.num_microbatches} microbatches"
    ticks_text = f"{len(ticks)} ticks" + (
        f", numbered by {schedule_text}"
        if scheduled
        else f" that do not match {schedule_text}, so they are not numbered"
    )
    title = f"A Program's ticks on {timeline.machine}, compared with {schedule.name}"
    heading = f"{seconds_text(timeline.seconds)}, {ticks_text}"
    return Picture(title, heading, tuple(rows), timeline.seconds, True, schedule.num_repeats > 1 and bool(scheduled))


def _sent(bars: list[Bar], axis: str) -> tuple[Wire, ...]:
    """Messages over the stages' axis on the first line, and over others on the second."""
    sent = sorted({(bar.start, bar.end, bar.stream) for bar in bars if bar.stream != "compute" and bar.end > bar.start})
    lines = [(0, "loss") if axis in axes.split(",") else (1, "synchronised") for *_, axes in sent]
    return tuple(
        Wire(start, end, kind, line, f"sent over {axes}: {seconds_text(end - start)}")
        for (start, end, axes), (line, kind) in zip(sent, lines, strict=True)
    )


def _ticks_of(
    stage: int, ticks: tuple[Tick, ...], scheduled: list[dict[int, Action] | None], schedule: Schedule
) -> tuple[list[Cell], int]:
    """The cells of a stage, and the number of ticks in which it follows the schedule."""
    cells, useful = [], 0
    for number, tick in enumerate(ticks):
        work, actions = tick.work[stage], scheduled[number] if scheduled else None
        action = actions.get(stage) if actions is not None else None
        if action is not None:
            useful += work is not None
            cells.append(_expected(work, tick, action, stage, number, schedule))
        elif work is not None:
            kind = "masked" if actions is not None else "loss" if scheduled else "tick"
            meaning = MASKED if actions is not None else "loss" if scheduled else WORDS["tick"]
            label = {"masked": (), "loss": (meaning,), "tick": (f"tick {number}", str(number))}[kind]
            cells.append(Cell(work.start, work.end, kind, 0, label, f"stage {stage}, tick {number}: {meaning}"))
    return cells, useful


def _expected(work: Work | None, tick: Tick, action: Action, stage: int, number: int, schedule: Schedule) -> Cell:
    if work is None:
        title = f"stage {stage}, tick {number}: nothing computed, where the schedule has {_named(action)}"
        return Cell(tick.start, tick.end, "missing", 0, ("?",), title)
    when = f"tick {number}, {seconds_text(work.end - work.start)}"
    return _cell(work.start, work.end, action, stage, schedule.num_repeats, when)


def _others(bars: list[Bar], work: list[Work | None], least: float) -> list[Cell]:
    """Compute of a stage outside its ticks that takes time: copies, and stores at the end."""
    inside = [piece for piece in work if piece]
    outside = [bar for bar in bars if bar.stream == "compute" and bar.end - bar.start > least]
    outside = [bar for bar in outside if not any(piece.start <= bar.start < piece.end for piece in inside)]
    runs: list[list[Bar]] = []
    for bar in outside:
        if runs and bar.start - runs[-1][-1].end <= 4 * least:
            runs[-1].append(bar)
        else:
            runs.append([bar])
    return [Cell(run[0].start, run[-1].end, "other", 0, (), _outside(run)) for run in runs]


def _outside(bars: list[Bar]) -> str:
    suffix = f" and {len(bars) - 1} more" if len(bars) > 1 else ""
    return f"no matmul: {plain_kind(bars[0].kind)}{suffix}, {line_text(bars[0].line)}"
