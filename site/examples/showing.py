"""Shared code of the examples: tables, measured quantities, and the collection of texts, pictures and figures.

``site/examples/<chapter>.py`` has functions marked with ``@example``. A page shows their results as text; the
cells of a ``Table``, and arguments of ``say``, can be quoted in sentences. An ``assert`` checks a page's claim.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax
from origins import Origin, example, kept, predicted_on

from autograder.contract.task import Case, Task, trace
from autograder.proof.coverage import mutants
from course.machine import Machine
from course.machines import machine
from course.mesh import abstract_mesh
from course.predict import Prediction, predict
from course.program import Locate, Program, export, parse, timeline
from course.program.compiled import DEFAULT_FLAGS, GpuReport, compile_all
from course.program.simulator import Timeline
from course.program.simulator.trace import to_trace
from course.render import holdings_svg, side_by_side
from course.render import svg as shapes
from course.render.pictures import unique

PICTURES: dict[str, str] = {}
DRAWN: dict[str, tuple[Origin, ...]] = {}
TRACES: dict[str, str] = {}
RECORDINGS: dict[str, str] = {}  # files of traces that were recorded, by the picture's name
FIGURES: dict[str, Any] = {}
__all__ = ["example", "kept"]
UNITS = {"ms": 1e-3, "us": 1e-6, "µs": 1e-6, "MiB": 2**20, "GiB": 2**30, "GB": 1e9}


def draw(name: str, svg: str, *origins: Origin) -> None:
    """Save a picture."""
    PICTURES[name] = svg
    if origins:
        DRAWN[name] = origins


def block(label: str, x: float, y: float, width: float, height: float, fill: str, title: str = "") -> str:
    """A filled rectangle of a diagram, with its label if that fits; it can be selected only if it has a title."""
    mark = shapes.Mark(0, 0, fill, (label,), title, label)
    return shapes.draw(mark, x, y, width, height, fill)


def line(x: float, y: float, to_x: float, to_y: float, colour: str) -> str:
    """A line of a diagram that ends in a dot."""
    path = f'<path d="M{x:g},{y:g}L{to_x:g},{to_y:g}" stroke="{colour}" stroke-width="1.4"/>'
    return path + f'<circle cx="{to_x:g}" cy="{to_y:g}" r="2.4" fill="{colour}"/>'


def diagram(
    name: str, size: tuple[float, float], title: str, description: str, parts: Iterable[str], origin: Origin = "diagram"
) -> None:
    """Save a drawing that a phone can show without scrolling, up to 400 px wide; see ``course.render.svg.svg``."""
    draw(name, shapes.svg(*size, title, description, "".join(parts), unique(title), least=0.85), origin)


def draw_steps(name: str, steps: Mapping[str, Timeline], until: float = 0.0) -> None:
    """Save timelines as one picture, and as a trace to download, with a process for each device of each."""
    machines = {step.machine for step in steps.values()}
    origins: set[Origin] = {predicted_on(m) for m in machines}
    draw(name, side_by_side(steps, until=until), *sorted(origins))
    events: list[dict[str, Any]] = []
    for number, (heading, step) in enumerate(steps.items()):
        for event in to_trace(step)["traceEvents"]:
            if event["name"] == "process_name" and heading:
                event["args"] = {"name": f"{heading}, {event['args']['name']}"}
            if "id" in event:
                event["id"] = f"{number}-{event['id']}"
            events.append({**event, "pid": 1000 * number + event["pid"]})
    about = {"machine": ", ".join(sorted(machines)), "step_seconds": [step.seconds for step in steps.values()]}
    trace = {"traceEvents": events, "displayTimeUnit": "ms", "otherData": about}
    TRACES[name] = json.dumps(trace, separators=(",", ":"))


def draw_timelines(chapter: str, **timelines: Timeline) -> None:
    """Save several timelines as pictures of their own, on one time scale."""
    until = max(step.seconds for step in timelines.values())
    for name, step in timelines.items():
        draw_steps(f"{chapter}_{name}", {"": step}, until)


def say(**figures: object) -> None:
    """Give a page figures that it can quote and that are in no table."""
    FIGURES.update({name: figure if isinstance(figure, dict) else str(figure) for name, figure in figures.items()})


class Row(dict[str, Any]):
    """The figures of one row by column; ``row.temporaries`` is the column ``temporaries, GiB``."""

    def __getattr__(self, name: str) -> Any:
        return self[name]


class Table:
    """Labelled rows of figures.

    Args:
        heads: Heading of the label, or of several labels.
        columns: Heading and format of each column, such as ``"step, ms .2f"``.
    """

    def __init__(self, heads: str | tuple[str, ...], *columns: str):
        self.heads = (heads,) if isinstance(heads, str) else heads
        self.columns = [tuple(column.rpartition(" ")[::2]) for column in columns]
        self.rows: dict[str, Row] = {}
        self.labels: list[tuple[str, ...]] = []
        self.origins: set[Origin] = set()  # as far as it is known from the figures

    def add(self, label: object, *figures: Any) -> Row:
        """Append a row; ``label`` is a tuple if there are several."""
        labels = tuple(map(str, label)) if isinstance(label, tuple) else (str(label),)
        keys = (head.partition(",")[0] for head, _ in self.columns)
        row = Row(zip(keys, figures, strict=True))
        assert len(row) == len(figures), "two columns have one name"
        self.labels.append(labels)
        self.rows[", ".join(labels)] = row
        return row

    def __getitem__(self, label: str) -> Row:
        return self.rows[label]

    def cells(self) -> dict[str, dict[str, str]]:
        """Every figure as formatted."""
        formats = [form for _, form in self.columns]
        return {
            label: {key: _shown(figure, form) for (key, figure), form in zip(row.items(), formats, strict=True)}
            for label, row in self.rows.items()
        }

    def __str__(self) -> str:
        lines = [[*self.heads, *(head for head, _ in self.columns)]]
        for labels, row in zip(self.labels, self.cells().values(), strict=True):
            lines.append([*labels, *row.values()])
        rule = ["---"] * len(self.heads) + ["---:"] * len(self.columns)
        return "\n".join("| " + " | ".join(line) + " |" for line in (lines[0], rule, *lines[1:]))


def _shown(figure: Any, form: str) -> str:
    return figure if isinstance(figure, str) else format(figure, form)


def wrong(chapter: str) -> dict[str, Callable[..., Any]]:
    """The chapter's mutants, by name."""
    return {mutant.name: mutant.function for mutant in mutants(chapter)}


def realistic(task: Task, mesh: dict[str, int] | None = None, **sizes: int) -> Case:
    """The realistic case that a task is judged on, with another mesh or other sizes."""
    assert task.at_scale
    large = task.at_scale[0]
    return replace(large.with_sizes(**sizes), mesh=mesh or large.mesh)


def program(
    task: Task, function: Callable[..., Any], case: Case | None = None, locate: Locate = lambda _: None
) -> Program:
    """A function as a task's Program, at the realistic case or another."""
    return trace(task, function, case or realistic(task), locate)


@dataclass(frozen=True)
class Seen(Prediction):
    """A prediction, and its program."""

    program: Program | None = None

    @property
    def calibrated_seconds(self) -> float:
        """Seconds of the step with the measured rates of its machine."""
        assert self.program
        return timeline(parse(self.program), machine(f"{self.machine.name}-calibrated")).seconds


def seen(of: Program, where: Machine | str) -> Seen:
    """The prediction of a program on a machine."""
    return Seen(**vars(predict(of, where)), program=of)


def look(
    task: Task,
    function: Callable[..., Any],
    case: Case | None = None,
    where: Machine | str = "",
    locate: Locate = lambda _: None,
) -> Seen:
    """The prediction of a function, on the task's machine or another."""
    return seen(program(task, function, case, locate), where or task.machine)


def over(
    mesh: dict[str, int],
    local: Callable[..., Any],
    inputs: dict[str, Any],
    ins: dict[str, Any],
    outs: dict[str, Any],
    **options: Any,
) -> Program:
    """``local``, which returns a dict, inside ``shard_map``; ``ins`` and ``outs`` are specs by name."""
    mapped = jax.shard_map(local, mesh=abstract_mesh(mesh), in_specs=tuple(ins.values()), out_specs=outs)
    return export(lambda **arrays: mapped(*arrays.values()), inputs, ins, mesh=mesh, out_specs=outs, **options)


def by_compiler(task: Task, ways: dict[str, Callable[..., Any]], **more: Any) -> dict[str, GpuReport]:
    """Functions of a task as compiled by the GPU compiler, with additional flags."""
    programs = [trace(task, function, realistic(task), lambda _: None, "cuda") for function in ways.values()]
    return dict(
        zip(ways, compile_all(programs, machine(task.machine), {**DEFAULT_FLAGS, **more}, time_limit=1800), strict=True)
    )


def holdings(mesh: dict[str, int], **drawn: tuple[tuple[int, ...], Any, tuple[str, str] | None]) -> None:
    """Draw shardings; by the picture's name: a shape, its spec and the names of its dims."""
    for name, (shape, spec, labels) in drawn.items():
        draw(name, holdings_svg(shape, spec, mesh, labels=labels or (), show_spec=True), "diagram")


def sent(prediction: Prediction) -> float:
    """Bytes that a device sends."""
    return sum(c.total_bytes for c in prediction.costs.collectives)


MEASURES: dict[str, Callable[[Any], Any]] = {
    "step": lambda prediction: prediction.timeline.seconds,
    "calibrated": lambda prediction: prediction.calibrated_seconds,
    "computing": lambda prediction: prediction.timeline.busy,
    "exposed": lambda prediction: prediction.timeline.exposed_seconds,
    "sent": sent,
    "temporaries": lambda prediction: prediction.memory.temporaries,
}
COMPILED: dict[str, Callable[[Any], Any]] = {
    "replayed": lambda report: report.replay.seconds,
    "exposed": lambda report: sum(report.replay.exposed.values()),
    "temporaries": lambda report: report.memory.temporaries,
}
MEASURES["busy"] = MEASURES["computing"]


def compare(head: str, predictions: Mapping[str, Prediction], *columns: str, base: str = "") -> Table:
    """Predictions side by side; units default to the first column's; ``times`` and ``... of`` refer to ``base``."""
    table, unit = Table(head, *columns), columns[0].rpartition(" ")[0].partition(", ")[2]
    first = predictions[base] if base else next(iter(predictions.values()))
    for name, prediction in predictions.items():
        figures = []
        for column, _ in table.columns:
            key, _, own = column.partition(", ")
            measure, ratio, _ = (key if key != "times" else "step of").partition(" of")
            figure = MEASURES[measure](prediction)
            figures.append(figure / MEASURES[measure](first) if ratio else figure / UNITS[own or unit])
        table.add(name, *figures)
        table.origins.add(predicted_on(prediction.timeline.machine))
    if any(column.startswith("calibrated") for column in columns):
        table.origins.add("predicted, calibrated")
    return table


def same_order(table: Table, first: str, second: str) -> bool:
    """Return True if two columns order the rows in the same way."""
    orders = (sorted(table.rows, key=lambda label, column=column: table[label][column]) for column in (first, second))
    return len({tuple(order) for order in orders}) == 1


def how_it_overlaps(c: Any) -> str:
    """Describe how a compiled collective overlaps."""
    return "overlaps a product" if c.spans_matmul else "alone"


def compiled(head: str, reports: dict[str, GpuReport], *columns: str, least: int = 0) -> Table:
    """Compiled programs side by side.

    Columns without a unit count those collectives of at least ``least`` bytes that span a product.
    """
    table = Table(head, *columns)
    table.origins.add("compiled")
    for name, report in reports.items():
        large = [c for c in report.collectives if c.operand_bytes >= least]
        spanning, total = sum(c.count for c in large if c.spans_matmul), sum(c.count for c in large)
        figures = []
        for column, _ in table.columns:
            key, _, unit = column.partition(", ")
            figures.append(COMPILED[key](report) / UNITS[unit] if unit else f"{spanning} of {total}")
        table.add(name, *figures)
    return table
